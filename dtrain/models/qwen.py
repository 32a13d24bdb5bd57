"""Qwen2 and 2.5 (arXiv:2407.10671, 2412.15115), and Qwen3 (arXiv:2505.09388), dense and with experts.

They have Llama's layer. Qwen2 has biases on q, k and v. Qwen3 has none, but an RMSNorm over each head of q and k.
"""

from typing import Any

from dtrain.models.common.config import FULL, SLIDING, ExpertsConfig, ModelConfig, RouterSettings
from dtrain.models.common.config_fields import format_value
from dtrain.models.common.decoder import DECODER_PLAN, QK_NORMS, Attention, CausalLM, PreNormLayer
from dtrain.models.common.functions import RMSNorm
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer
from dtrain.models.common.rope_config import Sections


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and 2.5."""

    @classmethod
    def read(cls, fields: ModelFields, sections: Sections | None = None) -> ModelConfig:
        """Override `CausalLM.read`.

        Args:
            fields: Fields of the config.json.
            sections: Axes of Qwen2.5-VL's rotary embedding. None for a text model.
        """
        if fields.get("attention_bias") is False:
            fields.add_problem("attention_bias false: Qwen2 always has biases on q, k and v")
        common = fields.read_common(cls.__name__, kv_heads=32)
        layers = _read_layers(fields, common["num_hidden_layers"])
        return fields.build_config(**common, **layers, qkv_bias=True, sections=sections)


class Qwen3Attention(Attention):
    """Attention with an RMSNorm over each head of q and k."""

    qk_norm = RMSNorm


class Qwen3Layer(PreNormLayer):
    """Layer of Qwen3."""

    attention = Qwen3Attention


class Qwen3SparseLayer(SparseLayer):
    """Layer of Qwen3 with experts."""

    attention = Qwen3Attention


class Qwen3ForCausalLM(CausalLM):
    """Qwen3."""

    plan = DECODER_PLAN | QK_NORMS
    layer = Qwen3Layer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        common = fields.read_common(cls.__name__, kv_heads=32, head_dim=128, bias=False)
        return fields.build_config(**common, **_read_layers(fields, common["num_hidden_layers"]))


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3 with experts."""

    plan = DECODER_PLAN | QK_NORMS | SPARSE_PLAN
    layer = Qwen3SparseLayer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        common = fields.read_common(cls.__name__, kv_heads=4, bias=False)
        num_layers = common["num_hidden_layers"]
        layers = _read_layers(fields, num_layers, moe=True)
        return fields.build_config(**common, **layers, experts=_read_experts(fields, num_layers))


def _read_experts(fields: ModelFields, num_layers: int) -> ExpertsConfig | None:
    """Read the experts. None if no layer is sparse.

    Every `decoder_sparse_step`-th layer is sparse, except for those of `mlp_only_layers`.
    """
    intermediate_size = fields.integer("moe_intermediate_size", 768)
    router = RouterSettings(is_normalized=fields.flag("norm_topk_prob", False))
    step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(isinstance(index, int) for index in dense_layers):
        fields.add_problem(f"mlp_only_layers {format_value(dense_layers)}: must be a list of layers' numbers")
        dense_layers = []
    sparse_layers = []
    for index in range(num_layers):
        if (index + 1) % step == 0 and index not in dense_layers:
            sparse_layers.append(index)
    return fields.read_experts(128, 8, intermediate_size, router, tuple(sparse_layers))


def _read_layers(fields: ModelFields, num_layers: int, moe: bool = False) -> dict[str, Any]:
    """Read layer types and window.

    The window only counts if it is switched on. Then layers from `max_window_layers` upwards have it, and with experts
    all layers.
    """
    window = fields.read_window()
    if not fields.flag("use_sliding_window", False):
        window = None
    first_windowed = 0 if moe else fields.integer("max_window_layers", 28, minimum=0)
    fields.ignore("max_window_layers")
    default = [FULL] * num_layers
    if window is not None:
        default = [SLIDING if index >= first_windowed else FULL for index in range(num_layers)]
    layer_types = fields.read_layer_types(num_layers, default, fixed=moe)
    return {"layer_types": layer_types, "sliding_window": fields.check_window(layer_types, window)}
