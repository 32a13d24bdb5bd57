"""Llama with nn.LayerNorm in the place of its norms, and one after the embeddings: a family in one file."""

import torch
from torch import Tensor, nn

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, CausalLM, Decoder, PreNormLayer
from dtrain.models.common.functions import RMSNorm, rms_norm
from dtrain.models.common.model_fields import ModelFields


class CentredNorm(RMSNorm):
    """weight · norm(x - mean(x)) + bias, all in max(float32, x's dtype)."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        weight, bias = self.local("weight").to(wide.dtype), self.local("bias").to(wide.dtype)
        return (rms_norm(centred, weight, self.eps) + bias).to(x.dtype)


class CentredLayer(PreNormLayer):
    norm = CentredNorm


class CentredDecoder(Decoder):
    """A decoder whose embeddings are normed."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, CentredLayer, CentredNorm)
        self.embed_norm = CentredNorm(config.hidden_size, config.rms_norm_eps)

    def _scale_embeddings(self, hidden: Tensor) -> Tensor:
        return self.embed_norm(super()._scale_embeddings(hidden))


class CentredLlamaForCausalLM(CausalLM):
    plan = {**DECODER_PLAN, "model.embed_norm": "sequence"}

    def __init__(self, config: ModelConfig):
        super().__init__(config, CentredDecoder(config))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        common = fields.read_common(cls.__name__, bias=False)
        common["rms_norm_eps"] = fields.number("layer_norm_eps", 1e-5, maximum=1.0)
        return fields.build_config(**common)
