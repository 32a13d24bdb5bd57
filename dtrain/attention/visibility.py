"""Visibility of keys to queries: the one meaning of the attention mask.

A query at position p of document d sees the key at
position j of document e when

    e == d  and  0 <= p - j < window          (no window: 0 <= p - j)

Positions restart with each document and padding is a document of its own (-1). A query always sees itself, so no row is
without a key and padding never gives NaN. Where tokens of an image see one another, a query there sees j as far as the
end of its image, 0 <= end - j, and p - j < window as before. Letters: B rows, Q queries, K keys.

Example: a row of two packed documents of 3 and 2 tokens, with window 2. Documents are 0 0 0 1 1, positions 0 1 2 0 1:

    query 0    1 . . . .
    query 1    1 1 . . .
    query 2    . 1 1 . .      position 0 is outside the window
    query 3    . . . 1 .      another document
    query 4    . . . 1 1
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dtrain.attention.packing import Packing

MASK_BYTES = 2**26  # of a mask that is held at once, on a GPU


@dataclass(frozen=True)
class Visibility:
    """The keys that the layers of one kind see in one forward.

    Without positions, query i and key i are the same token (Q == K) and every row is one document.
    query_positions [B, Q], key_positions [B or 1, K], query_documents [B, Q], key_documents [B, K]: int64 or None;
    positions come in pairs, documents too and only with positions. window: keys seen, the query's own included. rows:
    B. packing: where the documents of the whole rows lie, if the host knows; a kernel that takes it needs no tensor.
    query_ends: [B, Q] int64, the last position that each query sees, beyond its own within an image; None: its own.
    """

    queries: int
    keys: int
    window: int | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    rows: int = 1
    packing: "Packing | None" = None
    query_ends: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Causal by index, the same in every row; a window may still apply."""
        return self.query_positions is None

    @property
    def is_causal(self) -> bool:
        """Nothing but causal: no position, no document, and no window that would hide a key."""
        return self.is_plain and (self.window is None or self.window >= self.keys)

    def visible(self, queries: slice, device: torch.device) -> Tensor:
        """[B or 1, q, K] bool: which keys the queries of a slice see."""
        if self.query_positions is None or self.key_positions is None:
            q_pos, k_pos = (torch.arange(n, device=device, dtype=torch.int32)[None] for n in (self.queries, self.keys))
        else:
            q_pos, k_pos = self.query_positions.int(), self.key_positions.int()  # half the bytes of every distance
        distance = q_pos[:, queries, None] - k_pos[:, None, :]
        if self.query_ends is None:
            seen = distance >= 0
        else:
            seen = self.query_ends.int()[:, queries, None] >= k_pos[:, None, :]
        if self.window is not None:
            seen &= distance < self.window
        if self.query_documents is not None and self.key_documents is not None:
            seen &= self.query_documents.int()[:, queries, None] == self.key_documents.int()[:, None, :]
        return seen

    def bias(self, queries: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[B or 1, 1, q, K]: 0 where the queries of a slice see a key, -inf where not."""
        return additive(self.visible(queries, device), dtype)[:, None]

    def reach(self, queries: slice) -> slice:
        """The keys that a run of queries may see, as far as their places tell."""
        if not self.is_plain:
            return slice(0, self.keys)
        return slice(0 if self.window is None else max(0, queries.start - self.window + 1), queries.stop)

    def runs(self, row_bytes: int | None = None, most: int = MASK_BYTES) -> list[slice]:
        """The queries in runs, of which each takes at most `most` bytes; row_bytes: of one query of every row, by
        default what the distances to its keys take."""
        rows = 1 if self.is_plain else self.rows
        size = max(1, most // (row_bytes or 4 * rows * self.keys))
        return [slice(start, min(start + size, self.queries)) for start in range(0, self.queries, size)]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[...]: 0 where a key is `visible` [...], -inf where not: made once per forward, where a bool mask is converted by
    every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


Hidden = Tensor | Visibility
"""The mask of a block: a bias [B or 1, 1, q, k], or if it is large the `Visibility` to compute parts from."""
