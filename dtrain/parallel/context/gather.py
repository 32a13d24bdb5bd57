"""Whole sequences from the parts that the ranks of context parallel hold, in the head-tail layout of `batch`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.parallel.collectives import begin_all_gather, begin_reduce_scatter, wait
from dtrain.parallel.context.batch import chunks_of, shard_sequence


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
    return SequenceGather(tensor, group, dim).wait()


class SequenceGather:
    """Begin to gather a sequence. `wait` returns the whole stream, once.

    Autograd goes through nodes in the reverse order of their making: backward the reduce-scatter begins where `wait`
    stood, and is waited for where this was made, after the backward of all that was computed in between.
    """

    def __init__(self, tensor: Tensor, group: Any, dim: int = 1):
        self.dim, self.group = dim % tensor.dim(), group
        self.sent: Any = _Begin.apply(tensor, group)

    def wait(self) -> Tensor:
        whole = _End.apply(*self.sent, self.dim, self.group)
        del self.sent  # as large as the whole
        return whole


class _Begin(torch.autograd.Function):
    """Begin an all-gather; the backward waits for the reduce-scatter of the gradients.

    [.., S/n, ..] -> a view of itself, by which the gradient comes back, and [n, .., S/n, ..] on its way.
    """

    @staticmethod
    def forward(ctx, tensor, group):
        parts = begin_all_gather(tensor.unsqueeze(0), group)
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)  # no zeros for them
        return tensor.view_as(tensor), parts

    @staticmethod
    def backward(ctx, grad, _):
        return wait(grad), None


class _End(torch.autograd.Function):
    """Wait for an all-gather and join its parts; the backward begins the reduce-scatter of the gradients."""

    @staticmethod
    def forward(ctx, tensor, parts, dim, group):
        ctx.dim, ctx.group = dim, group
        return join_sequence(wait(parts).unbind(0), dim)

    @staticmethod
    def backward(ctx, grad):
        size = ctx.group.size()
        parts = torch.stack([shard_sequence(grad, rank, size, ctx.dim) for rank in range(size)])
        return begin_reduce_scatter(parts, ctx.group).squeeze(0), None, None, None


def gather_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, length: int, dim: int = 1) -> Tensor:
    """`shard_tokens` undone: [.., length, ..] in the caller's order on every cp rank, without the padding.

    One all-gather; backward, the ranks' gradients are summed (reduce-scatter): each rank owns a loss of its own.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    return gather_sequence(tensor, cp_mesh.get_group(), dim).narrow(dim, 0, length)
