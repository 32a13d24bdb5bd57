"""Small helpers over the caller's groups: where a shard begins, sums, and the context-parallel helpers that NeMo-RL's
users know, on `parallel.context.batch`'s head-tail layout.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.losses.head.vocabulary import Group, group_rank, group_size
from dtrain.parallel.collectives import gather_along, leave_region
from dtrain.parallel.context.batch import gather_sequence, shard_sequence

Bounds = tuple[int | Tensor, int | Tensor]  # the ids [start, end) of a shard


def assert_on_device(holds: Tensor, message: str) -> None:
    """Raises RuntimeError with `message` where the scalar `holds` is false; on CUDA a device assertion, which the host
    does not wait for."""
    torch._assert_async(holds, message)


def check_bounds(start: int | Tensor, end: int | Tensor, columns: int) -> None:
    """Raises ValueError where bounds on the host (no scalar tensors) do not name as many ids as a shard has columns."""
    if not isinstance(start, Tensor) and not isinstance(end, Tensor) and end - start != columns:
        raise ValueError(
            f"vocab_start_index={start} and vocab_end_index={end} name {end - start} ids, the logits' shard has "
            f"{columns} columns"
        )


def shard_bounds(logits: Tensor, rank: int | None, group: Group) -> Bounds:
    """The ids [start, end) of this rank's shard [..., V/tp], for callers who say only its size and its rank: cut as
    torch.chunk cuts, so every shard before the last that holds anything has the largest size.

    One max all-reduce of two numbers, on the device, no host synchronisation: the bounds are scalar tensors. A cut of
    another kind raises RuntimeError (on CUDA a device assertion). Without a group all ids.
    """
    columns = logits.shape[-1]
    if group is None:
        return 0, columns
    if rank is None:
        raise ValueError("vocab_parallel_rank is needed with vocab_parallel_group")
    if group_size(group) == 1:
        return 0, columns
    bounds = torch.tensor([columns, rank if columns else -1], device=logits.device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    largest, last = bounds.unbind()
    assert_on_device(
        (largest == columns) | (last <= rank), "vocabulary shards must be cut as torch.chunk cuts: pass their bounds"
    )
    return largest * rank, largest * rank + columns


def group_all_reduce_sum_with_grad(x: Tensor, group: Group) -> Tensor:
    """Σ of x [...] over the ranks of `group`, on every rank, a new tensor; each rank's gradient passes to its own x as
    it is.

    That is the derivative where every rank goes on with the same loss. One all-reduce; x itself without a group, with a
    group of one rank, or without torch.distributed.
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return x
    return leave_region(x, group)


@torch.no_grad()
def group_all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """`group_all_reduce_sum_with_grad` of x [...], for constants: no gradient."""
    return group_all_reduce_sum_with_grad(x, group).detach()


class AllGatherCPTensor:
    """The whole sequence from every cp rank's head-tail part."""

    @staticmethod
    def apply(tensor: Tensor, cp_group: Group, seq_dim: int = 1) -> Tensor:
        """tensor [..., S/cp, ...] -> [..., S, ...] in natural order; the tensor itself without a group.

        Backward the incoming gradients are summed over cp and cut: the true derivative where every cp rank owns a loss.
        One all-gather, backward one reduce-scatter. Raises ValueError for parts of odd length.
        """
        if group_size(cp_group) == 1:
            return tensor
        if tensor.shape[seq_dim] % 2:
            raise ValueError(f"a cp rank's part has two equal chunks; {tensor.shape[seq_dim]} tokens cannot be cut so")
        return gather_sequence(tensor, cp_group, seq_dim)


allgather_cp_sharded_tensor = AllGatherCPTensor.apply


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """[..., S, ...] -> this cp rank's head-tail part [..., S/cp, ...]; the tensor itself for cp_size 1. No collective.

    Raises ValueError where 2·cp does not divide S.
    """
    return input_ids if cp_size == 1 else shard_sequence(input_ids, cp_rank, cp_size, seq_dim)


def cp_shift_next(x: Tensor, cp_group: Group = None, *, fill: float) -> Tensor:
    """out[:, t] = x[:, t + 1] over the global sequence cut contiguously over cp, `fill` after its end.

    x [B, S/cp, ...]. One all-gather of [B, 1, ...]; differentiable, gradients summed over cp.
    """
    end = torch.full_like(x[:, :1], fill)
    size, rank = group_size(cp_group), group_rank(cp_group)
    if size > 1:
        firsts = gather_along(x[:, :1], 1, cp_group)  # [B, cp, ...]
        following = torch.cat([firsts[:, 1:], end], 1)
        end = following[:, rank : rank + 1]
    return torch.cat([x[:, 1:], end], 1)


def shard_like(ids: Tensor, local_length: int, cp_group: Group) -> Tensor:
    """Ids [B, S, ...] of whole rows, padded with −1 to cp·local_length and cut to this cp rank's part.

    Raises ValueError where the rows are longer than what the ranks hold, or 2·cp does not divide that.
    """
    size = group_size(cp_group)
    missing = local_length * size - ids.shape[1]
    if missing < 0:
        raise ValueError(f"{ids.shape[1]} positions of ids, but the ranks hold {local_length * size} of logits")
    if missing:
        ids = torch.cat([ids, ids.new_full((ids.shape[0], missing, *ids.shape[2:]), -1)], 1)
    return _get_tokens_on_this_cp_rank(ids, group_rank(cp_group), size)
