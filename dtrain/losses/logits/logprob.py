"""Log-probabilities at given ids, softmax, negative entropy and cross entropy from logits of a sharded vocabulary.

The forward reads the logits once, tile by tile, and has one all-gather of a few numbers per row. The backward reads the
logits again and writes the gradient tile by tile. No other tensor of the logits' size is saved. `head.softmax` explains
how the gradient is computed without a collective.

All functions take this rank's shard of the logits, which may be empty, and return the same values on every rank, in
float32 (float64 for float64 logits). The gradient is that of this rank's shard, in the dtype of the logits.
`chunk_size` bounds the positions of the sequence in a tile. Smaller tiles are used if they are faster.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.base.fused import Fused
from dtrain.losses.head.kl import gather_log_fractions
from dtrain.losses.head.softmax import RequestedStatistics, log_softmax, softmax_rows, tile_statistics
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
    """Raise ValueError if `chunk_size` is less than 1. None is allowed."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")


def rows_within(logits: Tensor, chunk_size: int | None = None) -> int:
    """Return the number of rows per tile of logits [..., v].

    This is the number of `tile_rows`, limited to `chunk_size` positions of the sequence (the last leading dimension).

    Example:
        3 positions of 2 rows:

        >>> rows_within(torch.zeros(2, 10, 7), chunk_size=3)
        6
    """
    check_chunk(chunk_size)
    rows = tile_rows(logits.shape[-1], logits.device.type)
    return rows if chunk_size is None else min(rows, chunk_size * max(logits.shape[:-2].numel(), 1))


class ChunkedDistributedGatherLogprob:
    """Log-probabilities at several ids of every position, from logits of a sharded vocabulary."""

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
        """Compute log softmax of the full vocabulary at `global_indices`.

        Args:
            vocab_parallel_logits: This rank's shard, [..., V/tp].
            global_indices: Ids of the full vocabulary, [..., k], the same on every rank. An id outside the vocabulary,
                -100 included, gives 0.0 and no gradient.
            vocab_start_index: The first id of the shard.
            vocab_end_index: The last id of the shard, plus 1.
            chunk_size: See the module's docstring. None: no bound.
            tp_group: Ranks over which the vocabulary is sharded. None if it is not.
            inference_only: Whether to return values without a gradient.

        Returns:
            [..., k], with the same bits on every rank.

        Raises:
            ValueError: If the bounds do not fit the shard.

        Collectives:
            One all-gather of 3 numbers per row. If k > 1, one of 2 numbers per row, and one all-reduce of k numbers per
            row. None in the backward.
        """
        check_bounds(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1])
        logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
        make_source = partial(GivenLogits, max_rows=rows_within(logits, chunk_size))
        shard = VocabShard(vocab_start_index, tp_group)
        return softmax_rows(make_source, logits, ids=global_indices, shard=shard).logprobs


class ChunkedDistributedLogprob:
    """`DistributedLogprob` with a bound on the size of a tile."""

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
        """Compute log p(target), [B, S].

        Args:
            vocab_parallel_logits: This rank's shard, [B, S, V/tp]. Any leading shape is accepted.
            target: Ids of the full vocabulary, [B, S]. An id outside [0, V) gives 0.0 and no gradient.
            vocab_start_index: The first id of the shard.
            vocab_end_index: The last id of the shard, plus 1.
            chunk_size: Positions of the sequence per tile. Extra memory is O(chunk_size · V/tp). None: no bound.
            tp_group: Ranks over which the vocabulary is sharded. None if it is not.
            inference_only: Whether to return values without a gradient.

        Returns:
            [B, S], with the same bits on every rank.

        Raises:
            ValueError: If the bounds do not fit the shard, or `chunk_size` is less than 1.

        Collectives:
            One all-gather of 3 numbers per position in the forward, none in the backward.
        """
        gather, ids = ChunkedDistributedGatherLogprob, target.unsqueeze(-1)
        bounds = vocab_start_index, vocab_end_index
        return gather.apply(vocab_parallel_logits, ids, *bounds, chunk_size, tp_group, inference_only).squeeze(-1)


class DistributedLogprob:
    """Log-probabilities of targets from logits of a sharded vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """Compute log p(target), [B, S].

        Args:
            vocab_parallel_logits: This rank's shard, [B, S, V/tp]. Any leading shape is accepted.
            target: Ids of the full vocabulary, [B, S]. An id outside [0, V) gives 0.0 and no gradient.
            vocab_start_index: The first id of the shard.
            vocab_end_index: The last id of the shard, plus 1.
            group: Ranks over which the vocabulary is sharded. None if it is not.
            inference_only: Whether to return values without a gradient.

        Returns:
            [B, S], with the same bits on every rank.

        Raises:
            ValueError: If the bounds do not fit the shard.

        Collectives:
            One all-gather of 3 numbers per position in the forward, none in the backward.
        """
        bounds = vocab_start_index, vocab_end_index
        return ChunkedDistributedLogprob.apply(vocab_parallel_logits, target, *bounds, None, group, inference_only)


def _lse_of(source: GivenLogits, group: Group) -> Tensor:
    """Return m and l of the full vocabulary, [*leading, 2].

    Collectives:
        One all-gather.
    """
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
    return tile_statistics(logits, no_ids, no_ids.bool(), RequestedStatistics()).stats


def _log_softmax(logits: Tensor, group: Group, temperature: float = 1.0) -> Tensor:
    """Return log p of this rank's ids in a new tensor, [..., v] in the compute dtype.

    Collectives:
        One all-gather.
    """
    source = GivenLogits(logits, max_rows=rows_within(logits), scaling=Scaling(temperature))
    lse = _lse_of(source, group)
    log_p = torch.empty(logits.shape, dtype=source.dtype, device=source.device)
    for index in source.indices():
        rows = log_p[index]
        logits_of_tile = source.tile(index, source.blocks[0]).logits
        rows.copy_(log_softmax(logits_of_tile, rows_of(lse, index)).view(rows.shape))
    return log_p


@torch.no_grad()
def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """Return log p of this rank's ids, [..., V/tp], for logits [..., V/tp]. No gradient. One all-gather."""
    return _log_softmax(vocab_parallel_logits, group)


@torch.no_grad()
def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """Return p of this rank's ids, [..., V/tp], for logits [..., V/tp]. No gradient. One all-gather."""
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
        # d log p_u / dz_v = [u = v] - p_v, so dL/dz_v = upstream_v - p_v · Σ_u upstream_u. The sum is over all ranks.
        total = group_all_reduce_sum(upstream.sum(-1, keepdim=True), ctx.group)
        grad = torch.addcmul(upstream, logp.exp(), total, value=-1)
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None


def vocab_parallel_log_softmax(logits: Tensor, temperature: float, *, tp_group: Group = None) -> Tensor:
    """Compute log softmax(logits / temperature) of this rank's ids. Differentiable.

    Args:
        logits: This rank's shard, [..., V/tp]. The local tensor of a DTensor is used.
        temperature: Divides the logits.
        tp_group: Ranks over which the vocabulary is sharded. None if it is not.

    Returns:
        [..., V/tp].

    Collectives:
        One all-gather of 2 numbers per row, and in the backward one all-reduce of one number per row.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    return _VocabParallelLogSoftmax.apply(logits, temperature, tp_group)


class ChunkedDistributedEntropy:
    """Negative entropy Σ p·log p from logits of a sharded vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor, chunk_size: int | None, tp_group: Group, inference_only: bool = False
    ) -> Tensor:
        """Compute Σ p·log p over the full vocabulary, [B, S]. A term with p = 0 is 0, also for logits of -inf.

        Args:
            vocab_parallel_logits: This rank's shard, [B, S, V/tp]. Any leading shape is accepted.
            chunk_size: See the module's docstring. Extra memory is O(chunk_size · V/tp). None: no bound.
            tp_group: Ranks over which the vocabulary is sharded. None if it is not.
            inference_only: Whether to return values without a gradient.

        Returns:
            [B, S] on every rank. This is minus the entropy, as in NeMo-RL.

        Collectives:
            One all-gather of 3 numbers per position in the forward, none in the backward.
        """
        logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
        no_ids = torch.zeros(*logits.shape[:-1], 0, dtype=torch.int64, device=logits.device)
        values = softmax_rows(
            partial(GivenLogits, max_rows=max(1, rows_within(logits, chunk_size) // 2)),
            logits,
            ids=no_ids,
            shard=VocabShard(0, tp_group),
            requested=RequestedStatistics(neg_entropy=True),
            masks_rows=False,
        )
        assert values.neg_entropy is not None
        return values.neg_entropy


class _CrossEntropy(torch.autograd.Function):
    """H(p, q) = -Σ p·log q with q of the student and p of the target. The gradient by the student's logits is q - p."""

    @staticmethod
    def forward(ctx, student_logits, target_logits, group):
        student, target = _tiled_pair(student_logits, target_logits)
        parts = torch.zeros(5, *student.leading, dtype=student.dtype, device=student.device)
        for index in student.indices():
            rows = parts[:, *index]
            student_tile = student.tile(index, student.blocks[0])
            target_tile = target.tile(index, target.blocks[0])
            rows.copy_(_cross_statistics(student_tile.logits, target_tile.logits).view(rows.shape))
            del student_tile, target_tile  # before the next ones are computed
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
    """Return sources with the same tiles, half as large as usual, because two tiles are in memory at a time."""
    max_rows = max(1, rows_within(student_logits) // 2)
    return GivenLogits(student_logits, max_rows=max_rows), GivenLogits(target_logits, max_rows=max_rows)


def _cross_statistics(student: Tensor, target: Tensor) -> Tensor:
    """Return m and l of the student's logits, m and l of the target's logits, and Σ p·log q, [5, t].

    p and q are softmaxes over this rank's ids only. The logits are [t, v].
    """
    lse, target_lse = _statistics(student), _statistics(target)  # [2, t] each
    log_q, p = log_softmax(student, lse.t()), log_softmax(target, target_lse.t()).exp_()
    crossed = log_q.mul_(p).masked_fill_(p == 0, 0).sum(-1)  # 0 · log 0 counts as 0, but would be NaN
    return torch.cat([lse, target_lse, crossed[None]])


@Fused
def _cross_gradient(
    student: Tensor, target: Tensor, lse: Tensor, target_lse: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return upstream [t, 1] · (q - p) from logits [t, v], in `dtype`."""
    q, p = log_softmax(student, lse).exp_(), log_softmax(target, target_lse).exp_()
    return q.sub_(p).mul_(upstream).to(dtype)


def _merge_cross(parts: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the `_cross_statistics` of the ranks.

    Args:
        parts: This rank's statistics, [5, ...].
        group: Ranks over which the vocabulary is sharded. None if it is not.

    Returns:
        H(p, q) over the full vocabulary [...], and m and l of the student's and of the target's logits, [..., 2] each.

    Collectives:
        One all-gather.
    """
    if group_size(group) == 1:
        return -parts[4], torch.stack([parts[0], parts[1]], -1), torch.stack([parts[2], parts[3]], -1)
    log_students, log_targets, (crossed,) = gather_log_fractions(parts, group)
    fraction, rank = log_targets.exp(), group_rank(group)
    # log q over the full vocabulary is log q over a rank's ids plus the log of these ids' fraction of q.
    value = -torch.where(fraction == 0, 0, fraction * (crossed + log_students)).sum(0)
    # m + l of the full vocabulary is m + l of a rank's ids minus the log of their fraction.
    lse = torch.stack([parts[0], parts[1] - log_students[rank]], -1)
    target_lse = torch.stack([parts[2], parts[3] - log_targets[rank]], -1)
    return value, lse, target_lse


class DistributedCrossEntropy:
    """Cross entropy H(p_target, q_student) over a sharded vocabulary.

    The cross entropy is KL(p_target || q_student) plus the target's entropy, which has no gradient.
    """

    @staticmethod
    def apply(student_logits: Tensor, target_logits: Tensor, group: Group, inference_only: bool = False) -> Tensor:
        """Compute -Σ p·log q over the full vocabulary, [B, S]. A term with p = 0 is 0. The student receives gradients.

        Args:
            student_logits: This rank's shard of the student's logits, [B, S, V/tp]. Any leading shape is accepted.
            target_logits: The same of the target.
            group: Ranks over which the vocabulary is sharded. None if it is not.
            inference_only: Whether to return values without a gradient.

        Returns:
            [B, S] on every rank.

        Raises:
            ValueError: If the shapes differ, or only one of the two is float64.

        Collectives:
            One all-gather of 5 numbers per row in the forward, none in the backward.
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
