"""Softmax of logits whose vocabulary is cut over ranks: softmax and log-softmax of each rank's own columns, negative
entropy and cross entropy. Tile by tile, the backward reading the logits again; one all-gather of a few numbers per row
and rank.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.head.vocabulary import (
    Group,
    Stats,
    compute_dtype,
    fill_rows_,
    group_rank,
    group_size,
    merge,
    merge_over,
    part_stats,
    tiles,
    weighted_sum_,
)
from dtrain.losses.logits.groups import group_all_reduce_sum
from dtrain.losses.logits.logprob import rows_within, tile_memory, tiles_to_fill
from dtrain.parallel.collectives import all_gather


def _log_softmax(logits: Tensor, group: Group, temperature: float = 1.0) -> Tensor:
    """A new tensor [..., v] in the compute dtype. One all-gather."""
    dtype = compute_dtype(logits.dtype)
    logp = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    packed = logp.new_empty(2, *logits.shape[:-1])
    for index in tiles(logits.shape[:-1], rows_within(logits)):
        tile = logits[index] if temperature == 1.0 else logits[index].to(dtype) / temperature
        packed[:, *index] = part_stats(tile, logp[index]).pack()
    stats = Stats(*packed.unbind())
    whole, log_share, _, _ = merge_over(stats, logits.shape[-1], group)
    if whole is not stats:
        logp.add_(log_share.unsqueeze(-1))
        fill_rows_(logp, (stats.m == -float("inf")) & (whole.m != -float("inf")), -float("inf"))
    return logp


@torch.no_grad()
def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """logits [..., V/tp] -> log p of this rank's ids, same shape, float32 (float64 from float64). No gradient."""
    return _log_softmax(vocab_parallel_logits, group)


@torch.no_grad()
def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """logits [..., V/tp] -> p of this rank's ids, same shape, float32 (float64 from float64). No gradient."""
    return _log_softmax(vocab_parallel_logits, group).exp_()


class _VocabParallelLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature, group):
        logp = _log_softmax(logits, group, temperature)
        ctx.save_for_backward(logp)
        ctx.temperature, ctx.group, ctx.dtype = temperature, group, logits.dtype
        return logp

    @staticmethod
    def backward(ctx, upstream):
        (logp,) = ctx.saved_tensors
        total = group_all_reduce_sum(upstream.sum(-1, keepdim=True), ctx.group)
        grad = torch.addcmul(upstream, logp.exp(), total, value=-1)
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None


def vocab_parallel_log_softmax(logits: Tensor, temperature: float, *, tp_group: Group = None) -> Tensor:
    """log softmax(logits / temperature) of this rank's ids: [..., V/tp] as the logits (a DTensor's local shard),
    float32 (float64 from float64), differentiable.

    Without a group the plain one. Forward one all-gather of 3 numbers per row, backward one all-reduce of one.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    return _VocabParallelLogSoftmax.apply(logits, temperature, tp_group)


class _NegEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, group, chunk_size):
        rows = max(1, rows_within(logits, chunk_size) // 2)
        memory = tile_memory(logits, rows), tile_memory(logits, rows)
        packed = torch.empty(3, *logits.shape[:-1], dtype=compute_dtype(logits.dtype), device=logits.device)
        for index in tiles(logits.shape[:-1], rows):
            tile = logits[index]
            packed[:, *index] = part_stats(tile, *(scratch(tile) for scratch in memory)).pack()
        whole, log_share, _, _ = merge_over(Stats(*packed.unbind()), logits.shape[-1], group)
        value = whole.pack()[2]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, log_share, value.clone(), packed[0] == -float("inf"))
            ctx.rows = rows
        return value

    @staticmethod
    def backward(ctx, upstream):
        logits, log_share, neg_entropy, dead = ctx.saved_tensors
        dtype = log_share.dtype
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        memory = tile_memory(logits, ctx.rows)
        scale = upstream.to(dtype).unsqueeze(-1)
        for index, out in tiles_to_fill(grad, ctx.rows):
            logp = torch.log_softmax(logits[index], -1, dtype=dtype, out=memory(out))
            logp.add_(log_share[index].unsqueeze(-1)).clamp_(min=torch.finfo(dtype).min)
            # d(Σ p·log p)/dz = p·(log p − Σ p·log p); the clamp keeps 0·log 0 at 0.
            torch.exp(logp, out=out).mul_(logp.sub_(neg_entropy[index].unsqueeze(-1))).mul_(scale[index])
            fill_rows_(out, dead[index])
        return grad, None, None


class ChunkedDistributedEntropy:
    """Σ p·log p, the negative entropy, from logits with a cut vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor, chunk_size: int | None, tp_group: Group, inference_only: bool = False
    ) -> Tensor:
        """logits [B, S, V/tp] -> Σ p·log p over the whole vocabulary [B, S], float32 (float64 from float64).

        p·log p is 0 where p is 0, logits of −inf included. Any leading shape; shards may be uneven or empty; extra
        memory O(chunk_size · V/tp). The value on every rank, the gradient the shard's own. One all-gather forward, none
        backward.
        """
        logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
        return _NegEntropy.apply(logits, tp_group, chunk_size)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, target, group):
        rows = max(1, rows_within(student) // 2)
        memory = tile_memory(student, rows), tile_memory(target, rows)
        leading = student.shape[:-1]
        parts = torch.empty(5, *leading, dtype=compute_dtype(student.dtype), device=student.device)
        for index in tiles(leading, rows):
            logq, p = (scratch(student[index]) for scratch in memory)
            students, targets = part_stats(student[index], logq), part_stats(target[index], p)
            fill_rows_(logq, students.m == -float("inf"), -float("inf"))
            crossed = weighted_sum_(logq, p.exp_())  # Σ p·log q over the shard's own softmaxes
            parts[:, *index] = torch.stack([students.m, students.l, targets.m, targets.l, crossed])
        value, student_share, target_share = _merge_cross(parts, group)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(student, target, student_share, target_share)
            ctx.rows = rows
        return value

    @staticmethod
    def backward(ctx, upstream):
        student, target, student_share, target_share = ctx.saved_tensors
        dtype = student_share.dtype
        grad = torch.empty(student.shape, dtype=student.dtype, device=student.device)
        memory = tile_memory(target, ctx.rows)
        upstream = upstream.to(dtype)
        student_scale, target_scale = ((upstream * share).unsqueeze(-1) for share in (student_share, target_share))
        for index, out in tiles_to_fill(grad, ctx.rows):
            p = torch.softmax(target[index], -1, dtype=dtype, out=memory(out)).mul_(target_scale[index])
            fill_rows_(p, target_share[index] == 0)
            torch.softmax(student[index], -1, dtype=dtype, out=out).mul_(student_scale[index])
            fill_rows_(out, student_share[index] == 0)
            out.sub_(p)  # dH(p, q)/dz = q − p
        return grad, None, None


def _merge_cross(parts: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """From m and l of student and target and Σ p·log q over the shard's own softmaxes [5, ...]: H(p, q) over the whole
    vocabulary, and this rank's shares of q and of p, all [...]. One all-gather."""
    if group_size(group) == 1:
        return -parts[4], torch.ones_like(parts[4]), torch.ones_like(parts[4])
    gathered = all_gather(parts[None], 0, group).transpose(0, 1)  # [5, n, ...]
    (_, log_students), (_, log_targets) = (merge(Stats(*gathered[i : i + 2].unbind())) for i in (0, 2))
    share = log_targets.exp()
    # log q of the whole is log q of the shard plus the shard's log share of q.
    value = -torch.where(share == 0, 0, share * (gathered[4] + log_students)).sum(0)
    rank = group_rank(group)
    return value, log_students[rank].exp(), share[rank]


class DistributedCrossEntropy:
    """H(p_target, q_student) over a cut vocabulary: the forward KL up to the target's entropy, a constant."""

    @staticmethod
    def apply(student_logits: Tensor, target_logits: Tensor, group: Group, inference_only: bool = False) -> Tensor:
        """student_logits, target_logits [B, S, V/tp] -> −Σ p·log q [B, S], float32 (float64 from float64).

        Gradient to the student only. p·log q is 0 where p is 0. Any leading shape, shards uneven or empty. The value on
        every rank, the gradient the shard's own. One all-gather of 5 numbers per row forward, none backward.
        Raises ValueError where the shapes differ.
        """
        if student_logits.shape != target_logits.shape:
            raise ValueError(
                f"student_logits {tuple(student_logits.shape)} and target_logits {tuple(target_logits.shape)} must "
                "have the same shape"
            )
        dtype = torch.promote_types(compute_dtype(student_logits.dtype), target_logits.dtype)
        if compute_dtype(student_logits.dtype) != dtype or compute_dtype(target_logits.dtype) != dtype:
            raise ValueError(
                f"student_logits are {student_logits.dtype} and target_logits {target_logits.dtype}: both or neither "
                "must be float64"
            )
        student_logits = student_logits.detach() if inference_only else student_logits
        return _CrossEntropy.apply(student_logits, target_logits, group)
