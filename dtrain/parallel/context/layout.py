"""The head-tail layout of a sequence over cp ranks: rank r of n holds chunks r and 2n−1−r of 2n, so that under a causal
mask every rank has the same work. Shard a stream to it, and gather it back in the caller's order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.parallel.collectives import all_gather, reduce_scatter


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
    return _GatherSequence.apply(tensor, dim % tensor.dim(), group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, group):
        ctx.dim, ctx.group = dim, group
        return join_sequence(all_gather(tensor.unsqueeze(0), 0, group).unbind(0), dim)  # [n, .., S/n, ..]

    @staticmethod
    def backward(ctx, grad):
        size = ctx.group.size()
        parts = torch.stack([shard_sequence(grad, rank, size, ctx.dim) for rank in range(size)])
        return reduce_scatter(parts, 0, ctx.group).squeeze(0), None, None


def mesh_rank(mesh: DeviceMesh) -> int:
    """This rank's place on a one-dimensional mesh, or on a stand-in for one that knows its group alone."""
    return mesh.get_local_rank() if hasattr(mesh, "get_local_rank") else dist.get_rank(group=mesh.get_group())
