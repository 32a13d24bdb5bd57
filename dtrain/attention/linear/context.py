"""Linear attention under context parallel. The messages are states, so their size does not depend on the rows' length.

A row is divided into 2·cp pieces, two on each rank (`parallel.context.batch`). The last state of a piece is an affine
function of its first state, M · S + U, where M and U depend only on the piece. Example with cp=2: rank 0 has the pieces
0 and 3, rank 1 has 1 and 2.

Forward: every rank computes M and U of its two pieces. One all-gather exchanges them, and then each rank computes the
first states of its pieces from those of all pieces before them:

    piece 0: 0    piece 1: U0    piece 2: M1 U0 + U1    piece 3: M2 (M1 U0 + U1) + U2

Backward: let d_p be the gradient of the first state of piece p by the outputs of the same piece. Every rank computes it
for its two pieces, and one all-gather exchanges them. The gradient of the last state of a piece, by everything after
it, is

    piece 3: 0    piece 2: d3    piece 1: d2 + M2ᵀ d3    piece 0: d1 + M1ᵀ (d2 + M2ᵀ d3)

A rank needs the M of all pieces after its first piece, and saves them in the forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.parallel.collectives import all_gather, gather_along
from dtrain.parallel.context.batch import get_chunk_indices


class Pieces:
    """The pieces of rows over context-parallel ranks. P = 2·cp is the number of pieces of a row.

    Args:
        group: The ranks.
        tokens: S/cp, the tokens of a row on a rank. Sequence parallel may have padded them further on the right.

    Attributes:
        local_pieces: The indices of this rank's two pieces.
        count: P.
    """

    def __init__(self, group: Any, tokens: int):
        self.group = group
        self.tokens = tokens
        self.local_pieces: Sequence[int] = get_chunk_indices(group.rank(), group.size())
        self.count = 2 * group.size()

    def split(self, x: Tensor) -> Tensor:
        """Convert rows [B, S/cp or more, ..] to pieces [B · 2, S/(2·cp), ..], without the padding."""
        return x[:, : self.tokens].unflatten(1, (2, -1)).flatten(0, 1)

    def join(self, x: Tensor, length: int) -> Tensor:
        """Convert pieces [B · 2, S/(2·cp), ..] to rows [B, length, ..], padded with zeros: the inverse of `split`."""
        x = x.unflatten(0, (-1, 2)).flatten(1, 2)
        missing = length - self.tokens
        return torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1) if missing else x

    def before(self, x: Tensor, count: int, fill: int) -> Tensor:
        """Return the tokens before each of this rank's pieces. Differentiable.

        Args:
            x: This rank's tokens, [B, S/cp, ..].
            count: The number of tokens.
            fill: The value before the first token of a row.

        Returns:
            [B · 2, count, ..].

        Collectives:
            One all-gather of `count` tokens per piece, and in the backward one reduce-scatter.
        """
        pieces = x[:, : self.tokens].unflatten(1, (2, -1))  # [B, 2, S/(2·cp), ..]
        last_tokens = pieces[:, :, -count:]  # fewer than `count` if a piece is shorter
        last_tokens_of_all = self._ordered(gather_along(last_tokens.unsqueeze(0), 0, self.group))  # [P, B, n, ..]
        preceding = []
        for index in self.local_pieces:
            # If pieces are shorter than `count`, the tokens come from several pieces.
            num_needed = -(-count // last_tokens.shape[2])
            first = max(0, index - num_needed)
            if index > 0:
                tokens = last_tokens_of_all[first:index].transpose(0, 1).flatten(1, 2)[:, -count:]
            else:
                tokens = last_tokens_of_all[0, :, :0]
            missing = tokens.new_full((len(x), count - tokens.shape[1], *x.shape[2:]), fill)
            preceding.append(torch.cat([missing, tokens], 1))
        return torch.stack(preceding, 1).flatten(0, 1)

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the first states of this rank's pieces.

        Args:
            maps: M and U of this rank's pieces, side by side, [B · 2, Hv, K, K + V].

        Returns:
            The first states, [B · 2, Hv, K, V], and for `backward` the M of all pieces after this rank's first one,
            [P - 1 - first, B, Hv, K, K].

        Collectives:
            One all-gather.
        """
        size = maps.shape[-2]
        maps_of_all = self._gathered(maps)
        m, u = maps_of_all[..., :size], maps_of_all[..., size:]
        first, last = self.local_pieces[0], self.local_pieces[-1]
        state = torch.zeros_like(u[0])
        states = [state] if first == 0 else []
        for piece in range(last):
            state = m[piece] @ state + u[piece]
            if piece + 1 in self.local_pieces:
                states.append(state)
        return torch.stack(states, 1).flatten(0, 1), m[first + 1 :].clone()

    def backward(self, grads: Tensor, maps: Tensor) -> Tensor:
        """Compute the gradients of the last states of this rank's pieces, by all pieces after them.

        Args:
            grads: Gradients of the first states of this rank's pieces by the outputs of the same pieces,
                [B · 2, Hv, K, V].
            maps: M of the pieces after this rank's first one, as `forward` returns them.

        Returns:
            [B · 2, Hv, K, V].

        Collectives:
            One all-gather.
        """
        grads_of_all = self._gathered(grads)
        first = self.local_pieces[0]
        last_grad = torch.zeros_like(grads_of_all[0])  # of the last piece
        last_grads = [last_grad] if self.count - 1 in self.local_pieces else []
        for piece in range(self.count - 1, first, -1):
            last_grad = (maps[piece - first - 1].mT @ last_grad).add_(grads_of_all[piece])
            if piece - 1 in self.local_pieces:
                last_grads.append(last_grad)
        last_grads.reverse()  # from the order of the computation to that of the pieces
        return torch.stack(last_grads, 1).flatten(0, 1)

    def _gathered(self, x: Tensor) -> Tensor:
        """Gather pieces [B · 2, ..] of all ranks to [P, B, ..], in the order of the row."""
        return self._ordered(all_gather(x.unflatten(0, (-1, 2)).unsqueeze(0), 0, self.group))

    def _ordered(self, gathered: Tensor) -> Tensor:
        """Order the pieces of the ranks, [cp, B, 2, ..], as in the row, [P, B, ..]."""
        # First pieces are 0 to cp - 1. Second pieces are 2·cp - 1 down to cp, so their order is reversed.
        return torch.cat([gathered[:, :, 0], gathered[:, :, 1].flip(0)])
