"""Qwen3.5 and 3.6, dense or with experts, alone or as the text tower of a multimodal checkpoint
(https://huggingface.co/Qwen).

Three layers of gated delta net (linear attention, arXiv:2412.06464) to each of full attention, whose output is gated;
norms multiply by 1 + weight, and a part of each head is rotated. What the files join, q, k and v of linear layers, the
model holds apart (`ModelConfig.fused_modules`). `attention.linear` has the arithmetic of linear attention.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.attention.linear.layer import LinearMask, causal_conv, conv_step, delta_step, gated_delta, last_window
from dtrain.models.common.config import FULL, LINEAR, LinearAttention, ModelConfig, RouterSettings
from dtrain.models.common.config_fields import format_value
from dtrain.models.common.decoder import DECODER_PLAN, QK_NORMS, Attention, Decoder, Mixer, PreNormLayer
from dtrain.models.common.functions import Gemma3RMSNorm, RMSNorm, normalize_rms
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import (
    AdapterContext,
    DecodingCache,
    LayerContext,
    MicroBatchContext,
    PlacedFeatures,
    Rotary,
)
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer
from dtrain.models.common.rope_config import Sections, read_rope
from dtrain.models.common.tower import TextTower
from dtrain.models.vision.qwen import Qwen3_5Vision
from dtrain.parallel.tensor import LocalParameters

# What published checkpoints may leave out.
_DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
}
# What published checkpoints with experts may leave out.
_MOE_DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 40, "moe_intermediate_size": 512}
_MOE_DEFAULTS |= {"shared_expert_intermediate_size": 512}


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate; q_proj gives, head by head, queries and gate."""

    qk_norm = Gemma3RMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        query = config.num_attention_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, 2 * query, bias=config.qkv_bias)

    def project_queries(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project_queries`: queries and gate, each [B, S, H, hd]"""
        q, gate = self.q_proj(hidden, adapters).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        return self.norm_and_rotate(q, self.q_norm, rotary), gate

    def forward(  # type: ignore[override]  # it takes what its own `project` gives
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Any, cache: DecodingCache | None = None
    ) -> Tensor:
        """Override `Attention.forward`; gate [B, S, H, hd]."""
        return super().forward(q, k, v, mask, cache) * gate.flatten(2).sigmoid()


class Channels(LocalParameters):
    """The weights [C, 1, W] of a convolution of each channel by itself."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class Decay(LocalParameters):
    """The part of each head's decay that no token changes. Held, and computed, in float32 at
    least. The decoder calls it before its layers: under FSDP it is a unit, and what is checkpointed holds none.
    """

    keeps_full_precision = True

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The rate, below 0, and the bias of a token's step, each [1, 1, Hv]"""
        rate, bias = self.local("A_log"), self.local("dt_bias")
        wide = torch.promote_types(rate.dtype, torch.float32)
        return -rate.to(wide).exp()[None, None], bias.to(wide)[None, None] * 1  # none is the parameter itself


class GatedRMSNorm(RMSNorm):
    """weight · norm(x) · silu(gate). Norm and gate in max(float32, x's dtype)."""

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., V], gate [..., V] -> [..., V] in x's dtype"""
        normed = self.local("weight") * normalize_rms(x, self.eps)
        return (normed * F.silu(gate.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)


class GatedDeltaNet(Mixer):
    """Linear attention: the state of each value head is a matrix [K, V] that every token decays and corrects."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        if config.linear_attention is None:
            raise ValueError("a linear layer in a model without sizes for one")
        self.index, self.sizes = index, config.linear_attention
        hidden, width = config.hidden_size, config.linear_attention.conv_width
        keys, values, heads = (
            config.linear_attention.total_key_dim,
            config.linear_attention.total_value_dim,
            config.linear_attention.num_value_heads,
        )
        self.in_proj_q = Linear(hidden, keys, bias=False)
        self.in_proj_k = Linear(hidden, keys, bias=False)
        self.in_proj_v = Linear(hidden, values, bias=False)
        self.in_proj_z = Linear(hidden, values, bias=False)
        self.in_proj_b = Linear(hidden, heads, bias=False)
        self.in_proj_a = Linear(hidden, heads, bias=False)
        self.conv1d_q = Channels(keys, width)
        self.conv1d_k = Channels(keys, width)
        self.conv1d_v = Channels(values, width)
        self.decay = Decay(heads)
        self.norm = GatedRMSNorm(config.linear_attention.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, hidden, bias=False)

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """hidden [B, S, D], and what `decay` gives in place of rotary tables -> what is convolved x [B, S, C] with its
        weights [C, W], the output's gate z [B, S, Hv · V], the logarithm of the decay g (≤ 0) and the strength of
        corrections beta [B, S, Hv]"""
        (rate, bias), hidden = rotary, self.enter(hidden)
        g = rate * F.softplus(self.in_proj_a(hidden, adapters).to(rate.dtype) + bias)
        x = torch.cat([proj(hidden, adapters) for proj in (self.in_proj_q, self.in_proj_k, self.in_proj_v)], -1)
        weights = [conv.local("weight") for conv in (self.conv1d_q, self.conv1d_k, self.conv1d_v)]
        weight = torch.cat(weights).squeeze(1)
        return x, weight, self.in_proj_z(hidden, adapters), g, self.in_proj_b(hidden, adapters).sigmoid()

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        z: Tensor,
        g: Tensor,
        beta: Tensor,
        mask: LinearMask | None,
        cache: DecodingCache | None = None,
    ) -> Tensor:
        """Map what `project` gives to [B, S, Hv · V], for `out_proj`"""
        if cache is None:
            assert mask is not None
            out, _ = gated_delta(*self._heads(causal_conv(x, weight, mask)), g, beta, mask)
        elif mask is not None:  # whole prompts
            out, state = gated_delta(*self._heads(causal_conv(x, weight, mask)), g, beta, mask)
            assert state is not None
            cache.write_states(self.index, last_window(x, mask), state)
        else:
            window, state = cache.read_states(self.index)
            mixed, window = conv_step(x, weight, window)
            out, state = delta_step(*self._heads(mixed), g, beta, state)
            cache.write_states(self.index, window, state)
        return self.norm.gated(out, z.unflatten(-1, (-1, self.sizes.value_dim))).flatten(2)

    def output(self, mixed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """[B, S, Hv · V] -> [B, S, D]"""
        return self.out_proj(mixed, adapters)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, C] -> q and k [B, S, Hk, K], v [B, S, Hv, V], of the heads that this rank has"""
        sizes = self.sizes
        parts = 2 * sizes.total_key_dim + sizes.total_value_dim
        keys, values = (x.shape[-1] * width // parts for width in (sizes.total_key_dim, sizes.total_value_dim))
        q, k, v = x.split([keys, keys, values], -1)
        return (
            q.unflatten(-1, (-1, sizes.key_dim)),
            k.unflatten(-1, (-1, sizes.key_dim)),
            v.unflatten(-1, (-1, sizes.value_dim)),
        )


class Qwen3_5Layer(PreNormLayer):
    """`linear_attn` or `self_attn`, as the layer's type says."""

    linear_attn: GatedDeltaNet
    norm = Gemma3RMSNorm

    def add_mixer(self, config: ModelConfig, index: int) -> None:
        self.is_linear = config.layer_types[index] == LINEAR
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, index)
        else:
            self.self_attn = GatedAttention(config, index)

    @property
    def mixer(self) -> Mixer:
        return self.linear_attn if self.is_linear else self.self_attn


class Qwen3_5MoeLayer(SparseLayer, Qwen3_5Layer):
    """A sparse one, with an expert of all tokens."""


class Qwen3_5Decoder(Decoder):
    """A decoder some of whose layers are linear."""

    def run_layers(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        layer_contexts: list[LayerContext],
        is_bare: bool,
        placed: PlacedFeatures | None = None,
    ) -> Tensor:
        """Override `Decoder.run_layers`: [B, S, D] -> [B, S, D]. Linear layers get their decays in place of rotary
        tables, because under FSDP the decays are units of their own."""
        contexts = []
        for layer, context in zip(cast(list[Qwen3_5Layer], list(self.layers)), layer_contexts, strict=True):
            if layer.is_linear:
                decay = layer.linear_attn.decay
                context = replace(context, rotary=decay.forward() if is_bare else decay())
            contexts.append(context)
        return super().run_layers(hidden, input_ids, contexts, is_bare, placed)

    def linear_mask(self, context: MicroBatchContext, length: int) -> LinearMask | None:
        """Override `Decoder.linear_mask`. With a cache, the mask of its prompts, or None if each row goes on by a
        token."""
        width = self.config.linear_attention.conv_width if self.config.linear_attention else 0
        if context.cache is not None:
            return context.cache.linear_mask(width)
        num_tokens = context.num_tokens or length
        return LinearMask.of(context.seq_ids, num_tokens, width, self.kernel.group, self.flash_delta, context.packing)


class Qwen3_5ForCausalLM(TextTower):
    tower_prefixes = ("model.language_model.",)
    carried_patterns = (r"model\.visual\..*",)
    vision_tower = Qwen3_5Vision
    default_kv_heads = 4
    initial_values = {
        "*.A_log": "decay",
        "*.dt_bias": "ones",
        "*.linear_attn.norm.weight": "ones",
        "*norm.weight": "zeros",
        "*.bias": "zeros",
        "*": "normal",
    }

    plan = {
        **DECODER_PLAN,
        **SPARSE_PLAN,
        "model.layers.*.linear_attn": "block",
        "model.layers.*.linear_attn.in_proj_*": "colwise",
        "model.layers.*.linear_attn.conv1d_*": "heads",
        "model.layers.*.linear_attn.decay": "heads",
        "model.layers.*.linear_attn.norm": "head_norm",
        "model.layers.*.linear_attn.out_proj": "rowwise",
        **QK_NORMS,
    }

    def __init__(self, config: ModelConfig):
        layer = Qwen3_5Layer if config.experts is None else Qwen3_5MoeLayer
        super().__init__(config, Qwen3_5Decoder(config, layer, Gemma3RMSNorm))

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """The head for several tokens too, which a text model's files have as well."""
        return (r"mtp\..*", *super().carried_checkpoint_names)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_DEFAULTS)
        fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # a head of its own, carried along
        for key, value in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish")):
            if fields.get(key) not in (None, value):
                fields.add_problem(f"{key} {format_value(fields.get(key))}: only {format_value(value)} is implemented")
        common = fields.read_common(cls.__name__, kv_heads=cls.default_kv_heads, head_dim=256, bias=False)
        if common["hidden_act"] != "silu":  # it would be the convolution's too
            fields.add_problem(f"hidden_act {format_value(fields.get('hidden_act'))}: only 'silu' is implemented")
        count, interval = common["num_hidden_layers"], fields.integer("full_attention_interval", 4)
        default = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
        types = fields.read_layer_types(count, default, kinds=(FULL, LINEAR))
        linear = LinearAttention(
            num_key_heads=fields.integer("linear_num_key_heads", 16),
            num_value_heads=fields.integer("linear_num_value_heads", 32),
            key_dim=fields.integer("linear_key_head_dim", 128),
            value_dim=fields.integer("linear_value_head_dim", 128),
            conv_width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        )
        if linear.num_value_heads % linear.num_key_heads:
            values, keys = linear.num_value_heads, linear.num_key_heads
            fields.add_problem(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
        sections = Sections((11, 11, 10), interleaved=True)
        rope = read_rope(fields, common["max_position_embeddings"], common["head_dim"], share=0.25, sections=sections)
        fields.refuse_the_rest()
        joined = ("in_proj_qkv", "conv1d")
        return ModelConfig(
            **common,
            layer_types=types,
            sliding_window=None,
            ropes=dict.fromkeys(types, rope),
            attention_gate=True,
            linear_attention=linear,
            fused_modules={
                module: tuple(f"{module.removesuffix('_qkv')}_{part}" for part in "qkv") for module in joined
            },
            unnamed_modules=("decay",),
        )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts: every layer is sparse; what files join are stacks."""

    default_kv_heads = 2

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_MOE_DEFAULTS)
        if fields.get("norm_topk_prob") is False:
            fields.add_problem("norm_topk_prob false: in this architecture the weights of a token add up to one")
        inner, shared = fields.integer("moe_intermediate_size"), fields.integer("shared_expert_intermediate_size")
        layers = tuple(range(fields.integer("num_hidden_layers")))
        experts = fields.read_experts(
            256, 8, inner, RouterSettings(is_normalized=True), layers, shared_intermediate_size=shared, is_stacked=True
        )
        if experts is None:
            fields.add_problem("num_experts 0: the dense models are Qwen3_5ForCausalLM")
        # Of dense layers, which there are none of.
        return replace(super().read(fields.with_defaults({"intermediate_size": shared})), experts=experts)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text tower, described by `text_config`."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The text tower, described by `text_config`."""
