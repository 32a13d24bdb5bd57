"""Top-k of a sharded vocabulary: largest logits, logits at given ids, and distillation from a teacher's top-k."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.head.topk import topk_over_shards
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
    """Return the k largest logits over the full vocabulary, and their ids. No gradient.

    Args:
        vocab_parallel_logits: This rank's shard, [B, S, V/tp]. Rank r + 1 has the ids after those of rank r.
        k: More than V means V.
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.
        vocab_start_index: The first id of the shard.
        vocab_end_index: The last id of the shard, plus 1.
        chunk_size: Positions of the sequence per top-k. None: all.

    Returns:
        Logits in descending order, float32 (float64 for float64 logits), and ids of the full vocabulary, int64, both
        [B, S, k] on every rank. The lower id comes first if logits are equal.

    Raises:
        ValueError: If k < 1, or if the bounds do not fit the shard.

    Collectives:
        One exchange of shard sizes on the host. Per chunk, one all-gather of k candidates per row.
    """
    check_bounds(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1])
    sizes = shard_sizes(vocab_parallel_logits.shape[-1], tp_group, vocab_parallel_logits.device)
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    k = min(k, sum(sizes))
    logits = vocab_parallel_logits if vocab_parallel_logits.dim() > 1 else vocab_parallel_logits[None]
    chunks = logits.split(max(chunk_size or logits.shape[-2], 1), -2)
    values_of_chunks, ids_of_chunks = [], []
    for chunk in chunks:
        chunk_values, chunk_ids = topk_over_shards(chunk, k, tp_group, vocab_start_index, sizes)
        values_of_chunks.append(chunk_values)
        ids_of_chunks.append(chunk_ids)
    values, ids = torch.cat(values_of_chunks, -2), torch.cat(ids_of_chunks, -2)
    shape = (*vocab_parallel_logits.shape[:-1], k)
    return values.view(shape), ids.view(shape)


def vocab_parallel_argmax(logits: Tensor, *, tp_group: Group = None) -> Tensor:
    """Return the id of the largest logit, [...]. The lowest id if several are equal. No gradient.

    Args:
        logits: This rank's shard, [..., V/tp], of a vocabulary that is divided as torch.chunk does. The local tensor of
            a DTensor is used.
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.

    Collectives:
        One all-reduce and one exchange of the shards' sizes, and one all-gather of 2 numbers per row.
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
    """Return the logits at given ids of the full vocabulary. Differentiable.

    Args:
        vocab_parallel_logits: [B, S/cp, V/tp], the head and tail chunk of each row under context parallel.
        global_indices: Ids of the full vocabulary in natural order, [B, S, K]. An id outside [0, V) gives 0.0 and no
            gradient. They may be shorter than cp times the local logits. Then the result is as long as the ids.
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.
        cp_group: Ranks over which the sequence is sharded. None if it is not. In the backward, the gradients of the cp
            ranks are summed.
        vocab_start_index: The first id of the shard.
        vocab_end_index: The last id of the shard, plus 1.
        chunk_size: Not needed, because only the K logits per position are cast. Accepted for compatibility.

    Returns:
        [B, S, K] on every rank, float32 (float64 for float64 logits).

    Collectives:
        One all-reduce over tp, and one all-gather over cp.
    """
    check_bounds(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1])
    length = global_indices.shape[1]
    ids = shard_like(global_indices, vocab_parallel_logits.shape[1], cp_group)
    local, is_local = on_shard(ids, vocab_start_index, vocab_parallel_logits.shape[-1])
    at_ids = group_all_reduce_sum_with_grad(_LogitsAt.apply(vocab_parallel_logits, local, is_local), tp_group)
    return allgather_cp_sharded_tensor(at_ids, cp_group, seq_dim=1)[:, :length]


class _LogitsAt(torch.autograd.Function):
    """Logits [..., v] at columns [..., k], 0 where `is_local` [..., k] is False.

    The backward of torch's `gather` sums the gradients of repeated columns in the dtype of the logits, for example
    bfloat16. Here they are summed in float32 and rounded once.
    """

    @staticmethod
    def forward(ctx, logits, columns, is_local):
        ctx.save_for_backward(columns, is_local)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return pick(logits, columns, is_local, compute_dtype(logits.dtype))

    @staticmethod
    def backward(ctx, upstream):
        columns, is_local = ctx.saved_tensors
        upstream = torch.where(is_local, upstream, 0)
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=upstream.device)
        if not grad.shape[-1]:
            return grad, None, None
        for index in tiles(grad.shape[:-1], rows_within(grad)):
            tile = grad[index].to(upstream.dtype)  # the gradient's own memory if it has that dtype
            tile.scatter_add_(-1, columns[index], upstream[index])
            grad[index] = tile
        return grad, None, None


def vocab_parallel_gather_columns(logits: Tensor, column_indices: Tensor, *, tp_group: Group = None) -> Tensor:
    """Return the logits of the same ids at every position. Differentiable.

    Args:
        logits: This rank's shard, [B, S, V/tp], of a vocabulary that is divided as torch.chunk does. The local tensor
            of a DTensor is used.
        column_indices: Ids of the full vocabulary, [K].
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.

    Returns:
        [B, S, K] on every rank, float32 (float64 for float64 logits).

    Collectives:
        One all-reduce of two numbers for the shard's bounds, and one of the result.
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
    """Return the log-probabilities of student and teacher at the teacher's top-k tokens.

    Position t of the student is compared with position t of the teacher. The last position is dropped.

    Args:
        student_logits: This rank's shard, [B, S/cp, V/tp], with `vocab_parallel_group`. Or a DTensor on ("tp",) or
            ("cp", "tp"). Or a plain tensor, [B, S, V]. Head-tail over cp.
        teacher_topk_logits: [B, S, K] in natural order.
        teacher_topk_indices: Ids of these logits in the full vocabulary, [B, S, K].
        zero_outside_topk: True: the teacher is 0 outside its top-k, and the student is normalised over the full
            vocabulary. False: the student is normalised over the teacher's top-k. The teacher is always normalised over
            its top-k.
        calculate_entropy: Whether to return the student's negative entropy.
        vocab_parallel_rank: This rank's index in `vocab_parallel_group`.
        vocab_parallel_group: Ranks over which the vocabulary is sharded, as torch.chunk divides it.
        context_parallel_group: Ranks over which the sequence is sharded. In the backward, the gradients of the cp ranks
            are summed.

    Returns:
        Log-probabilities of the student and of the teacher, [B, S - 1, K] each, and the student's Σ p·log p over the
        full vocabulary, [B, S - 1], or None. float32 (float64 for float64 logits).

    Raises:
        ValueError: If K = 0, or if there is a `vocab_parallel_group` without a rank.

    Collectives:
        Over tp: those of `ChunkedDistributedGatherLogprob`, or one all-reduce with zero_outside_topk=False. One more
        all-gather with `calculate_entropy`, and one more all-reduce for the bounds of a shard that is not a DTensor.
        Over cp: one all-gather of each result of the student.
    """
    ids = teacher_topk_indices.to(student_logits.device)
    if ids.shape[-1] == 0:
        raise ValueError("topk must be positive: the teacher has no tokens")
    tp_group, cp_group = vocab_parallel_group, context_parallel_group
    if isinstance(student_logits, DTensor):
        logits, bounds, tp_group, cp_group = local_logits(student_logits)
    else:
        logits, bounds = student_logits, shard_bounds(student_logits, vocab_parallel_rank, tp_group)
    length = ids.shape[1]
    if zero_outside_topk:
        local_ids = shard_like(ids, logits.shape[1], cp_group)
        student = ChunkedDistributedGatherLogprob.apply(logits, local_ids, *bounds, None, tp_group)
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
