"""The decoder that all families share, and the classes of layers and attention from which a family chooses.

Module names are Hugging Face's, so that checkpoints need no key map. A forward runs as follows:

    CausalLM.forward           token ids -> logits; losses call `with_head` instead and never build the logits
      Decoder.states           embeddings, all layers, final norm
        layer_contexts         rotary tables and attention masks, made once for all layers of one type
        layer(hidden, layer_context)
          before_attention     norm, q, k and v projections, rotary embedding
          mixer                attention, or linear attention
          after_attention      output projection, residual, norm, MLP, residual

`before_attention` and `after_attention` only take tensors and the context of adapters, so they may be compiled.
Attention and mixtures of experts read the micro-batch's context and are not compiled. `micro_batch` describes the
contexts.

Letters in shapes: B rows, S tokens, D hidden size, H query heads, kv key heads, hd head size, F MLP size, V vocabulary.
Under tensor parallelism H, kv and F are this rank's share, because they follow from the sharded projections.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dtrain.attention.kernels import Kernel
from dtrain.base.batch import PADDING_SEQ_ID
from dtrain.models.common.config import LINEAR, SLIDING, KVHeads, ModelConfig, Rope
from dtrain.models.common.functions import (
    ACTIVATIONS,
    RMSNorm,
    apply_rotary,
    gated_activation,
    rotary_tables,
    round_scale,
)
from dtrain.models.common.linear import Linear, WrapperSettings
from dtrain.models.common.masks import AttentionMasks
from dtrain.models.common.micro_batch import (
    AdapterContext,
    DecodingCache,
    Images,
    LayerContext,
    MicroBatchContext,
    PlacedFeatures,
    Rotary,
)
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.routing import MicroBatchRouting, Routing, RoutingRecord
from dtrain.parallel.tensor import (
    Block,
    ParallelModel,
    ScoreHead,
    Stack,
    VocabEmbedding,
    VocabHead,
    gather_vocabulary,
)

if TYPE_CHECKING:
    from dtrain.attention.linear.flash import FlashDelta
    from dtrain.attention.linear.layer import LinearMask
    from dtrain.models.vision.common import VisionTower

# Tensor-parallel plan: module pattern -> style. `parallel.apply` applies it, and `dtrain plan` prints it.
DECODER_PLAN = {
    "model": "decoder",
    "model.embed_tokens": "vocab_embedding",
    "model.layers.*.self_attn": "block",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise_kv",
    "model.layers.*.self_attn.v_proj": "colwise_kv",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp": "block",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.input_layernorm": "sequence",
    "model.layers.*.post_attention_layernorm": "sequence",
    "model.norm": "sequence",
    "lm_head": "vocab_head",
}
# To be added to the plan of families that normalise each head of q and k.
QK_NORMS = {"model.layers.*.self_attn.q_norm": "head_norm", "model.layers.*.self_attn.k_norm": "head_norm"}


class Mixer(Block):
    """Base of the modules by which a layer mixes tokens: attention and linear attention.

    A layer calls three methods. `project` and `output` compute each token by itself, so they may be compiled.

        project   normed hidden states [B, S, D] and rotary tables -> the tensors that `forward` takes before the mask
        forward   mixes tokens
        output    the result of `forward` -> [B, S, D]
    """

    project: Callable[[Tensor, Rotary, AdapterContext | None], tuple[Tensor, ...]]
    output: Callable[[Tensor, AdapterContext | None], Tensor]


class Attention(Mixer):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions.

    Attributes:
        kernel: Attention kernel, set when the model is built.
        qk_norm: Class of the norms of the heads of q and k, in a family that has them.
        index: Number of the layer.
        head_dim: Size of a head of q and k.
        scale: Factor of the scores.
    """

    kernel: Kernel
    qk_norm: type[nn.Module] | None = None

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        heads = config.kv_heads_of(config.layer_types[index])
        self.index = index
        self.head_dim = heads.head_dim
        self.scale = config.attention_scale
        self.add_projections(config, heads)

    def add_projections(self, config: ModelConfig, heads: KVHeads) -> None:
        """Add the projections, and the norms of heads if the family has some."""
        hidden_size = config.hidden_size
        q_size = config.num_attention_heads * heads.head_dim
        kv_size = heads.count * heads.head_dim
        self.q_proj = Linear(hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(hidden_size, kv_size, bias=config.qkv_bias)
        self.k_proj.key_heads = heads.count
        self.v_proj.key_heads = heads.count
        self.o_proj = Linear(q_size, hidden_size, bias=config.o_bias)
        self.q_norm = self.qk_norm(heads.head_dim, config.rms_norm_eps) if self.qk_norm else None
        self.k_norm = self.qk_norm(heads.head_dim, config.rms_norm_eps) if self.qk_norm else None

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Project hidden states [B, S, D] to q [B, S, H, hd], k and v [B, S, kv, hd].

        Further results of a family's `project_queries` come after the values.

        Collectives:
            Those of `Block.enter` under tensor parallelism.
        """
        hidden = self.enter(hidden)
        q, *further = self.project_queries(hidden, rotary, adapters)
        k_and_v = self.project_keys(hidden, rotary, adapters)
        return q, *k_and_v, *further

    def project_queries(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Project hidden states [B, S, D] to q [B, S, H, hd].

        A family may return further tensors, which its `forward` takes after the values.
        """
        q = self.q_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        return (self.norm_and_rotate(q, self.q_norm, rotary),)

    def project_keys(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Project hidden states [B, S, D] to k and v [B, S, kv, hd]."""
        k = self.k_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        return self.norm_and_rotate(k, self.k_norm, rotary), v

    def norm_and_rotate(self, x: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
        """Normalise queries or keys [B, S, heads, hd] and apply the rotary embedding."""
        if norm is not None:
            x = norm(x)
        cos, signed_sin = rotary[:2]
        return apply_rotary(x, cos, signed_sin)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: DecodingCache | None = None) -> Tensor:
        """Compute attention.

        Args:
            q: [B, S, H, hd].
            k: [B, S, kv, hd].
            v: [B, S, kv, hd].
            mask: The kernel's form of the mask. Not read with a cache.
            cache: KV cache, which attends in place of the kernel.

        Returns:
            [B, S, H · hd], for `o_proj`.
        """
        if cache is not None:
            return cache.attend(self.index, q, k, v, self.scale, sinks=self.sinks()).flatten(2)
        return self.kernel(q, k, v, mask, self.scale, self.sinks()).flatten(2)

    def sinks(self) -> Tensor | None:
        """Return the attention sinks of the heads, [H]. None in a family without sinks."""
        return None

    def output(self, mixed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Compute the output projection, [B, S, H · hd] -> [B, S, D]."""
        return self.o_proj(mixed, adapters)


class GatedMLP(Block):
    """Gated MLP: down(act(gate(x)) · up(x)).

    Args:
        config: Config of the model.
        intermediate_size: Inner size. None: `config.intermediate_size`.
    """

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None):
        super().__init__()
        hidden_size = config.hidden_size
        intermediate_size = intermediate_size or config.intermediate_size
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute the MLP, [B, S, D] -> [B, S, D]."""
        x = self.enter(x)
        inner = gated_activation(self.gate_proj(x, adapters), self.up_proj(x, adapters), self.activation)
        return self.down_proj(inner, adapters)


class KeysFirstProjection(Protocol):
    """Interface of `keys_first.KeysFirst`, which gathers the keys of other ranks while queries are projected."""

    def start_exchange(self, mask: Any) -> tuple[Callable[..., tuple[Tensor, ...]], Any]:
        """Prepare one forward with `mask`.

        Returns:
            A replacement for `Layer.before_attention`, and the cache that attends in place of the kernel.
        """

    def compile_with(self, compiled: Callable[..., Any]) -> "KeysFirstProjection":
        """Return the same projection with its two functions compiled by `compiled`."""


class Layer(nn.Module):
    """A decoder layer: `before_attention`, the mixer, `after_attention`.

    Attributes:
        regions: Replacements for `before_attention` and `after_attention`, compiled or in tiles (`memory.compilation`,
            `memory.tiles`). None runs both as written. Decoding always does, because its shapes change with every
            token.
        keys_first: Replaces `before_attention` if keys of other ranks are gathered while queries are projected.
        is_sparse: Whether the MLP is a mixture of experts. `after_attention` then gets the layer's context too and is
            not compiled.
    """

    self_attn: Attention
    input_layernorm: RMSNorm
    regions: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    keys_first: KeysFirstProjection | None = None
    is_sparse = False

    @property
    def mixer(self) -> Mixer:
        """Attention, or another module that mixes tokens."""
        return self.self_attn

    def before_attention(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Normalise the layer's input and project it for the mixer.

        Args:
            hidden: The layer's input, [B, S, D].
            adapters: Whether adapters take part, and their dropout.
            rotary: The rotary tables, [B or 1, S, 1, hd] each.

        Returns:
            The result of `Mixer.project`.
        """
        return self.mixer.project(self.input_layernorm(hidden), rotary, adapters)

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Compute the layer's output, [B, S, D].

        Args:
            hidden: The layer's input, [B, S, D].
            adapters: Whether adapters take part, and their dropout.
            attended: The mixer's output, [B, S, H · hd].
            context: The layer's context in sparse layers. None in dense layers, whose `after_attention` may be
                compiled.
        """
        raise NotImplementedError

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Compute the layer, [B, S, D] -> [B, S, D]."""
        cache, adapters = context.cache, context.adapters
        before, after = self.before_attention, self.after_attention
        if self.regions is not None and cache is None:
            before, after = self.regions
        if self.keys_first is not None and cache is None:
            before, cache = self.keys_first.start_exchange(context.mask)
        # Sparse layers also get the context, for routing. Parts of dense layers may be compiled and take no context.
        further = (context,) if self.is_sparse else ()
        # The attention output has no name here: a local variable would keep it alive while the MLP is computed.
        return after(hidden, adapters, self._attend(before, hidden, context, cache), *further)

    def _attend(
        self,
        before: Callable[..., tuple[Tensor, ...]],
        hidden: Tensor,
        context: LayerContext,
        cache: DecodingCache | None,
    ) -> Tensor:
        """Project the layer's input by `before` and mix tokens, [B, S, D] -> [B, S, H · hd]."""
        return self.mixer(*before(hidden, context.adapters, *context.rotary), context.mask, cache)


class PreNormLayer(Layer):
    """Layer with a norm before attention and a norm before the MLP, as in Llama.

    A family sets its own `attention` and `norm`, or overrides `add_mixer` and `add_mlp`.

    Attributes:
        attention: Class of the attention.
        norm: Class of the norms.
    """

    attention: type[Attention] = Attention
    norm: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.add_mixer(config, index)
        self.add_mlp(config, index)
        self.input_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)

    def add_mixer(self, config: ModelConfig, index: int) -> None:
        """Add the module that mixes tokens."""
        self.self_attn = self.attention(config, index)

    def add_mlp(self, config: ModelConfig, index: int) -> None:
        """Add the MLP."""
        self.mlp: Block = GatedMLP(config, config.mlp_size(index))

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `Layer.after_attention`: output projection, residual, norm, MLP, residual."""
        hidden = hidden + self.mixer.output(attended, adapters)
        del attended  # free its memory for the MLP
        return hidden + self.feed_forward(self.post_attention_layernorm(hidden), adapters, context)

    def feed_forward(self, normed: Tensor, adapters: AdapterContext | None, context: LayerContext | None) -> Tensor:
        """Compute the MLP, [B, S, D] -> [B, S, D]. The arguments are those of `Layer.after_attention`."""
        return self.mlp(normed, adapters)


class Decoder(Stack):
    """Embedding, layers and final norm: token ids to hidden states.

    Args:
        config: Config of the model.
        layer: Makes the layer of a number.
        norm: Class of the final norm.
        embed_scale: Factor of the embeddings. None: they are not scaled.

    Attributes:
        kernel: Attention kernel of all layers, set when the model is built.
        flash_delta: Fused kernel of linear attention. None: torch computes it.
        no_flash_delta_reason: Why `flash_delta` is None although it was wanted.
        vision: The vision tower, in a tuple of one or no element.
    """

    kernel: Kernel
    flash_delta: "FlashDelta | None" = None
    no_flash_delta_reason: str = ""
    # In a tuple, because nn.Module would register a plain attribute as a child of its own name.
    vision: "tuple[()] | tuple[VisionTower]" = ()

    def __init__(
        self,
        config: ModelConfig,
        layer: Callable[[ModelConfig, int], nn.Module],
        norm: type[nn.Module] = RMSNorm,
        embed_scale: float | None = None,
    ):
        super().__init__()
        self.config = config
        self.embed_scale = embed_scale
        self.rotary_sizes = {kind: config.rotary_dim(kind) for kind in config.layer_types}
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, config.rms_norm_eps)

    def states(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor:
        """Override `Stack.states`: token ids [B, S] -> hidden states after the final norm [B, S, D]."""
        skips_hooks = context.cache is not None and context.cache.skips_hooks
        look_up = self.embed_tokens.forward if skips_hooks else self.embed_tokens
        hidden = self._scale_embeddings(look_up(input_ids))  # [B, S, D]
        # Image features replace the embeddings of image tokens, and some are added to the outputs of layers.
        placed = None
        if context.images is not None:
            placed = self._encode_images(context.images, context, hidden.shape[1])
            hidden = placed.insert(hidden)
        layer_contexts = self.layer_contexts(input_ids, context, hidden.dtype)
        return self.norm(self.run_layers(hidden, input_ids, layer_contexts, skips_hooks, placed))

    def _encode_images(self, images: Images, context: MicroBatchContext, length: int) -> PlacedFeatures:
        """Compute the features of images for rows of which this rank embeds `length` tokens."""
        if not self.vision:
            raise ValueError("The batch has images, but this model was built without its vision tower.")
        tower = self.vision[0]
        cp_group = self.kernel.group if context.cache is None else None
        adapters = None if context.adapters is None else context.adapters.for_vision_tower()
        return tower.place_features(images, length, self.tp, cp_group, adapters)

    def run_layers(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        layer_contexts: list[LayerContext],
        skips_hooks: bool,
        placed: PlacedFeatures | None = None,
    ) -> Tensor:
        """Compute all layers, [B, S, D] -> [B, S, D].

        Args:
            hidden: The embeddings, [B, S, D], or [B, S/tp, D] under sequence parallel.
            input_ids: Their token ids, [B, S]. Not cut by sequence parallel.
            layer_contexts: The context of each layer.
            skips_hooks: Whether layers are called without their hooks (`DecodingCache.skips_hooks`).
            placed: Features of images, of which some are added to the outputs of layers.
        """
        for index, (layer, context) in enumerate(zip(self.layers, layer_contexts, strict=True)):
            run_layer = layer.forward if skips_hooks else layer
            hidden = run_layer(hidden, context)
            if placed is not None:
                hidden = placed.add_deepstack(index, hidden)
        return hidden

    def layer_contexts(self, input_ids: Tensor, context: MicroBatchContext, dtype: torch.dtype) -> list[LayerContext]:
        """Return the context of each layer. Layers of one type share rotary tables and mask.

        Args:
            input_ids: [B, S].
            context: The micro-batch.
            dtype: Dtype of the hidden states.

        Collectives:
            Under context parallel with a mask, one all-gather of positions and documents. In models with linear
            attention, the one of `LinearMask.of`.
        """
        positions = self._positions(input_ids, context)
        rotary = self._rotary_by_type(positions, input_ids, context, dtype)
        masks = self._masks_by_type(positions, input_ids, context, dtype)
        is_real = self._real_tokens(input_ids, context)
        contexts = []
        for kind in self.config.layer_types:
            contexts.append(
                LayerContext(rotary[kind], masks[kind], context.cache, is_real, context.routing, context.adapters)
            )
        return contexts

    def _positions(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor:
        """Return the positions of the tokens, [B or 1, S]."""
        if context.cache is not None:
            return context.cache.positions
        if context.position_ids is not None:
            return context.position_ids
        length = input_ids.shape[1]
        max_length = self.config.max_document_length
        if max_length is not None and length > max_length:
            raise ValueError(
                f"The rows have {length} tokens, and with LongRoPE this model takes documents of at most {max_length}."
            )
        return torch.arange(length, device=input_ids.device)[None]

    def _rotary_by_type(
        self, positions: Tensor, input_ids: Tensor, context: MicroBatchContext, dtype: torch.dtype
    ) -> dict[str, Rotary]:
        """Return the rotary tables of each layer type. Types with the same rope share them."""
        if context.images is not None and context.images.rotary_ids is not None:
            positions = context.images.rotary_ids  # [B, S, 3]
        elif self.layers[0].regions is not None:
            # Compiled parts always get one table per row: a table [1, S] would be another shape to compile for.
            positions = positions.expand(len(input_ids), -1)
        # Decoding keeps the frequencies on the device from token to token. Training computes them once per forward.
        frequency_cache = None if context.cache is None else context.cache.rotary_frequencies
        tables_by_rope: dict[tuple[Rope, int], Rotary] = {}
        tables_by_type = {}
        for kind in dict.fromkeys(self.config.layer_types):
            rope, head_dim = self.config.ropes[kind], self.rotary_sizes[kind]
            if (rope, head_dim) not in tables_by_rope:
                tables_by_rope[rope, head_dim] = self.make_rotary(rope, head_dim, positions, dtype, frequency_cache)
            tables_by_type[kind] = tables_by_rope[rope, head_dim]
        return tables_by_type

    def _masks_by_type(
        self, positions: Tensor, input_ids: Tensor, context: MicroBatchContext, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return the kernel's form of the mask of each layer type. None with a cache, except in linear attention.

        Collectives:
            Those of `AttentionMasks`.
        """
        num_rows, length = input_ids.shape
        config = self.config
        attention_masks = None
        if context.cache is None:
            attention_masks = AttentionMasks(self.kernel, context, positions, num_rows, length, dtype, input_ids.device)
        masks: dict[str, Any] = {}
        for kind in dict.fromkeys(config.layer_types):
            if kind == LINEAR:
                masks[kind] = self.linear_mask(context, length)
            elif attention_masks is None:
                masks[kind] = None
            else:
                window = config.sliding_window if kind == SLIDING else None
                masks[kind] = attention_masks.for_window(window, sees_images=kind in config.bidirectional_types)
        return masks

    def linear_mask(self, context: MicroBatchContext, length: int) -> "LinearMask | None":
        """Return the mask of linear attention over rows of `length` tokens, in a family that has such layers."""
        raise NotImplementedError

    def _real_tokens(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor | None:
        """Compute the mask of the tokens that are not padding, [B, S] bool. None for rows without padding."""
        if self.config.experts is None:  # only sparse layers read it
            return None
        if context.seq_ids is not None:
            return context.seq_ids != PADDING_SEQ_ID
        if context.num_tokens is None:
            return None
        num_rows, length = input_ids.shape
        return (torch.arange(length, device=input_ids.device) < context.num_tokens).expand(num_rows, -1)

    def attach_vision_tower(self, tower: "VisionTower") -> None:
        """Add a vision tower, whose children become children of the decoder.

        The tower itself is no child, because in Hugging Face's names its children are next to the layers, for example
        `model.visual`.
        """
        for name, child in tower.named_children():
            self.add_module(name, child)
        self.vision = (tower,)
        self.vision_layers = tuple(tower.layers)

    @property
    def takes_packing(self) -> bool:
        """True if a layer computes from the packing of a micro-batch."""
        return self.kernel.takes_packing or self.flash_delta is not None

    def make_rotary(
        self,
        rope: Rope,
        head_dim: int,
        positions: Tensor,
        dtype: torch.dtype,
        frequency_cache: dict[Any, Tensor] | None,
    ) -> Rotary:
        """Compute what layers with `rope` read by position. A family may add further tensors.

        Args:
            rope: The rotary embedding.
            head_dim: Elements of a head.
            positions: [B or 1, S], or [B, S, 3] by axis.
            dtype: Dtype of the tables.
            frequency_cache: Frequencies on the device, kept from call to call.
        """
        return rotary_tables(rope, head_dim, positions, dtype, frequency_cache)

    def _scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Scale embeddings [B, S, D] as the first layer takes them."""
        if self.embed_scale is None:
            return hidden
        return hidden * round_scale(self.embed_scale, hidden.dtype)


class CausalLM(ParallelModel):
    """A decoder and its head. Base of the families, built by `models.build`.

    Attributes:
        plan: Tensor-parallel plan, module pattern -> style.
        config: Config of the model.
        model: The decoder.
        adapters: Settings that the adapters of the layers share. None without adapters.
        routing: Settings that the sparse layers share. None without sparse layers.
        initial_values: Parameter pattern -> "normal" (std `config.initializer_range`), "ones", "zeros" or "decay" (the
            logarithm of a uniform number). The first pattern that matches decides.
        initial_buffers: Buffer pattern -> value. Buffers are not trained.
        vision_tower: Class of the vision tower, in a family that takes images.
        compile_obstacle: Why the layers of this class cannot be compiled. None if they can.
        uncompiled_reason: Why layers that were to be compiled are not.
        layer: Class of the layers, in a family without a decoder of its own.
        tied_parameters: Parameter name -> name of the parameter that it shares, for example `lm_head.weight` ->
            `model.embed_tokens.weight`.
    """

    plan: Mapping[str, str] = DECODER_PLAN
    config: ModelConfig
    model: Decoder
    adapters: WrapperSettings | None = None
    routing: "Routing | None" = None
    initial_values: Mapping[str, str] = {"*norm.weight": "ones", "*.bias": "zeros", "*": "normal"}
    initial_buffers: Mapping[str, float] = {"*.e_score_correction_bias": 0.0, "*": 1.0}
    vision_tower: "type[VisionTower] | None" = None
    compile_obstacle: str | None = None
    uncompiled_reason: str | None = None
    layer: Callable[[ModelConfig, int], nn.Module] = PreNormLayer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Return the config that the fields of a config.json describe.

        Every field is used, known to change no number, or added to `fields.problems`. The default of a missing field is
        transformers' default for the family.
        """
        raise NotImplementedError

    def __init__(self, config: ModelConfig, decoder: Decoder | None = None):
        super().__init__()
        self.config = config
        self.model = decoder or Decoder(config, type(self).layer)
        if config.vision is not None and self.vision_tower is not None:
            tower = self.vision_tower(config.vision)
            self.model.attach_vision_tower(tower)
            # The tower's patterns come first, because the first pattern that matches decides.
            of_tower = {f"model.{pattern}": kind for pattern, kind in tower.initial_patterns()}
            self.initial_values = of_tower | {**self.initial_values}
        if config.num_labels is None:
            self.lm_head = VocabHead(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.score = ScoreHead(config.hidden_size, config.num_labels, bias=False)
        self.plan = self._applicable_plan()
        self.tied_parameters: dict[str, str] = {}
        if config.tie_word_embeddings:
            self.tied_parameters["lm_head.weight"] = "model.embed_tokens.weight"
        self.tie_weights()

    def _applicable_plan(self) -> dict[str, str]:
        """Return the entries of the tensor-parallel plan that match a module of this model."""
        styles = {**self.plan}
        for tower in self.model.vision:
            for pattern, style in tower.plan().items():
                styles[f"model.{pattern}"] = style
        styles["score"] = "score_head"
        names = [name for name, _ in self.named_modules()]
        plan = {}
        for pattern, style in styles.items():
            if any(fnmatchcase(name, pattern) for name in names):
                plan[pattern] = style
        return plan

    @property
    def head(self) -> VocabHead | ScoreHead:
        """The vocabulary's head, or that of a classifier."""
        return self.lm_head if self.config.num_labels is None else self.score

    def tie_weights(self) -> None:
        """Make every parameter in `tied_parameters` the parameter that it shares.

        Must be called again after anything that replaced parameters one by one, such as `to_empty`.
        """
        for name, shared in self.tied_parameters.items():
            module, _, parameter = name.rpartition(".")
            setattr(self.get_submodule(module), parameter, self.get_parameter(shared))

    def use_kernel(self, kernel: Kernel) -> None:
        """Set the attention kernel of all layers."""
        self.model.kernel = kernel
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.kernel = kernel

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        cache: DecodingCache | None = None,
        images: Images | None = None,
        adapters: AdapterContext | None = None,
    ) -> Tensor:
        """Compute logits, [B, S, V] in the weights' dtype. Issues no collective of its own.

        Args:
            input_ids: [B, S] int64.
            position_ids: Positions of packed rows, which restart in each document, [B, S].
            seq_ids: Documents of packed rows, -1 on padding, [B, S]. None: each row is one document, with any padding
                at its right, so attention is plainly causal.
            cache: KV cache with the keys of earlier tokens. position_ids and seq_ids are then not read.
            images: Images among the tokens.
            adapters: `micro_batch.NO_ADAPTERS` computes without the model's adapters. None computes with them.
        """
        context = MicroBatchContext(position_ids, seq_ids, cache=cache, images=images, adapters=adapters)
        return self.logits(self.model(input_ids, context))

    def logits(self, hidden: Tensor, skips_hooks: bool = False) -> Tensor:
        """Compute logits from hidden states.

        Args:
            hidden: Hidden states after the final norm, [..., D].
            skips_hooks: Whether the head is called without its hooks (`DecodingCache.skips_hooks`).

        Returns:
            [..., V], or [..., labels] of a classifier.
        """
        head = self.head.forward if skips_hooks else self.head
        logits = head(hidden)
        cap = self.config.final_logit_softcapping
        if cap is None or self.config.num_labels is not None:
            return logits
        return torch.tanh(logits / cap) * cap

    def next_logits(
        self,
        input_ids: Tensor,
        cache: DecodingCache,
        images: Images | None = None,
        record: RoutingRecord | None = None,
        adapters: AdapterContext | None = None,
    ) -> Tensor:
        """Compute the logits after each row's last token, [B, V] in the weights' dtype, full on every tp rank.

        Under FSDP this is a registered forward method.

        Args:
            input_ids: New tokens, [B, S]. `cache.last_index` selects the last one of each row.
            cache: KV cache.
            images: Images among the tokens.
            record: Filled by the sparse layers. None: nothing is recorded.
            adapters: Whether the model's adapters take part. None: they do.

        Collectives:
            Those of the layers. Under tensor parallelism, one all-gather of the logits.
        """
        routing = None if record is None else MicroBatchRouting(record=record)
        context = MicroBatchContext(cache=cache, images=images, routing=routing, adapters=adapters)
        hidden = self.model(input_ids, context)  # [B, S, D]
        # The head only computes the last token of each row: those of a full prompt, [B, S, V], would take much memory.
        if cache.last_index is not None:
            hidden = hidden[torch.arange(hidden.shape[0], device=hidden.device), cache.last_index, None]
        return gather_vocabulary(self.logits(hidden[:, 0], cache.skips_hooks))

    def with_head(self, fn: Callable[[Tensor, Tensor], Any], input_ids: Tensor, context: MicroBatchContext) -> Any:
        """Call `fn(hidden, head_weight)` inside the forward and return its result.

        A loss reads the head's weight in this way, and never needs all logits at once. Under FSDP this must be a
        registered forward method: outside of one, the weight would be this rank's shard, and the loss silently wrong.
        The caller applies `config.final_logit_softcapping`.

        Args:
            fn: Called with hidden states [B, S/cp, D] and the head's weight: [V/tp, D], or [labels, D/tp] of a
                classifier.
            input_ids: [B, S/cp].
            context: The micro-batch.
        """
        hidden = self.model(input_ids, context)
        return self.head.with_weight(fn, hidden)

    def checkpoint_names(self, name: str) -> list[str]:
        """Return the names that parameter `name` may have in a checkpoint's files, the most common one first."""
        return [name]

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """Patterns (re.fullmatch) of tensors that dtrain does not train. An export copies them unchanged."""
        return ()

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Patterns (re.fullmatch) of tensors in files that are no parameters of this model and are skipped."""
        patterns = [r".*\.rotary_emb\.inv_freq"]  # a buffer that transformers once saved
        if self.config.has_new_head:
            patterns.append(r"lm_head\..*")
        return tuple(patterns)
