"""OLMo 2 and 3 (arXiv:2501.00656, https://huggingface.co/allenai): norms after attention and MLP instead of before.

q and k are normalised over all heads at once, so under tensor parallelism their mean squares are averaged over ranks.
OLMo 3 has three sliding layers to each full layer, and only scales the rotary positions of full layers.
"""

import torch
from torch import Tensor

from dtrain.models.common.config import FULL, SLIDING, ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, Attention, CausalLM, Decoder, GatedMLP, Layer
from dtrain.models.common.functions import RMSNorm, apply_rotary, rms_norm
from dtrain.models.common.micro_batch import AdapterContext, LayerContext, Rotary
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.rope_config import read_ropes_by_kind, read_theta
from dtrain.parallel.collectives import all_reduce_in_backward, all_reduce_in_forward

_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50_279, "max_position_embeddings": 2048}


class OlmoRMSNorm(RMSNorm):
    """RMSNorm in max(float32, x's dtype), the weight included, and rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size] and multiply by the weight, in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), self.local("weight").to(wide), self.eps).to(x.dtype)

    def normalize_by(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Normalise x by a given mean square, in max(float32, x's dtype).

        Args:
            x: This rank's elements, [..., size/tp].
            mean_square: Mean of the squares of all ranks' elements, [..., 1].
        """
        weight = self.local("weight").to(mean_square.dtype)
        return (weight * (x.to(mean_square.dtype) * torch.rsqrt(mean_square + self.eps))).to(x.dtype)


class OlmoAttention(Attention):
    """Attention with a norm over all heads of q, and one over all heads of k."""

    q_norm: OlmoRMSNorm
    k_norm: OlmoRMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.q_norm = OlmoRMSNorm(config.num_attention_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = OlmoRMSNorm(config.num_key_value_heads * config.head_dim, config.rms_norm_eps)

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project`.

        Collectives:
            Under tensor parallelism, also one all-reduce of [B, S, 2], in the forward and in the backward.
        """
        hidden, heads = self.enter(hidden), (-1, self.head_dim)
        q, k = self._normalize(self.q_proj(hidden, adapters), self.k_proj(hidden, adapters))
        v = self.v_proj(hidden, adapters).unflatten(-1, heads)  # [B, S, kv, hd]
        return apply_rotary(q.unflatten(-1, heads), *rotary), apply_rotary(k.unflatten(-1, heads), *rotary), v

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise q [B, S, H · hd] and k [B, S, kv · hd] of this rank over all heads of all ranks."""
        if self.tp is None:
            return self.q_norm(q), self.k_norm(k)
        wide = torch.promote_types(q.dtype, torch.float32)
        # A key head that several ranks have counts on each of them, so the mean over ranks is the mean over heads.
        local_means = [tensor.to(wide).square().mean(-1, keepdim=True) for tensor in (q, k)]
        means = torch.cat(local_means, -1) / self.tp.size
        total = all_reduce_in_backward(all_reduce_in_forward(means, self.tp.group), self.tp.group)
        q_mean, k_mean = total.split(1, -1)
        return self.q_norm.normalize_by(q, q_mean), self.k_norm.normalize_by(k, k_mean)


class OlmoLayer(Layer):
    """Layer with a norm after attention and a norm after the MLP."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.self_attn = OlmoAttention(config, index)
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = OlmoRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = OlmoRMSNorm(config.hidden_size, config.rms_norm_eps)

    def before_attention(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Override `Layer.before_attention`, without a norm."""
        return self.self_attn.project(hidden, rotary, adapters)

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `Layer.after_attention`."""
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended, adapters))
        del attended  # free its memory for the MLP
        return hidden + self.post_feedforward_layernorm(self.mlp(hidden, adapters))


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2."""

    plan = {
        **{name: style for name, style in DECODER_PLAN.items() if not name.endswith("input_layernorm")},
        # These norms have a weight for each output of q_proj and k_proj, sharded like these.
        "model.layers.*.self_attn.q_norm": "colwise",
        "model.layers.*.self_attn.k_norm": "colwise_kv",
        "model.layers.*.post_feedforward_layernorm": "sequence",
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, OlmoLayer, OlmoRMSNorm))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_DEFAULTS)
        return fields.build_config(**fields.read_common(cls.__name__, pad=1, bias=False))


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3."""

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`. Rotary scaling belongs to the full layers, and both layer types have one base."""
        fields = fields.with_defaults(_DEFAULTS)
        common = fields.read_common(cls.__name__, pad=1, bias=False)
        num_layers = common["num_hidden_layers"]
        default_types = [SLIDING if (index + 1) % 4 else FULL for index in range(num_layers)]
        layer_types = fields.read_layer_types(num_layers, default_types)
        theta = read_theta(fields, "rope_theta", 500_000.0)
        if theta != 500_000.0:
            # transformers 4 applies it to all layers, 5 to full layers.
            fields.add_problem(f"rope_theta {theta:g}: say it in rope_parameters, under {FULL} and under {SLIDING}")
        ropes = read_ropes_by_kind(fields, common["max_position_embeddings"], {FULL: theta, SLIDING: theta})
        window = fields.check_window(layer_types, fields.read_window())
        fields.refuse_the_rest()
        return ModelConfig(**common, layer_types=layer_types, sliding_window=window, ropes=ropes)
