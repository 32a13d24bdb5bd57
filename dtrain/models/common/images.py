"""Images of a micro-batch: the tokens that stand for them, and their features in the place of embeddings."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.batch import Grid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    index: Tensor
    rotary_ids: Tensor | None = None
    ends: Tensor | None = None
    dp: RankImages | None = None

    def padded(self, missing: int) -> "Images":
        """Return the images of rows with `missing` more tokens of text at their ends."""
        rotary_ids = None if self.rotary_ids is None else F.pad(self.rotary_ids, (0, 0, 0, missing))
        ends = None if self.ends is None else F.pad(self.ends, (0, missing), value=2**30)
        return replace(self, index=F.pad(self.index, (0, missing), value=-1), rotary_ids=rotary_ids, ends=ends)

    @cached_property
    def digest(self) -> str:
        """Hash of all values: images of equal digests have equal features in equal places."""
        tensors = self.pixels, self.index, self.rotary_ids, self.ends
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
    index: Tensor
    is_image: Tensor

    def insert(self, hidden: Tensor) -> Tensor:
        """Return the embeddings [B, S, D], at image tokens the features."""
        tokens = self.features.tokens
        if not len(tokens):
            return hidden + tokens.sum()  # a graph for the tower's part of the collectives
        return torch.where(self._has_feature, self._by_token(tokens, hidden), hidden)

    def add(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the output [B, S, D] of a decoder layer, with what the tower adds to it at image tokens."""
        added = self.features.deepstack.get(layer)
        if added is None:
            return hidden
        if not len(added):
            return hidden + added.sum()
        return hidden + torch.where(self._has_feature, self._by_token(added, hidden), 0)

    @property
    def _has_feature(self) -> Tensor:
        return (self.index >= 0)[..., None]  # [B, S, 1]

    def _by_token(self, rows: Tensor, hidden: Tensor) -> Tensor:
        return rows.to(hidden.dtype)[self.index.clamp(min=0)]  # [B, S, D]
