"""DeepSeek-V3 and R1 (arXiv:2412.19437), and models with the same layers: Kimi K2, Moonlight.

*Latent attention.* A token's queries, and its keys and values together, are projected down to a latent vector,
normalised, and projected up to heads. A part of each head has rotary positions, and this part of the keys is the same
for all heads (`config.LatentAttention`).

Under tensor parallelism every rank computes the latents (under sequence parallel, those of its own tokens), and the
projections up to heads are sharded by heads. The latents enter the block in place of the hidden states. For DeepSeek-V3
these are 2,112 elements of a token (1,536 + 512 + 64) instead of 7,168.

*Experts.* After the first layers, MLPs are mixtures of experts that are scored by sigmoids and chosen in groups
(`config.RouterSettings`), plus a shared expert.

Files may contain layers after the last one that predict further tokens. They are not trained, and an export copies
them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dtrain.models.common.config import (
    FULL,
    SIGMOID,
    ExpertsConfig,
    KVHeads,
    LatentAttention,
    ModelConfig,
    RouterSettings,
)
from dtrain.models.common.config_fields import format_value
from dtrain.models.common.decoder import DECODER_PLAN, Attention, CausalLM, GatedMLP
from dtrain.models.common.functions import RMSNorm, apply_rotary
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext, Rotary
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer, SparseMLP

_LATENT_EPS = 1e-6  # eps of the latents' norms, whatever rms_norm_eps is
_DEFAULTS = {"num_attention_heads": 128, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}  # the only values that are implemented


class DeepseekV3Attention(Attention):
    """Multi-head latent attention."""

    def add_projections(self, config: ModelConfig, heads: KVHeads) -> None:
        """Override `Attention.add_projections`."""
        sizes = config.latent_attention
        if sizes is None:
            raise ValueError("latent attention in a model without sizes for it")
        self.sizes = sizes
        hidden_size, has_bias = config.hidden_size, config.qkv_bias
        q_size = heads.count * sizes.query_dim
        if sizes.q_rank is None:
            self.q_proj = Linear(hidden_size, q_size, bias=False)
        else:
            self.q_a_proj = Linear(hidden_size, sizes.q_rank, bias=has_bias)
            self.q_a_layernorm = RMSNorm(sizes.q_rank, _LATENT_EPS)
            self.q_b_proj = Linear(sizes.q_rank, q_size, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden_size, sizes.kv_rank + sizes.rope_dim, bias=has_bias)
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, _LATENT_EPS)
        self.kv_b_proj = Linear(sizes.kv_rank, heads.count * (sizes.nope_dim + sizes.value_dim), bias=False)
        self.o_proj = Linear(heads.count * sizes.value_dim, hidden_size, bias=config.o_bias)

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project`.

        Args:
            hidden: [B, S, D], or [B, S/tp, D] under sequence parallel.
            rotary: Rotary tables for `rope_dim` elements.
            adapters: Whether adapters take part, and their dropout.

        Returns:
            q and k [B, S, H, nope + rope], v [B, S, H, value].
        """
        sizes = self.sizes
        # Down to latents.
        if sizes.q_rank is None:
            q_latent = hidden
        else:
            q_latent = self.q_a_layernorm(self.q_a_proj(hidden, adapters))
        kv_latent, k_rope = self.kv_a_proj_with_mqa(hidden, adapters).split([sizes.kv_rank, sizes.rope_dim], -1)
        kv_latent = self.kv_a_layernorm(kv_latent)
        if self.tp is not None:  # all three enter the block in one collective
            parts = q_latent, kv_latent, k_rope
            entered = self.enter(torch.cat(parts, -1))
            q_latent, kv_latent, k_rope = entered.split([part.shape[-1] for part in parts], -1)

        # Up to heads.
        q_up = self.q_proj if sizes.q_rank is None else self.q_b_proj
        q = q_up(q_latent, adapters).unflatten(-1, (-1, sizes.query_dim))
        q_nope, q_rope = q.split([sizes.nope_dim, sizes.rope_dim], -1)
        k_and_v = self.kv_b_proj(kv_latent, adapters).unflatten(-1, (-1, sizes.nope_dim + sizes.value_dim))
        k_nope, v = k_and_v.split([sizes.nope_dim, sizes.value_dim], -1)

        k_rope = self.rotate(k_rope[:, :, None], rotary)  # [B, S, 1, rope], the same for all heads
        k = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], -1)
        return torch.cat([q_nope, self.rotate(q_rope, rotary)], -1), k, v

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Apply the rotary embedding to [B, S, heads, rope].

        Pairs of neighbours are first put half of `rope` apart, as `apply_rotary` takes them. Queries and keys both stay
        in that order, which leaves their products unchanged.
        """
        if self.sizes.is_interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        cos, signed_sin = rotary
        return apply_rotary(x, cos, signed_sin)


class DeepseekV3Mixture(SparseMLP):
    """Mixture of experts with a shared expert that has no gate."""

    def add_shared(self, config: ModelConfig, sizes: ExpertsConfig) -> None:
        """Override `SparseMLP.add_shared`."""
        self.shared_experts = GatedMLP(config, sizes.shared_intermediate_size)

    def shared(self, hidden: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Override `SparseMLP.shared`."""
        out: Tensor = self.shared_experts(hidden, adapters)
        return out


class DeepseekV3Layer(SparseLayer):
    """Layer with latent attention."""

    attention = DeepseekV3Attention
    mixture = DeepseekV3Mixture


class DeepseekV3ForCausalLM(CausalLM):
    """DeepSeek-V3."""

    layer = DeepseekV3Layer
    plan = {
        **DECODER_PLAN,
        **SPARSE_PLAN,
        "model.layers.*.self_attn.*_a_*": "latent",
        "model.layers.*.self_attn.*_b_proj": "colwise",
        "model.layers.*.mlp.shared_experts": "within",
        "model.layers.*.mlp.shared_experts.gate_proj": "colwise",
        "model.layers.*.mlp.shared_experts.up_proj": "colwise",
        "model.layers.*.mlp.shared_experts.down_proj": "rowwise_within",
    }

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """Override `CausalLM.carried_checkpoint_names`: the layers that predict further tokens."""
        first = self.config.num_hidden_layers
        numbers = range(first, first + self.config.num_nextn_predict_layers)
        pattern = rf"model\.layers\.({'|'.join(map(str, numbers))})\..*"
        return (pattern, *super().carried_checkpoint_names)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_DEFAULTS)
        for key, value in _ONLY.items():
            if fields.get(key) not in (None, value):
                fields.add_problem(f"{key} {format_value(fields.get(key))}: only {format_value(value)} is implemented")
        # The factor of a balance loss (here `moe.balance`), sums of other fields, and how the model was trained.
        fields.ignore("aux_loss_alpha", "seq_aux", "qk_head_dim", "ep_size")
        latent = LatentAttention(
            q_rank=fields.optional_integer("q_lora_rank", None if "q_lora_rank" in fields else 1536),
            nope_dim=fields.integer("qk_nope_head_dim", 128),
            rope_dim=fields.integer("qk_rope_head_dim", 64),
            kv_rank=fields.integer("kv_lora_rank", 512),
            value_dim=fields.integer("v_head_dim", 128),
            is_interleaved=fields.flag("rope_interleave", True),
        )
        common = fields.read_common(cls.__name__, head_dim=latent.rope_dim, bias=False)
        num_heads = common["num_attention_heads"]
        num_extra_layers = fields.integer("num_nextn_predict_layers", 1, minimum=0)
        if common["head_dim"] != latent.rope_dim:
            fields.add_problem(f"head_dim {common['head_dim']} is not qk_rope_head_dim {latent.rope_dim}")
        if common["num_key_value_heads"] != num_heads:
            fields.add_problem(
                f"num_key_value_heads {common['num_key_value_heads']}: each of the {num_heads} heads has keys of its "
                "own here"
            )
        config = fields.build_config(
            **common,
            latent_attention=latent,
            kv_heads_by_type={FULL: KVHeads(num_heads, latent.query_dim, latent.value_dim)},
            experts=_read_experts(fields, common["num_hidden_layers"]),
            unnamed_modules=("selection",),
            num_nextn_predict_layers=num_extra_layers,
        )
        scale = latent.query_dim**-0.5 * config.ropes[FULL].score_scale ** 2
        return replace(config, attention_scale=scale)


def _read_experts(fields: ModelFields, num_layers: int) -> ExpertsConfig | None:
    """Read the experts, which all layers have except for the first ones. None if no layer is sparse.

    Defaults are the sizes of DeepSeek-V3.
    """
    num_experts = fields.integer("n_routed_experts", 256)
    num_groups, num_top_groups = fields.integer("n_group", 8), fields.integer("topk_group", 4)
    is_normalized = fields.flag("norm_topk_prob", True)
    scale = fields.number("routed_scaling_factor", 2.5)
    intermediate_size = fields.integer("moe_intermediate_size", 2048)
    num_shared_experts = fields.integer("n_shared_experts", 1)
    first_sparse = fields.integer("first_k_dense_replace", 3, minimum=0)
    router = RouterSettings(is_normalized, SIGMOID, num_groups, num_top_groups, has_selection_bias=True, scale=scale)
    return fields.read_experts(
        num_experts,
        8,
        intermediate_size,
        router,
        layers=tuple(range(first_sparse, num_layers)),
        shared_intermediate_size=intermediate_size * num_shared_experts,
        has_shared_gate=False,
    )
