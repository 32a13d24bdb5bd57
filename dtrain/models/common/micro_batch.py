"""Everything that belongs to one micro-batch's forward, passed down as an argument.

`MicroBatchContext` contains the parts: `DecodingCache` is the interface of a KV cache, `Images` has the images of the
rows, whose features replace embeddings, and `AdapterContext` is the part that adapters read.

Nothing about a micro-batch is stored on a module. So several micro-batches may be in flight: two forwards may be
followed by their two backwards in any order, as in a pipeline schedule, with the same gradients as one after the other.
Activation checkpointing calls a layer a second time with the same arguments, so it also recomputes with the
micro-batch's own context. So do adapters, whose part of the context is `AdapterContext`.

Data flow, for two packed rows of 8 tokens (documents of 5 + 3 and of 6 tokens, 2 tokens of padding) on 2 cp ranks:

1. `policy.score.Scorer` builds a `MicroBatchContext` from the host's batch. `position_ids` and `seq_ids` are this
   rank's part, [2, 4]; `packing` describes the full rows (`begins=((0, 5), (0, 6))`). In a mixture of experts
   `routing.document_ids` is [2, 4] with values 0 to 2 and -1, `routing.num_documents` is 3, and `routing.record` is
   empty. It calls `model.with_head(loss, input_ids, context)`.
2. `Stack.forward` pads rows under sequence parallel, and calls `context.padded` so that all parts stay equally long.
3. `Decoder.states` makes one `LayerContext` for each layer: rotary tables of [2, 4, 1, hd], the attention kernel's form
   of the mask, and `is_real` [2, 4], which is False on padding. Layers of one type share these tensors.
4. A layer is called as `layer(hidden, layer_context)`. `hidden` stays a tensor argument of its own because FSDP2 and
   activation checkpointing find the tensors of the graph among the arguments. The layer passes `layer_context.adapters`
   to its linear layers. Compiled parts of a layer get tensors and this context only.
5. A sparse layer reads `layer_context.routing` and stores its counts and its balance loss in `routing.record`.
6. The policy reads the record after the forward.

Data flow of adapters. A policy scores the same rows with LoRA (dropout 0.1, step 7) and without it, as the reference:

1. `Policy` calls `Scorer.run_at_head(batch, loss, step=7)` and `Scorer.run_at_head(batch, loss, adapters=False)`.
2. The scorer builds the contexts `AdapterContext(dropout_tokens=[2, 4])` and `AdapterContext(enabled=False)`. Without
   dropout the first one is None, which means the same as `AdapterContext()`: every adapter takes part, nothing is
   dropped. `inference.engine`, which has no dropout, and `CausalLM.forward` get the context from their caller.
3. `Decoder.states` passes the context to the vision tower, without the numbers of tokens, and in each `LayerContext`
   to the layers. Modules pass it on as their argument `adapters`, down to each layer that may have a wrapper: `Linear`,
   `Router`, and `ExpertLinear` inside of `Experts.compute_on_expert_ranks`.
4. The wrapper (`adapters.lora.Adapter`, `ParameterAdapter`) reads it. With `enabled=False` it returns the layer's own
   output. Nothing else knows whether adapters take part, so both forwards may be in flight at the same time.

| who | builds or reads |
| --- | --- |
| `policy/score.py` | builds the context of a micro-batch that is trained or scored |
| `inference/engine.py` | builds one with a KV cache, and reads the record's choices for routing replay |
| `parallel/tensor.py` `Stack` | `padded`, `cache` |
| `decoder.py` `Decoder` | all fields; makes the layers' contexts |
| `adapters/lora.py` | `AdapterContext`, which `memory/tiles.py` cuts tile by tile |
| `policy/reference.py`, `inference/engine.py` | whether the forwards that they stand for have the adapters |
| `moe.py` `SparseMLP` | `LayerContext.is_real` and `routing`; writes the record |
| `memory/activation_offload.py` | `LayerContext.shared_values`, which stay on the device |
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.batch import PADDING_SEQ_ID, Grid
from dtrain.models.common.routing import MicroBatchRouting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dtrain.attention.linear.layer import LinearMask
    from dtrain.attention.packing import Packing


Rotary = tuple[Tensor, ...]  # cosine and sine tables, and further tensors that a family's layers read by position

# Position of tokens that sequence parallel adds: behind every position of every rank, so that no token sees them.
PADDING_POSITION = 2**30


class DecodingCache(Protocol):
    """The interface that a model's forward reads and writes in place of its own kernel and masks.

    positions: [B or 1, S], the rotary positions of the tokens, but for images that have their own. last: [B], which of
    the S is each row's last one that counts; None where S is 1. turns: the rotary frequencies on the device, by what
    they are made from; the model fills it. bare: whether modules are called without their hooks, which no graph can
    hold.
    """

    positions: Tensor
    last_index: Tensor | None
    rotary_frequencies: dict[Any, Tensor]
    skips_hooks: bool

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        is_stored: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [B, S, H, hd], k and v [B, S, kv, hd] → [B, S, H, hd]. is_stored: whether `layer` has kept k and v already
        in this forward, and another layer reads them. sinks [H]: as kernels take them."""
        ...

    def linear_mask(self, width: int) -> "LinearMask | None":
        """Return the mask of convolutions of this width over whole prompts; None where rows go on by one token."""
        ...

    def read_states(self, layer: int) -> tuple[Tensor, ...]:
        """Return what `write_states` was last given of each row in this layer of linear attention, [B, ..] each."""
        ...

    def write_states(self, layer: int, *states: Tensor) -> None:
        """Keep what each row goes on from, [B, ..] each."""
        ...


class Features(NamedTuple):
    """Features of the images of a call, one image behind the other.

    Attributes:
        tokens: [T, E], in the place of the embeddings of T tokens.
        deepstack: By the index of a decoder layer, [T, E] that are added to its output at these tokens (DeepStack,
            arXiv:2406.04334).
    """

    tokens: Tensor
    deepstack: dict[int, Tensor]


@dataclass(frozen=True)
class RankImages:
    """Images of the micro-batches that data-parallel ranks compute at the same time. grids: of the images of each dp
    rank; group: the dp ranks beside this one."""

    grids: Sequence[Sequence[Grid]]
    group: "ProcessGroup"


@dataclass(frozen=True, eq=False)
class Images:
    """Images of the rows of a micro-batch, as a model with a vision tower takes them.

    pixels: [P, values], the patches of all images, one image behind the other. grids: of each image, as its tower takes
    them. index: [B, S] int64, which feature stands in the place of each token's embedding, -1 for text. rotary_ids:
    [B, S, 3] int64, the positions of tokens in time, height and width, of a model whose rotary embedding has these
    axes; else None. ends: [B, S] int64, for an image token the position of its image's last token within the document,
    for text its own; None where attention within images is causal.
    """

    pixels: Tensor
    grids: Sequence[Grid]
    feature_index: Tensor
    rotary_ids: Tensor | None = None
    ends: Tensor | None = None
    dp: RankImages | None = None

    def padded(self, missing: int) -> "Images":
        """Return the images of rows with `missing` more tokens of text at their ends."""
        rotary_ids = None if self.rotary_ids is None else F.pad(self.rotary_ids, (0, 0, 0, missing))
        ends = None if self.ends is None else F.pad(self.ends, (0, missing), value=2**30)
        return replace(
            self, feature_index=F.pad(self.feature_index, (0, missing), value=-1), rotary_ids=rotary_ids, ends=ends
        )

    @cached_property
    def digest(self) -> str:
        """Hash of all values: images of equal digests have equal features in equal places."""
        tensors = self.pixels, self.feature_index, self.rotary_ids, self.ends
        shapes = [None if tensor is None else (str(tensor.dtype), *tensor.shape) for tensor in tensors]
        whole = hashlib.sha256(repr(([tuple(grid) for grid in self.grids], shapes)).encode())
        for tensor in tensors:
            if tensor is not None:
                whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return whole.hexdigest()


@dataclass(frozen=True)
class PlacedFeatures:
    """Features of a micro-batch's images, and where they stand among the tokens that a rank embeds: index [B, S/tp]
    int64 under sequence parallel, else [B, S]. is_image: [B, S] bool, of all tokens."""

    features: Features
    feature_index: Tensor
    is_image: Tensor

    def insert(self, hidden: Tensor) -> Tensor:
        """Return the embeddings [B, S, D], at image tokens the features."""
        tokens = self.features.tokens
        if not len(tokens):
            return hidden + tokens.sum()  # a graph for the tower's part of the collectives
        return torch.where(self._has_feature, self._by_token(tokens, hidden), hidden)

    def add_deepstack(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the output [B, S, D] of a decoder layer, with what the tower adds to it at image tokens."""
        added = self.features.deepstack.get(layer)
        if added is None:
            return hidden
        if not len(added):
            return hidden + added.sum()
        return hidden + torch.where(self._has_feature, self._by_token(added, hidden), 0)

    @property
    def _has_feature(self) -> Tensor:
        return (self.feature_index >= 0)[..., None]  # [B, S, 1]

    def _by_token(self, rows: Tensor, hidden: Tensor) -> Tensor:
        return rows.to(hidden.dtype)[self.feature_index.clamp(min=0)]  # [B, S, D]


@dataclass(frozen=True, eq=False)
class AdapterContext:
    """A micro-batch's part of the context that adapters read.

    In place of a context, None stands for `AdapterContext()`.

    Attributes:
        enabled: Whether the adapters take part. If not, each layer computes with its own weights only.
        dropout_tokens: A number for each token, from which dropout is computed, [B, S/cp] int64. None drops nothing.
    """

    enabled: bool = True
    dropout_tokens: Tensor | None = None

    def padded(self, missing: int) -> "AdapterContext":
        """Return the context of rows with `missing` more tokens of padding at their ends."""
        if self.dropout_tokens is None:
            return self
        return replace(self, dropout_tokens=F.pad(self.dropout_tokens, (0, missing)))

    def for_vision_tower(self) -> "AdapterContext":
        """Return the context for a vision tower, whose inputs are patches of images and have no dropout."""
        return replace(self, dropout_tokens=None)


NO_ADAPTERS = AdapterContext(enabled=False)
"""Context of a forward without the model's adapters."""


@dataclass(frozen=True, eq=False)
class MicroBatchContext:
    """One micro-batch's forward, except for its token ids. The defaults describe rows of one document each.

    Attributes:
        position_ids: Positions, [B, S/cp]. None counts each row from 0.
        seq_ids: Documents of packed rows, -1 on padding, [B, S/cp]. None if each row is one document, with any padding
            at its right: plain causal attention.
        packing: Documents of the full rows on the host, for a decoder that `takes_packing`.
        images: Images among the tokens.
        cache: KV cache that attends in place of kernel and mask. `position_ids` and `seq_ids` are then not read.
        routing: Routing in the sparse layers. None lets the router decide everywhere and records nothing.
        adapters: Whether adapters take part, and their dropout. None: they do, and drop nothing.
        num_tokens: Tokens of a row without the padding that sequence parallel adds. None if it added none.
    """

    position_ids: Tensor | None = None
    seq_ids: Tensor | None = None
    packing: "Packing | None" = None
    images: Images | None = None
    cache: DecodingCache | None = None
    routing: MicroBatchRouting | None = None
    adapters: AdapterContext | None = None
    num_tokens: int | None = None

    def padded(self, num_tokens: int, missing: int) -> "MicroBatchContext":
        """Return the context of rows of `num_tokens` with `missing` more tokens of padding at their ends."""
        if missing == 0:
            return self
        position_ids, seq_ids = self.position_ids, self.seq_ids
        if position_ids is not None:
            position_ids = F.pad(position_ids, (0, missing), value=PADDING_POSITION)
        if seq_ids is not None:
            seq_ids = F.pad(seq_ids, (0, missing), value=PADDING_SEQ_ID)
        return replace(
            self,
            position_ids=position_ids,
            seq_ids=seq_ids,
            images=None if self.images is None else self.images.padded(missing),
            routing=None if self.routing is None else self.routing.padded(missing),
            adapters=None if self.adapters is None else self.adapters.padded(missing),
            num_tokens=num_tokens,
        )

    def for_another_model(self) -> "MicroBatchContext":
        """Return the same rows for another model, such as a teacher: its own router and adapters, no dropout."""
        return replace(self, routing=None, adapters=None)


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What one decoder layer reads about a micro-batch besides its hidden states.

    Attributes:
        rotary: Rotary tables, [B or 1, S, 1, hd] each, and what else the family's layers read by position.
        mask: The attention kernel's form of the mask. None with a cache, except in linear attention.
        cache: KV cache. None in training.
        is_real: Which tokens are not padding, [B, S] bool. None if all are.
        routing: Routing in sparse layers.
        adapters: Whether adapters take part, and their dropout.
    """

    rotary: Rotary
    mask: Any
    cache: DecodingCache | None = None
    is_real: Tensor | None = None
    routing: MicroBatchRouting | None = None
    adapters: AdapterContext | None = None

    def shared_values(self) -> tuple[Any, ...]:
        """Return the tensors, or nested lists and tuples of tensors, that other layers of the micro-batch also read."""
        return self.rotary, self.mask, self.is_real
