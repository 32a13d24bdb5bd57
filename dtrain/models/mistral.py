"""Mistral Small 3.1 and 3.2, and Ministral 3 (https://huggingface.co/mistralai), alone or as the text tower of a
multimodal checkpoint; Mixtral (arXiv:2401.04088). Llama's layer; Ministral 3 scales queries by their position, as
Llama 4 does, and each MLP of Mixtral is a mixture of experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dtrain.models.common.config import ModelConfig, Rope
from dtrain.models.common.decoder import DECODER_PLAN, Attention, CausalLM, Decoder, PreNormLayer, Rotary, plan_of
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer
from dtrain.models.common.tower import TextTower


class ScaledAttention(Attention):
    """Attention whose queries are multiplied by a number of each position."""

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """Override `Attention.project`; rotary: the tables, and the queries' scale [B or 1, S, 1, 1]"""
        *turns, scale = rotary
        q, k, v = super().project(hidden, tuple(turns))
        return q * scale, k, v


class ScaledLayer(PreNormLayer):
    def add_mixer(self, config: ModelConfig, index: int, qk_norm: type[nn.Module] | None) -> None:
        """Give the layer its attention."""
        self.self_attn = ScaledAttention(config, index)

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Override `Layer.before`; more: the queries' scale [B or 1, S, 1, 1]"""
        return self.mixer.project(self.input_layernorm(hidden), (cos, sin, *more))


class ScaledDecoder(Decoder):
    """A decoder that hands its layers the queries' scale beside the rotary tables."""

    def turns(
        self, rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype, held: dict[Any, Tensor] | None
    ) -> Rotary:
        """Override `Decoder.turns`, and 1 + beta · ln(1 + floor(position / original length)), in max(float32, dtype)
        and rounded: [B or 1, S, 1, 1]"""
        wide = torch.promote_types(dtype, torch.float32)
        lengths = torch.floor(positions.to(wide) / rope.original_max_positions)
        scale = (1 + rope.query_beta * torch.log1p(lengths)).to(dtype)
        return *super().turns(rope, head_dim, positions, dtype, held), scale[..., None, None]


class MistralForCausalLM(TextTower):
    tower_names = ("language_model.model.", "model.language_model.")
    head_names = ("lm_head.", "language_model.lm_head.")
    carried = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)

    def __init__(self, config: ModelConfig):
        is_scaled = any(rope.query_beta for rope in config.ropes.values())
        decoder = ScaledDecoder(config, ScaledLayer) if is_scaled else Decoder(config, PreNormLayer)
        super().__init__(config, decoder)


# What Mixtral's files call an expert's matrices.
_MIXTRAL = {"gate_proj.weight": "w1.weight", "down_proj.weight": "w2.weight", "up_proj.weight": "w3.weight"}


class MixtralForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, SparseLayer))
        self.plan = plan_of(self, {**DECODER_PLAN, **SPARSE_PLAN})

    def checkpoint_names(self, name: str) -> list[str]:
        before, of_mlp, after = name.partition(".mlp.")
        if not of_mlp:
            return [name]
        for ours, theirs in _MIXTRAL.items():
            after = after.replace(ours, theirs)
        return [f"{before}.block_sparse_moe.{after}"]
