"""Collectives inside a forward, with their derivatives, as tensor, sequence and context parallel need them.

torch's functional collectives do the work. They are exact on gloo (torch.distributed.nn.functional corrupts the
gradients of permuted tensors there), and torch.compile and CommDebugMode see them. All ranks of `group` must call each
function. The differentiable ones, with two ranks as an example:

    function                  forward                               backward
    all_reduce_in_backward    identity                              all-reduce          into a block
    all_reduce_in_forward     all-reduce                            identity            out of a block
    gather_along              all-gather        [2, 3, D] each      reduce-scatter      into a block (sequence parallel)
                                             -> [2, 6, D]
    reduce_scatter_along      reduce-scatter    [2, 6, D] each      all-gather          out of a block, the same
                                             -> [2, 3, D]
    gather_for_replicated     all-gather                            local slice         for replicated computation
    exchange                  all-to-all                            all-to-all          tokens to experts and back
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional

# Waits for a collective that a `begin_` function has started. On CUDA, the stream waits and not the host.
wait = torch.ops._c10d_functional.wait_tensor

# Selective activation checkpointing distinguishes collectives by what a rank receives: a shard of a sum, or a result
# that is as large as the full tensor.
REDUCE_SCATTER_OPS = frozenset({_ops.reduce_scatter_tensor.default})
REPLICATED_RESULT_OPS = frozenset({_ops.all_gather_into_tensor.default, _ops.all_reduce.default, wait.default})


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Reduce `tensor` over the ranks, and return the result as a new tensor of the same shape. Not differentiable.

    Args:
        tensor: Any shape, the same on every rank.
        group: The ranks.
        op: "sum" or "max".
    """
    return wait(_ops.all_reduce(tensor.contiguous(), op, group.group_name))


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors in rank order. Not differentiable.

    Args:
        tensor: [.., n, ..], the same shape on every rank.
        dim: The dimension of n.
        group: The ranks.

    Returns:
        [.., n · ranks, ..].
    """
    gathered = wait(begin_all_gather(tensor, group))
    # The operation concatenates along the first dimension only.
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim)


def begin_all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Start an all-gather along the first dimension: [n, ..] to [n·ranks, ..]. Not differentiable.

    The result may be read only after `wait(result)`.
    """
    return _ops.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' tensors, and return this rank's chunk of the sum. Not differentiable.

    Args:
        tensor: [.., n, ..], the same shape on every rank. n is a multiple of the number of ranks.
        dim: The dimension of n.
        group: The ranks.

    Returns:
        [.., n / ranks, ..].
    """
    if dim != 0:
        tensor = torch.cat(tensor.chunk(group.size(), dim))
    return wait(begin_reduce_scatter(tensor, group))


def begin_reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Start a reduce-scatter along the first dimension: [n, ..] to [n/ranks, ..]. Not differentiable.

    The result may be read only after `wait(result)`.
    """
    return _ops.reduce_scatter_tensor(tensor.contiguous(), "sum", group.size(), group.group_name)


def all_to_all(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to every rank, and return the received rows. Not differentiable.

    Args:
        rows: [sum(sends), ..], sorted by the rank to which they go.
        receives: The number of rows that each rank sends to this one.
        sends: The number of rows that this rank sends to each rank.
        group: The ranks.

    Returns:
        [sum(receives), ..], sorted by the rank from which they came.
    """
    return wait(_ops.all_to_all_single(rows.contiguous(), list(receives), list(sends), group.group_name))


def all_reduce_in_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `tensor`, and all-reduce its gradient in the backward.

    Used for a replicated tensor from which each rank computes another part of the result, so that each rank's gradient
    is a part of the sum. Megatron calls this function `copy_to_tensor_model_parallel_region`.
    """
    return _Collective.apply(tensor, _identity_view, partial(all_reduce, group=group))


def all_reduce_in_forward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' tensors, and pass the gradient on unchanged in the backward.

    Used for partial results whose sum every rank uses in the same way. Megatron calls this function
    `reduce_from_tensor_model_parallel_region`.
    """
    return _Collective.apply(tensor, partial(all_reduce, group=group), _unchanged)


def gather_along(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`, [.., n, ..] to [.., n·ranks, ..]. In the backward, sum over ranks and scatter."""
    backward = partial(reduce_scatter, dim=dim, group=group)
    return _Collective.apply(tensor, partial(all_gather, dim=dim, group=group), backward)


def gather_for_replicated(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`, [.., n, ..] to [.., n·ranks, ..], for replicated computation.

    Every rank must compute the same values from the result. All ranks then have the same gradient, and the backward
    returns this rank's slice of it without communication.
    """
    length = tensor.shape[dim]

    def local_slice(grad: Tensor) -> Tensor:
        return grad.narrow(dim, group.rank() * length, length)

    return _Collective.apply(tensor, partial(all_gather, dim=dim, group=group), local_slice)


def slice_for_sharded(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice along `dim`, [.., n·ranks, ..] to [.., n, ..], of a replicated tensor.

    The reverse of `gather_for_replicated`: in the backward, all-gather.
    """
    length = tensor.shape[dim] // group.size()

    def local_slice(full: Tensor) -> Tensor:
        return full.narrow(dim, group.rank() * length, length)

    return _Collective.apply(tensor, local_slice, partial(all_gather, dim=dim, group=group))


def reduce_scatter_along(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along `dim`, [.., n, ..] to [.., n/ranks, ..]. In the backward, all-gather."""
    backward = partial(all_gather, dim=dim, group=group)
    return _Collective.apply(tensor, partial(reduce_scatter, dim=dim, group=group), backward)


def exchange(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows as `all_to_all` does. In the backward, another all-to-all returns their gradients."""
    forward = partial(all_to_all, receives=receives, sends=sends, group=group)
    backward = partial(all_to_all, receives=sends, sends=receives, group=group)
    return _Collective.apply(rows, forward, backward)


def flat_views(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """View a flat buffer as consecutive tensors, so that one message can carry all of them.

    Args:
        buffer: [.., n].
        shapes: Shapes with n elements in total.

    Returns:
        One view [.., *shape] per shape.

    Example:
        >>> [view.tolist() for view in flat_views(torch.arange(7), [(2, 2), (3,)])]
        [[[0, 1], [2, 3]], [4, 5, 6]]
    """
    sizes = [prod(shape) for shape in shapes]
    return [part.unflatten(-1, shape) for part, shape in zip(buffer.split(sizes, -1), shapes, strict=True)]


def _identity_view(tensor: Tensor) -> Tensor:
    """Return a view of `tensor`: a new tensor for autograd, without a copy."""
    return tensor.view_as(tensor)


def _unchanged(grad: Tensor) -> Tensor:
    return grad


class _Collective(torch.autograd.Function):
    """Apply `forward_fn` to a tensor in the forward, and `backward_fn` to its gradient in the backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward_fn: Callable[..., Tensor], backward_fn: Callable[..., Tensor]
    ) -> Tensor:
        ctx.backward_fn = backward_fn
        return forward_fn(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_fn(grad), None, None
