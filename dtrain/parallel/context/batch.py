"""A batch under context parallel, cut to the head-tail layout and put together again.

In that layout rank r of n holds chunks r and 2n−1−r of 2n of a sequence, so that under a causal mask every rank has the
same work. Of packed sequences each is cut by itself.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import STREAMS
from dtrain.parallel.collectives import begin_all_gather, begin_reduce_scatter, flat_views, wait


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of the 2·size that a rank holds, in its order."""
    return rank, 2 * size - 1 - rank


def shard_sequence(tensor: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """This rank's part [.., S/size, ..] of a whole stream [.., S, ..]. No collective.

    Raises ValueError where 2·size does not divide S: pad first, nothing is dropped.
    """
    if tensor.shape[dim] % (2 * size):
        raise ValueError(
            f"a sequence of {tensor.shape[dim]} tokens cannot be cut into {2 * size} equal chunks for cp={size}; "
            f"pad it to a multiple of {2 * size}"
        )
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[index] for index in chunks_of(rank, size)], dim)


def mesh_rank(mesh: DeviceMesh) -> int:
    """This rank's place on a one-dimensional mesh, or on a stand-in for one that knows its group alone."""
    return mesh.get_local_rank() if hasattr(mesh, "get_local_rank") else dist.get_rank(group=mesh.get_group())


def sequence_of(positions: Tensor, ends: Tensor) -> Tensor:
    """The sequence [n] that each of `positions` [n] lies in; ends [N + 1]: the first is 0."""
    return torch.searchsorted(ends[1:].contiguous(), positions, right=True)


def held_positions(ends: Tensor, tokens: int, rank: int, size: int) -> Tensor:
    """Return the packed positions of a cp rank's tokens, in its order: the head and the tail chunk of each sequence.

    Example: sequences of 8 and 4 tokens on 2 ranks, so ends = [0, 8, 12]. The first one is cut into 4 chunks of 2
    tokens, the second one into 4 chunks of 1. Rank 0 has positions 0 1 6 7 8 11, and rank 1 has 2 3 4 5 9 10.

    Args:
        ends: Where the sequences end, [N + 1], after a 0. 2 · size divides each length.
        tokens: The number of packed tokens on all ranks.
        rank: The cp rank.
        size: The number of cp ranks.

    Returns:
        [tokens / size], rising.
    """
    # A rank has 1/size of each sequence, so its own tokens are packed with the ends divided by size.
    local_positions = torch.arange(tokens // size, device=ends.device)
    local_ends = torch.div(ends, size, rounding_mode="floor")
    sequence = sequence_of(local_positions, local_ends)
    start, end = ends[sequence], ends[sequence + 1]
    chunk = torch.div(end - start, 2 * size, rounding_mode="floor")  # tokens of a chunk
    offset = local_positions - local_ends[sequence]  # among the rank's tokens of the sequence: two chunks
    head_position = rank * chunk + offset
    tail_position = (2 * size - 1 - rank) * chunk + offset - chunk
    return start + torch.where(offset >= chunk, tail_position, head_position)


def cut_streams(batch: Mapping[str, Tensor], cp_mesh: DeviceMesh, beside: Collection[str] = ()) -> dict[str, Tensor]:
    """This cp rank's part of a batch, as new tensors: every stream [B, S, ..], but those of `beside`, as `shard_tokens`
    cuts it, with its pad value of `batch.STREAMS`, else 0. No collective."""
    pads = {name: STREAMS[name].pad if name in STREAMS else 0 for name in batch}
    return {
        name: stream if name in beside else shard_tokens(stream, cp_mesh, pads[name]) for name, stream in batch.items()
    }


def shard_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, pad: float | None = 0) -> Tensor:
    """This cp rank's part of a per-token tensor [B, S, ..] of the caller's (advantages, old log-probabilities), as the
    batch's streams are cut: padded with `pad` on the right to a multiple of 2·cp, head-tail. No collective."""
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    padded = pad_right(tensor, 2 * cp_mesh.size(), pad, dim=1)
    return shard_sequence(padded, mesh_rank(cp_mesh), cp_mesh.size(), dim=1)


def pad_right(tensor: Tensor, multiple: int, pad: float | int | bool | None, dim: int) -> Tensor:
    """[.., S, ..] padded along `dim` to a multiple; pad None: the values go on counting."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    if pad is not None:
        return torch.cat([tensor, tensor.new_full(shape, pad)], dim)
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    steps = torch.arange(1, missing + 1, device=tensor.device, dtype=tensor.dtype)
    return torch.cat([tensor, last + steps.view([-1 if axis == dim else 1 for axis in range(tensor.dim())])], dim)


def join_sequence(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The whole stream [.., S, ..] in its natural order, from the ranks' parts [.., S/n, ..] in rank order. No
    collective."""
    chunks: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        chunks |= zip(chunks_of(rank, len(parts)), part.chunk(2, dim), strict=True)
    return torch.cat([chunks[index] for index in range(2 * len(parts))], dim)


def gather_sequence(tensor: Tensor, group: Any, dim: int = 1) -> Tensor:
    """The whole stream [.., S, ..] in its natural order, from every rank's part [.., S/n, ..]. One all-gather.

    Backward the ranks' gradients are summed and cut: one reduce-scatter. That is the derivative where every rank has a
    loss of its own.
    """
    (whole,) = SequenceGather([tensor], group, dim).wait()
    return whole


class SequenceGather:
    """An all-gather of sequences of equal dtype that is under way. `wait` returns the full streams, once.

    The tensors may have different shapes, as keys and values with heads of different sizes: they travel flat, behind
    one another. On two ranks, for k of 6 numbers and v of 4 per rank:

        rank 0 sends  k0 (6), v0 (4)        every rank receives [2, 10]:   k0 v0
        rank 1 sends  k1 (6), v1 (4)                                       k1 v1
        `wait` returns k = k0 and k1 in the order of the sequence, and v in the same way

    The message travels while other things are computed, in both directions:

        forward     `__init__` begins the all-gather           computation X            `wait` waits for it
        backward    `_End` begins the reduce-scatter           backward of X            `_Begin` waits for it

    Autograd runs nodes in the reverse order of their creation, which puts the backward of X between the other two.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Any, dim: int = 1):
        self.dim, self.group = dim % tensors[0].dim(), group
        self.shapes = [tensor.shape for tensor in tensors]
        flat = [tensor.reshape(-1) for tensor in tensors]
        self.sent: Any = _Begin.apply(flat[0] if len(flat) == 1 else torch.cat(flat), group)

    def wait(self) -> tuple[Tensor, ...]:
        wholes = _End.apply(*self.sent, self.shapes, self.dim, self.group)
        del self.sent  # as large as the wholes
        return wholes


class _Begin(torch.autograd.Function):
    """Begin an all-gather. The backward waits for the reduce-scatter of the gradients.

    Takes flat [n]. Returns a view of it, whose only use is that `_End` returns a gradient for it, and the gathered
    [ranks, n], which has not arrived yet and has no gradient.
    """

    @staticmethod
    def forward(ctx, flat, group):
        parts = begin_all_gather(flat.unsqueeze(0), group)
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)  # no zeros for them
        return flat.view_as(flat), parts

    @staticmethod
    def backward(ctx, grad, _):
        return wait(grad), None


class _End(torch.autograd.Function):
    """Wait for an all-gather and join its parts; the backward begins the reduce-scatter of the gradients."""

    @staticmethod
    def forward(ctx, flat, parts, shapes, dim, group):
        ctx.dim, ctx.group = dim, group
        of_ranks = flat_views(wait(parts), shapes)  # [ranks, .., S/ranks, ..] each
        return tuple(join_sequence(one.unbind(0), dim) for one in of_ranks)

    @staticmethod
    def backward(ctx, *grads):
        size = ctx.group.size()
        parts = []  # for each rank, its part of every stream's gradient
        for rank in range(size):
            for grad in grads:
                parts.append(shard_sequence(grad, rank, size, ctx.dim).reshape(-1))
        summed = begin_reduce_scatter(torch.cat(parts).view(size, -1), ctx.group)  # [1, n], on its way
        # Nothing may read it before `_Begin.backward` has waited. `flat` has no other use, so autograd adds nothing.
        return summed.squeeze(0), None, None, None, None


def gather_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, length: int) -> Tensor:
    """`shard_tokens` undone: [B, length, ..] in the caller's order on every cp rank, without the padding.

    One all-gather; backward, the ranks' gradients are summed (reduce-scatter): each rank owns a loss of its own.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    return gather_sequence(tensor, cp_mesh.get_group(), dim=1).narrow(1, 0, length)
