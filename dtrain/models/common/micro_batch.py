"""The context of one micro-batch's forward, passed down as an argument.

    MicroBatchContext   a micro-batch, except for its token ids
      DecodingCache     interface of a KV cache
      Images            images of the rows, whose features replace embeddings
      AdapterContext    what adapters read
      MicroBatchRouting what sparse layers read (`routing`)
    LayerContext        what one decoder layer reads, made by `Decoder.layer_contexts`

Nothing about a micro-batch is stored on a module. Several micro-batches may therefore be in flight: two forwards may be
followed by their two backwards in any order, as in a pipeline schedule, with the same gradients as one after the other.
Activation checkpointing calls a layer a second time with the same arguments, so the recomputation also has the
micro-batch's own context.

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
| `policy/reference.py`, `inference/engine.py` | whether adapters take part |
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
    from dtrain.attention.tree import TreePacking


Rotary = tuple[Tensor, ...]  # cosine and sine tables, and further tensors that a family's layers read by position

# Position of the padding that sequence parallel adds: larger than any other position, so that no token sees padding.
PADDING_POSITION = 2**30


class DecodingCache(Protocol):
    """Interface of a KV cache, which attends in place of the model's kernel and masks.

    Attributes:
        positions: Rotary positions of the tokens, [B or 1, S]. Images may have their own (`Images.rotary_ids`).
        last_index: Index in S of each row's last real token, [B]. None if S is 1.
        rotary_frequencies: Rotary frequencies on the device, which the model fills and reads.
        skips_hooks: Whether modules are called without their hooks, which a CUDA graph cannot contain.
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
        """Store keys and values, and compute attention over all stored ones.

        Args:
            layer: Number of the layer under which keys and values are stored.
            q: [B, S, H, hd].
            k: [B, S, kv, hd].
            v: [B, S, kv, hd].
            scale: Factor of the scores.
            is_stored: Whether k and v of this forward are stored already, because a later layer reads them again.
            sinks: Attention sinks, [H].

        Returns:
            [B, S, H, hd].
        """
        ...

    def linear_mask(self, width: int) -> "LinearMask | None":
        """Return the mask for convolutions of `width` tokens over full prompts. None if rows grow by one token."""
        ...

    def read_states(self, layer: int) -> tuple[Tensor, ...]:
        """Return the states of a linear-attention layer after the last token of each row, [B, ...] each."""
        ...

    def write_states(self, layer: int, *states: Tensor) -> None:
        """Store the states from which each row continues, [B, ...] each."""
        ...


class Features(NamedTuple):
    """Features of the images of a call, concatenated over the images.

    Attributes:
        tokens: Features that replace the embeddings of T tokens, [T, E].
        deepstack: By the index of a decoder layer, features [T, E] that are added to its output at these tokens
            (DeepStack, arXiv:2406.04334).
    """

    tokens: Tensor
    deepstack: dict[int, Tensor]


@dataclass(frozen=True)
class RankImages:
    """Images of the micro-batches that data-parallel ranks compute at the same time.

    Attributes:
        grids: Sizes of the images of each dp rank.
        group: The dp ranks.
    """

    grids: Sequence[Sequence[Grid]]
    group: "ProcessGroup"


@dataclass(frozen=True, eq=False)
class Images:
    """Images of the rows of a micro-batch, for a model with a vision tower.

    For example, a row of 6 tokens with an image of 2 tokens at positions 2 and 3:

        feature_index   [-1, -1,  0,  1, -1, -1]
        ends            [ 0,  1,  3,  3,  4,  5]   token 2 also sees token 3

    Attributes:
        pixels: Patches of all images, concatenated over the images, [P, values].
        grids: Size of each image in patches, as its tower takes it.
        feature_index: Index of the feature that replaces each token's embedding, -1 for text, [B, S] int64.
        rotary_ids: Positions in time, height and width, [B, S, 3] int64. None for a model with one rotary axis.
        ends: Last position that each token sees: for an image token, the position of its image's last token within the
            document, for a text token its own. [B, S] int64. None if attention within images is causal.
        dp: Images of other dp ranks, if images are balanced over dp.
    """

    pixels: Tensor
    grids: Sequence[Grid]
    feature_index: Tensor
    rotary_ids: Tensor | None = None
    ends: Tensor | None = None
    dp: RankImages | None = None

    def padded(self, missing: int) -> "Images":
        """Return the images of rows with `missing` more tokens of text at their ends."""
        feature_index = F.pad(self.feature_index, (0, missing), value=-1)
        rotary_ids = None if self.rotary_ids is None else F.pad(self.rotary_ids, (0, 0, 0, missing))
        ends = None if self.ends is None else F.pad(self.ends, (0, missing), value=PADDING_POSITION)
        return replace(self, feature_index=feature_index, rotary_ids=rotary_ids, ends=ends)

    @cached_property
    def digest(self) -> str:
        """Hash of all values. Images with the same digest have the same features at the same tokens."""
        tensors = self.pixels, self.feature_index, self.rotary_ids, self.ends
        shapes = [None if tensor is None else (str(tensor.dtype), *tensor.shape) for tensor in tensors]
        grids = [tuple(grid) for grid in self.grids]
        digest = hashlib.sha256(repr((grids, shapes)).encode())
        for tensor in tensors:
            if tensor is not None:
                values = tensor.detach().cpu().contiguous().flatten()
                digest.update(values.view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class PlacedFeatures:
    """Features of a micro-batch's images, and the tokens to which they belong.

    Attributes:
        features: The features.
        feature_index: Index of each token's feature, -1 for text, of the tokens that this rank embeds: [B, S] int64, or
            [B, S/tp] under sequence parallel.
        is_image: Which of all tokens are image tokens, [B, S] bool.
    """

    features: Features
    feature_index: Tensor
    is_image: Tensor

    def insert(self, hidden: Tensor) -> Tensor:
        """Replace the embeddings [B, S, D] of image tokens by features."""
        tokens = self.features.tokens
        if not len(tokens):
            # Without an image, the sum of nothing still connects the tower to the graph, so that this rank takes part
            # in the collectives of the tower's backward.
            return hidden + tokens.sum()
        return torch.where(self._has_feature, self._select_by_token(tokens, hidden), hidden)

    def add_deepstack(self, layer: int, hidden: Tensor) -> Tensor:
        """Add features to the output [B, S, D] of a decoder layer at image tokens, if there are some for this layer."""
        added = self.features.deepstack.get(layer)
        if added is None:
            return hidden
        if not len(added):
            return hidden + added.sum()  # as in `insert`
        return hidden + torch.where(self._has_feature, self._select_by_token(added, hidden), 0)

    @property
    def _has_feature(self) -> Tensor:
        return (self.feature_index >= 0)[..., None]  # [B, S, 1]

    def _select_by_token(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """Select the row of each token, [T, D] -> [B, S, D]. Text tokens get the first row, which is not used."""
        return rows.to(hidden.dtype)[self.feature_index.clamp(min=0)]


@dataclass(frozen=True, eq=False)
class AdapterContext:
    """Context of a micro-batch for adapters. None in its place means the same as `AdapterContext()`.

    Attributes:
        enabled: Whether the adapters take part. If not, each layer computes with the weights of the base model.
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
    """Context of one micro-batch's forward. The defaults describe rows that are one document each.

    Attributes:
        position_ids: Positions, [B, S/cp]. None counts each row from 0.
        seq_ids: Documents of packed rows, -1 on padding, [B, S/cp]. None if each row is one document, with any padding
            at its right: plain causal attention.
        packing: Documents of the full rows on the host, for a decoder that `takes_packing`. Kernels that do not compute
            from a `TreePacking` ignore it.
        images: Images among the tokens.
        cache: KV cache that attends in place of kernel and mask. `position_ids` and `seq_ids` are then not read.
        routing: Routing in the sparse layers. None lets the router decide everywhere and records nothing.
        adapters: Whether adapters take part, and their dropout. None: they do, and drop nothing.
        num_tokens: Tokens of a row without the padding that sequence parallel adds. None if it added none.
        last_seq_ids: In rows with shared beginnings, the last document that sees each token, -1 on padding, [B, S/cp].
            `attention.visibility` defines it. None: only the token's own document sees it.
    """

    position_ids: Tensor | None = None
    seq_ids: Tensor | None = None
    packing: "Packing | TreePacking | None" = None
    images: Images | None = None
    cache: DecodingCache | None = None
    routing: MicroBatchRouting | None = None
    adapters: AdapterContext | None = None
    num_tokens: int | None = None
    last_seq_ids: Tensor | None = None

    def padded(self, num_tokens: int, missing: int) -> "MicroBatchContext":
        """Return the context of rows of `num_tokens` with `missing` more tokens of padding at their ends."""
        if missing == 0:
            return self
        position_ids, seq_ids, last_seq_ids = self.position_ids, self.seq_ids, self.last_seq_ids
        if position_ids is not None:
            position_ids = F.pad(position_ids, (0, missing), value=PADDING_POSITION)
        if seq_ids is not None:
            seq_ids = F.pad(seq_ids, (0, missing), value=PADDING_SEQ_ID)
        if last_seq_ids is not None:
            last_seq_ids = F.pad(last_seq_ids, (0, missing), value=PADDING_SEQ_ID)
        return replace(
            self,
            position_ids=position_ids,
            seq_ids=seq_ids,
            last_seq_ids=last_seq_ids,
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
    """Context of one decoder layer in a micro-batch.

    Attributes:
        rotary: Rotary tables, [B or 1, S, 1, hd] each, and further tensors by position in some families.
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
