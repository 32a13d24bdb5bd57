"""Helpers over process groups: bounds of vocabulary shards, sums, and sequences under context parallel.

Sequences use the head-tail layout of `parallel.context.batch`. For example, 8 tokens on 2 ranks: rank 0 has tokens 0 1
and 6 7, rank 1 has 2 3 and 4 5. Only `cp_shift_next` uses contiguous parts, tokens 0 to 3 and 4 to 7.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.losses.head.vocabulary import Group, group_rank, group_size
from dtrain.parallel.collectives import all_reduce_in_forward, gather_along
from dtrain.parallel.context.batch import gather_sequence, shard_sequence

Bounds = tuple[int | Tensor, int | Tensor]  # start and end of a shard's ids; the end is exclusive


def assert_on_device(condition: Tensor, message: str) -> None:
    """Raise RuntimeError if `condition`, a bool scalar, is false. On CUDA the host does not wait for it."""
    torch._assert_async(condition, message)


def check_bounds(start: int | Tensor, end: int | Tensor, columns: int) -> None:
    """Check that bounds contain as many ids as a shard has columns. Scalar tensors are not checked.

    Args:
        start: The first id of the shard.
        end: The last id of the shard, plus 1.
        columns: The number of columns of the shard.

    Raises:
        ValueError: If they differ.
    """
    if not isinstance(start, Tensor) and not isinstance(end, Tensor) and end - start != columns:
        raise ValueError(
            f"vocab_start_index={start} and vocab_end_index={end} contain {end - start} ids, but the logits' shard has "
            f"{columns} columns"
        )


def shard_bounds(logits: Tensor, rank: int | None, group: Group) -> Bounds:
    """Return the bounds of this rank's ids, if the vocabulary is divided as torch.chunk does.

    torch.chunk gives all ranks the same size, except that the last ones may have fewer ids or none. For example, 10 ids
    over 4 ranks: 3 3 3 1. So rank r starts at r · (the largest size).

    Args:
        logits: This rank's shard, [..., V/tp].
        rank: This rank's index in the group.
        group: Ranks over which the vocabulary is sharded. None: this rank has all ids.

    Returns:
        The bounds. With a group of several ranks they are scalar tensors on the device, so that the host need not wait.

    Raises:
        ValueError: If there is a group without a rank.
        RuntimeError: If the vocabulary is divided in another way. On CUDA it is a device assertion.

    Collectives:
        One all-reduce of two numbers.
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
    largest, last_rank = bounds.unbind()  # the largest size, and the last rank that has any ids
    assert_on_device(
        (largest == columns) | (last_rank <= rank),
        "the vocabulary's shards are not those of torch.chunk: pass their bounds",
    )
    return largest * rank, largest * rank + columns


def group_all_reduce_sum_with_grad(x: Tensor, group: Group) -> Tensor:
    """Sum x [...] over the ranks of a group, on every rank, in a new tensor.

    In the backward, the gradient of the sum becomes the gradient of each rank's x, unchanged. This is the derivative if
    every rank computes the same loss from the sum.

    Without a group, with a group of one rank, or without torch.distributed, x itself is returned.

    Collectives:
        One all-reduce in the forward, none in the backward.
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return x
    return all_reduce_in_forward(x, group)


@torch.no_grad()
def group_all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum x [...] over the ranks of a group as `group_all_reduce_sum_with_grad` does, without a gradient."""
    return group_all_reduce_sum_with_grad(x, group).detach()


class AllGatherCPTensor:
    """Gathers a sequence from the head-tail parts of the cp ranks."""

    @staticmethod
    def apply(tensor: Tensor, cp_group: Group, seq_dim: int = 1) -> Tensor:
        """Gather a sequence in natural order.

        In the backward, the ranks' gradients of the full sequence are summed, and each rank receives its part. This is
        the derivative if each cp rank has a loss of its own and the total loss is their sum.

        Args:
            tensor: This rank's head and tail chunk, [..., S/cp, ...].
            cp_group: Ranks over which the sequence is sharded. None: returns `tensor`.
            seq_dim: The dimension of the sequence.

        Returns:
            [..., S, ...].

        Raises:
            ValueError: If S/cp is odd.

        Collectives:
            One all-gather in the forward, one reduce-scatter in the backward.
        """
        if group_size(cp_group) == 1:
            return tensor
        if tensor.shape[seq_dim] % 2:
            raise ValueError(f"a cp rank has two chunks of the same length, but {tensor.shape[seq_dim]} tokens are odd")
        return gather_sequence(tensor, cp_group, seq_dim)


allgather_cp_sharded_tensor = AllGatherCPTensor.apply


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """Return a cp rank's head and tail chunk [..., S/cp, ...] of a sequence [..., S, ...]. No collective.

    With cp_size=1 the sequence itself is returned.

    Args:
        input_ids: The full sequence, [..., S, ...].
        cp_rank: The cp rank.
        cp_size: The number of cp ranks.
        seq_dim: The dimension of the sequence.

    Raises:
        ValueError: If 2 · cp_size does not divide S.

    Example:
        >>> _get_tokens_on_this_cp_rank(torch.arange(8)[None], cp_rank=0, cp_size=2)
        tensor([[0, 1, 6, 7]])
    """
    return input_ids if cp_size == 1 else shard_sequence(input_ids, cp_rank, cp_size, seq_dim)


def cp_shift_next(x: Tensor, cp_group: Group = None, *, fill: float) -> Tensor:
    """Shift a sequence that is sharded over cp in contiguous parts: out[:, t] = x[:, t + 1]. Differentiable.

    For example, [0, 1] on rank 0 and [2, 3] on rank 1 become [1, 2] and [3, fill].

    Args:
        x: This rank's part, [B, S/cp, ...].
        cp_group: Ranks over which the sequence is sharded. None if it is not.
        fill: The value after the last token.

    Collectives:
        One all-gather of [B, 1, ...]. In the backward one reduce-scatter, which sums the ranks' gradients.
    """
    last = torch.full_like(x[:, :1], fill)  # the token after this rank's part
    size, rank = group_size(cp_group), group_rank(cp_group)
    if size > 1:
        first_tokens = gather_along(x[:, :1], 1, cp_group)  # [B, cp, ...]
        tokens_after_parts = torch.cat([first_tokens[:, 1:], last], 1)
        last = tokens_after_parts[:, rank : rank + 1]
    return torch.cat([x[:, 1:], last], 1)


def shard_like(ids: Tensor, local_length: int, cp_group: Group) -> Tensor:
    """Pad ids of full rows with -1 to the length of the logits, and return this cp rank's part.

    Args:
        ids: [B, S, ...].
        local_length: Tokens of the logits on each cp rank.
        cp_group: Ranks over which the sequence of the logits is sharded. None if it is not.

    Returns:
        [B, local_length, ...], head-tail.

    Raises:
        ValueError: If S is larger than cp · local_length, or `local_length` is odd under context parallel.
    """
    size = group_size(cp_group)
    missing = local_length * size - ids.shape[1]
    if missing < 0:
        raise ValueError(f"{ids.shape[1]} positions of ids, but the ranks have logits of {local_length * size}")
    if missing:
        ids = torch.cat([ids, ids.new_full((ids.shape[0], missing, *ids.shape[2:]), -1)], 1)
    return _get_tokens_on_this_cp_rank(ids, group_rank(cp_group), size)
