"""The largest logits of a vocabulary cut over ranks, and the logits of given ids."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.head.topk import topk_over
from dtrain.losses.head.vocabulary import (
    Group,
    compute_dtype,
    group_rank,
    group_size,
    on_shard,
    pick,
    shard_sizes,
)
from dtrain.losses.logits.groups import (
    allgather_cp_sharded_tensor,
    check_bounds,
    group_all_reduce_sum_with_grad,
    shard_bounds,
    shard_like,
)
from dtrain.losses.logits.logprob import rows_within, tiles_to_fill


@torch.no_grad()
def distributed_vocab_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    tp_group: Group,
    *,
    vocab_start_index: int | Tensor,
    vocab_end_index: int | Tensor,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [B, S, V/tp] -> the k largest logits over the whole vocabulary, descending, float32 (float64 from
    float64), and their global ids int64, both [B, S, k] on every rank. Equal logits: the lower id first, the same on
    every rank.

    Shards follow one another in the order of the ranks. k > V means V. chunk_size: positions looked at at once. No
    gradient. One all-gather of k candidates per row (one per chunk), and one exchange of shard sizes on the host.
    """
    check_bounds(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1])
    sizes = shard_sizes(vocab_parallel_logits.shape[-1], tp_group, vocab_parallel_logits.device)
    if k < 1:
        raise ValueError(f"k={k}: at least one token is asked for")
    k = min(k, sum(sizes))
    logits = vocab_parallel_logits if vocab_parallel_logits.dim() > 1 else vocab_parallel_logits[None]
    chunks = logits.split(max(chunk_size or logits.shape[-2], 1), -2)
    parts = [topk_over(chunk, k, tp_group, vocab_start_index, sizes) for chunk in chunks]
    shape = (*vocab_parallel_logits.shape[:-1], k)
    values, ids = (torch.cat(tensors, -2).view(shape) for tensors in zip(*parts, strict=True))
    return values, ids


def vocab_parallel_argmax(logits: Tensor, *, tp_group: Group = None) -> Tensor:
    """logits [..., V/tp] (a DTensor's local shard) -> the global id of the largest [...], the lower of equal ones.

    Shards are cut as torch.chunk cuts. One all-gather of 2 numbers per row, two small exchanges. No gradient.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    if group_size(tp_group) == 1:
        return logits.argmax(-1)
    start, end = shard_bounds(logits, group_rank(tp_group), tp_group)
    return distributed_vocab_topk(logits, 1, tp_group, vocab_start_index=start, vocab_end_index=end)[1].squeeze(-1)


def gather_logits_at_global_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: Group = None,
    cp_group: Group = None,
    *,
    vocab_start_index: int | Tensor,
    vocab_end_index: int | Tensor,
    chunk_size: int | None = None,
) -> Tensor:
    """The raw logits at global ids: logits [B, S/cp, V/tp], global_indices [B, S, K] in natural order -> [B, S, K],
    float32 (float64 from float64), on every rank; differentiable.

    An id outside [0, V): 0.0 and no gradient. Under cp the logits lie head-tail and the incoming gradient is summed
    over cp; indices shorter than S are padded and the result cut. One all-reduce over tp, one all-gather over cp; only
    the gathered logits are cast, whatever chunk_size says.
    """
    check_bounds(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1])
    length = global_indices.shape[1]
    ids = shard_like(global_indices, vocab_parallel_logits.shape[1], cp_group)
    local, is_mine = on_shard(ids, vocab_start_index, vocab_parallel_logits.shape[-1])
    at_ids = group_all_reduce_sum_with_grad(_LogitsAt.apply(vocab_parallel_logits, local, is_mine), tp_group)
    return allgather_cp_sharded_tensor(at_ids, cp_group, seq_dim=1)[:, :length]


class _LogitsAt(torch.autograd.Function):
    """logits [..., v] at columns [..., k], 0 where not mine; gradients of equal columns are summed before they are
    rounded.
    """

    @staticmethod
    def forward(ctx, logits, columns, is_mine):
        ctx.save_for_backward(columns, is_mine)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return pick(logits, columns, is_mine, compute_dtype(logits.dtype))

    @staticmethod
    def backward(ctx, upstream):
        columns, is_mine = ctx.saved_tensors
        upstream = torch.where(is_mine, upstream, 0)
        grad = torch.empty(ctx.shape, dtype=ctx.dtype, device=upstream.device)
        for index, out in tiles_to_fill(grad, rows_within(grad)):
            out.zero_().scatter_add_(-1, columns[index], upstream[index])
        return grad, None, None


def vocab_parallel_gather_columns(logits: Tensor, column_indices: Tensor, *, tp_group: Group = None) -> Tensor:
    """The raw logits of the same ids [K] at every position: logits [B, S, V/tp] (a DTensor's local shard) -> [B, S, K],
    float32 (float64 from float64), on every rank; differentiable.

    Shards are cut as torch.chunk cuts. One all-reduce of the result, one of two numbers.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    start, end = shard_bounds(logits, group_rank(tp_group), tp_group)
    ids = column_indices.expand(*logits.shape[:-1], -1)
    return gather_logits_at_global_indices(logits, ids, tp_group, vocab_start_index=start, vocab_end_index=end)
