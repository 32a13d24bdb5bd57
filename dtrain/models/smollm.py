"""SmolLM3 (https://huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama's layer, in one of four without rotary positions
(arXiv:2501.18795)."""

from torch import Tensor, nn

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import Attention, CausalLM, Decoder, PreNormLayer, Rotary


class NoRopeAttention(Attention):
    """Attention that knows of positions by the mask alone."""

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """hidden [B, S, D] -> q [B, S, H, hd], k and v [B, S, kv, hd], none of them rotated"""
        hidden, heads = self.enter(hidden), (-1, self.head_dim)
        return tuple(proj(hidden).unflatten(-1, heads) for proj in (self.q_proj, self.k_proj, self.v_proj))


class SmolLM3Layer(PreNormLayer):
    def add_mixer(self, config: ModelConfig, index: int, qk_norm: type[nn.Module] | None) -> None:
        """Give the layer its attention, with or without rotary positions."""
        kind = NoRopeAttention if index in config.no_rope_layers else Attention
        self.self_attn = kind(config, index)


class SmolLM3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, SmolLM3Layer))
