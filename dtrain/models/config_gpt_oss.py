"""config.json of gpt-oss, as transformers and OpenAI's files write it. Imports no torch."""

from dtrain.models.common.config import FULL, SLIDING, ModelConfig
from dtrain.models.common.config_fields import Fields, shown
from dtrain.models.common.config_parts import (
    common_fields,
    read_experts,
    read_layer_types,
    used_window,
    with_one_rope,
)

_DEFAULTS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(architecture: str, fields: Fields) -> ModelConfig:
    """Read gpt-oss: every layer is sparse, and one in two sees a window, where `layer_types` says nothing else."""
    fields = fields.over(_DEFAULTS)
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = fields.over({"rope_parameters": _ROPE})
    common = common_fields(architecture, fields, kv_heads=8, head_dim=64)
    if common["hidden_act"] != "silu":
        fields.problem(f"hidden_act {shown(fields.get('hidden_act'))}: only 'silu' is implemented")
    bias, count = fields.flag("attention_bias", True), common["num_hidden_layers"]
    types = read_layer_types(fields, count, [FULL if index % 2 else SLIDING for index in range(count)])
    window = fields.optional_integer("sliding_window", None if "sliding_window" in fields else 128)
    gate = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    fields.known("initial_context_length")  # that of the rope, again
    if fields.get("experts_per_token") not in (None, fields.get("num_experts_per_tok")):
        fields.problem("experts_per_token and num_experts_per_tok differ: they are one number under two names")
    experts = read_experts(
        fields,
        128,
        4,
        common["intermediate_size"],
        True,
        tuple(range(count)),
        stacked=True,
        biased=True,
        turned=True,
        clamp=gate,
    )
    if experts is None:
        fields.problem("num_local_experts 0: in this architecture every MLP is a mixture")
    return with_one_rope(
        fields,
        theta=150_000.0,
        **common,
        layer_types=types,
        sliding_window=used_window(fields, types, window),
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        experts=experts,
        unnamed=("scores",),
    )
