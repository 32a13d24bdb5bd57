"""Mistral (arXiv:2310.06825), Mixtral (arXiv:2401.04088), Mistral Small 3.1 and 3.2, and Ministral 3
(https://huggingface.co/mistralai), also as the text tower of a multimodal checkpoint.

They have Llama's layer, with a sliding window if the config has one. Ministral 3 scales queries by their position, as
Llama 4 does. Each MLP of Mixtral is a mixture of experts.
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
    """Mistral."""

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        return fields.build_config(**fields.read_common(cls.__name__, kv_heads=8), sliding_window=fields.read_window())


class ScaledAttention(Attention):
    """Attention whose queries are multiplied by a factor of their position."""

    def project_queries(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project_queries`.

        `rotary` has the rotary tables and the factor of each position, [B or 1, S, 1, 1].
        """
        (q,) = super().project_queries(hidden, rotary, adapters)
        _, _, position_scale = rotary
        return (q * position_scale,)


class ScaledLayer(PreNormLayer):
    """Layer whose queries are scaled by their position."""

    attention = ScaledAttention


class ScaledDecoder(Decoder):
    """Decoder that also computes the factors of queries by position."""

    def make_rotary(
        self,
        rope: Rope,
        head_dim: int,
        positions: Tensor,
        dtype: torch.dtype,
        frequency_cache: dict[Any, Tensor] | None,
    ) -> Rotary:
        """Override `Decoder.make_rotary`. Adds the factor of each position, [B or 1, S, 1, 1].

        The factor is 1 + beta · ln(1 + floor(position / original length)), computed in max(float32, dtype) and rounded.
        """
        wide = torch.promote_types(dtype, torch.float32)
        num_lengths = torch.floor(positions.to(wide) / rope.original_max_positions)
        scale = (1 + rope.query_beta * torch.log1p(num_lengths)).to(dtype)
        tables = super().make_rotary(rope, head_dim, positions, dtype, frequency_cache)
        return *tables, scale[..., None, None]


# Fields that Ministral 3's files, and the text_config of Mistral Small, may leave out.
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
    """Ministral 3."""

    tower_prefixes = ("language_model.model.", "model.language_model.")
    head_prefixes = ("lm_head.", "language_model.lm_head.")
    carried_patterns = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)

    def __init__(self, config: ModelConfig):
        is_scaled = any(rope.query_beta for rope in config.ropes.values())
        super().__init__(config, ScaledDecoder(config, ScaledLayer) if is_scaled else None)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_MINISTRAL3_DEFAULTS)
        common = fields.read_common(cls.__name__, kv_heads=8, head_dim=128, pad=11)
        window = fields.optional_integer("sliding_window")
        return fields.build_config(scales_queries=True, **common, sliding_window=window)


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Text tower of a multimodal checkpoint: Mistral's or Ministral 3's text model.

    The head is untied if neither level of the config has `tie_word_embeddings`, as in the published files.
    """

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        is_scaled = fields.get("model_type") == "ministral3"
        if is_scaled:
            return super().read(fields)
        return MistralForCausalLM.read(fields)


# The model's names of an expert's matrices -> those of Mixtral's files.
_MIXTRAL_NAMES = {"gate_proj.weight": "w1.weight", "down_proj.weight": "w2.weight", "up_proj.weight": "w3.weight"}


class MixtralForCausalLM(CausalLM):
    """Mixtral."""

    plan = DECODER_PLAN | SPARSE_PLAN
    layer = SparseLayer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(
            {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 1_000_000.0}
        )
        common = fields.read_common(cls.__name__, kv_heads=8)
        window = fields.optional_integer("sliding_window")
        fields.must_be_off("router_jitter_noise", "noise on what is routed is not implemented; set it to 0.0")
        all_layers = tuple(range(common["num_hidden_layers"]))
        router = RouterSettings(is_normalized=True)
        experts = fields.read_experts(8, 2, common["intermediate_size"], router, all_layers)
        return fields.build_config(**common, sliding_window=window, experts=experts)

    def checkpoint_names(self, name: str) -> list[str]:
        """Override `CausalLM.checkpoint_names`: files name the MLP and its matrices otherwise."""
        layer, separator, in_mlp = name.partition(".mlp.")
        if not separator:
            return [name]
        for model_name, file_name in _MIXTRAL_NAMES.items():
            in_mlp = in_mlp.replace(model_name, file_name)
        return [f"{layer}.block_sparse_moe.{in_mlp}"]
