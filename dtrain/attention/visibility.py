"""The meaning of the attention mask: which keys a query sees. All kernels implement this definition.

A query at position p of document d sees the key at position j of document e if

    e == d  and  0 <= p - j < window          (no window: 0 <= p - j)

Positions restart at 0 in each document. Padding is a document of its own (-1), so a query always sees at least itself,
and padding never gives NaN. In models whose images are bidirectional, a query within an image sees the keys up to the
last position of the image: 0 <= end - j instead of 0 <= p - j. Letters: B rows, Q queries, K keys.

In rows with shared beginnings (`attention.tree`), a document is a node of a forest, and a query also sees the keys of
its node's ancestors. Nodes are numbered in depth-first preorder, so the subtree of node e has the numbers e to l, its
last document. The condition e == d becomes e <= d <= l. For a node without children l = e, which is the same as e == d.

Example: a row of two packed documents of 3 and 2 tokens, with window 2. Documents are 0 0 0 1 1, positions 0 1 2 0 1:

    query 0    1 . . . .
    query 1    1 1 . . .
    query 2    . 1 1 . .      position 0 is outside the window
    query 3    . . . 1 .      another document
    query 4    . . . 1 1
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dtrain.attention.packing import Packing
    from dtrain.attention.tree import TreePacking

MASK_BYTES = 2**26  # largest mask in memory at a time, on a GPU


class MaskStreams(NamedTuple):
    """Positions and documents of tokens, from which masks are computed.

    Attributes:
        positions: [B or 1, S] int64.
        documents: [B, S] int64. None: each row is one document.
        last_documents: In rows with shared beginnings, the last document that sees each token, [B, S] int64. None: only
            the token's own document sees it.
    """

    positions: Tensor
    documents: Tensor | None = None
    last_documents: Tensor | None = None


@dataclass(frozen=True)
class Visibility:
    """The mask of all layers of one kind (full attention, or a sliding window) in one forward.

    Without positions, query i and key i are the same token (Q == K), and every row is one document. Documents are given
    only together with positions.

    Attributes:
        queries: Q.
        keys: K.
        window: Number of keys that a query sees, its own included. None: no window.
        query_positions: [B, Q] int64, or None.
        key_positions: [B or 1, K] int64, or None.
        query_documents: [B, Q] int64, or None.
        key_documents: [B, K] int64, or None.
        rows: B.
        packing: The documents of the full rows, if the host knows them. A kernel that computes from the packing needs
            no tensors.
        query_ends: Last position that each query sees, [B, Q] int64: the end of its image, or its own position. None:
            their own positions.
        key_last_documents: Last document whose queries see each key, [B, K] int64. None: the key's own document.
    """

    queries: int
    keys: int
    window: int | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    rows: int = 1
    packing: "Packing | TreePacking | None" = None
    query_ends: Tensor | None = None
    key_last_documents: Tensor | None = None

    @property
    def is_by_index(self) -> bool:
        """True if query i sees the keys up to i, or the last `window` of them, in every row."""
        return self.query_positions is None

    @property
    def is_causal(self) -> bool:
        """True for the plain causal mask: `is_by_index`, and no window hides a key."""
        return self.is_by_index and (self.window is None or self.window >= self.keys)

    def visible(self, queries: slice, device: torch.device) -> Tensor:
        """Return the mask of visible keys for a slice of the queries.

        Args:
            queries: The slice of queries.
            device: Device of the result.

        Returns:
            [B or 1, q, K] bool.

        Example:
            >>> Visibility(queries=3, keys=3, window=2).visible(slice(0, 3), torch.device("cpu")).int()
            tensor([[[1, 0, 0],
                     [1, 1, 0],
                     [0, 1, 1]]], dtype=torch.int32)
        """
        if self.query_positions is None or self.key_positions is None:
            q_pos = torch.arange(self.queries, device=device, dtype=torch.int32)[None]
            k_pos = torch.arange(self.keys, device=device, dtype=torch.int32)[None]
        else:
            # int32, because the distances [B, q, K] would take twice the memory in int64.
            q_pos, k_pos = self.query_positions.int(), self.key_positions.int()
        distance = q_pos[:, queries, None] - k_pos[:, None, :]
        if self.query_ends is None:
            visible = distance >= 0
        else:
            visible = self.query_ends.int()[:, queries, None] >= k_pos[:, None, :]
        if self.window is not None:
            visible &= distance < self.window
        if self.query_documents is not None and self.key_documents is not None:
            query_documents = self.query_documents.int()[:, queries, None]
            key_documents = self.key_documents.int()[:, None, :]
            if self.key_last_documents is None:
                visible &= query_documents == key_documents
            else:
                visible &= query_documents >= key_documents
                visible &= query_documents <= self.key_last_documents.int()[:, None, :]
        return visible

    def bias(self, queries: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the additive mask of a slice of queries, [B or 1, 1, q, K]: 0 for visible keys, -inf for others."""
        return additive(self.visible(queries, device), dtype)[:, None]

    def reach(self, queries: slice) -> slice:
        """Return a slice that contains all keys that the queries of a slice see.

        For a mask by index it is derived from the indices. For example, queries 4 to 5 with window 3: keys 2 to 5. For
        other masks it is all keys.
        """
        if not self.is_by_index:
            return slice(0, self.keys)
        first_key = 0 if self.window is None else max(0, queries.start - self.window + 1)
        return slice(first_key, queries.stop)

    def runs(self, row_bytes: int | None = None, max_bytes: int = MASK_BYTES) -> list[slice]:
        """Divide the queries into consecutive slices that take at most `max_bytes` bytes each.

        Args:
            row_bytes: Bytes that one query takes, over all B rows. None: the bytes of its int32 distances to all keys.
            max_bytes: Largest number of bytes of a slice. A slice has at least one query.

        Example:
            >>> Visibility(queries=5, keys=5).runs(row_bytes=10, max_bytes=20)
            [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        """
        if row_bytes is None:
            rows = 1 if self.is_by_index else self.rows
            row_bytes = 4 * rows * self.keys
        size = max(1, max_bytes // row_bytes)
        return [slice(start, min(start + size, self.queries)) for start in range(0, self.queries, size)]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask [...] to an additive mask, [...]: 0 for True, -inf for False.

    torch would convert a bool mask in every layer. This function is called once per forward.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


BlockMask = Tensor | Visibility
"""Mask of a block of keys: an additive mask [B or 1, 1, Q, K]. If that would be large, a `Visibility`, from which the
additive mask of some queries at a time is computed."""
