"""Log-probabilities of given ids, softmax, negative entropy and cross entropy from logits whose vocabulary is cut over
ranks.

One streaming pass over the logits in tiles, one all-gather of a few numbers per row and rank; the backward reads the
logits once more and writes the gradient where it stays: nothing of the logits' size is held between.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.head.kl import gather_pair
from dtrain.losses.head.vocabulary import (
    Group,
    Stats,
    compute_dtype,
    fill_rows_,
    group_rank,
    group_size,
    merge_over,
    on_shard,
    part_stats,
    pick,
    tile_rows,
    tiles,
    weighted_sum_,
)
from dtrain.losses.logits.groups import check_bounds, group_all_reduce_sum


def check_chunk(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: a chunk holds at least one position")


def rows_within(logits: Tensor, chunk_size: int | None = None) -> int:
    """Rows per tile of logits [..., v]: our own choice, within `chunk_size` positions of the sequence (the last leading
    dimension)."""
    check_chunk(chunk_size)
    rows = tile_rows(logits.shape[-1], logits.device.type)
    return rows if chunk_size is None else min(rows, chunk_size * max(logits.shape[:-2].numel(), 1))


def tile_memory(like: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """For each tile of `like` [..., v], of `rows` rows at most, memory of its shape in the compute dtype: the same for
    all of them."""
    elements = min(rows, like.shape[:-1].numel()) * like.shape[-1]
    memory = torch.empty(elements, dtype=compute_dtype(like.dtype), device=like.device)
    return lambda tile: memory[: tile.numel()].view(tile.shape)


def tiles_to_fill(result: Tensor, rows: int) -> Iterator[tuple[tuple[int | slice, ...], Tensor]]:
    """Each tile of `result` [..., v] that holds something, as its index and as memory in the compute dtype, which is
    rounded into the result when it has been filled."""
    is_wide = result.dtype == compute_dtype(result.dtype)
    memory = tile_memory(result[:0] if is_wide else result, rows)
    for index in tiles(result.shape[:-1], rows):
        tile = result[index]
        if tile.numel():
            out = tile if is_wide else memory(tile)
            yield index, out
            if not is_wide:
                tile.copy_(out)


def _stats_of(logits: Tensor, rows: int, scratches: int = 1) -> Stats:
    """m and l of the rows of logits [..., v], `rows` of them at a time; with two scratches Σ p·log p too."""
    memory = [tile_memory(logits, rows) for _ in range(scratches)]
    packed = torch.empty(1 + scratches, *logits.shape[:-1], dtype=compute_dtype(logits.dtype), device=logits.device)
    for index in tiles(logits.shape[:-1], rows):
        tile = logits[index]
        packed[:, *index] = part_stats(tile, *(scratch(tile) for scratch in memory)).pack()
    return Stats(*packed.unbind())


class _LogprobAt(torch.autograd.Function):
    """log p at ids [..., k] from logits [..., v]; see `ChunkedDistributedGatherLogprob`."""

    @staticmethod
    def forward(ctx, logits, ids, start, group, chunk_size):
        rows, columns = rows_within(logits, chunk_size), logits.shape[-1]
        local, is_mine = on_shard(ids, start, columns)
        stats = _stats_of(logits, rows)
        at_ids = pick(logits, local, is_mine, compute_dtype(logits.dtype))
        if ids.shape[-1] == 1:
            whole, log_share, summed, vocabulary, _ = merge_over(stats, columns, group, at_ids.squeeze(-1)[None])
            at_ids = summed.squeeze(0).unsqueeze(-1)
        else:
            whole, log_share, _, vocabulary, _ = merge_over(stats, columns, group)
            if group_size(group) > 1:
                dist.all_reduce(at_ids, group=group)  # one rank has each id: fewer bytes than gathering k per rank
        valid = (ids >= 0) & (ids < vocabulary)
        if ctx.needs_input_grad[0]:
            dead = ~valid.any(-1) | (stats.m == -float("inf"))
            ctx.save_for_backward(logits, local, is_mine & valid, valid, log_share.exp(), dead)
            ctx.rows = rows
        return torch.where(valid, (at_ids - whole.m.unsqueeze(-1)) - whole.l.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx, grad_logprobs):
        logits, local, is_mine, valid, share, dead = ctx.saved_tensors
        upstream = torch.where(valid, grad_logprobs, 0).to(share.dtype)  # [..., k]
        # d log p_k / dz_v = [v = k] − p_v; p over the whole vocabulary is the shard's own softmax times its share.
        scale = -(upstream.sum(-1) * share).unsqueeze(-1)
        upstream = upstream * is_mine
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for index, out in tiles_to_fill(grad, ctx.rows):
            torch.softmax(logits[index], -1, dtype=out.dtype, out=out).mul_(scale[index])
            fill_rows_(out, dead[index])
            out.scatter_add_(-1, local[index], upstream[index])
        return grad, None, None, None, None


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
        """log softmax(logits over the whole vocabulary) at global_indices, [..., k], float32 (float64 from float64).

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
        return _LogprobAt.apply(logits, global_indices, vocab_start_index, tp_group, chunk_size)


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


def _log_softmax(logits: Tensor, group: Group, temperature: float = 1.0) -> Tensor:
    """A new tensor [..., v] in the compute dtype. One all-gather."""
    dtype = compute_dtype(logits.dtype)
    logp = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    packed = logp.new_empty(2, *logits.shape[:-1])
    for index in tiles(logits.shape[:-1], rows_within(logits)):
        tile = logits[index] if temperature == 1.0 else logits[index].to(dtype) / temperature
        packed[:, *index] = part_stats(tile, logp[index]).pack()
    stats = Stats(*packed.unbind())
    whole, log_share, *_ = merge_over(stats, logits.shape[-1], group)
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
        stats = _stats_of(logits, rows, scratches=2)
        whole, log_share, *_ = merge_over(stats, logits.shape[-1], group)
        value = whole.pack()[2]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, log_share, value.clone(), stats.m == -float("inf"))
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
        ones = torch.ones_like(parts[4])
        return -parts[4], ones, ones
    log_students, log_targets, (crossed,) = gather_pair(parts, group)
    share, rank = log_targets.exp(), group_rank(group)
    # log q of the whole is log q of the shard plus the shard's log share of q.
    value = -torch.where(share == 0, 0, share * (crossed + log_students)).sum(0)
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
        if compute_dtype(student_logits.dtype) != compute_dtype(target_logits.dtype):
            raise ValueError(
                f"student_logits are {student_logits.dtype} and target_logits {target_logits.dtype}: both or neither "
                "must be float64"
            )
        student_logits = student_logits.detach() if inference_only else student_logits
        return _CrossEntropy.apply(student_logits, target_logits, group)
