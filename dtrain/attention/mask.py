"""Which keys a query may see: the one meaning that every kernel computes.

A query at position p of document d sees the key at position j of document e when

    e == d  and  0 <= p - j < window          (no window: 0 <= p - j)

Positions restart with each document and padding is a document of its own (-1). A query always sees itself, so no row is
without a key and padding never gives NaN. Letters: B rows, Q queries, K keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """What the layers of one kind see in one forward.

    Without positions, query i and key i are the same token (Q == K) and every row is one document.
    query_positions [B, Q], key_positions [B or 1, K], query_documents [B, Q], key_documents [B, K]: int64 or None;
    positions come in pairs, documents too and only with positions. window: keys seen, the query's own included.
    """

    queries: int
    keys: int
    window: int | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

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
        if self.is_plain:
            distance = torch.arange(self.queries, device=device)[queries, None] - torch.arange(self.keys, device=device)
            distance = distance[None]
        else:
            distance = self.query_positions[:, queries, None] - self.key_positions[:, None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.query_documents is not None:
            seen &= self.query_documents[:, queries, None] == self.key_documents[:, None, :]
        return seen


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, -inf where not: made once per forward, where a bool mask is converted by every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
