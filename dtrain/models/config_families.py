"""config.json of each family, field by field, as transformers 4 and 5 write it. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dtrain.models.common.config import FULL, LINEAR, SLIDING, Experts, LinearAttention, ModelConfig
from dtrain.models.common.config_fields import Fields, shown
from dtrain.models.common.config_parts import (
    common_fields,
    read_experts,
    read_layer_types,
    read_text_tower,
    used_window,
    with_one_rope,
    written_window,
)
from dtrain.models.common.rope_config import PHI_KINDS, read_olmo_ropes, read_rope
from dtrain.models.config_gemma import read_gemma3, read_gemma3_multimodal, read_gemma4, read_gemma4_multimodal
from dtrain.models.config_gpt_oss import read_gpt_oss


def _llama(architecture: str, fields: Fields) -> ModelConfig:
    common = common_fields(architecture, fields)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    return with_one_rope(
        fields,
        **common,
        layer_types=read_layer_types(fields, count, [FULL] * count, fixed=True),
        sliding_window=None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False) -> ModelConfig:
    common = common_fields(architecture, fields, kv_heads=8, tie=tie)
    window, count = written_window(fields), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    values = {**common, "layer_types": types, "sliding_window": window, "is_text_tower": is_text_tower}
    return with_one_rope(fields, **values)


def _mixtral(architecture: str, fields: Fields) -> ModelConfig:
    fields = fields.over({"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2})
    common = common_fields(architecture, fields, kv_heads=8)
    window, count = fields.optional_integer("sliding_window"), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    fields.must_be_off("router_jitter_noise", "noise on what is routed is not implemented; set it to 0.0")
    experts = read_experts(fields, 8, 2, common["intermediate_size"], True, tuple(range(count)))
    values = {**common, "layer_types": types, "sliding_window": window, "experts": experts}
    return with_one_rope(fields, theta=1_000_000.0, **values)


# What Ministral 3's files may leave out, and the same of Mistral Small's text_config.
_MINISTRAL3_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def _ministral3(architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False) -> ModelConfig:
    fields = fields.over(_MINISTRAL3_DEFAULTS)
    common = common_fields(architecture, fields, kv_heads=8, head_dim=128, pad=11, tie=tie)
    window, count = fields.optional_integer("sliding_window"), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    values = {**common, "layer_types": types, "sliding_window": window, "is_text_tower": is_text_tower}
    return with_one_rope(fields, scales_queries=True, **values)


def _mistral3_multimodal(architecture: str, fields: Fields) -> ModelConfig:
    """A text tower of either kind. Where neither level says so it is untied, as the published files are."""
    fields.known("vision_config", "image_token_index", "projector_hidden_act", "vision_feature_layer")
    fields.known("multimodal_projector_bias", "spatial_merge_size")
    text = fields.get("text_config")
    is_scaled = isinstance(text, dict) and text.get("model_type") == "ministral3"
    return read_text_tower(architecture, fields, _ministral3 if is_scaled else _mistral, tie=False)


def _qwen2(
    architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False, theta: float = 10_000.0
) -> ModelConfig:
    if fields.get("attention_bias") is False:
        fields.problem("attention_bias false: Qwen2 always has biases on q, k and v")
    common = common_fields(architecture, fields, kv_heads=32, tie=tie)
    layers = _qwen_layers(fields, common["num_hidden_layers"])
    return with_one_rope(fields, theta=theta, **common, **layers, qkv_bias=True, is_text_tower=is_text_tower)


_IMAGES = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _qwen2_5_vl(architecture: str, fields: Fields) -> ModelConfig:
    """The text tower, described by `text_config`, or, in the first files, beside the rest."""
    fields.known(*_IMAGES, "vision_token_id")
    defaults = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80, "eos_token_id": 151_645}

    def read(architecture: str, text: Fields, tie: bool, is_text_tower: bool) -> ModelConfig:
        return _qwen2(architecture, text.over(defaults), tie, is_text_tower, theta=1_000_000.0)

    if isinstance(fields.get("text_config"), dict):
        return read_text_tower(architecture, fields, read, tie=False)
    return read(architecture, fields, tie=False, is_text_tower=True)


def _qwen3_vl(architecture: str, fields: Fields) -> ModelConfig:
    fields.known(*_IMAGES)

    def read(architecture: str, text: Fields, tie: bool, is_text_tower: bool) -> ModelConfig:
        common = common_fields(architecture, text, kv_heads=32, head_dim=128, tie=tie)
        bias, count = text.flag("attention_bias", False), common["num_hidden_layers"]
        types = read_layer_types(text, count, [FULL] * count, fixed=True)
        values = {**common, "layer_types": types, "sliding_window": None, "is_text_tower": is_text_tower}
        return with_one_rope(text, theta=500_000.0, **values, qkv_bias=bias, o_bias=bias)

    return read_text_tower(architecture, fields, read, tie=False)


def _qwen3(architecture: str, fields: Fields) -> ModelConfig:
    common = common_fields(architecture, fields, kv_heads=32, head_dim=128)
    bias = fields.flag("attention_bias", False)
    layers = _qwen_layers(fields, common["num_hidden_layers"])
    return with_one_rope(fields, **common, **layers, qkv_bias=bias, o_bias=bias)


def _qwen3_moe(architecture: str, fields: Fields) -> ModelConfig:
    common = common_fields(architecture, fields, kv_heads=4)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    return with_one_rope(
        fields,
        **common,
        **_qwen_layers(fields, count, moe=True),
        qkv_bias=bias,
        o_bias=bias,
        experts=_qwen_experts(fields, count),
    )


def _qwen_experts(fields: Fields, count: int) -> Experts | None:
    """Read the experts of each `decoder_sparse_step`-th layer but those of `mlp_only_layers`; None: no layer is
    sparse."""
    inner, normed = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob", False)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        fields.problem(f"mlp_only_layers {shown(dense)}: must be a list of layers' numbers")
        dense = []
    sparse = tuple(index for index in range(count) if index not in dense and (index + 1) % step == 0)
    return read_experts(fields, 128, 8, inner, normed, sparse)


def _qwen_layers(fields: Fields, count: int, moe: bool = False) -> dict[str, Any]:
    """The window counts only where it is switched on, from a certain layer upwards; in a mixture of experts in all."""
    window, switched_on = written_window(fields), fields.flag("use_sliding_window", False)
    window = window if switched_on else None
    full_layers = 0 if moe else fields.integer("max_window_layers", 28, minimum=0)
    fields.known("max_window_layers")
    default = [SLIDING if window is not None and index >= full_layers else FULL for index in range(count)]
    types = read_layer_types(fields, count, default, fixed=moe)
    return {"layer_types": types, "sliding_window": used_window(fields, types, window)}


# What published Qwen3.5 checkpoints may leave out.
_QWEN3_5_DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
}


def _qwen3_5(
    architecture: str,
    fields: Fields,
    tie: bool = False,
    is_text_tower: bool = False,
    experts: Experts | None = None,
    kv_heads: int = 4,
) -> ModelConfig:
    fields = fields.over(_QWEN3_5_DEFAULTS)
    fields.known("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # a head of its own, which is carried along
    for key, value in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish")):
        if fields.get(key) not in (None, value):
            fields.problem(f"{key} {shown(fields.get(key))}: only {shown(value)} is implemented")
    common = common_fields(architecture, fields, kv_heads=kv_heads, head_dim=256, tie=tie)
    if common["hidden_act"] != "silu":  # it would be the convolution's too
        fields.problem(f"hidden_act {shown(fields.get('hidden_act'))}: only 'silu' is implemented")
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    interval = fields.integer("full_attention_interval", 4)
    types = read_layer_types(
        fields, count, [LINEAR if (n + 1) % interval else FULL for n in range(count)], kinds=(FULL, LINEAR)
    )
    linear = LinearAttention(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
    if linear.value_heads % linear.key_heads:
        fields.problem(
            f"linear_num_value_heads {linear.value_heads} is not a multiple of linear_num_key_heads {linear.key_heads}"
        )
    rope = read_rope(fields, common["max_position_embeddings"], common["head_dim"], share=0.25)
    fields.refuse_the_rest()
    joined = ("in_proj_qkv", "conv1d")
    return ModelConfig(
        **common,
        layer_types=types,
        sliding_window=None,
        ropes=dict.fromkeys(types, rope),
        qkv_bias=bias,
        o_bias=bias,
        attention_gate=True,
        linear=linear,
        experts=experts,
        is_text_tower=is_text_tower,
        fused={module: tuple(f"{module.removesuffix('_qkv')}_{part}" for part in "qkv") for module in joined},
        unnamed=("decay",),
    )


# What published checkpoints with experts may leave out.
_QWEN3_5_MOE_DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 40, "moe_intermediate_size": 512}
_QWEN3_5_MOE_DEFAULTS |= {"shared_expert_intermediate_size": 512}


def _qwen3_5_moe(architecture: str, fields: Fields, tie: bool = False, is_text_tower: bool = False) -> ModelConfig:
    """Read Qwen3.5 with experts: every layer is sparse; what files join are stacks."""
    fields = fields.over(_QWEN3_5_MOE_DEFAULTS)
    if fields.get("norm_topk_prob") is False:
        fields.problem("norm_topk_prob false: in this architecture the weights of a token add up to one")
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer("shared_expert_intermediate_size")
    layers = tuple(range(fields.integer("num_hidden_layers")))
    experts = read_experts(fields, 256, 8, inner, True, layers, shared=shared, stacked=True)
    if experts is None:
        fields.problem("num_experts 0: the dense models are Qwen3_5ForCausalLM")
    fields = fields.over({"intermediate_size": shared})  # of dense layers, which there are none of
    return _qwen3_5(architecture, fields, tie, is_text_tower, experts, kv_heads=2)


def _qwen3_5_multimodal(architecture: str, fields: Fields, read: Callable[..., ModelConfig] = _qwen3_5) -> ModelConfig:
    fields.known("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    fields.known("language_model_only")
    return read_text_tower(architecture, fields, read, tie=False)


def _phi3(architecture: str, fields: Fields) -> ModelConfig:
    defaults = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32_000}
    fields = fields.over({**defaults, "original_max_position_embeddings": 4096})
    common = common_fields(architecture, fields, pad=32_000)
    window, count = fields.optional_integer("sliding_window"), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [FULL if window is None else SLIDING] * count, fixed=True)
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for key in ("full_attn_mod", "interpolate_factor"):  # of the code beside the first files; 1 is off
        if fields.integer(key, 1) != 1:
            fields.problem(f"{key} {fields.get(key)}: only 1 is implemented")
    values = {**common, "layer_types": types, "sliding_window": window, "fused": fused}
    config = with_one_rope(fields, 1.0, kinds=PHI_KINDS, **values)
    if window is None or config.most_positions is None or window < config.most_positions:
        return config
    return replace(config, layer_types=(FULL,) * count, sliding_window=None, ropes={FULL: config.ropes[SLIDING]})


_OLMO_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50_279, "max_position_embeddings": 2048}


def _olmo2(architecture: str, fields: Fields) -> ModelConfig:
    common = common_fields(architecture, fields := fields.over(_OLMO_DEFAULTS), pad=1)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [FULL] * count, fixed=True)
    return with_one_rope(fields, **common, layer_types=types, sliding_window=None, qkv_bias=bias, o_bias=bias)


def _olmo3(architecture: str, fields: Fields) -> ModelConfig:
    common = common_fields(architecture, fields := fields.over(_OLMO_DEFAULTS), pad=1)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [SLIDING if (index + 1) % 4 else FULL for index in range(count)])
    ropes = read_olmo_ropes(fields, common["max_position_embeddings"], FULL, SLIDING)
    window = used_window(fields, types, written_window(fields))
    fields.refuse_the_rest()
    return ModelConfig(**common, layer_types=types, sliding_window=window, ropes=ropes, qkv_bias=bias, o_bias=bias)


_SMOLLM3_DEFAULTS = {"bos_token_id": 128_000, "eos_token_id": 128_001, "max_position_embeddings": 32_768}


def _smollm3(architecture: str, fields: Fields) -> ModelConfig:
    common = common_fields(architecture, fields := fields.over(_SMOLLM3_DEFAULTS), kv_heads=4, pad=128_004, tie=True)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    fields.known("max_window_layers")  # of Qwen2, whose config was the model's first
    interval = fields.integer("no_rope_layer_interval", 4)
    written = fields.get("no_rope_layers")  # 1 for a layer that is rotated
    turned = [int((index + 1) % interval != 0) for index in range(count)] if written is None else written
    if not isinstance(turned, list) or any(flag not in (0, 1) for flag in turned) or len(turned) < count:
        fields.problem(f"no_rope_layers {shown(written)}: must be a list of 0 and 1, one a layer")
        turned = [1] * count
    no_rope_layers = tuple(index for index in range(count) if not turned[index])
    window = fields.optional_integer("sliding_window")
    window = window if fields.flag("use_sliding_window", False) else None
    default = [SLIDING if window is not None and index in no_rope_layers else FULL for index in range(count)]
    types = read_layer_types(fields, count, default)
    return with_one_rope(
        fields,
        theta=2_000_000.0,
        **common,
        layer_types=types,
        sliding_window=used_window(fields, types, window),
        no_rope_layers=no_rope_layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _granite(
    architecture: str, fields: Fields, inner: int | None = None, fused: Mapping[str, tuple[str, ...]] | None = None
) -> ModelConfig:
    """inner: an intermediate_size of another name."""
    common = common_fields(architecture, fields := fields.over({"bos_token_id": 1, "eos_token_id": 2}))
    common["intermediate_size"] = inner or common["intermediate_size"]
    if "attention_multiplier" in fields and fields.get("attention_multiplier") is None:
        fields.problem("attention_multiplier null: must be a number; a file without it has 1.0")
    common["attention_scale"] = fields.number("attention_multiplier", 1.0)
    bias, count = fields.flag("attention_bias", False), common["num_hidden_layers"]
    return with_one_rope(
        fields,
        **common,
        layer_types=read_layer_types(fields, count, [FULL] * count, fixed=True),
        sliding_window=None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_scaling=fields.number("logits_scaling", 1.0),
        fused=fused or {},
    )


_DENSE = "only Granite 4's dense models are read, such as ibm-granite/granite-4.0-micro"
# Of experts and mamba layers, which dense models do not have.
_UNUSED = """num_experts_per_tok output_router_logits router_aux_loss_coef time_step_limit init_method mamba_n_heads
mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias"""


def _granite_hybrid(architecture: str, fields: Fields) -> ModelConfig:
    fields = fields.over({"intermediate_size": 11_008, "position_embedding_type": "none"})
    fields.known(*_UNUSED.split(), "layers_block_type")
    fields.must_be_off("mlp_bias", "the MLPs of this architecture have no biases")
    experts = fields.integer("num_local_experts", 8, minimum=0)
    if experts:
        fields.problem(f"num_local_experts {experts}: a mixture of experts; {_DENSE}")
    types = fields.get("layers_block_type") or fields.get("layer_types") or []
    if not isinstance(types, list) or not types or any(kind not in ("attention", FULL) for kind in types):
        fields.problem(f"layer_types {shown(types or 'missing')}: layers of mamba; {_DENSE}")
    for key, only in (("position_embedding_type", "rope"), ("normalization_function", "rmsnorm")):
        fields.choice(key, (only,), only)
    # Said already; the rest of the file is that of Granite 3.
    dense = fields.without("layer_types")
    fused = {"input_linear": ("gate_proj", "up_proj")}
    return _granite(architecture, dense, fields.integer("shared_intermediate_size", 1024), fused)


READERS: dict[str, Callable[[str, Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Ministral3ForCausalLM": _ministral3,
    "Mistral3ForConditionalGeneration": _mistral3_multimodal,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5_multimodal,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": partial(_qwen3_5_multimodal, read=_qwen3_5_moe),
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": read_gemma3_multimodal,
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4ForConditionalGeneration": read_gemma4_multimodal,
    "GptOssForCausalLM": read_gpt_oss,
}

# Classifiers, whose head has an output for each class, or one: a reward. The language model that each is but for that.
CLASSIFIERS = {
    name.replace("CausalLM", "SequenceClassification"): name
    for name in (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Phi3ForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "SmolLM3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "GptOssForCausalLM",
    )
} | {
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    "Qwen3_5TextForSequenceClassification": "Qwen3_5ForCausalLM",
}

# For files without `architectures`, such as those that models from scratch are described by.
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
}
