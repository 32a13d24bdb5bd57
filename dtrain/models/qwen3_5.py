"""Qwen3.5 and 3.6, dense or with experts, also as the text tower of a multimodal checkpoint
(https://huggingface.co/Qwen).

There are three layers of gated delta net (linear attention, arXiv:2412.06464) to each layer of full attention, whose
output is gated. Norms multiply by 1 + weight, and a part of each head is rotated. Files join q, k and v of linear
layers, which are separate modules in the model (`ModelConfig.fused_modules`). `attention.linear` computes linear
attention.

The letters in shapes are those of `decoder`. In linear layers there are Hk heads of queries and keys with K elements,
Hv heads of values with V elements, and C = 2 · Hk · K + Hv · V channels in the convolution of W tokens.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.attention.linear.layer import LinearMask, causal_conv, conv_step, delta_step, gated_delta, last_window
from dtrain.attention.tree import TreePacking
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

# Fields that published checkpoints may leave out.
_DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
}
# Fields that published checkpoints with experts may leave out.
_MOE_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate.

    For each head, `q_proj` computes the query and then the gate.
    """

    qk_norm = Gemma3RMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        query = config.num_attention_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, 2 * query, bias=config.qkv_bias)

    def project_queries(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project_queries`. Returns queries and gate, [B, S, H, hd] each."""
        q, gate = self.q_proj(hidden, adapters).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        return self.norm_and_rotate(q, self.q_norm, rotary), gate

    def forward(  # type: ignore[override]  # it takes the results of its own `project`
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Any, cache: DecodingCache | None = None
    ) -> Tensor:
        """Override `Attention.forward`, with a gate [B, S, H, hd]."""
        return super().forward(q, k, v, mask, cache) * gate.flatten(2).sigmoid()


class Channels(LocalParameters):
    """The weights [C, 1, W] of a depthwise convolution."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class Decay(LocalParameters):
    """The part of each head's decay that does not depend on the token. Stored and computed in float32 or better.

    The decoder calls it before its layers: under FSDP it is a unit of its own, because layers that are checkpointed
    must not contain one.
    """

    keeps_full_precision = True

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the rate, which is below 0, and the bias of a token's step, each [1, 1, Hv]."""
        rate, bias = self.local("A_log"), self.local("dt_bias")
        wide = torch.promote_types(rate.dtype, torch.float32)
        # Times 1, so that no result is the parameter itself.
        return -rate.to(wide).exp()[None, None], bias.to(wide)[None, None] * 1


class GatedRMSNorm(RMSNorm):
    """RMSNorm with a gate: weight · norm(x) · silu(gate). Norm and gate are computed in max(float32, x's dtype)."""

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x [..., V] and multiply it by silu(gate), gate [..., V], in x's dtype."""
        normed = self.local("weight") * normalize_rms(x, self.eps)
        return (normed * F.silu(gate.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)


class GatedDeltaNet(Mixer):
    """Linear attention. The state of each value head is a matrix [K, V] that every token decays and corrects."""

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
        """Override `Mixer.project`.

        Args:
            hidden: [B, S, D].
            rotary: The results of `decay`, in place of rotary tables.
            adapters: Whether adapters take part, and their dropout.

        Returns:
            x: Input of the convolution, [B, S, C].
            weight: Weights of the convolution, [C, W].
            z: Gate of the output, [B, S, Hv · V].
            g: Logarithm of the decay, at most 0, [B, S, Hv].
            beta: Strength of the corrections, [B, S, Hv].
        """
        rate, bias = rotary
        hidden = self.enter(hidden)
        g = rate * F.softplus(self.in_proj_a(hidden, adapters).to(rate.dtype) + bias)
        x = torch.cat([proj(hidden, adapters) for proj in (self.in_proj_q, self.in_proj_k, self.in_proj_v)], -1)
        weights = [conv.local("weight") for conv in (self.conv1d_q, self.conv1d_k, self.conv1d_v)]
        weight = torch.cat(weights).squeeze(1)
        z = self.in_proj_z(hidden, adapters)
        beta = self.in_proj_b(hidden, adapters).sigmoid()
        return x, weight, z, g, beta

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
        """Mix tokens. The first five arguments are the results of `project`.

        Args:
            x: [B, S, C].
            weight: [C, W].
            z: [B, S, Hv · V].
            g: [B, S, Hv].
            beta: [B, S, Hv].
            mask: Mask of the rows. None if a cache continues each row by one token.
            cache: Cache of states, which is read and written.

        Returns:
            [B, S, Hv · V], for `out_proj`.
        """
        if cache is None:
            assert mask is not None
            out, _ = gated_delta(*self._heads(causal_conv(x, weight, mask)), g, beta, mask)
        elif mask is not None:  # full prompts
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
        """Compute the output projection, [B, S, Hv · V] -> [B, S, D]."""
        return self.out_proj(mixed, adapters)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels [B, S, C] into this rank's heads: q and k [B, S, Hk, K], v [B, S, Hv, V]."""
        sizes = self.sizes
        # Under tensor parallelism the local channels have the same proportions as all channels.
        num_channels = 2 * sizes.total_key_dim + sizes.total_value_dim
        key_channels = x.shape[-1] * sizes.total_key_dim // num_channels
        value_channels = x.shape[-1] * sizes.total_value_dim // num_channels
        q, k, v = x.split([key_channels, key_channels, value_channels], -1)
        return (
            q.unflatten(-1, (-1, sizes.key_dim)),
            k.unflatten(-1, (-1, sizes.key_dim)),
            v.unflatten(-1, (-1, sizes.value_dim)),
        )


class Qwen3_5Layer(PreNormLayer):
    """Layer with linear attention (`linear_attn`) or attention (`self_attn`), by its type."""

    linear_attn: GatedDeltaNet
    norm = Gemma3RMSNorm

    def add_mixer(self, config: ModelConfig, index: int) -> None:
        """Override `PreNormLayer.add_mixer`."""
        self.is_linear = config.layer_types[index] == LINEAR
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, index)
        else:
            self.self_attn = GatedAttention(config, index)

    @property
    def mixer(self) -> Mixer:
        """Override `Layer.mixer`."""
        return self.linear_attn if self.is_linear else self.self_attn


class Qwen3_5MoeLayer(SparseLayer, Qwen3_5Layer):
    """Sparse layer with a shared expert."""


class Qwen3_5Decoder(Decoder):
    """Decoder with layers of linear attention."""

    def run_layers(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        layer_contexts: list[LayerContext],
        skips_hooks: bool,
        placed: PlacedFeatures | None = None,
    ) -> Tensor:
        """Override `Decoder.run_layers`. Linear layers get their decays in place of rotary tables.

        The decays are computed here, because under FSDP they are units of their own.
        """
        contexts = []
        for layer, context in zip(cast(list[Qwen3_5Layer], list(self.layers)), layer_contexts, strict=True):
            if layer.is_linear:
                decay = layer.linear_attn.decay
                context = replace(context, rotary=decay.forward() if skips_hooks else decay())
            contexts.append(context)
        return super().run_layers(hidden, input_ids, contexts, skips_hooks, placed)

    def linear_mask(self, context: MicroBatchContext, length: int) -> LinearMask | None:
        """Override `Decoder.linear_mask`.

        With a cache this is the mask of its prompts. It is None if each row continues by one token.
        """
        sizes = self.config.linear_attention
        width = sizes.conv_width if sizes else 0
        if context.cache is not None:
            return context.cache.linear_mask(width)
        num_tokens = context.num_tokens or length
        packing = context.packing
        if isinstance(packing, TreePacking):
            raise ValueError("linear attention does not compute rows in which sequences share their beginnings")
        return LinearMask.of(context.seq_ids, num_tokens, width, self.kernel.group, self.flash_delta, packing)


class Qwen3_5ForCausalLM(TextTower):
    """Qwen3.5."""

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
        """Override `CausalLM.carried_checkpoint_names`: also the layers that predict further tokens."""
        return (r"mtp\..*", *super().carried_checkpoint_names)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_DEFAULTS)
        fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # an export copies these layers
        for key, value in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish")):
            if fields.get(key) not in (None, value):
                fields.add_problem(f"{key} {format_value(fields.get(key))}: only {format_value(value)} is implemented")
        common = fields.read_common(cls.__name__, kv_heads=cls.default_kv_heads, head_dim=256, bias=False)
        if common["hidden_act"] != "silu":  # the activation of the convolution too
            fields.add_problem(f"hidden_act {format_value(fields.get('hidden_act'))}: only 'silu' is implemented")
        num_layers = common["num_hidden_layers"]
        interval = fields.integer("full_attention_interval", 4)
        default_types = [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
        layer_types = fields.read_layer_types(num_layers, default_types, kinds=(FULL, LINEAR))
        linear = LinearAttention(
            num_key_heads=fields.integer("linear_num_key_heads", 16),
            num_value_heads=fields.integer("linear_num_value_heads", 32),
            key_dim=fields.integer("linear_key_head_dim", 128),
            value_dim=fields.integer("linear_value_head_dim", 128),
            conv_width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        )
        if linear.num_value_heads % linear.num_key_heads:
            fields.add_problem(
                f"linear_num_value_heads {linear.num_value_heads} is not a multiple of linear_num_key_heads "
                f"{linear.num_key_heads}"
            )
        sections = Sections((11, 11, 10), interleaved=True)
        rope = read_rope(
            fields, common["max_position_embeddings"], common["head_dim"], rotary_fraction=0.25, sections=sections
        )
        fields.refuse_the_rest()
        return ModelConfig(
            **common,
            layer_types=layer_types,
            sliding_window=None,
            ropes=dict.fromkeys(layer_types, rope),
            attention_gate=True,
            linear_attention=linear,
            fused_modules={
                "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
                "conv1d": ("conv1d_q", "conv1d_k", "conv1d_v"),
            },
            unnamed_modules=("decay",),
        )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts. Every layer is sparse, and files store experts in stacks."""

    default_kv_heads = 2

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_MOE_DEFAULTS)
        if fields.get("norm_topk_prob") is False:
            fields.add_problem("norm_topk_prob false: in this architecture the weights of a token add up to one")
        shared_size = fields.integer("shared_expert_intermediate_size")
        experts = fields.read_experts(
            num_experts=256,
            top_k=8,
            intermediate_size=fields.integer("moe_intermediate_size"),
            router=RouterSettings(is_normalized=True),
            layers=tuple(range(fields.integer("num_hidden_layers"))),
            shared_intermediate_size=shared_size,
            is_stacked=True,
        )
        if experts is None:
            fields.add_problem("num_experts 0: the dense models are Qwen3_5ForCausalLM")
        # There are no dense layers, so any `intermediate_size` will do.
        config = super().read(fields.with_defaults({"intermediate_size": shared_size}))
        return replace(config, experts=experts)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Text tower of a multimodal checkpoint. `text_config` describes it."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Text tower of a multimodal checkpoint. `text_config` describes it."""
