"""Log-probabilities of given ids, softmax, negative entropy and cross entropy from logits whose vocabulary is sharded.

One pass over the logits in tiles, one all-gather of a few numbers per row and rank; the backward reads the logits once
more and writes the gradient where it stays. Nothing of the logits' size is kept in between.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.base.fused import Fused
from dtrain.losses.head.kl import gather_pair
from dtrain.losses.head.softmax import Wanted, log_softmax, softmax_rows, tile_statistics
from dtrain.losses.head.sources import GivenLogits, Scaling, rows_of
from dtrain.losses.head.vocabulary import (
    Group,
    Stats,
    VocabShard,
    compute_dtype,
    group_rank,
    group_size,
    merge_over,
    tile_rows,
)
from dtrain.losses.logits.groups import check_bounds, group_all_reduce_sum


def check_chunk(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: a chunk holds at least one position")


def rows_within(logits: Tensor, chunk_size: int | None = None) -> int:
    """Return the rows per tile of logits [..., v]: the usual number, within `chunk_size` positions of the sequence, the
    last leading dimension."""
    check_chunk(chunk_size)
    rows = tile_rows(logits.shape[-1], logits.device.type)
    return rows if chunk_size is None else min(rows, chunk_size * max(logits.shape[:-2].numel(), 1))


class ChunkedDistributedGatherLogprob:
    """log p at several ids of every position, from logits with a cut vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int | Tensor,
        vocab_end_index: int | Tensor,
        chunk_size: int | None,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """log softmax(logits over the full vocabulary) at global_indices, [..., k], float32 (float64 from float64).

        logits [..., v]: this rank's ids [start, end) of a vocabulary cut over the group (None: it is whole), v may be
        0; global_indices [..., k], the same on every rank. An id outside the vocabulary, -100 included: 0.0 and no
        gradient. The values come back on every rank, bit for bit the same; the gradient is the shard's own, in the
        logits' dtype. Nothing of the logits' size is saved for the backward, which reads them again.
        Forward: one all-gather of 3 numbers per row (k > 1: of 2, and one all-reduce of k). Backward: none.
        chunk_size bounds the positions in memory at once; smaller tiles are taken where they are faster. Raises
        ValueError where the bounds do not fit the shard.
        """
        check_bounds(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1])
        logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
        make_source = partial(GivenLogits, max_rows=rows_within(logits, chunk_size))
        shard = VocabShard(vocab_start_index, tp_group)
        return softmax_rows(make_source, logits, ids=global_indices, shard=shard).logprobs


class ChunkedDistributedLogprob:
    """`DistributedLogprob` with a bound on the positions in memory at once."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int | Tensor,
        vocab_end_index: int | Tensor,
        chunk_size: int | None,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """[B, S] as `DistributedLogprob.apply`; extra memory O(chunk_size · V/tp), chunk_size in positions."""
        gather, ids = ChunkedDistributedGatherLogprob, target.unsqueeze(-1)
        bounds = vocab_start_index, vocab_end_index
        return gather.apply(vocab_parallel_logits, ids, *bounds, chunk_size, tp_group, inference_only).squeeze(-1)


class DistributedLogprob:
    """log p(target) from logits with a cut vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """logits [B, S, V/tp], target [B, S] global ids -> log p(target) [B, S]; any leading shape. Otherwise as
        `ChunkedDistributedGatherLogprob.apply`."""
        bounds = vocab_start_index, vocab_end_index
        return ChunkedDistributedLogprob.apply(vocab_parallel_logits, target, *bounds, None, group, inference_only)


def _lse_of(source: GivenLogits, group: Group) -> Tensor:
    """Return m and l of the full vocabulary, [*leading, 2]. One all-gather."""
    packed = torch.zeros(2, *source.leading, dtype=source.dtype, device=source.device)
    for index in source.indices():
        tile = source.tile(index, source.blocks[0])
        rows = packed[:, *index]
        rows.copy_(_statistics(tile.logits).view(rows.shape))
    stats = merge_over(Stats(*packed.unbind()), source.columns, group).stats
    return torch.stack([stats.m, stats.l], -1)


def _statistics(logits: Tensor) -> Tensor:
    """Return m and l of a tile's logits [t, v], [2, t]."""
    no_ids = torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
    return tile_statistics(logits, no_ids, no_ids.bool(), Wanted()).stats


def _log_softmax(logits: Tensor, group: Group, temperature: float = 1.0) -> Tensor:
    """Return log p of this rank's ids, a new tensor [..., v] in the compute dtype. One all-gather."""
    source = GivenLogits(logits, max_rows=rows_within(logits), scaling=Scaling(temperature))
    lse = _lse_of(source, group)
    log_p = torch.empty(logits.shape, dtype=source.dtype, device=source.device)
    for index in source.indices():
        rows = log_p[index]
        rows.copy_(log_softmax(source.tile(index, source.blocks[0]).logits, rows_of(lse, index)).view(rows.shape))
    return log_p


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


class ChunkedDistributedEntropy:
    """Σ p·log p, the negative entropy, from logits with a cut vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor, chunk_size: int | None, tp_group: Group, inference_only: bool = False
    ) -> Tensor:
        """logits [B, S, V/tp] -> Σ p·log p over the full vocabulary [B, S], float32 (float64 from float64).

        p·log p is 0 where p is 0, logits of −inf included. Any leading shape; shards may be uneven or empty; extra
        memory O(chunk_size · V/tp). The value on every rank, the gradient the shard's own. One all-gather forward, none
        backward.
        """
        logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
        no_ids = torch.zeros(*logits.shape[:-1], 0, dtype=torch.int64, device=logits.device)
        values = softmax_rows(
            partial(GivenLogits, max_rows=max(1, rows_within(logits, chunk_size) // 2)),
            logits,
            ids=no_ids,
            shard=VocabShard(0, tp_group),
            wanted=Wanted(neg_entropy=True),
            masks_rows=False,
        )
        assert values.neg_entropy is not None
        return values.neg_entropy


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student_logits, target_logits, group):
        student, target = _tiled_pair(student_logits, target_logits)
        parts = torch.zeros(5, *student.leading, dtype=student.dtype, device=student.device)
        for index in student.indices():
            rows = parts[:, *index]
            rows.copy_(
                _cross_statistics(
                    student.tile(index, student.blocks[0]).logits, target.tile(index, target.blocks[0]).logits
                ).view(rows.shape)
            )
        value, lse, target_lse = _merge_cross(parts, group)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(student_logits, target_logits, lse, target_lse)
        return value

    @staticmethod
    def backward(ctx, upstream):
        student_logits, target_logits, lse, target_lse = ctx.saved_tensors
        student, target = _tiled_pair(student_logits, target_logits)
        student.begin_gradients([True])
        for index in student.indices():
            tile = student.tile(index, student.blocks[0])
            grad = _cross_gradient(
                tile.logits,
                target.tile(index, target.blocks[0]).logits,
                rows_of(lse, index),
                rows_of(target_lse, index),
                upstream[index].reshape(-1, 1).to(student.dtype),
                student.gradient_dtype,
            )
            student.add_gradient(tile, grad)
        return *student.gradients(), None, None


def _tiled_pair(student_logits: Tensor, target_logits: Tensor) -> tuple[GivenLogits, GivenLogits]:
    max_rows = max(1, rows_within(student_logits) // 2)
    return GivenLogits(student_logits, max_rows=max_rows), GivenLogits(target_logits, max_rows=max_rows)


def _cross_statistics(student: Tensor, target: Tensor) -> Tensor:
    """Return m and l of the student's and of the target's logits [t, v], and Σ p·log q of the part's own softmaxes,
    [5, t]."""
    lse, target_lse = _statistics(student), _statistics(target)  # [2, t] each
    log_q, p = log_softmax(student, lse.t()), log_softmax(target, target_lse.t()).exp_()
    crossed = log_q.mul_(p).masked_fill_(p == 0, 0).sum(-1)  # 0 · log 0 counts as 0, and is NaN
    return torch.cat([lse, target_lse, crossed[None]])


@Fused
def _cross_gradient(
    student: Tensor, target: Tensor, lse: Tensor, target_lse: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return upstream [t, 1] · (q - p) from logits [t, v], in `dtype`."""
    q, p = log_softmax(student, lse).exp_(), log_softmax(target, target_lse).exp_()
    return q.sub_(p).mul_(upstream).to(dtype)


def _merge_cross(parts: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the parts of `_cross_statistics`, [5, ...].

    Returns:
        H(p, q) over the full vocabulary [...], and m and l of the student's and of the target's logits, [..., 2] each.

    Collectives:
        One all-gather.
    """
    if group_size(group) == 1:
        return -parts[4], torch.stack([parts[0], parts[1]], -1), torch.stack([parts[2], parts[3]], -1)
    log_students, log_targets, (crossed,) = gather_pair(parts, group)
    share, rank = log_targets.exp(), group_rank(group)
    # log q of the full vocabulary is log q of the part plus the part's log share of q.
    value = -torch.where(share == 0, 0, share * (crossed + log_students)).sum(0)
    # m + l of the full vocabulary is m + l of the part minus the part's log share.
    lse = torch.stack([parts[0], parts[1] - log_students[rank]], -1)
    target_lse = torch.stack([parts[2], parts[3] - log_targets[rank]], -1)
    return value, lse, target_lse


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
        if compute_dtype(student_logits.dtype) != compute_dtype(target_logits.dtype):
            raise ValueError(
                f"student_logits are {student_logits.dtype} and target_logits {target_logits.dtype}: both or neither "
                "must be float64"
            )
        student_logits = student_logits.detach() if inference_only else student_logits
        return _CrossEntropy.apply(student_logits, target_logits, group)
