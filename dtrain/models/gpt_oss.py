"""gpt-oss (arXiv:2508.10925): every MLP is a mixture of experts with biases and a clamped gate, one layer in two sees
a window, and each query head has a sink (`attention.blocks`).

Files have the experts as stacks of transposed matrices, gate and up joined column by column in turn
(`checkpoint.huggingface.file_rows`), and call the router `router`.
"""

import torch
from torch import Tensor, nn

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, Attention, CausalLM, Decoder, plan_of
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer
from dtrain.models.olmo import OlmoRMSNorm
from dtrain.parallel.placement import LocalParameters


class Sinks(LocalParameters):
    """A score of each query head. Files have it as the attention's own."""

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
    """A sparse layer whose attention has sinks, and whose norms are rounded once."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, norm=OlmoRMSNorm)

    def add_mixer(self, config: ModelConfig, index: int, qk_norm: type[nn.Module] | None) -> None:
        """Give the layer its attention."""
        self.self_attn = GptOssAttention(config, index)


class GptOssForCausalLM(CausalLM):
    initial = {"*.mlp.gate.bias": "normal", **CausalLM.initial}

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, GptOssLayer, OlmoRMSNorm))
        self.plan = plan_of(self, {**DECODER_PLAN, **SPARSE_PLAN, "model.layers.*.self_attn.scores": "heads"})

    def checkpoint_names(self, name: str) -> list[str]:
        return [name.replace(".mlp.gate.", ".mlp.router.")]
