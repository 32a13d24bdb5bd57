"""Gemma3's text model (arXiv:2503.19786), alone or as the text tower of a multimodal checkpoint.

Five sliding layers to each full one, with a rotary base for either kind; norms before and after attention and MLP, and
over each head of q and k, all multiplying by 1 + weight; embeddings scaled by sqrt(D).
"""

import torch
from torch import Tensor

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, Attention, Decoder, GatedMLP, Layer, RMSNorm
from dtrain.models.common.functions import rms_norm
from dtrain.models.common.tower import TextTower


class Gemma3RMSNorm(RMSNorm):
    """(1 + weight) · norm(x), all in max(float32, x's dtype), rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), 1.0 + self.local("weight").to(wide), self.eps).to(x.dtype)


class Gemma3Layer(Layer):
    """Decoder layer with each residual branch between two norms."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index, qk_norm=Gemma3RMSNorm)
        self.mlp = GatedMLP(config)
        self.input_layernorm = Gemma3RMSNorm(size, eps)
        self.post_attention_layernorm = Gemma3RMSNorm(size, eps)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(size, eps)
        self.post_feedforward_layernorm = Gemma3RMSNorm(size, eps)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Override `Layer.after`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended))
        del attended  # the MLP needs its memory
        return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))


class Gemma3ForCausalLM(TextTower):
    tower_names = ("language_model.model.", "model.language_model.")  # transformers 4's, and 5's
    head_names = ("lm_head.", "language_model.lm_head.")
    carried = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
    plan = {
        **DECODER_PLAN,
        "model.layers.*.self_attn.q_norm": "head_norm",
        "model.layers.*.self_attn.k_norm": "head_norm",
        "model.layers.*.pre_feedforward_layernorm": "sequence",
        "model.layers.*.post_feedforward_layernorm": "sequence",
    }
    initial = {"*norm.weight": "zeros", "*.bias": "zeros", "*": "normal"}

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, Gemma3Layer, Gemma3RMSNorm, embed_scale=config.hidden_size**0.5))
