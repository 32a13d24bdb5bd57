"""The decoder that all families share, and the parts they choose from. Module names are Hugging Face's.

A forward makes what all layers of one type share once (rotary tables, the kernel's form of the mask) and passes it down
as `layer(hidden, layer_context)` (`micro_batch` has the data flow). With a cache there is no mask because the cache
attends itself. A layer is two functions of tensors, before attention and after it, which may be compiled. Attention and
mixtures of experts read the micro-batch's context and are not compiled.
Letters: B rows, S tokens, D hidden size, H query heads, kv key heads, hd head size, F MLP size, V vocabulary; heads and
F are counted from the projections' outputs, which may be one rank's share.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dtrain.attention.kernels import Kernel
from dtrain.attention.visibility import Visibility
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

# Module pattern -> style under tensor parallelism (a plan is data: parallel/ applies it, `dtrain plan` prints it).
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
QK_NORMS = {"model.layers.*.self_attn.q_norm": "head_norm", "model.layers.*.self_attn.k_norm": "head_norm"}


class Mixer(Block):
    """Base of the modules by which a layer mixes tokens. `project`, before: hidden [B, S, D], normed, and the rotary
    tables to what `forward` takes before the mask; `forward`, between tokens; `output`, after: to [B, S, D]."""

    project: Callable[[Tensor, Rotary, AdapterContext | None], tuple[Tensor, ...]]
    output: Callable[[Tensor, AdapterContext | None], Tensor]


class Attention(Mixer):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. `kernel` is set when the model is built.
    qk_norm: of the heads of q and k, in a family that norms them."""

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
        """Add the projections, and norms of heads."""
        hidden, query = config.hidden_size, config.num_attention_heads * heads.head_dim
        self.q_proj = Linear(hidden, query, bias=config.qkv_bias)
        self.k_proj, self.v_proj = (
            Linear(hidden, heads.count * heads.head_dim, bias=config.qkv_bias) for _ in range(2)
        )
        self.k_proj.key_heads = self.v_proj.key_heads = heads.count
        self.o_proj = Linear(query, hidden, bias=config.o_bias)
        self.q_norm = self.qk_norm(heads.head_dim, config.rms_norm_eps) if self.qk_norm else None
        self.k_norm = self.qk_norm(heads.head_dim, config.rms_norm_eps) if self.qk_norm else None

    def project(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """hidden [B, S, D] -> q [B, S, H, hd], k and v [B, S, kv, hd], and what else `project_queries` gives"""
        hidden = self.enter(hidden)
        q, *more = self.project_queries(hidden, rotary, adapters)
        return q, *self.project_keys(hidden, rotary, adapters), *more

    def project_queries(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """[B, S, D], entered -> q [B, S, H, hd], and what else a family's `forward` takes after the values"""
        q = self.q_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        return (self.norm_and_rotate(q, self.q_norm, rotary),)

    def project_keys(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """[B, S, D], entered -> k and v [B, S, kv, hd]"""
        k = self.k_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        return self.norm_and_rotate(k, self.k_norm, rotary), v

    def norm_and_rotate(self, x: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
        """Queries or keys [B, S, heads, hd], normed and rotated by their positions."""
        return apply_rotary(x if norm is None else norm(x), *rotary[:2])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: DecodingCache | None = None) -> Tensor:
        """Map what `project` gives to [B, S, H · hd], for `o_proj`; mask: the kernel's form of it."""
        if cache is not None:
            return cache.attend(self.index, q, k, v, self.scale, sinks=self.sinks()).flatten(2)
        return self.kernel(q, k, v, mask, self.scale, self.sinks()).flatten(2)

    def sinks(self) -> Tensor | None:
        """[H], as kernels take them, of a family that has some."""
        return None

    def output(self, mixed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """[B, S, H · hd] -> [B, S, D]"""
        return self.o_proj(mixed, adapters)


class GatedMLP(Block):
    """down(act(gate(x)) · up(x)). inner: its size, where it is not `intermediate_size`."""

    def __init__(self, config: ModelConfig, inner: int | None = None):
        super().__init__()
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        x = self.enter(x)
        mixed = gated_activation(self.gate_proj(x, adapters), self.up_proj(x, adapters), self.activation)
        return self.down_proj(mixed, adapters)


class KeysFirstProjection(Protocol):
    """An order of the projections in which keys of other ranks travel while queries are projected."""

    def start_exchange(self, mask: Any) -> tuple[Callable[..., tuple[Tensor, ...]], Any]:
        """Return, for one forward with `mask`, what replaces `Layer.before_attention`, and the cache that attends."""

    def compile_with(self, compiled: Callable[..., Any]) -> "KeysFirstProjection":
        """Return the same with its two functions compiled."""


class Layer(nn.Module):
    """A decoder layer: what comes `before` attention, attention, and what a family computes `after` it.

    Attributes:
        regions: The two parts, compiled or in tiles (`memory.compilation`, `memory.tiles`). None runs them as written,
            as decoding always does, because its shapes change with every token.
        keys_first: Replaces `before` if keys of other ranks are gathered while queries are projected.
        is_sparse: Whether the MLP is a mixture of experts. `after` then gets the layer's context and is not compiled.
    """

    self_attn: Attention
    input_layernorm: RMSNorm
    regions: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    keys_first: KeysFirstProjection | None = None
    is_sparse = False

    @property
    def mixer(self) -> Mixer:
        return self.self_attn

    def before_attention(self, hidden: Tensor, adapters: AdapterContext | None, *rotary: Tensor) -> tuple[Tensor, ...]:
        """Project the layer's input for its mixer, as the mixer's `project`.

        Args:
            hidden: The layer's input, [B, S, D].
            adapters: Whether adapters take part, and their dropout.
            rotary: The rotary tables, [B or 1, S, 1, hd] each.
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
            context: The layer's context in sparse layers. None in dense ones, whose `after` may be compiled.
        """
        raise NotImplementedError

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """hidden [B, S, D] -> [B, S, D]"""
        mask, cache, adapters = context.mask, context.cache, context.adapters
        before, after = (
            self.regions
            if self.regions is not None and cache is None
            else (self.before_attention, self.after_attention)
        )
        if self.keys_first is not None and cache is None:
            before, cache = self.keys_first.start_exchange(mask)
        # Attention is called inside the argument list: a local name would keep its output alive during the MLP.
        if self.is_sparse:
            return after(hidden, adapters, self.mixer(*before(hidden, adapters, *context.rotary), mask, cache), context)
        return after(hidden, adapters, self.mixer(*before(hidden, adapters, *context.rotary), mask, cache))


class PreNormLayer(Layer):
    """A norm before attention and one before the MLP, each in its residual branch. A family has its own `attention` and
    `norm`, makes another mixer in `add_mixer`, and another MLP in `add_mlp`."""

    attention: type[Attention] = Attention
    norm: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.add_mixer(config, index)
        self.add_mlp(config, index)
        self.input_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)

    def add_mixer(self, config: ModelConfig, index: int) -> None:
        self.self_attn = self.attention(config, index)

    def add_mlp(self, config: ModelConfig, index: int) -> None:
        self.mlp: Block = GatedMLP(config, config.mlp_size(index))

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `Layer.after_attention`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.mixer.output(attended, adapters)
        del attended  # the MLP needs its memory
        return hidden + self.feed_forward(self.post_attention_layernorm(hidden), adapters, context)

    def feed_forward(self, normed: Tensor, adapters: AdapterContext | None, context: LayerContext | None) -> Tensor:
        """Compute the MLP, [B, S, D] -> [B, S, D]. The contexts are those of `Layer.after_attention`."""
        return self.mlp(normed, adapters)


class Decoder(Stack):
    """Token ids to hidden states after the final norm. `embed_scale` multiplies the embeddings. flash_delta computes
    linear attention where it is not None; why it is, no_flash_delta_reason says."""

    kernel: Kernel
    flash_delta: "FlashDelta | None" = None
    no_flash_delta_reason: str = ""
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
        """Override `Stack.states`: ids [B, S] -> [B, S, D]"""
        is_bare = context.cache is not None and context.cache.skips_hooks
        look_up = self.embed_tokens.forward if is_bare else self.embed_tokens
        hidden = self._scale_embeddings(look_up(input_ids))  # [B, S, D]
        placed = None
        if context.images is not None:
            if not self.vision:
                raise ValueError("images, and this model was built without its vision tower")
            cp_group = self.kernel.group if context.cache is None else None
            of_tower = None if context.adapters is None else context.adapters.for_vision_tower()
            placed = self.vision[0].place_features(context.images, hidden.shape[1], self.tp, cp_group, of_tower)
            hidden = placed.insert(hidden)
        layer_contexts = self.layer_contexts(input_ids, context, hidden.dtype)
        return self.norm(self.run_layers(hidden, input_ids, layer_contexts, is_bare, placed))

    def run_layers(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        layer_contexts: list[LayerContext],
        is_bare: bool,
        placed: PlacedFeatures | None = None,
    ) -> Tensor:
        """Compute all layers, [B, S, D] -> [B, S, D].

        Args:
            hidden: The embeddings.
            input_ids: Their ids, [B, S], which sequence parallel does not cut.
            layer_contexts: The context of each layer.
            is_bare: Whether modules are called without their hooks (`DecodingCache.skips_hooks`).
            placed: Features of images.
        """
        for index, (layer, context) in enumerate(zip(self.layers, layer_contexts, strict=True)):
            hidden = (layer.forward if is_bare else layer)(hidden, context)
            if placed is not None:
                hidden = placed.add_deepstack(index, hidden)
        return hidden

    def layer_contexts(self, input_ids: Tensor, context: MicroBatchContext, dtype: torch.dtype) -> list[LayerContext]:
        """Return the context of each layer. Layers of one type share tables and mask.

        Args:
            input_ids: [B, S].
            context: The micro-batch.
            dtype: Dtype of the hidden states.

        Collectives:
            Under context parallel with a mask one all-gather of positions and documents. In models with linear
            attention the one of `LinearMask.of`.
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
        """Return the positions, [B or 1, S]."""
        length, most = input_ids.shape[1], self.config.max_document_length
        if context.cache is not None:
            return context.cache.positions
        if context.position_ids is not None:
            return context.position_ids
        if most is not None and length > most:
            raise ValueError(f"rows of {length} tokens: with LongRoPE this model takes {most}")
        return torch.arange(length, device=input_ids.device)[None]

    def _rotary_by_type(
        self, positions: Tensor, input_ids: Tensor, context: MicroBatchContext, dtype: torch.dtype
    ) -> dict[str, Rotary]:
        """Return the rotary tables of each layer type. Types with the same rope share them."""
        if context.images is not None and context.images.rotary_ids is not None:
            positions = context.images.rotary_ids  # [B, S, 3]
        elif self.layers[0].regions is not None:  # one table for all rows would be another shape to compile for
            positions = positions.expand(len(input_ids), -1)
        frequencies = None if context.cache is None else context.cache.rotary_frequencies
        made: dict[tuple[Rope, int], Rotary] = {}
        by_type = {}
        for kind in dict.fromkeys(self.config.layer_types):
            rope = self.config.ropes[kind], self.rotary_sizes[kind]
            if rope not in made:
                made[rope] = self.make_rotary(*rope, positions, dtype, frequencies)
            by_type[kind] = made[rope]
        return by_type

    def _masks_by_type(
        self, positions: Tensor, input_ids: Tensor, context: MicroBatchContext, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return the kernel's form of the mask of each layer type. None with a cache, except in linear attention."""
        config, kernel, packing, seq_ids = self.config, self.kernel, context.packing, context.seq_ids
        num_rows, length = input_ids.shape
        ends = None if context.images is None else context.images.ends
        has_cache = context.cache is not None
        keys = None
        if not has_cache and (seq_ids is not None or kernel.is_context_parallel or ends is not None):
            keys = kernel.keys(positions, seq_ids, packing if ends is None else None)
        masks: dict[str, Any] = {}
        for kind in dict.fromkeys(config.layer_types):
            if kind == LINEAR:
                masks[kind] = self.linear_mask(context, length)
                continue
            if has_cache:
                masks[kind] = None
                continue
            window = config.sliding_window if kind == SLIDING else None
            sees_ends = ends is not None and kind in config.bidirectional_types
            if keys is not None and (sees_ends or packing is None or not kernel.takes_packing):
                key_positions, key_documents = keys
                visibility = Visibility(
                    length,
                    key_positions.shape[1],
                    window,
                    positions,
                    key_positions,
                    seq_ids,
                    key_documents,
                    num_rows,
                    query_ends=ends if sees_ends else None,
                )
            else:
                visibility = Visibility(length, length, window, rows=num_rows, packing=packing)
            masks[kind] = kernel.prepare(visibility, dtype, input_ids.device)
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
        """Give the decoder a vision tower, whose children are its own from now on, by their names."""
        for name, child in tower.named_children():
            self.add_module(name, child)
        # No modules of its own: in files its children stand beside the layers.
        self.vision, self.vision_layers = (tower,), tuple(tower.layers)

    @property
    def takes_packing(self) -> bool:
        return self.kernel.takes_packing or self.flash_delta is not None

    def make_rotary(
        self, rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype, held: dict[Any, Tensor] | None
    ) -> Rotary:
        """`tables` of positions [B or 1, S], for layers with this rope; a family may add what else these take."""
        return rotary_tables(rope, head_dim, positions, dtype, held)

    def _scale_embeddings(self, hidden: Tensor) -> Tensor:
        """[B, S, D] as they were looked up -> as the first layer takes them"""
        return hidden if self.embed_scale is None else hidden * round_scale(self.embed_scale, hidden.dtype)


class CausalLM(ParallelModel):
    """A decoder and its head; the families derive from it. Built by `models.build`, never by hand.

    config: the ModelConfig; plan: module pattern -> tensor-parallel style; initial: parameter pattern (first match) ->
    "normal" (std config.initializer_range), "ones", "zeros" or "decay" (the logarithm of a uniform number).
    initial_buffers: the same of buffers, which are not trained: pattern -> value.
    tied_parameters: parameter name -> name of the parameter that it shares, for example the head's weight -> that of
    the embedding.
    """

    plan: Mapping[str, str] = DECODER_PLAN
    config: ModelConfig
    model: Decoder
    adapters: WrapperSettings | None = None  # shared by the wrappers of the layers
    routing: "Routing | None" = None  # what sparse layers share
    initial_values: Mapping[str, str] = {"*norm.weight": "ones", "*.bias": "zeros", "*": "normal"}
    initial_buffers: Mapping[str, float] = {"*.e_score_correction_bias": 0.0, "*": 1.0}
    vision_tower: "type[VisionTower] | None" = None  # of a family that takes images
    uncompiled_reason: str | None = None  # why layers that were to be compiled are not
    layer: Callable[[ModelConfig, int], nn.Module] = PreNormLayer  # of a family without a decoder of its own

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Return the config that a config.json's fields describe; every field is used, known to change nothing, or one
        of `fields.problems`. Where it is absent the default is transformers' for the family."""
        raise NotImplementedError

    def __init__(self, config: ModelConfig, decoder: Decoder | None = None):
        super().__init__()
        self.config = config
        self.model = decoder or Decoder(config, type(self).layer)
        if config.vision is not None and self.vision_tower is not None:
            tower = self.vision_tower(config.vision)
            self.model.attach_vision_tower(tower)
            self.initial_values = {f"model.{pattern}": kind for pattern, kind in tower.initial_patterns()} | {
                **self.initial_values
            }
        if config.num_labels is None:
            self.lm_head = VocabHead(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.score = ScoreHead(config.hidden_size, config.num_labels, bias=False)
        names = [name for name, _ in self.named_modules()]
        of_tower = {f"model.{pattern}": style for tower in self.model.vision for pattern, style in tower.plan().items()}
        styles = {**self.plan, **of_tower, "score": "score_head"}
        self.plan = {key: style for key, style in styles.items() if any(fnmatchcase(name, key) for name in names)}
        self.tied_parameters: dict[str, str] = {}
        if config.tie_word_embeddings:
            self.tied_parameters["lm_head.weight"] = "model.embed_tokens.weight"
        self.tie_weights()

    @property
    def head(self) -> VocabHead | ScoreHead:
        return self.lm_head if self.config.num_labels is None else self.score

    def tie_weights(self) -> None:
        """Make every parameter in `tied_parameters` the parameter that it shares.

        Must be called again after anything that replaced parameters one by one, such as `to_empty`.
        """
        for name, shared in self.tied_parameters.items():
            module, _, parameter = name.rpartition(".")
            setattr(self.get_submodule(module), parameter, self.get_parameter(shared))

    def use_kernel(self, kernel: Kernel) -> None:
        """Set one kernel for all layers."""
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
        """Compute logits, [B, S, V] in the weights' dtype. No collective of its own.

        Args:
            input_ids: [B, S] int64.
            position_ids: Positions of packed rows, which restart in each document, [B, S].
            seq_ids: Documents of packed rows, -1 on padding, [B, S]. Without them each row is one document, with any
                padding at its right: plain causal attention.
            cache: KV cache with the keys of the tokens before. position_ids and seq_ids are then not read.
            images: Images among the tokens.
            adapters: `micro_batch.NO_ADAPTERS` computes without the model's adapters. None: with them.
        """
        context = MicroBatchContext(position_ids, seq_ids, cache=cache, images=images, adapters=adapters)
        return self.logits(self.model(input_ids, context))

    def logits(self, hidden: Tensor, is_bare: bool = False) -> Tensor:
        """Compute logits from hidden states.

        Args:
            hidden: Hidden states after the final norm, [..., D].
            is_bare: Whether the head is called without its hooks (`DecodingCache.skips_hooks`).

        Returns:
            [..., V], or [..., labels] of a classifier.
        """
        logits = (self.head.forward if is_bare else self.head)(hidden)
        cap = self.config.final_logit_softcapping if self.config.num_labels is None else None
        return logits if cap is None else torch.tanh(logits / cap) * cap

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
            input_ids: Tokens that are read with `cache`, [B, S]. `cache.last_index` selects one of each row.
            cache: KV cache.
            images: Images among the tokens.
            record: Filled by the sparse layers. None if nobody reads it.
            adapters: Whether the model's adapters take part. None: they do.

        Collectives:
            Those of the layers. Under tensor parallel one all-gather of the logits.
        """
        routing = None if record is None else MicroBatchRouting(record=record)
        context = MicroBatchContext(cache=cache, images=images, routing=routing, adapters=adapters)
        hidden = self.model(input_ids, context)  # [B, S, D]
        if cache.last_index is not None:
            hidden = hidden[torch.arange(hidden.shape[0], device=hidden.device), cache.last_index, None]
        return gather_vocabulary(self.logits(hidden[:, 0], cache.skips_hooks))

    def with_head(self, fn: Callable[[Tensor, Tensor], Any], input_ids: Tensor, context: MicroBatchContext) -> Any:
        """Return `fn(hidden, head_weight)`, called inside this forward: how a loss reads the head without logits.

        Under FSDP this must be a registered forward method, or the head's weight is one rank's shard. The caller
        applies `config.final_logit_softcapping`.

        Args:
            fn: Called with hidden states [B, S/cp, D] and the head's weight, [V/tp, D], or [labels, D/tp] in a
                classifier.
            input_ids: [B, S/cp].
            context: The micro-batch.
        """
        hidden = self.model(input_ids, context)
        return self.head.with_weight(fn, hidden)

    def checkpoint_names(self, name: str) -> list[str]:
        """The names that parameter `name` may have in a checkpoint's files, the likeliest first."""
        return [name]

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """Patterns (re.fullmatch) of tensors of parts that dtrain does not train: an export has them as they are."""
        return ()

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Patterns (re.fullmatch) of tensors in the files that are no parameters of this model, and no mistake."""
        head = (r"lm_head\..*",) if self.config.has_new_head else ()
        return (r".*\.rotary_emb\.inv_freq", *head)  # the first: a buffer that transformers once saved
