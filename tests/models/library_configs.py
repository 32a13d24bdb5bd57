"""Tiny configs of every causal language model of transformers.

`tiny_config` starts from the defaults of a config class, keeps a layer of each kind, and replaces sizes by small ones.
It knows names of fields and no families, except for those in `_OWN`, whose sizes depend on each other.
"""

from collections.abc import Mapping
from typing import Any

import transformers

VOCAB = 67
MAX_LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "output_vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "decoder_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 32,
    "embedding_size": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "dim_ff": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "dense_intermediate_size": 48,
    "prefix_dense_intermediate_size": 48,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "num_query_groups": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "swa_head_dim": 16,
    "attention_head_dim": 16,
    "dim_head": 16,
    "kv_channels": 16,
    "rotary_dim": 4,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    # mixtures of experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "router_hidden_size": 16,
    # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "indexer_n_heads": 2,
    "indexer_head_dim": 16,
    # linear attention, Mamba and convolutions
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "chunk_size": 8,
    "lru_width": 32,
    "attention_hidden_size": 32,
    # lengths
    "sliding_window": 4,
    "sliding_window_size": 4,
    "attention_window_size": 4,
    "local_attention": 4,
    "window_size": 4,
    "attention_chunk_size": 4,
    "max_position_embeddings": 64,
    "max_target_positions": 64,
    # tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "eod_token_id": 2,
    "unk_index": 3,
    "mask_token_id": 3,
    "initializer_range": 0.1,
    "init_std": 0.1,
}
_LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers")
# Fields of classes whose sizes depend on each other, or whose defaults are unusual.
_MLA = {"num_key_value_heads": 4, "head_dim": 8}
_GEMMA3N = ["sliding_attention", "full_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": {"num_key_value_heads": 4, "num_local_experts": 8, "n_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": _MLA | {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "dory": {"num_hidden_layers": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _GEMMA3N * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },  # fmt: skip
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": 8, "num_key_value_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": _MLA,
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1, "layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4},
    "phi4_multimodal": {"num_hidden_layers": 3},
    "youtu": _MLA,
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> transformers.PreTrainedConfig:
    """Return the tiny config of a model type.

    Args:
        model_type: A key of `transformers.CONFIG_MAPPING`.
        changes: Further fields.
    """
    cls = transformers.CONFIG_MAPPING[model_type]
    return cls(**{**tiny_fields(cls), **_OWN.get(model_type, {}), **changes})


def tiny_fields(cls: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    """Return the fields in which a tiny config differs from the defaults of its class."""
    defaults = cls()
    attributes: Mapping[str, str] = defaults.attribute_map
    written = defaults.to_dict()
    fields: dict[str, Any] = {}
    for name, value in written.items():
        if isinstance(value, dict) and "model_type" in value:
            part = transformers.CONFIG_MAPPING.get(value["model_type"], type(getattr(defaults, name)))
            fields[name] = tiny_fields(part)
    for name, size in _SIZES.items():
        written_name = attributes.get(name, name)
        if written_name not in written:
            continue
        value = written[written_name]
        if value is None and name not in ("pad_token_id", "bos_token_id", "eos_token_id"):
            continue
        if value in (0, False):
            continue
        fields[written_name] = size
    heads = attributes.get("num_attention_heads", "num_attention_heads")
    keys = attributes.get("num_key_value_heads", "num_key_value_heads")
    if keys in fields and written[keys] in (1, written.get(heads)):
        fields[keys] = 1 if written[keys] == 1 else 4
    if "n_group" in written and (written["n_group"] or 0) > 1:
        fields |= {"n_group": 2, "topk_group": 1}
    fields |= _fewer_layers(written, attributes)
    return fields


def _fewer_layers(written: Mapping[str, Any], attributes: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the layers: of each kind one, and two layers at least."""
    fields: dict[str, Any] = {}
    for name in _LAYER_COUNTS:
        count = written.get(attributes.get(name, name))
        if not isinstance(count, int):
            continue
        lists = {key: value for key, value in written.items() if isinstance(value, list) and len(value) == count}
        kinds = [tuple(str(values[layer]) for values in lists.values()) for layer in range(count)]
        chosen = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]][:MAX_LAYERS]
        # A dense first layer may be a number instead of a list.
        dense = min(written.get("first_k_dense_replace") or written.get("num_dense_layers") or 0, 1)
        size = max(len(chosen), 2)
        chosen += [layer for layer in range(count) if layer not in chosen][: size - len(chosen)]
        chosen.sort()
        fields[attributes.get(name, name)] = len(chosen)
        for key, values in lists.items():
            fields[key] = [values[layer] for layer in chosen]
        for key in ("first_k_dense_replace", "num_dense_layers"):
            if written.get(key):
                fields[key] = dense
    return fields
