"""gpt-oss (arXiv:2508.10925).

Every MLP is a mixture of experts with biases and a clamped activation. One layer in two has a sliding window. Each
query head has an attention sink (`attention.blocks`).

Files store the experts as stacks of transposed matrices in which the columns of gate and up alternate
(`checkpoint.huggingface.file_rows`), and call the router `router`.
"""

import torch
from torch import Tensor, nn

from dtrain.models.common.config import FULL, SLIDING, ModelConfig, RouterSettings
from dtrain.models.common.config_fields import format_value
from dtrain.models.common.decoder import DECODER_PLAN, Attention, CausalLM, Decoder
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer
from dtrain.models.olmo import OlmoRMSNorm
from dtrain.parallel.tensor import LocalParameters

_DEFAULTS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Sinks(LocalParameters):
    """Attention sink of each query head, [H]. In files it belongs to the attention (`ModelConfig.unnamed_modules`)."""

    def __init__(self, heads: int):
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(heads))


class GptOssAttention(Attention):
    """Attention with sinks."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.scores = Sinks(config.num_attention_heads)

    def sinks(self) -> Tensor:
        """Override `Attention.sinks`: [H]"""
        return self.scores.local("sinks")


class GptOssLayer(SparseLayer):
    """Sparse layer whose attention has sinks."""

    attention = GptOssAttention
    norm = OlmoRMSNorm


class GptOssForCausalLM(CausalLM):
    """gpt-oss."""

    initial_values = {"*.mlp.gate.bias": "normal", **CausalLM.initial_values}
    plan = DECODER_PLAN | SPARSE_PLAN | {"model.layers.*.self_attn.scores": "heads"}

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, GptOssLayer, OlmoRMSNorm))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`. Every layer is sparse. Without `layer_types`, even layers have the window."""
        fields = fields.with_defaults(_DEFAULTS)
        if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
            fields = fields.with_defaults({"rope_parameters": _ROPE})
        common = fields.read_common(cls.__name__, kv_heads=8, head_dim=64, bias=True)
        if common["hidden_act"] != "silu":
            fields.add_problem(f"hidden_act {format_value(fields.get('hidden_act'))}: only 'silu' is implemented")
        num_layers = common["num_hidden_layers"]
        default_types = [FULL if index % 2 else SLIDING for index in range(num_layers)]
        layer_types = fields.read_layer_types(num_layers, default_types)
        window = fields.optional_integer("sliding_window", None if "sliding_window" in fields else 128)
        gain, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
        fields.ignore("initial_context_length")  # also in the rope's object
        if fields.get("experts_per_token") not in (None, fields.get("num_experts_per_tok")):
            fields.add_problem("experts_per_token and num_experts_per_tok differ: they are one number under two names")
        experts = fields.read_experts(
            num_experts=128,
            top_k=4,
            intermediate_size=common["intermediate_size"],
            router=RouterSettings(is_normalized=True),
            layers=tuple(range(num_layers)),
            is_stacked=True,
            has_biases=True,
            is_transposed=True,
            clamp=(gain, limit),
        )
        if experts is None:
            fields.add_problem("num_local_experts 0: in this architecture every MLP is a mixture")
        return fields.build_config(
            **common,
            layer_types=layer_types,
            sliding_window=fields.check_window(layer_types, window),
            experts=experts,
            has_sinks=True,
            unnamed_modules=("scores",),
        )

    def checkpoint_names(self, name: str) -> list[str]:
        """Override `CausalLM.checkpoint_names`: files call the router `router`."""
        return [name.replace(".mlp.gate.", ".mlp.router.")]
