"""OLMo 2 and 3 (arXiv:2501.00656, https://huggingface.co/allenai): Llama's parts with norms after attention and MLP.

q and k are normed over all heads at once, so under tensor parallel a mean is taken over ranks. OLMo 3 has three sliding
layers to each full one, and scales the rotary positions of full layers alone.
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
    """weight · norm(x), all in max(float32, x's dtype), rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), self.local("weight").to(wide), self.eps).to(x.dtype)

    def scaled(self, x: Tensor, mean: Tensor) -> Tensor:
        """x [..., size/tp] by the mean [..., 1] of the squares of all ranks' shares, in max(float32, x's dtype)."""
        weight = self.local("weight").to(mean.dtype)
        return (weight * (x.to(mean.dtype) * torch.rsqrt(mean + self.eps))).to(x.dtype)


class OlmoAttention(Attention):
    """Attention with norms over the whole projections of q and k."""

    q_norm: OlmoRMSNorm
    k_norm: OlmoRMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.q_norm = OlmoRMSNorm(config.num_attention_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = OlmoRMSNorm(config.num_key_value_heads * config.head_dim, config.rms_norm_eps)

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project`; under tensor parallel one all-reduce [B, S, 2], forward and backward."""
        hidden, heads = self.enter(hidden), (-1, self.head_dim)
        q, k = self._normed(self.q_proj(hidden, adapters), self.k_proj(hidden, adapters))
        v = self.v_proj(hidden, adapters).unflatten(-1, heads)  # [B, S, kv, hd]
        return apply_rotary(q.unflatten(-1, heads), *rotary), apply_rotary(k.unflatten(-1, heads), *rotary), v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, S, H · hd] and k [B, S, kv · hd], of which this rank may have some heads, normed over all"""
        if self.tp is None:
            return self.q_norm(q), self.k_norm(k)
        wide = torch.promote_types(q.dtype, torch.float32)
        # A key head that several ranks have counts on each of them: the mean over ranks is the mean over heads.
        means = torch.cat([tensor.to(wide).square().mean(-1, keepdim=True) for tensor in (q, k)], -1) / self.tp.size
        of_q, of_k = all_reduce_in_backward(all_reduce_in_forward(means, self.tp.group), self.tp.group).split(1, -1)
        return self.q_norm.scaled(q, of_q), self.k_norm.scaled(k, of_k)


class OlmoLayer(Layer):
    """A norm after attention and one after the MLP, each in its residual branch."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.self_attn = OlmoAttention(config, index)
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = OlmoRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = OlmoRMSNorm(config.hidden_size, config.rms_norm_eps)

    def before_attention(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Override `Layer.before_attention`, without a norm: hidden [B, S, D] -> q, k and v."""
        return self.self_attn.project(hidden, rotary, adapters)

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `Layer.after_attention`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended, adapters))
        del attended  # the MLP needs its memory
        return hidden + self.post_feedforward_layernorm(self.mlp(hidden, adapters))


class Olmo2ForCausalLM(CausalLM):
    plan = {
        **{name: style for name, style in DECODER_PLAN.items() if not name.endswith("input_layernorm")},
        # A weight for each output of q_proj and k_proj, cut as these are.
        "model.layers.*.self_attn.q_norm": "colwise",
        "model.layers.*.self_attn.k_norm": "colwise_kv",
        "model.layers.*.post_feedforward_layernorm": "sequence",
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, OlmoLayer, OlmoRMSNorm))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_DEFAULTS)
        return fields.build_config(**fields.read_common(cls.__name__, pad=1, bias=False))


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`: rotary scaling belongs to the full layers, and both kinds have one base."""
        fields = fields.with_defaults(_DEFAULTS)
        common = fields.read_common(cls.__name__, pad=1, bias=False)
        count = common["num_hidden_layers"]
        types = fields.read_layer_types(count, [SLIDING if (index + 1) % 4 else FULL for index in range(count)])
        theta = read_theta(fields, "rope_theta", 500_000.0)
        if theta != 500_000.0:
            # transformers 4 gives it to all layers, 5 to full ones.
            fields.add_problem(f"rope_theta {theta:g}: say it in rope_parameters, under {FULL} and under {SLIDING}")
        ropes = read_ropes_by_kind(fields, common["max_position_embeddings"], {FULL: theta, SLIDING: theta})
        window = fields.check_window(types, fields.read_window())
        fields.refuse_the_rest()
        return ModelConfig(**common, layer_types=types, sliding_window=window, ropes=ropes)
