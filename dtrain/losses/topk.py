"""The largest logits of a vocabulary cut over ranks, and the logits of given ids."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.context import _get_tokens_on_this_cp_rank, allgather_cp_sharded_tensor
from dtrain.losses.shard import (
    Group,
    check_bounds,
    group_all_reduce_sum_with_grad,
    group_rank,
    group_size,
    on_shard,
    pick,
    shard_sizes,
    shard_start,
)
from dtrain.losses.softmax_stats import compute_dtype, tile_rows, tiles


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
    length = vocab_parallel_logits.shape[-2] if vocab_parallel_logits.dim() > 1 else 1
    step = max(chunk_size or length, 1)
    parts = []
    for start in range(0, max(length, 1), step):
        chunk = vocab_parallel_logits
        if vocab_parallel_logits.dim() > 1:
            chunk = vocab_parallel_logits[..., start : start + step, :]
        parts.append(topk_over(chunk, k, tp_group, vocab_start_index, sizes))
    values, ids = (torch.cat(tensors, -2) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
    return values, ids


def topk_over(logits: Tensor, k: int, group: Group, start: int | Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """`distributed_vocab_topk` with the shards' sizes known and k at most their sum. One all-gather."""
    values, ids = local_topk(logits, min(k, logits.shape[-1]))
    values, ids = values.to(compute_dtype(logits.dtype)), ids + start
    if group_size(group) == 1:
        return values, ids
    missing = min(k, max(sizes)) - values.shape[-1]
    if missing:  # a shorter shard's list ends in entries that lose against every token
        values = torch.nn.functional.pad(values, (0, missing), value=-float("inf"))
        ids = torch.nn.functional.pad(ids, (0, missing), value=torch.iinfo(torch.int32).max)
    # One message: values and ids in integers of the values' width.
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    message = torch.stack([values.contiguous().view(integer), ids.to(integer)])
    gathered = [torch.empty_like(message) for _ in sizes]
    dist.all_gather(gathered, message, group=group)
    message = torch.cat(gathered, -1)  # [2, .., candidates of all]
    values, ids = message[0].view(values.dtype), message[1]
    if min(sizes) < min(k, max(sizes)):  # some end in no tokens, which must lose against a later rank's −inf
        values, ids = _ordered(values, ids)
        return values[..., :k], ids[..., :k].long()
    # Each list is in order, and so are the lists: the lower place has the lower id.
    values, places = local_topk(values, k)
    return values, ids.gather(-1, places).long()


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Both [.., n], by descending value, equal values by ascending id."""
    ids, order = ids.sort(-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def local_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of logits [.., v] and their columns, equal ones by lower column, which torch.topk leaves open."""
    if logits.is_cuda or k == logits.shape[-1]:
        values, columns = logits.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], columns[..., :k]
    if logits.is_meta:  # shapes alone, as a plan has: no values to look at
        return logits.topk(k, -1)
    # On the CPU a look is free: only rows with equal values need work, and few of those a second look at the logits.
    values, columns = _largest(logits, k + 1)
    equal = values[..., 1:] == values[..., :-1]
    ties, cut = equal.any(-1), equal[..., -1]  # cut: the k-th value is also outside
    values, columns = values[..., :k], columns[..., :k]
    if cut.any():
        columns[cut] = _lowest_columns(logits[cut], values[cut], columns[cut])
    if ties.any():
        values[ties], columns[ties] = _ordered(values[ties], columns[ties])
    return values, columns


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """torch.topk on a CPU, in less than one of its passes over wide rows.

    The columns are dealt out to groups, and the k largest stand in the k groups with the largest maxima: those maxima
    are k elements, and no other group holds more than the smallest of them. Only equal ones of the k-th value may stand
    elsewhere.
    """
    size = logits.shape[-1]
    groups = 2 ** round(math.log2(k * size) / 2)  # near √(k·size), where both searches together are shortest
    if groups * 4 > size:
        return logits.topk(k, -1)
    whole = size // groups
    firsts = torch.arange(0, size, groups)[:, None]
    values = logits.new_empty(*logits.shape[:-1], k)
    columns = torch.empty(values.shape, dtype=torch.int64)
    for index in tiles(logits.shape[:-1], 32):
        row = logits[index]
        maxima = row[..., : whole * groups].unflatten(-1, (whole, groups)).amax(-2)
        rest = row[..., whole * groups :]
        if rest.shape[-1]:
            torch.maximum(maxima[..., : rest.shape[-1]], rest, out=maxima[..., : rest.shape[-1]])
        chosen = maxima.topk(k, -1, sorted=False).indices
        candidates = (chosen.unsqueeze(-2) + firsts).flatten(-2)
        found = row.gather(-1, candidates.clamp(max=size - 1))
        if rest.shape[-1]:
            found.masked_fill_(candidates >= size, -float("inf"))
        values[index], places = found.topk(k, -1)
        columns[index] = candidates.gather(-1, places)
    return values, columns


def _lowest_columns(logits: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """columns [n, k] of the k largest of logits [n, v], descending, those of the last value replaced by the lowest."""
    last = values[:, -1:]
    rows, candidates = (logits == last).nonzero().unbind(1)  # by row, then by column
    slots = (values == last).sum(-1)  # the last `slots` places of each row belong to the last value
    rank = torch.arange(len(rows)) - torch.searchsorted(rows, torch.arange(len(slots)))[rows]
    fits = rank < slots[rows]
    place = values.shape[1] - slots[rows] + rank
    columns[rows[fits], place[fits]] = candidates[fits]
    return columns


def vocab_parallel_argmax(logits: Tensor, *, tp_group: Group = None) -> Tensor:
    """logits [.., V/tp] (a DTensor's local shard) -> the global id of the largest logit [..], the lower of equal ones.

    Shards are cut as torch.chunk cuts. One all-gather of 2 numbers per row, two small exchanges. No gradient.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    if group_size(tp_group) == 1:
        return logits.argmax(-1)
    start = shard_start(logits.shape[-1], group_rank(tp_group), tp_group, logits.device)
    _, ids = distributed_vocab_topk(
        logits, 1, tp_group, vocab_start_index=start, vocab_end_index=start + logits.shape[-1]
    )
    return ids.squeeze(-1)


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
    """logits [.., v] at columns [.., k], 0 where not mine; gradients of equal columns are summed before they are
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
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=upstream.device)
        if not grad.shape[-1]:
            return grad, None, None
        for index in tiles(ctx.shape[:-1], tile_rows(ctx.shape[-1], grad.device.type)):
            tile = grad[index]
            if grad.dtype != upstream.dtype:
                tile = torch.zeros(tile.shape, dtype=upstream.dtype, device=grad.device)
            tile.scatter_add_(-1, columns[index], upstream[index])
            if grad.dtype != upstream.dtype:
                grad[index] = tile
        return grad, None, None


def shard_like(ids: Tensor, local_length: int, cp_group: Group) -> Tensor:
    """Ids [B, S, ..] of whole rows, padded with −1 to cp·local_length and cut to this cp rank's part.

    Raises ValueError where the rows are longer than what the ranks hold, or 2·cp does not divide that.
    """
    size = group_size(cp_group)
    missing = local_length * size - ids.shape[1]
    if missing < 0:
        raise ValueError(f"{ids.shape[1]} positions of ids, but the ranks hold {local_length * size} of logits")
    if missing:
        ids = torch.cat([ids, ids.new_full((ids.shape[0], missing, *ids.shape[2:]), -1)], 1)
    return _get_tokens_on_this_cp_rank(ids, group_rank(cp_group), size)


def vocab_parallel_gather_columns(logits: Tensor, column_indices: Tensor, *, tp_group: Group = None) -> Tensor:
    """The raw logits of the same ids [K] at every position: logits [B, S, V/tp] (a DTensor's local shard) -> [B, S, K],
    float32 (float64 from float64), on every rank; differentiable.

    Shards are cut as torch.chunk cuts. One all-reduce of the result, one of two numbers.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    start = shard_start(logits.shape[-1], group_rank(tp_group), tp_group, logits.device)
    return gather_logits_at_global_indices(
        logits,
        column_indices.expand(*logits.shape[:-1], -1),
        tp_group,
        vocab_start_index=start,
        vocab_end_index=start + logits.shape[-1],
    )
