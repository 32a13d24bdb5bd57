"""DeepSeek-V3 and R1 (arXiv:2412.19437), and models with the same layers: Kimi K2, Moonlight.

Attention is latent: a token's queries, and its keys and values together, are projected down to a latent vector, normed,
and up to heads. A part of each head has rotary positions; that of keys is one for all heads (`config.LatentAttention`).
Under tensor parallel every rank computes the latents, under sequence parallel those of its tokens, and these enter the
block in place of the hidden states: 2,112 elements of a token where DeepSeek-V3 has hidden states of 7,168. The
projections up to heads are cut by heads.

Behind the first layers MLPs are mixtures of experts, chosen by sigmoids in groups (`config.RouterSettings`), and a
shared expert. Files may have layers that predict further tokens behind the last one. They are not trained: an export
has them as they are.
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

_LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is
_DEFAULTS = {"num_attention_heads": 128, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}  # what is implemented of each


class DeepseekV3Attention(Attention):
    """Multi-head latent attention."""

    def add_projections(self, config: ModelConfig, heads: KVHeads) -> None:
        """Override `Attention.add_projections`."""
        if config.latent_attention is None:
            raise ValueError("latent attention in a model without sizes for it")
        self.sizes = sizes = config.latent_attention
        hidden, has_bias = config.hidden_size, config.qkv_bias
        if sizes.q_rank is None:
            self.q_proj = Linear(hidden, heads.count * sizes.query_dim, bias=False)
        else:
            self.q_a_proj = Linear(hidden, sizes.q_rank, bias=has_bias)
            self.q_a_layernorm = RMSNorm(sizes.q_rank, _LATENT_EPS)
            self.q_b_proj = Linear(sizes.q_rank, heads.count * sizes.query_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, sizes.kv_rank + sizes.rope_dim, bias=has_bias)
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, _LATENT_EPS)
        self.kv_b_proj = Linear(sizes.kv_rank, heads.count * (sizes.nope_dim + sizes.value_dim), bias=False)
        self.o_proj = Linear(heads.count * sizes.value_dim, hidden, bias=config.o_bias)

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project`: [B, S or S/tp, D] -> q and k [B, S, H, nope + rope], v [B, S, H, value]"""
        sizes = self.sizes
        to_queries = hidden if sizes.q_rank is None else self.q_a_layernorm(self.q_a_proj(hidden, adapters))
        latent, k_rope = self.kv_a_proj_with_mqa(hidden, adapters).split([sizes.kv_rank, sizes.rope_dim], -1)
        latent = self.kv_a_layernorm(latent)
        if self.tp is not None:  # all three in one message
            parts = to_queries, latent, k_rope
            entered = self.enter(torch.cat(parts, -1))
            to_queries, latent, k_rope = entered.split([part.shape[-1] for part in parts], -1)
        up = self.q_proj if sizes.q_rank is None else self.q_b_proj
        q = up(to_queries, adapters).unflatten(-1, (-1, sizes.query_dim))
        q_nope, q_rope = q.split([sizes.nope_dim, sizes.rope_dim], -1)
        k_and_v = self.kv_b_proj(latent, adapters).unflatten(-1, (-1, sizes.nope_dim + sizes.value_dim))
        k_nope, v = k_and_v.split([sizes.nope_dim, sizes.value_dim], -1)
        k_rope = self.rotated(k_rope[:, :, None], rotary)  # [B, S, 1, rope]
        k = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], -1)
        return torch.cat([q_nope, self.rotated(q_rope, rotary)], -1), k, v

    def rotated(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate [B, S, heads, rope]. Pairs that are neighbours come out half of `rope` apart, in queries and keys."""
        if self.sizes.is_interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x, *rotary)


class DeepseekV3Mixture(SparseMLP):
    """Experts, and a shared one without a gate."""

    def add_shared(self, config: ModelConfig, sizes: ExpertsConfig) -> None:
        """Override `SparseMLP.add_shared`."""
        self.shared_experts = GatedMLP(config, sizes.shared_intermediate_size)

    def shared(self, hidden: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Override `SparseMLP.shared`: [B, S, D] -> [B, S, D]"""
        out: Tensor = self.shared_experts(hidden, adapters)
        return out


class DeepseekV3Layer(SparseLayer):
    attention, mixture = DeepseekV3Attention, DeepseekV3Mixture


class DeepseekV3ForCausalLM(CausalLM):
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
        """Layers behind the last one, which predict further tokens: as many as config.json says."""
        first, count = self.config.num_hidden_layers, self.config.num_nextn_predict_layers
        behind = "|".join(map(str, range(first, first + count)))
        return (rf"model\.layers\.({behind})\..*", *super().carried_checkpoint_names)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_DEFAULTS)
        for key, value in _ONLY.items():
            if fields.get(key) not in (None, value):
                fields.add_problem(f"{key} {format_value(fields.get(key))}: only {format_value(value)} is implemented")
        # The factor of a balance loss (`moe.balance`); sums of other fields; where it was trained.
        fields.ignore("aux_loss_alpha", "seq_aux", "qk_head_dim", "ep_size")
        q_rank = fields.optional_integer("q_lora_rank", None if "q_lora_rank" in fields else 1536)
        nope, rope = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
        kv_rank, value = fields.integer("kv_lora_rank", 512), fields.integer("v_head_dim", 128)
        latent = LatentAttention(q_rank, kv_rank, nope, rope, value, fields.flag("rope_interleave", True))
        common = fields.read_common(cls.__name__, head_dim=rope, bias=False)
        heads, carried = common["num_attention_heads"], fields.integer("num_nextn_predict_layers", 1, minimum=0)
        if common["head_dim"] != rope:
            fields.add_problem(f"head_dim {common['head_dim']} is not qk_rope_head_dim {rope}")
        if common["num_key_value_heads"] != heads:
            key_heads = common["num_key_value_heads"]
            fields.add_problem(f"num_key_value_heads {key_heads}: each of the {heads} heads has keys of its own here")
        experts = _read_experts(fields, common["num_hidden_layers"])
        common |= {
            "latent_attention": latent,
            "kv_heads_by_type": {FULL: KVHeads(heads, latent.query_dim, value)},
            "experts": experts,
        }
        config = fields.build_config(**common, unnamed_modules=("selection",), num_nextn_predict_layers=carried)
        return replace(config, attention_scale=latent.query_dim**-0.5 * config.ropes[FULL].score_scale ** 2)


def _read_experts(fields: ModelFields, num_layers: int) -> ExpertsConfig | None:
    """Read the experts of all layers but the first ones; None: no layer is sparse."""
    count, top = fields.integer("n_routed_experts", 256), 8  # what is missing is DeepSeek-V3's
    groups, top_groups = fields.integer("n_group", 8), fields.integer("topk_group", 4)
    normed, scale = fields.flag("norm_topk_prob", True), fields.number("routed_scaling_factor", 2.5)
    inner = fields.integer("moe_intermediate_size", 2048)
    shared = inner * fields.integer("n_shared_experts", 1)
    sparse = tuple(range(fields.integer("first_k_dense_replace", 3, minimum=0), num_layers))
    router = RouterSettings(normed, SIGMOID, groups, top_groups, has_selection_bias=True, scale=scale)
    return fields.read_experts(
        count, top, inner, router, sparse, shared_intermediate_size=shared, has_shared_gate=False
    )
