"""Qwen2 and 2.5 (arXiv:2407.10671, 2412.15115), and Qwen3 (arXiv:2505.09388), dense and with experts.

Llama's layer; Qwen2 with biases on q, k and v, Qwen3 without them and with an RMSNorm over each head of q and k.
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
    @classmethod
    def read(cls, fields: ModelFields, sections: Sections | None = None) -> ModelConfig:
        """Override `CausalLM.read`; sections: of Qwen2.5-VL's rotary embedding."""
        if fields.get("attention_bias") is False:
            fields.add_problem("attention_bias false: Qwen2 always has biases on q, k and v")
        common = fields.read_common(cls.__name__, kv_heads=32)
        layers = _read_layers(fields, common["num_hidden_layers"])
        return fields.build_config(**common, **layers, qkv_bias=True, sections=sections)


class Qwen3Attention(Attention):
    qk_norm = RMSNorm


class Qwen3Layer(PreNormLayer):
    attention = Qwen3Attention


class Qwen3SparseLayer(SparseLayer):
    attention = Qwen3Attention


class Qwen3ForCausalLM(CausalLM):
    plan = DECODER_PLAN | QK_NORMS
    layer = Qwen3Layer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        common = fields.read_common(cls.__name__, kv_heads=32, head_dim=128, bias=False)
        return fields.build_config(**common, **_read_layers(fields, common["num_hidden_layers"]))


class Qwen3MoeForCausalLM(CausalLM):
    plan = DECODER_PLAN | QK_NORMS | SPARSE_PLAN
    layer = Qwen3SparseLayer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        common = fields.read_common(cls.__name__, kv_heads=4, bias=False)
        count = common["num_hidden_layers"]
        layers = _read_layers(fields, count, moe=True)
        return fields.build_config(**common, **layers, experts=_read_experts(fields, count))


def _read_experts(fields: ModelFields, count: int) -> ExpertsConfig | None:
    """Read the experts of each `decoder_sparse_step`-th layer but those of `mlp_only_layers`; None: no layer is
    sparse."""
    inner, normed = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob", False)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        fields.add_problem(f"mlp_only_layers {format_value(dense)}: must be a list of layers' numbers")
        dense = []
    sparse = tuple(index for index in range(count) if index not in dense and (index + 1) % step == 0)
    return fields.read_experts(128, 8, inner, RouterSettings(normed), sparse)


def _read_layers(fields: ModelFields, count: int, moe: bool = False) -> dict[str, Any]:
    """The window counts only where it is switched on, from a certain layer upwards; in a mixture of experts in all."""
    window, switched_on = fields.read_window(), fields.flag("use_sliding_window", False)
    window = window if switched_on else None
    full_layers = 0 if moe else fields.integer("max_window_layers", 28, minimum=0)
    fields.ignore("max_window_layers")
    default = [SLIDING if window is not None and index >= full_layers else FULL for index in range(count)]
    types = fields.read_layer_types(count, default, fixed=moe)
    return {"layer_types": types, "sliding_window": fields.check_window(types, window)}
