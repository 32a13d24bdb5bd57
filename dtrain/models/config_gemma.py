"""config.json of Gemma 3 and Gemma 4. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from dtrain.models.common.config import FULL, SLIDING, KeyHeads, ModelConfig, PerLayer
from dtrain.models.common.config_fields import Fields, shown
from dtrain.models.common.config_parts import (
    common_fields,
    read_experts,
    read_layer_types,
    read_text_tower,
    used_window,
    written_window,
)
from dtrain.models.common.rope_config import read_gemma4_ropes, read_gemma_ropes

# What the published Gemma3 checkpoints leave out of their text_config.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def read_gemma3(architecture: str, fields: Fields, tie: bool = True, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_GEMMA3_DEFAULTS)
    fields.must_be_off("attn_logit_softcapping", "capping attention logits is not implemented")
    if fields.get("hidden_act") is not None:
        fields.problem("hidden_act: Gemma3 reads hidden_activation")
    common = common_fields(architecture, fields, activation=("hidden_activation", None), pad=0, tie=tie)
    common["attention_scale"] = fields.number("query_pre_attn_scalar", 256) ** -0.5
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    spellings = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next(filter(None, [fields.optional_integer(key) for key in spellings]), 6)
    types = read_layer_types(fields, count, [SLIDING if (index + 1) % pattern else FULL for index in range(count)])
    values = {
        **common,
        "layer_types": types,
        "sliding_window": used_window(fields, types, written_window(fields)),
        "ropes": read_gemma_ropes(fields, common["max_position_embeddings"], FULL, SLIDING),
        "qkv_bias": bias,
        "o_bias": bias,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }
    fields.refuse_the_rest()
    return ModelConfig(**values, is_text_tower=is_text_tower)


def read_gemma3_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    """The text tower: `text_config` describes it, the rest of the file images and tokens."""
    fields.known("vision_config", "mm_tokens_per_image", "initializer_range", "audio_config")
    fields.known("boi_token_index", "eoi_token_index", "image_token_index")
    return read_text_tower(architecture, fields, read_gemma3, tie=True)


# What published Gemma4 checkpoints may leave out.
_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def read_gemma4(architecture: str, fields: Fields, tie: bool = True, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_GEMMA4_DEFAULTS)
    fields.known("num_experts", "top_k_experts", "moe_intermediate_size")  # of experts, which may be off
    if fields.get("use_bidirectional_attention") == "vision":  # among an image's tokens; text is causal
        fields = fields.without("use_bidirectional_attention")
    common = common_fields(architecture, fields, activation=("hidden_activation", None), head_dim=256, pad=0, tie=tie)
    common["attention_scale"] = 1.0  # q and k are normed, and their weights trained to it
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [SLIDING if (index + 1) % 6 else FULL for index in range(count)])
    types = (*types[:-1], FULL)  # as transformers has it, whatever is written
    heads = _gemma4_heads(fields, types, common)
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    if missing := sorted(set(types) - set(types[: max(0, count - shared)])):
        fields.problem(
            f"num_kv_shared_layers {shared} of {count}: no layer before these has keys of {' and '.join(missing)}"
        )
        shared = 0
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if size and rows < common["vocab_size"]:
        fields.problem(
            f"vocab_size_per_layer_input {rows} is less than vocab_size {common['vocab_size']}: the tokens beyond it "
            "have no row"
        )
    experts = None
    if fields.flag("enable_moe_block", False):  # beside the MLP of every layer
        inner, layers = fields.integer("moe_intermediate_size"), tuple(range(count))
        experts = read_experts(fields, None, None, inner, True, layers, "top_k_experts", stacked=True, beside=True)
    max_positions, sizes = common["max_position_embeddings"], {kind: own.size for kind, own in heads.items()}
    values = {
        **common,
        "layer_types": types,
        "sliding_window": used_window(fields, types, written_window(fields)),
        "ropes": read_gemma4_ropes(fields, max_positions, FULL, SLIDING, sizes),
        "qkv_bias": bias,
        "o_bias": bias,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        "key_heads": heads,
        "shared_layers": shared,
        "shared_width": 2 if fields.flag("use_double_wide_mlp", False) else 1,
        "per_layer": PerLayer(rows, size) if size else None,
        "experts": experts,
    }
    fields.refuse_the_rest()
    return ModelConfig(**values, is_text_tower=is_text_tower)


def _gemma4_heads(fields: Fields, types: tuple[str, ...], common: Mapping[str, Any]) -> dict[str, KeyHeads]:
    """Full layers have sizes of their own: `global_head_dim` and `num_global_key_value_heads`, or, where transformers
    has written the file, `per_layer_config`, an object for each layer."""
    tied = fields.flag("attention_k_eq_v", False)
    size = fields.integer("global_head_dim", 512)
    count = fields.optional_integer("num_global_key_value_heads") if tied else None
    fields.known("num_global_key_value_heads")  # without attention_k_eq_v it says nothing
    own = {"head_dim": size} | ({} if count is None else {"num_key_value_heads": count})
    written = fields.get("per_layer_config")
    if written is None:
        written = {str(index): own for index, kind in enumerate(types) if kind == FULL}
    problem = (
        f"per_layer_config {shown(written)}: must give head_dim and num_key_value_heads, alike in layers of a type"
    )
    heads: dict[str, KeyHeads] = {}
    for index, kind in enumerate(types):
        values = written.get(str(index), {}) if isinstance(written, dict) else None
        if not isinstance(values, dict) or set(values) - {"head_dim", "num_key_value_heads"}:
            fields.problem(problem)
            values = {}
        of_layer = Fields(values, fields.problems, prefix=f"per_layer_config.{index}.")
        key_heads = KeyHeads(
            of_layer.integer("num_key_value_heads", common["num_key_value_heads"]),
            of_layer.integer("head_dim", common["head_dim"]),
            tied and kind == FULL,
        )
        if heads.setdefault(kind, key_heads) != key_heads:
            fields.problem(problem)
    for kind, key_heads in heads.items():
        if common["num_attention_heads"] % key_heads.count:
            queries = common["num_attention_heads"]
            fields.problem(
                f"num_attention_heads {queries} is not a multiple of the {key_heads.count} KV heads of {kind}"
            )
        if key_heads.size % 2:
            fields.problem(f"head_dim {key_heads.size} of {kind} is odd, rotary embeddings need pairs")
    return heads


def read_gemma4_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    fields.known("vision_config", "audio_config", "initializer_range", "vision_soft_tokens_per_image")
    fields.known("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
    fields.known("image_token_id", "video_token_id", "audio_token_id")
    return read_text_tower(architecture, fields, read_gemma4, tie=True)
