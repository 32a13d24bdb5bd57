"""The largest logits of a vocabulary cut over ranks, the logits of given ids, and the log-probabilities of student and
teacher at the teacher's top-k."""

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
    tiles,
)
from dtrain.losses.logits.groups import (
    allgather_cp_sharded_tensor,
    check_bounds,
    group_all_reduce_sum_with_grad,
    shard_bounds,
    shard_like,
)
from dtrain.losses.logits.logprob import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    rows_within,
)
from dtrain.losses.logits.next_token import local_logits


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
    """logits [B, S, V/tp] -> the k largest logits over the full vocabulary, descending, float32 (float64 from
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
    values, ids = (torch.cat(tensors, -2) for tensors in zip(*parts, strict=True))
    shape = (*vocab_parallel_logits.shape[:-1], k)
    return values.view(shape), ids.view(shape)


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
    """Logits [..., v] at columns [..., k], 0 where not mine.

    Autograd's own gather would sum the gradients of equal columns in the logits' dtype; here they are rounded once.
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
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=upstream.device)
        if not grad.shape[-1]:
            return grad, None, None
        for index in tiles(grad.shape[:-1], rows_within(grad)):
            tile = grad[index].to(upstream.dtype)  # the gradient's own memory if it has that dtype
            tile.scatter_add_(-1, columns[index], upstream[index])
            grad[index] = tile
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


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor | DTensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group = None,
    context_parallel_group: Group = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Student's and teacher's log-probabilities at the teacher's top-k tokens, both [B, S − 1, K], and the student's
    negative entropy Σ p·log p over the full vocabulary [B, S − 1] where `calculate_entropy`, else None.

    student_logits: this rank's shard [B, S/cp, V/tp] with a group and its rank there, a DTensor on ("tp",) or
    ("cp", "tp"), or plain [B, S, V]; head-tail over cp. teacher_topk_logits, teacher_topk_indices [B, S, K] in natural
    order. Position t goes with position t; the last is dropped.

    The teacher is normalised over its top-k. The student is too, unless zero_outside_topk (the teacher is taken to be
    zero elsewhere): then its log-probabilities are those over the full vocabulary.
    float32 (float64 from float64). Under cp incoming gradients are summed over cp. Raises ValueError for K = 0.
    """
    ids = teacher_topk_indices.to(student_logits.device)
    if ids.shape[-1] == 0:
        raise ValueError("topk must be positive: the teacher gives no token")
    tp_group, cp_group = vocab_parallel_group, context_parallel_group
    if isinstance(student_logits, DTensor):
        logits, bounds, tp_group, cp_group = local_logits(student_logits)
    else:
        logits, bounds = student_logits, shard_bounds(student_logits, vocab_parallel_rank, tp_group)
    length = ids.shape[1]
    if zero_outside_topk:
        mine = shard_like(ids, logits.shape[1], cp_group)
        student = ChunkedDistributedGatherLogprob.apply(logits, mine, *bounds, None, tp_group)
        student = allgather_cp_sharded_tensor(student, cp_group)[:, :length]
    else:
        student = gather_logits_at_global_indices(
            logits, ids, tp_group, cp_group, vocab_start_index=bounds[0], vocab_end_index=bounds[1]
        ).log_softmax(-1)
    teacher = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)
    neg_entropy = None
    if calculate_entropy:
        neg_entropy = ChunkedDistributedEntropy.apply(logits, None, tp_group)
        neg_entropy = allgather_cp_sharded_tensor(neg_entropy, cp_group)[:, : length - 1]
    return student[:, :-1], teacher[:, :-1], neg_entropy
