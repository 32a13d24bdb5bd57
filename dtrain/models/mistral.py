"""Mistral (arXiv:2310.06825), Mixtral (arXiv:2401.04088), and Mistral Small 3.1 and 3.2 and Ministral 3
(https://huggingface.co/mistralai), alone or as the text tower of a multimodal checkpoint. Llama's layer, with a sliding
window where the config has one; Ministral 3 scales queries by their position, as Llama 4 does, and each MLP of Mixtral
is a mixture of experts.
"""

from typing import Any

import torch
from torch import Tensor

from dtrain.models.common.config import ModelConfig, Rope, RouterSettings
from dtrain.models.common.decoder import DECODER_PLAN, Attention, CausalLM, Decoder, PreNormLayer
from dtrain.models.common.micro_batch import AdapterContext, Rotary
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer
from dtrain.models.common.tower import TextTower
from dtrain.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        return fields.build_config(**fields.read_common(cls.__name__, kv_heads=8), sliding_window=fields.read_window())


class ScaledAttention(Attention):
    """Attention whose queries are multiplied by a number of each position."""

    def project_queries(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project_queries`; rotary: the tables, and the queries' scale [B or 1, S, 1, 1]"""
        (q,) = super().project_queries(hidden, rotary, adapters)
        return (q * rotary[2],)


class ScaledLayer(PreNormLayer):
    attention = ScaledAttention


class ScaledDecoder(Decoder):
    """A decoder that hands its layers the queries' scale beside the rotary tables."""

    def make_rotary(
        self, rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype, held: dict[Any, Tensor] | None
    ) -> Rotary:
        """Override `Decoder.make_rotary`, and 1 + beta · ln(1 + floor(position / original length)), in max(float32,
        dtype) and rounded: [B or 1, S, 1, 1]"""
        wide = torch.promote_types(dtype, torch.float32)
        lengths = torch.floor(positions.to(wide) / rope.original_max_positions)
        scale = (1 + rope.query_beta * torch.log1p(lengths)).to(dtype)
        return *super().make_rotary(rope, head_dim, positions, dtype, held), scale[..., None, None]


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


class Ministral3ForCausalLM(TextTower):
    tower_prefixes = ("language_model.model.", "model.language_model.")
    head_prefixes = ("lm_head.", "language_model.lm_head.")
    carried_patterns = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)

    def __init__(self, config: ModelConfig):
        is_scaled = any(rope.query_beta for rope in config.ropes.values())
        super().__init__(config, ScaledDecoder(config, ScaledLayer) if is_scaled else None)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_MINISTRAL3_DEFAULTS)
        common = fields.read_common(cls.__name__, kv_heads=8, head_dim=128, pad=11)
        window = fields.optional_integer("sliding_window")
        return fields.build_config(scales_queries=True, **common, sliding_window=window)


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """A text tower of either kind. Where neither level of its config says so it is untied, as the published files
    are."""

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        is_scaled = fields.get("model_type") == "ministral3"
        return super().read(fields) if is_scaled else MistralForCausalLM.read(fields)


# What Mixtral's files call an expert's matrices.
_MIXTRAL = {"gate_proj.weight": "w1.weight", "down_proj.weight": "w2.weight", "up_proj.weight": "w3.weight"}


class MixtralForCausalLM(CausalLM):
    plan = DECODER_PLAN | SPARSE_PLAN
    layer = SparseLayer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        defaults = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 1_000_000.0}
        fields = fields.with_defaults(defaults)
        common = fields.read_common(cls.__name__, kv_heads=8)
        window, layers = fields.optional_integer("sliding_window"), tuple(range(common["num_hidden_layers"]))
        fields.must_be_off("router_jitter_noise", "noise on what is routed is not implemented; set it to 0.0")
        experts = fields.read_experts(8, 2, common["intermediate_size"], RouterSettings(is_normalized=True), layers)
        return fields.build_config(**common, sliding_window=window, experts=experts)

    def checkpoint_names(self, name: str) -> list[str]:
        before, of_mlp, after = name.partition(".mlp.")
        if not of_mlp:
            return [name]
        for ours, theirs in _MIXTRAL.items():
            after = after.replace(ours, theirs)
        return [f"{before}.block_sparse_moe.{after}"]
