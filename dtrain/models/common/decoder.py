"""The decoder that all families share, and the parts they choose from. Module names are Hugging Face's.

A forward makes what all layers of one kind share once (rotary tables, the kernel's form of the mask) and hands it down:
`layer(hidden, rotary, mask, cache)`; with a cache there is no mask, for it attends by itself. A layer is two functions
of tensors, before attention and after it, which may be compiled; attention, handed each micro-batch's own, is not.
Letters: B rows, S tokens, D hidden size, H query heads, kv key heads, hd head size, F MLP size, V vocabulary; heads and
F are counted from the projections' outputs, which may be one rank's share.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.attention.kernels import Kernel
from dtrain.attention.visibility import Visibility
from dtrain.base.batch import PADDING_DOCUMENT
from dtrain.models.common.cache import Cached
from dtrain.models.common.config import LINEAR, SLIDING, ModelConfig, Rope
from dtrain.models.common.functions import ACTIVATIONS, RMSNorm, gated, rotate, rounded, tables
from dtrain.models.common.images import Images, PlacedFeatures
from dtrain.models.common.model_fields import ModelFields
from dtrain.parallel.tensor import (
    Block,
    LocalParameters,
    ParallelModel,
    ScoreHead,
    Stack,
    TensorParallel,
    VocabEmbedding,
    VocabHead,
    gather_vocabulary,
)

if TYPE_CHECKING:
    from dtrain.adapters.lora import Adapter, AdapterState
    from dtrain.adapters.nf4 import NF4Weight
    from dtrain.attention.linear.flash import FlashDelta
    from dtrain.attention.packing import Packing
    from dtrain.models.common.keys_first import KeysFirst
    from dtrain.models.common.routing import Routing
    from dtrain.models.vision.common import VisionTower

Rotary = tuple[Tensor, ...]  # two tables, and what else a family's layers take of positions
Handed = tuple[Any, ...]  # rotary, mask, cache, and of a sparse layer where tokens are no padding

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


class PlainWeight:
    """Weight [out, in] of a linear layer, held as its parameter `weight`. read: gives a parameter, or a rank's part of
    it, by its name."""

    def product(self, x: Tensor, bias: Tensor | None, read: Callable[[str], Tensor]) -> Tensor:
        """x [.., in] -> x · Wᵀ + bias, [.., out]"""
        return F.linear(x, read("weight"), bias)

    def matrix(self, read: Callable[[str], Tensor]) -> Tensor:
        """W [out, in]"""
        return read("weight")


class Linear(LocalParameters, nn.Linear):
    """A linear layer of a block. held: its weight, as its parameters hold it. adapter: what computes its forward, where
    it has one. tp: set by the style `rowwise`, under which a rank holds some of the weight's columns."""

    held: "PlainWeight | NF4Weight" = PlainWeight()
    adapter: "Adapter | None" = None
    tp: TensorParallel | None = None
    cut: TensorParallel | None = None  # set by the style `sequence`, which may cut the tokens that it sees
    key_heads: int | None = None  # of a layer that gives keys or values: how many heads of them
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        if self.adapter is not None:
            return self.adapter(self, x)
        return self.product(x, None if self.bias is None else self.local("bias"))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> x · Wᵀ + bias, [..., out], without an adapter."""
        return self.held.product(x, bias, self.local)

    def matrix(self, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """W [out, in], of which this rank computes with [out/tp, in] or [out, in/tp]; inside a forward. In the dtype of
        computation. part: what to take of each parameter instead."""
        return self.held.matrix(self.local if part is None else lambda name: part(getattr(self, name)))


class Mixer(Block):
    """Base of the modules by which a layer mixes tokens. `project`, before: hidden [B, S, D], normed, and the rotary
    tables to what `forward` takes before the mask; `forward`, between tokens; `output`, after: to [B, S, D]."""

    project: Callable[[Tensor, Rotary], tuple[Tensor, ...]]
    output: Callable[[Tensor], Tensor]


class Attention(Mixer):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. `kernel` is set when the model is built.
    qk_norm: of the heads of q and k, in a family that norms them."""

    kernel: Kernel
    qk_norm: type[nn.Module] | None = None

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        heads = config.heads_of(config.layer_types[index])
        self.index = index
        self.head_dim = heads.size
        self.scale = config.attention_scale
        hidden, query = config.hidden_size, config.num_attention_heads * heads.size
        self.q_proj = Linear(hidden, query, bias=config.qkv_bias)
        self.k_proj, self.v_proj = (Linear(hidden, heads.count * heads.size, bias=config.qkv_bias) for _ in range(2))
        self.k_proj.key_heads = self.v_proj.key_heads = heads.count
        self.o_proj = Linear(query, hidden, bias=config.o_bias)
        self.q_norm = self.qk_norm(heads.size, config.rms_norm_eps) if self.qk_norm else None
        self.k_norm = self.qk_norm(heads.size, config.rms_norm_eps) if self.qk_norm else None

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """hidden [B, S, D] -> q [B, S, H, hd], k and v [B, S, kv, hd], and what else `project_queries` gives"""
        hidden = self.enter(hidden)
        q, *more = self.project_queries(hidden, rotary)
        return q, *self.project_keys(hidden, rotary), *more

    def project_queries(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """[B, S, D], entered -> q [B, S, H, hd], and what else a family's `forward` takes after the values"""
        return (self.turn(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)), self.q_norm, rotary),)

    def project_keys(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """[B, S, D], entered -> k and v [B, S, kv, hd]"""
        k, v = (proj(hidden).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return self.turn(k, self.k_norm, rotary), v

    def turn(self, x: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
        """Queries or keys [B, S, heads, hd], normed and rotated by their positions."""
        return rotate(x if norm is None else norm(x), *rotary[:2])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cache: Cached | None = None) -> Tensor:
        """Map what `project` gives to [B, S, H · hd], for `o_proj`; mask: the kernel's form of it."""
        if cache is not None:
            return cache.attend(self.index, q, k, v, self.scale, sinks=self.sinks()).flatten(2)
        return self.kernel(q, k, v, mask, self.scale, self.sinks()).flatten(2)

    def sinks(self) -> Tensor | None:
        """[H], as kernels take them, of a family that has some."""
        return None

    def output(self, mixed: Tensor) -> Tensor:
        """[B, S, H · hd] -> [B, S, D]"""
        return self.o_proj(mixed)


class GatedMLP(Block):
    """down(act(gate(x)) · up(x)). inner: its size, where it is not `intermediate_size`."""

    def __init__(self, config: ModelConfig, inner: int | None = None):
        super().__init__()
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        x = self.enter(x)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


class Layer(nn.Module):
    """Attention and MLP: what comes `before` attention, and what a family says comes `after` it, by tensors alone.
    regions: the two compiled or in tiles, where they are (`memory.compilation`, `tiles`); decoding, whose shapes change
    with every token, goes without. keys_first: in place of `before`, where keys of other ranks come meanwhile."""

    self_attn: Attention
    input_layernorm: RMSNorm
    regions: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    keys_first: "KeysFirst | None" = None
    is_sparse = False  # whether its MLP is a mixture of experts, and takes which tokens are real

    @property
    def mixer(self) -> Mixer:
        return self.self_attn

    def before(self, hidden: Tensor, *rotary: Tensor) -> tuple[Tensor, ...]:
        """hidden [B, S, D], the rotary tables [B or 1, S, 1, hd] -> what the mixer's `project` gives"""
        return self.mixer.project(self.input_layernorm(hidden), rotary)

    def after(self, hidden: Tensor, attended: Tensor, *real: Tensor) -> Tensor:
        """hidden [B, S, D] as the layer had it, attended [B, S, H · hd] -> [B, S, D]; real: of a sparse layer, as
        `SparseMLP` takes it"""
        raise NotImplementedError

    def forward(self, hidden: Tensor, rotary: Rotary, mask: Any, cache: Cached | None = None, *real: Tensor) -> Tensor:
        """hidden [B, S, D] -> [B, S, D]; real: as `after` takes it"""
        before, after = self.regions if self.regions is not None and cache is None else (self.before, self.after)
        if self.keys_first is not None and cache is None:
            before, cache = self.keys_first.under(mask)
        if not real:  # a call with a star keeps its arguments, and `after` gives up what was attended
            return after(hidden, self.mixer(*before(hidden, *rotary), mask, cache))
        return after(hidden, self.mixer(*before(hidden, *rotary), mask, cache), real[0])


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
        self.mlp: Block = GatedMLP(config, config.inner_size(index))

    def after(self, hidden: Tensor, attended: Tensor, *real: Tensor) -> Tensor:
        """Override `Layer.after`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.mixer.output(attended)
        del attended  # the MLP needs its memory
        return hidden + self.mlp(self.post_attention_layernorm(hidden), *real)


class Decoder(Stack):
    """Token ids to hidden states after the final norm. `embed_scale` multiplies the embeddings. flash_delta computes
    linear attention where it is not None; why it is, delta_note says."""

    kernel: Kernel
    flash_delta: "FlashDelta | None" = None
    delta_note: str = ""
    vision: "tuple[()] | tuple[VisionTower]" = ()
    linear_mask: Callable[..., Any]  # of a family with linear attention: seq_ids [B, S], tokens, cache, packing -> mask

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
        self.head_sizes = {kind: config.heads_of(kind).size for kind in config.layer_types}
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, config.rms_norm_eps)

    def states(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        cache: Cached | None = None,
        packing: "Packing | None" = None,
        tokens: int | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """Override `Stack.states`; arguments as in `CausalLM.forward`."""
        config, device, kernel = self.config, input_ids.device, self.kernel
        bare = cache is not None and cache.bare
        hidden = self._embedded((self.embed_tokens.forward if bare else self.embed_tokens)(input_ids))  # [B, S, D]
        placed = None
        if images is not None:
            if not self.vision:
                raise ValueError("images, and this model was built without its vision tower")
            placed = self.vision[0].placed(images, hidden.shape[1], self.tp, kernel.group if cache is None else None)
            hidden = placed.insert(hidden)
        length = input_ids.shape[1]
        if cache is not None:
            position_ids = cache.positions
        elif position_ids is None and config.most_positions is not None and length > config.most_positions:
            raise ValueError(f"rows of {length} tokens: with LongRoPE this model takes {config.most_positions}")
        positions = torch.arange(length, device=device)[None] if position_ids is None else position_ids  # [B or 1, S]
        ends = None if images is None else images.ends
        by_position = cache is None and (seq_ids is not None or kernel.is_context_parallel or ends is not None)
        keys = kernel.keys(positions, seq_ids, packing if ends is None else None) if by_position else None
        turns, turned = None if cache is None else cache.turns, positions
        if self.layers[0].regions is not None:  # one table for all rows would be another shape to compile for
            turned = positions.expand(len(input_ids), -1)
        if images is not None and images.rotary_ids is not None:
            turned = images.rotary_ids  # [B, S, 3]
        ropes = {kind: (config.ropes[kind], self.head_sizes[kind]) for kind in config.layer_types}
        rotary = {rope: self.turns(*rope, turned, hidden.dtype, turns) for rope in dict.fromkeys(ropes.values())}
        masks: dict[str, Any] = dict.fromkeys(ropes)
        for kind in ropes:
            if kind == LINEAR:
                masks[kind] = self.linear_mask(seq_ids, tokens or length, cache, packing)
            elif cache is None:
                window = config.sliding_window if kind == SLIDING else None
                visibility = Visibility(length, length, window, rows=len(input_ids), packing=packing)
                sees_ends = ends is not None and kind in config.bidirectional
                if keys is not None and (sees_ends or packing is None or not kernel.takes_packing):
                    of_keys, owners = keys
                    visibility = Visibility(
                        *(length, of_keys.shape[1], window, positions, of_keys, seq_ids, owners, len(input_ids)),
                        query_ends=ends if sees_ends else None,
                    )
                masks[kind] = kernel.prepare(visibility, hidden.dtype, device)
        real = None if seq_ids is None else seq_ids != PADDING_DOCUMENT  # [B, S]
        if real is None and tokens is not None and tokens < length:
            real = (torch.arange(length, device=device) < tokens).expand(len(input_ids), -1)
        handed: list[Handed] = [
            (rotary[ropes[kind]], masks[kind], cache, *((real,) if layer.is_sparse and real is not None else ()))
            for layer, kind in zip(cast(list[Layer], list(self.layers)), config.layer_types, strict=True)
        ]
        return self.norm(self.through(hidden, input_ids, handed, bare, placed))

    def through(
        self, hidden: Tensor, input_ids: Tensor, handed: list[Handed], bare: bool, placed: PlacedFeatures | None = None
    ) -> Tensor:
        """The embeddings [B, S, D] of `input_ids` [B, S], which sequence parallel does not cut, through all layers ->
        [B, S, D]. handed: what each layer takes beside them. bare: as in `Cached`. placed: of images."""
        for index, (layer, beside) in enumerate(zip(self.layers, handed, strict=True)):
            hidden = (layer.forward if bare else layer)(hidden, *beside)
            if placed is not None:
                hidden = placed.add(index, hidden)
        return hidden

    def add_vision(self, tower: "VisionTower") -> None:
        """Give the decoder a vision tower, whose children are its own from now on, by their names."""
        for name, child in tower.named_children():
            self.add_module(name, child)
        # No modules of its own: in files its children stand beside the layers.
        self.vision, self.vision_layers = (tower,), tuple(tower.layers)

    @property
    def takes_packing(self) -> bool:
        return self.kernel.takes_packing or self.flash_delta is not None

    def turns(
        self, rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype, held: dict[Any, Tensor] | None
    ) -> Rotary:
        """`tables` of positions [B or 1, S], for layers with this rope; a family may add what else these take."""
        return tables(rope, head_dim, positions, dtype, held)

    def _embedded(self, hidden: Tensor) -> Tensor:
        """[B, S, D] as they were looked up -> as the first layer takes them"""
        return hidden if self.embed_scale is None else hidden * rounded(self.embed_scale, hidden.dtype)


class CausalLM(ParallelModel):
    """A decoder and its head; the families derive from it. Built by `models.build`, never by hand.

    config: the ModelConfig; plan: module pattern -> tensor-parallel style; initial: parameter pattern (first match) ->
    "normal" (std config.initializer_range), "ones", "zeros" or "decay" (the logarithm of a uniform number).
    """

    plan: Mapping[str, str] = DECODER_PLAN
    config: ModelConfig
    model: Decoder
    adapters: "AdapterState | None" = None  # what those of the layers share
    routing: "Routing | None" = None  # what sparse layers share
    initial: Mapping[str, str] = {"*norm.weight": "ones", "*.bias": "zeros", "*": "normal"}
    vision_tower: "type[VisionTower] | None" = None  # of a family that takes images
    uncompiled: str | None = None  # why layers that were to be compiled are not
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
            self.model.add_vision(tower)
            self.initial = {f"model.{pattern}": kind for pattern, kind in tower.starting_values()} | {**self.initial}
        if config.labels is None:
            self.lm_head = VocabHead(config.hidden_size, config.vocab_size, bias=False)
        else:
            self.score = ScoreHead(config.hidden_size, config.labels, bias=False)
        names = [name for name, _ in self.named_modules()]
        of_tower = {f"model.{pattern}": style for tower in self.model.vision for pattern, style in tower.plan().items()}
        styles = {**self.plan, **of_tower, "score": "score_head"}
        self.plan = {key: style for key, style in styles.items() if any(fnmatchcase(name, key) for name in names)}
        self.tie_weights()

    @property
    def head(self) -> VocabHead | ScoreHead:
        return self.lm_head if self.config.labels is None else self.score

    def tie_weights(self) -> None:
        """Share one parameter between embedding and head where the config says so, and one A for the adapters of layers
        that the files join; again after anything that replaced them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if self.adapters is not None:
            layers: Any = {name: each for name, each in self.named_modules() if getattr(each, "adapter", None)}
            for name, layer in layers.items():
                layer.lora_A = layers[self.config.parts(self.config.whole(name))[0]].lora_A

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
        cache: Cached | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """input_ids [B, S] int64 -> logits [B, S, V] in the weights' dtype.

        Without seq_ids every row is one document, padding (if any) at its right: plain causal attention.
        seq_ids [B, S]: packed rows, the document of each token (-1 on padding), with position_ids [B, S] that restart.
        cache: holds the keys of the tokens before, and says where these stand; position_ids and seq_ids are not read.
        No collective of its own.
        """
        return self.logits(self.model(input_ids, position_ids, seq_ids, cache, images=images))

    def logits(self, hidden: Tensor, bare: bool = False) -> Tensor:
        """hidden [..., D] after the final norm -> logits [..., V], a classifier's [..., labels]; bare: `Cached`'s."""
        logits = (self.head.forward if bare else self.head)(hidden)
        cap = self.config.final_logit_softcapping if self.config.labels is None else None
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def next_logits(self, input_ids: Tensor, cache: Cached, images: Images | None = None) -> Tensor:
        """[B, V] in the weights' dtype, whole on every tp rank: what follows the tokens [B, S] that are read with
        `cache`, of each row the one that `cache.last` names. Under FSDP a registered forward method. Collectives: the
        layers', and under tp one all-gather of the logits."""
        hidden = self.model(input_ids, cache=cache, images=images)  # [B, S, D]
        if cache.last is not None:
            hidden = hidden[torch.arange(hidden.shape[0], device=hidden.device), cache.last, None]
        return gather_vocabulary(self.logits(hidden[:, 0], cache.bare))

    def with_head(
        self,
        fn: Callable[[Tensor, Tensor], Any],
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        packing: "Packing | None" = None,
        images: Images | None = None,
    ) -> Any:
        """`fn(hidden [B, S/cp, D], head_weight [V/tp, D] or [labels, D/tp])`'s result: how a loss reaches the head
        without whole logits. packing: of the whole rows, for a decoder that `takes_packing`. Under FSDP it must be
        registered as a forward method, or the head's weight is one rank's shard. The caller applies
        config.final_logit_softcapping."""
        hidden = self.model(input_ids, position_ids, seq_ids, packing=packing, images=images)
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
