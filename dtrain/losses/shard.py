"""A vocabulary cut over ranks: which ids a rank holds, and what ranks tell each other about their shards.

A group of None, or of one rank, means that the whole vocabulary is here: no collective then.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.parallel.collectives import all_gather

Group = Any  # a torch ProcessGroup, or None


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows [start, start + rows of its weight) of a vocabulary cut over `group`; shards may be uneven or
    empty, but cover the vocabulary. largest: the rows of the largest shard; None: the ranks ask one another."""

    start: int
    group: Group
    largest: int | None = None


def group_size(group: Group) -> int:
    """Ranks in `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank's place in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def on_shard(ids: Tensor, start: int | Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Global ids as columns of a shard that begins at `start`, and whether they are there; column 0 where not."""
    local = ids - start
    is_mine = (local >= 0) & (local < columns)
    return torch.where(is_mine, local, 0), is_mine


def pick(logits: Tensor, columns: Tensor, is_mine: Tensor, dtype: torch.dtype) -> Tensor:
    """logits [.., v] at columns [.., k] in `dtype`, 0 where they are not mine; v may be 0."""
    if not logits.shape[-1]:
        return torch.zeros(columns.shape, dtype=dtype, device=logits.device)
    return torch.where(is_mine, logits.gather(-1, columns).to(dtype), 0)


def check_bounds(start: int | Tensor, end: int | Tensor, columns: int) -> None:
    """Raises ValueError where host bounds do not name as many ids as the shard has columns."""
    if not isinstance(start, Tensor) and not isinstance(end, Tensor) and end - start != columns:
        raise ValueError(
            f"vocab_start_index={start} and vocab_end_index={end} name {end - start} ids, the logits' shard has "
            f"{columns} columns"
        )


def shard_start(columns: int, rank: int, group: Group, device: torch.device) -> int | Tensor:
    """Where this rank's shard begins, for callers who say only its size and its rank: cut as torch.chunk cuts, so every
    shard before the last that holds anything has the largest size.

    One max all-reduce of two numbers, on the device, no host synchronisation: the answer is a scalar tensor. A cut of
    another kind raises RuntimeError (on CUDA a device assertion). 0 without a group.
    """
    if group_size(group) == 1:
        return 0
    found = torch.full((2,), columns, device=device)
    found[1] = rank if columns else -1
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    largest, last = found.unbind()
    torch._assert_async(
        (largest == columns) | (last <= rank), "vocabulary shards must be cut as torch.chunk cuts: pass their bounds"
    )
    return largest * rank


def shard_sizes(columns: int, group: Group, device: torch.device) -> list[int]:
    """Every rank's number of columns, on the host. One all-gather of a number, on the CPU where the group can do
    that.
    """
    if group_size(group) == 1:
        return [columns]
    on_host = torch.device("cpu") in group._device_types
    return all_gather(torch.full((1,), columns, device="cpu" if on_host else device), 0, group).tolist()


def group_all_reduce_sum_with_grad(x: Tensor, group: Group) -> Tensor:
    """Σ of x over the ranks of `group`, on every rank, a new tensor; each rank's gradient passes to its own x as it is.

    That is the derivative where every rank goes on with the same loss. One all-reduce; x itself without a group, with a
    group of one rank, or without torch.distributed.
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return x
    return _AllReduceSum.apply(x, group)


@torch.no_grad()
def group_all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """`group_all_reduce_sum_with_grad` without a gradient: for counts and other constants."""
    return group_all_reduce_sum_with_grad(x, group).detach()


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None
