"""Log-probabilities of given ids from logits whose vocabulary is cut over ranks.

One streaming pass over the logits in tiles, one all-gather of three numbers per row and rank; the backward reads the
logits once more and writes the gradient where it stays: nothing of the logits' size is held between.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.losses.head.vocabulary import (
    Group,
    Stats,
    compute_dtype,
    fill_rows_,
    group_size,
    merge_over,
    on_shard,
    part_stats,
    pick,
    tile_rows,
    tiles,
)
from dtrain.losses.logits.groups import check_bounds


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


class _LogprobAt(torch.autograd.Function):
    """log p at ids [..., k] from logits [..., v]; see `logprob_at`."""

    @staticmethod
    def forward(ctx, logits, ids, start, group, chunk_size):
        rows, columns = rows_within(logits, chunk_size), logits.shape[-1]
        memory, dtype = tile_memory(logits, rows), compute_dtype(logits.dtype)
        local, is_mine = on_shard(ids, start, columns)
        at_ids = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        packed = at_ids.new_empty(2, *logits.shape[:-1])
        for index in tiles(logits.shape[:-1], rows):
            tile = logits[index]
            packed[:, *index] = part_stats(tile, memory(tile)).pack()
            at_ids[index] = pick(tile, local[index], is_mine[index], dtype)
        stats = Stats(*packed.unbind())
        if ids.shape[-1] == 1:
            whole, log_share, summed, vocabulary = merge_over(stats, columns, group, at_ids.squeeze(-1)[None])
            at_ids = summed.squeeze(0).unsqueeze(-1)
        else:
            whole, log_share, _, vocabulary = merge_over(stats, columns, group)
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


def logprob_at(
    logits: Tensor,
    ids: Tensor,
    start: int | Tensor,
    end: int | Tensor,
    group: Group,
    chunk_size: int | None = None,
    inference_only: bool = False,
) -> Tensor:
    """log softmax(logits over the whole vocabulary) at ids, [..., k] in max(float32, the logits' dtype).

    logits [..., v]: this rank's ids [start, end) of a vocabulary cut over `group` (None: it is whole), v may be 0; ids
    [..., k] global, the same on every rank. An id outside the vocabulary gives 0.0 and no gradient.
    The values come back on every rank, bit for bit the same; the gradient is the shard's own, in the logits' dtype.
    Forward: one all-gather of 3 numbers per row (k > 1: of 2, and one all-reduce of k). Backward: none.
    chunk_size bounds the positions in memory at once; smaller tiles are taken where they are faster. Raises ValueError
    where the bounds do not fit the shard.
    """
    check_bounds(start, end, logits.shape[-1])
    return _LogprobAt.apply(logits.detach() if inference_only else logits, ids, start, group, chunk_size)


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
        """logits [B, S, V/tp], target [B, S] global ids -> log p(target) [B, S], float32 (float64 from float64).

        Any leading shape. A target outside [0, V), -100 included: 0.0 and a zero gradient. Nothing of the logits' size
        is saved for the backward, which reads them again. Collectives as in `logprob_at`. Raises ValueError where the
        bounds do not fit the shard.
        """
        bounds = (vocab_start_index, vocab_end_index)
        ids = target.unsqueeze(-1)
        return logprob_at(vocab_parallel_logits, ids, *bounds, group, None, inference_only).squeeze(-1)


class ChunkedDistributedLogprob:
    """`DistributedLogprob` with a bound on the positions in memory at once."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """[B, S] as `DistributedLogprob.apply`; extra memory O(chunk_size · V/tp), chunk_size in positions."""
        bounds = (vocab_start_index, vocab_end_index)
        ids = target.unsqueeze(-1)
        return logprob_at(vocab_parallel_logits, ids, *bounds, tp_group, chunk_size, inference_only).squeeze(-1)


class ChunkedDistributedGatherLogprob:
    """log p at several global ids of every position."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """logits [B, S, V/tp], global_indices [B, S, K] -> [B, S, K]; otherwise as `ChunkedDistributedLogprob`."""
        bounds = (vocab_start_index, vocab_end_index)
        return logprob_at(vocab_parallel_logits, global_indices, *bounds, tp_group, chunk_size, inference_only)
