"""The head-tail layout of sequences under context parallel: sharding, and gathering again.

A sequence is divided into 2·cp chunks, and rank r has the chunks r and 2·cp - 1 - r. Under a causal mask all ranks then
have the same work. Example: 8 tokens, cp = 2. A query at position p sees p + 1 keys:

    rank 0    chunks 0 and 3    tokens 0 1 6 7    1 + 2 + 7 + 8 = 18 scores
    rank 1    chunks 1 and 2    tokens 2 3 4 5    3 + 4 + 5 + 6 = 18 scores

Training shards full rows in this way, packed or not. The flat batches of `make_cp_batch_for_te` shard each packed
sequence separately (`get_rank_positions`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import STREAMS
from dtrain.parallel.collectives import begin_all_gather, begin_reduce_scatter, flat_views, wait


def get_chunk_indices(rank: int, size: int) -> tuple[int, int]:
    """Return the indices of a rank's head and tail chunk, out of 2·size chunks.

    Example:
        >>> [get_chunk_indices(rank, 2) for rank in range(2)]
        [(0, 3), (1, 2)]
    """
    return rank, 2 * size - 1 - rank


def shard_sequence(tensor: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return a rank's head and tail chunk of a full sequence. No collectives.

    Args:
        tensor: The full sequence, [.., S, ..].
        rank: The cp rank.
        size: The number of cp ranks.
        dim: The dimension of the sequence.

    Returns:
        [.., S/size, ..].

    Raises:
        ValueError: If 2·size does not divide S.

    Example:
        >>> [shard_sequence(torch.arange(8), rank, 2, dim=0).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if tensor.shape[dim] % (2 * size):
        raise ValueError(
            f"a sequence of {tensor.shape[dim]} tokens cannot be cut into {2 * size} equal chunks for cp={size}: "
            f"pad it to a multiple of {2 * size}"
        )
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[index] for index in get_chunk_indices(rank, size)], dim)


def mesh_rank(mesh: DeviceMesh) -> int:
    """Return this rank's index on a one-dimensional mesh, or on an object that only has `get_group`."""
    return mesh.get_local_rank() if hasattr(mesh, "get_local_rank") else dist.get_rank(group=mesh.get_group())


def find_sequences(positions: Tensor, ends: Tensor) -> Tensor:
    """Return the index of the packed sequence that contains each position.

    Args:
        positions: Packed positions, [n].
        ends: cu_seqlens: the end of each sequence, after a 0, [N + 1].

    Example:
        >>> find_sequences(torch.tensor([0, 7, 8]), torch.tensor([0, 8, 12])).tolist()
        [0, 0, 1]
    """
    return torch.searchsorted(ends[1:].contiguous(), positions, right=True)


def get_rank_positions(ends: Tensor, tokens: int, rank: int, size: int) -> Tensor:
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

    Example:
        >>> get_rank_positions(torch.tensor([0, 8, 12]), 12, 0, 2).tolist()
        [0, 1, 6, 7, 8, 11]
    """
    # A rank has 1/size of each sequence, so its own tokens are packed with the ends divided by size.
    local_positions = torch.arange(tokens // size, device=ends.device)
    local_ends = torch.div(ends, size, rounding_mode="floor")
    sequence = find_sequences(local_positions, local_ends)
    start, end = ends[sequence], ends[sequence + 1]
    chunk = torch.div(end - start, 2 * size, rounding_mode="floor")  # tokens of a chunk
    offset = local_positions - local_ends[sequence]  # among the rank's tokens of the sequence: two chunks
    head_position = rank * chunk + offset
    tail_position = (2 * size - 1 - rank) * chunk + offset - chunk
    return start + torch.where(offset >= chunk, tail_position, head_position)


def shard_streams(batch: Mapping[str, Tensor], cp_mesh: DeviceMesh, keep: Collection[str] = ()) -> dict[str, Tensor]:
    """Shard the streams of a batch over the cp ranks, as new tensors. No collectives.

    Args:
        batch: Streams [B, S, ..]. They are padded with the value of `batch.STREAMS`, or with 0.
        cp_mesh: The cp ranks.
        keep: Names of tensors that are not per token, and are returned unchanged.
    """
    shards = {}
    for name, stream in batch.items():
        if name in keep:
            shards[name] = stream
        else:
            pad = STREAMS[name].pad if name in STREAMS else 0
            shards[name] = shard_tokens(stream, cp_mesh, pad)
    return shards


def shard_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, pad: float | None = 0) -> Tensor:
    """Shard a tensor with one value per token over the cp ranks, as the streams of a batch. No collectives.

    Args:
        tensor: [B, S, ..], for example advantages.
        cp_mesh: The cp ranks. None: returns `tensor`.
        pad: Value of the padding on the right, to a multiple of 2·cp tokens. None: see `pad_right`.

    Returns:
        This rank's head and tail chunk.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    padded = pad_right(tensor, 2 * cp_mesh.size(), pad, dim=1)
    return shard_sequence(padded, mesh_rank(cp_mesh), cp_mesh.size(), dim=1)


def pad_right(tensor: Tensor, multiple: int, pad: float | int | bool | None, dim: int) -> Tensor:
    """Pad a tensor on the right to a multiple of tokens.

    Args:
        tensor: [.., S, ..].
        multiple: The length will be a multiple of it.
        pad: Value of the padding. None: the values count on by 1, as positions do. For example, 0 1 2 becomes 0 1 2 3.
        dim: The dimension of the sequence.

    Example:
        >>> pad_right(torch.arange(3), 4, None, 0).tolist()
        [0, 1, 2, 3]
    """
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    if pad is not None:
        return torch.cat([tensor, tensor.new_full(shape, pad)], dim)
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    steps = torch.arange(1, missing + 1, device=tensor.device, dtype=tensor.dtype)
    steps_shape = [1] * tensor.dim()
    steps_shape[dim] = -1
    return torch.cat([tensor, last + steps.view(steps_shape)], dim)


def join_sequence(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Join the parts of all ranks, [.., S/cp, ..] each, to the full sequence [.., S, ..]. No collectives.

    Args:
        parts: The parts, in the order of the ranks.
        dim: The dimension of the sequence.
    """
    chunks: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        head_index, tail_index = get_chunk_indices(rank, len(parts))
        chunks[head_index], chunks[tail_index] = part.chunk(2, dim)
    return torch.cat([chunks[index] for index in range(2 * len(parts))], dim)


def gather_sequence(tensor: Tensor, group: Any, dim: int = 1) -> Tensor:
    """Gather the head and tail chunks of all ranks to the full sequence in natural order.

    In the backward, the ranks' gradients of the full sequence are summed, and each rank receives its part. This is the
    derivative if every rank has a loss of its own, and the total loss is their sum.

    Args:
        tensor: This rank's part, [.., S/cp, ..].
        group: The cp ranks.
        dim: The dimension of the sequence.

    Returns:
        [.., S, ..].

    Collectives:
        One all-gather in the forward, one reduce-scatter in the backward.
    """
    (full,) = SequenceGather([tensor], group, dim).wait()
    return full


class SequenceGather:
    """An asynchronous all-gather of sequences. `wait` returns the full sequences, and can be called once.

    The tensors must have the same dtype, but may have different shapes, for example keys and values with heads of
    different sizes. They are sent in one message, flat and one after another. On two ranks, with 6 numbers of k and 4
    of v per rank:

        rank 0 sends  k0 (6), v0 (4)        every rank receives [2, 10]:   k0 v0
        rank 1 sends  k1 (6), v1 (4)                                       k1 v1
        `wait` returns k0 and k1 joined in the order of the sequence, and v in the same way

    The backward of k is the reverse: each rank has a gradient of the full sequence. It cuts it into the part of rank 0
    and that of rank 1, [2, 10] with v, and a reduce-scatter returns to each rank the sum of the ranks' gradients of its
    part.

    Both messages travel while something else is computed (X):

        forward     `__init__` begins the all-gather           computation X            `wait` waits for it
        backward    `_End` begins the reduce-scatter           backward of X            `_Begin` waits for it

    Autograd runs nodes in the reverse order of their creation, so the backward of X runs between the other two.

    Args:
        tensors: This rank's parts, [.., S/cp, ..] each.
        group: The cp ranks.
        dim: The dimension of the sequence.

    Collectives:
        One all-gather in the forward, one reduce-scatter in the backward.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Any, dim: int = 1):
        self.dim, self.group = dim % tensors[0].dim(), group
        self.shapes = [tensor.shape for tensor in tensors]
        flat = [tensor.reshape(-1) for tensor in tensors]
        self.sent: Any = _Begin.apply(flat[0] if len(flat) == 1 else torch.cat(flat), group)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait, and return the full sequences [.., S, ..] in natural order."""
        full = _End.apply(*self.sent, self.shapes, self.dim, self.group)
        del self.sent  # it is as large as the full sequences
        return full


class _Begin(torch.autograd.Function):
    """Begin an all-gather. The backward waits for the reduce-scatter of the gradients.

    The input is flat, [n]. The outputs are a view of it and the gathered tensor, [ranks, n], which has not arrived yet.
    The view connects the two nodes for autograd: `_End` returns the gradient of the view, and the gathered tensor has
    none.
    """

    @staticmethod
    def forward(ctx, flat, group):
        parts = begin_all_gather(flat.unsqueeze(0), group)
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)  # do not allocate zeros as the gradient of `parts`
        return flat.view_as(flat), parts

    @staticmethod
    def backward(ctx, grad, _):
        return wait(grad), None


class _End(torch.autograd.Function):
    """Wait for an all-gather and join its parts; the backward begins the reduce-scatter of the gradients."""

    @staticmethod
    def forward(ctx, flat, parts, shapes, dim, group):
        ctx.dim, ctx.group = dim, group
        gathered = flat_views(wait(parts), shapes)  # one tensor [ranks, .., S/ranks, ..] per stream
        return tuple(join_sequence(stream.unbind(0), dim) for stream in gathered)

    @staticmethod
    def backward(ctx, *grads):
        size = ctx.group.size()
        parts = []  # for each rank, its part of every stream's gradient
        for rank in range(size):
            for grad in grads:
                parts.append(shard_sequence(grad, rank, size, ctx.dim).reshape(-1))
        summed = begin_reduce_scatter(torch.cat(parts).view(size, -1), ctx.group)  # [1, n], asynchronous
        # `summed` must not be read before `_Begin.backward` has waited for it. `flat` has no other use than `_End`, so
        # autograd passes this gradient on without adding another one to it, which would read it.
        return summed.squeeze(0), None, None, None, None


def gather_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, length: int) -> Tensor:
    """Undo `shard_tokens`: gather the parts of all cp ranks, and remove the padding.

    Args:
        tensor: This rank's part, [B, S/cp, ..].
        cp_mesh: The cp ranks. None: returns `tensor`.
        length: The length before padding.

    Returns:
        [B, length, ..] in natural order, on every cp rank.

    Collectives:
        One all-gather, and in the backward one reduce-scatter, which sums the ranks' gradients.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    return gather_sequence(tensor, cp_mesh.get_group(), dim=1).narrow(1, 0, length)
