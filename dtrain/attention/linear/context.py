"""Linear attention under context parallel: what the ranks exchange, its size independent of the rows' length.

A row lies on cp ranks in 2·cp pieces (`parallel.context.batch`), two of them on each. A piece's last state is an
affine map of its first one, M · S + U: from all maps each rank computes the first states of its own pieces. Backward
the same is done with the transposed maps: the gradient of a piece's last state is what the pieces after it give.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.parallel.collectives import all_gather, gather_along
from dtrain.parallel.context.batch import chunks_of


class Pieces:
    """The pieces of the rows over the ranks of `group`. P: their number, 2·cp. tokens: S/cp; what a rank has beyond
    them is padding of sequence parallel."""

    def __init__(self, group: Any, tokens: int):
        self.group, self.tokens = group, tokens
        self.mine: Sequence[int] = chunks_of(group.rank(), group.size())
        self.count = 2 * group.size()

    def split(self, x: Tensor) -> Tensor:
        """[B, S/cp or more, ..] -> [B · 2, S/(2·cp), ..]: each piece a row."""
        return x[:, : self.tokens].unflatten(1, (2, -1)).flatten(0, 1)

    def join(self, x: Tensor, length: int) -> Tensor:
        """`split` undone, zeros beyond: [B · 2, S/(2·cp), ..] -> [B, length, ..]."""
        x = x.unflatten(0, (-1, 2)).flatten(1, 2)
        missing = length - self.tokens
        return torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1) if missing else x

    def before(self, x: Tensor, count: int, fill: int) -> Tensor:
        """The `count` tokens before each of this rank's pieces [B · 2, count, ..], from x [B, S/cp, ..] of every rank;
        `fill` before the row. One all-gather of as many tokens a piece; backward one reduce-scatter."""
        ends = x[:, : self.tokens].unflatten(1, (2, -1))[:, :, -count:]  # a piece may be shorter
        pieces = self._ordered(gather_along(ends.unsqueeze(0), 0, self.group))  # [P, B, n, ..]
        preceding = []
        for piece in self.mine:
            first = max(0, piece - -(-count // ends.shape[2]))
            known = pieces[first:piece].transpose(0, 1).flatten(1, 2)[:, -count:] if piece else pieces[0, :, :0]
            missing = known.new_full((len(x), count - known.shape[1], *x.shape[2:]), fill)
            preceding.append(torch.cat([missing, known], 1))
        return torch.stack(preceding, 1).flatten(0, 1)

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """maps [B · 2, Hv, K, K + V], (M, U) of this rank's pieces -> their first states [B · 2, Hv, K, V], and the M
        [p, B, Hv, K, K] of all pieces after this rank's first. One all-gather."""
        size = maps.shape[-2]
        pieces, head = self._gathered(maps), self.mine[0]
        state = torch.zeros_like(pieces[0, ..., size:])
        states = [state] if head == 0 else []
        for piece in range(self.mine[-1]):
            state = pieces[piece, ..., :size] @ state + pieces[piece, ..., size:]
            if piece + 1 in self.mine:
                states.append(state)
        return torch.stack(states, 1).flatten(0, 1), pieces[head + 1 :, ..., :size].clone()

    def backward(self, grads: Tensor, kept: Tensor) -> Tensor:
        """grads [B · 2, Hv, K, V]: of the first states of this rank's pieces by their own outputs -> those of their
        last states by all that follows. One all-gather."""
        pieces, head = self._gathered(grads), self.mine[0]
        state = torch.zeros_like(pieces[0])
        state_grads = [state] if self.count - 1 in self.mine else []
        for piece in range(self.count - 1, head, -1):
            state = (kept[piece - head - 1].mT @ state).add_(pieces[piece])
            if piece - 1 in self.mine:
                state_grads.append(state)
        return torch.stack(state_grads[::-1], 1).flatten(0, 1)

    def _gathered(self, x: Tensor) -> Tensor:
        """[B · 2, ..] -> [P, B, ..], in the row's order."""
        return self._ordered(all_gather(x.unflatten(0, (-1, 2)).unsqueeze(0), 0, self.group))

    def _ordered(self, gathered: Tensor) -> Tensor:
        """[cp, B, 2, ..] -> [P, B, ..]"""
        return torch.cat([gathered[:, :, 0], gathered[:, :, 1].flip(0)])
