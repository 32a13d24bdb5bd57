"""Collectives inside a forward, each with its derivative: what tensor, sequence and context parallel move.

torch's functional collectives underneath: exact on gloo (torch.distributed.nn.functional corrupts the gradients of
permuted tensors there), visible to torch.compile and to CommDebugMode. All ranks of `group` call each function.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional
wait = torch.ops._c10d_functional.wait_tensor  # of what a `begin_` gave; on CUDA the stream waits, not the host

# Operations by what a rank gets, which checkpointing keeps apart: its own part of a sum; what all have, and the waits.
REDUCE_SCATTER_OPS = frozenset({_ops.reduce_scatter_tensor.default})
REPLICATED_RESULT_OPS = frozenset({_ops.all_gather_into_tensor.default, _ops.all_reduce.default, wait.default})


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The reduction of `tensor` [..] over `group` (sum or max), a new tensor of its shape. No derivative."""
    return wait(_ops.all_reduce(tensor.contiguous(), op, group.group_name))


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors [.., n, ..] joined along `dim` in rank order: [.., n·ranks, ..]. No derivative."""
    joined = wait(begin_all_gather(tensor, group))
    return joined if dim == 0 else torch.cat(joined.chunk(group.size()), dim)


def begin_all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors [n, ..] joined in rank order, [n·ranks, ..], on its way: `wait` gives it. No derivative."""
    return _ops.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [.., n/ranks, ..] of the sum over ranks of [.., n, ..], cut along `dim`. No derivative."""
    return wait(begin_reduce_scatter(tensor if dim == 0 else torch.cat(tensor.chunk(group.size(), dim)), group))


def begin_reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [n/ranks, ..] of the sum over ranks of [n, ..], on its way: `wait` gives it. No derivative."""
    return _ops.reduce_scatter_tensor(tensor.contiguous(), "sum", group.size(), group.group_name)


def all_to_all(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows [sum(sends), ..], sends[r] of them to rank r, and return those received, [sum(receives), ..], in the
    ranks' order. No derivative."""
    return wait(_ops.all_to_all_single(rows.contiguous(), list(receives), list(sends), group.group_name))


def all_reduce_in_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A replicated tensor [..] into a region where each rank computes its part: nothing forward, an all-reduce
    backward."""
    return _Collective.apply(tensor, lambda whole: whole.view_as(whole), partial(all_reduce, group=group))


def all_reduce_in_forward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts [..] summed on every rank: all-reduce forward, nothing backward."""
    return _Collective.apply(tensor, partial(all_reduce, group=group), lambda grad: grad)


def gather_along(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """[.., n, ..] -> [.., n·ranks, ..], joined along `dim` (all-gather); backward the ranks' gradients are summed and
    cut (reduce-scatter)."""
    back = partial(reduce_scatter, dim=dim, group=group)
    return _Collective.apply(tensor, partial(all_gather, dim=dim, group=group), back)


def gather_for_replicated(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """[.., n, ..] -> [.., n·ranks, ..], joined along `dim` (all-gather), for what every rank computes alike from it:
    backward each takes its part of a gradient that all have, and sends nothing."""
    length = tensor.shape[dim]
    return _Collective.apply(
        tensor,
        partial(all_gather, dim=dim, group=group),
        lambda grad: grad.narrow(dim, group.rank() * length, length),
    )


def reduce_scatter_along(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """[.., n, ..] -> [.., n/ranks, ..]: the ranks' tensors summed, and cut along `dim` (reduce-scatter); backward an
    all-gather."""
    back = partial(all_gather, dim=dim, group=group)
    return _Collective.apply(tensor, partial(reduce_scatter, dim=dim, group=group), back)


def exchange(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows as `all_to_all` does; backward their gradients go back by another all-to-all."""
    there = partial(all_to_all, receives=receives, sends=sends, group=group)
    return _Collective.apply(rows, there, partial(all_to_all, receives=sends, sends=receives, group=group))


def flat_views(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """View a flat buffer [.., n] as tensors [.., *shape] behind one another. One message can then carry them all."""
    sizes = [prod(shape) for shape in shapes]
    return [part.unflatten(-1, shape) for part, shape in zip(buffer.split(sizes, -1), shapes, strict=True)]


class _Collective(torch.autograd.Function):
    """`send(tensor)`, whose derivative is `send_back(gradient)`."""

    @staticmethod
    def forward(ctx, tensor, send, send_back):
        ctx.send_back = send_back
        return send(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.send_back(grad), None, None
