"""A teacher's top-k tokens from its hidden states, and a student's divergence from them from the student's own: the
logits of either exist one tile of tokens at a time. The gradient is formed in the forward, as in `weighted_sum`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.torch_functions import has_values
from dtrain.losses.head.kl import check_share, forward_kl, generalized_jsd, reverse_kl
from dtrain.losses.head.softmax import FormedSum, RowGradient, Wanted, finite, gradient_of_logits, tile_statistics
from dtrain.losses.head.sources import HeadLogits, Scaling, head_tile_rows, tile_rows_of
from dtrain.losses.head.vocabulary import (
    UNSHARDED,
    Group,
    HeadInput,
    Stats,
    VocabShard,
    compute_dtype,
    group_size,
    merge_over,
    on_shard,
    shard_sizes,
)


@torch.no_grad()
def topk_logits_from_hidden_states(
    model: HeadInput, k: int, index: Tensor, *, shard: VocabShard | None = None, rows_per_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits (after the softcap) of tokens, and their ids. No gradient.

    Args:
        model: Hidden states and head.
        k: The number of logits. More than the vocabulary means all of it.
        index: The tokens' flat positions, [T].
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens whose logits exist at once. None for the usual number.

    Returns:
        Logits in descending order, in max(float32, the dtype), and ids of the full vocabulary, int64, both [T, k], on
        every rank. Equal logits are ordered by ascending id.

    Raises:
        ValueError: If k < 1.

    Collectives:
        One all-gather of k candidates per token and tile, one exchange of shard sizes on the host.
    """
    if k < 1:
        raise ValueError(f"k={k}: at least one token is asked for")
    shard = shard or UNSHARDED
    sizes = shard_sizes(len(model.weight), shard.group, model.weight.device)
    k = min(k, sum(sizes))
    source = HeadLogits(
        model.hidden,
        model.weight,
        index=index,
        max_rows=rows_per_tile or head_tile_rows(max(sizes), model.weight.device.type),
        scaling=Scaling(softcap=model.softcap),
        dtype=compute_dtype(model.hidden.dtype),
    )
    values = torch.empty(len(index), k, dtype=source.dtype, device=index.device)
    ids = torch.empty(len(index), k, dtype=torch.int64, device=index.device)
    for rows in source.indices():
        values[rows], ids[rows] = topk_over(
            source.tile(rows, source.blocks[0]).logits, k, shard.group, shard.start, sizes
        )
    return values, ids


class TopkKlSums(NamedTuple):
    """Sums over tokens.

    Attributes:
        total: The loss, with a gradient.
        inside: The probability that the student gives to the teacher's tokens.
    """

    total: Tensor
    inside: Tensor


def topk_kl_sum_from_hidden_states(
    student: HeadInput,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    index: Tensor,
    *,
    forward_share: float = 1.0,
    jsd_beta: float | None = None,
    temperature: float = 1.0,
    zero_outside: bool = True,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> TopkKlSums:
    """Sum a divergence between a teacher's top-k tokens and a student over tokens.

    The divergences are those of `kl_sum_from_hidden_states`, which also describes gradients, and equal it if all tokens
    are among the K. The teacher is normalised over its K tokens.

    Args:
        student: Hidden states and head of the student.
        teacher_logits: The teacher's raw logits [T, K].
        teacher_ids: Their ids of the full vocabulary, [T, K].
        index: The tokens' flat positions [T], each at most once.
        forward_share: The share of the forward KL, in [0, 1].
        jsd_beta: The teacher's share of the mixture. None for the KLs.
        temperature: Divides the logits of both.
        zero_outside: Whether the teacher is zero outside its K tokens. Then the student is normalised over the whole
            vocabulary, and log 0 counts as -100 in KL(p_student || p_teacher). Otherwise the student is normalised over
            the K tokens, too.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens whose logits exist at once. None for the usual number.

    Raises:
        ValueError: If the share is out of range.

    Collectives:
        Per tile, one all-gather of K + 2 numbers per token, K + 3 with the reverse KL.
    """
    check_share(forward_share)
    shard = shard or UNSHARDED
    source = HeadLogits(
        student.hidden,
        student.weight,
        index=index,
        max_rows=rows_per_tile or tile_rows_of(student.weight, shard),
        scaling=Scaling(temperature, student.softcap),
        dtype=compute_dtype(student.hidden.dtype),
    )
    tokens = FormedSum(source)

    def divergence(teacher_logits: Tensor, at_ids: Tensor, lse: Tensor, neg_entropy: Tensor | None = None) -> Tensor:
        """Return the divergence [t] from the student's logits at the ids [t, K], its log Σ exp z [t] and Σ p·log p."""
        teacher = (teacher_logits.to(at_ids.dtype) / temperature).log_softmax(-1)
        student = at_ids - lse[:, None] if zero_outside else at_ids.log_softmax(-1)
        if jsd_beta is not None:
            return generalized_jsd(student, teacher, jsd_beta)
        value = torch.zeros_like(lse)
        if forward_share > 0:
            value = value + forward_share * forward_kl(student, teacher)
        if forward_share < 1:
            value = value + (1 - forward_share) * reverse_kl(student, teacher, neg_entropy)
        return value

    needs_entropy = zero_outside and forward_share < 1 and jsd_beta is None
    wanted = Wanted(neg_entropy=needs_entropy)
    total, inside = _topk_kl_sums(tokens, teacher_logits, teacher_ids, divergence, wanted, shard)
    return TopkKlSums(tokens.with_gradient(total), inside)


@torch.no_grad()
def _topk_kl_sums(
    tokens: FormedSum,
    teacher_logits: Tensor,
    ids: Tensor,
    divergence: Callable[..., Tensor],
    wanted: Wanted,
    shard: VocabShard,
) -> tuple[Tensor, Tensor]:
    """Return the sums of the divergence and of the probability inside; the gradient is added to `tokens`."""
    source = tokens.source
    total = torch.zeros((), dtype=source.dtype, device=source.device)
    inside = torch.zeros_like(total)

    def add(rows: slice) -> None:  # a function: nothing of a tile exists when the next one is computed
        columns, is_mine = on_shard(ids[rows], shard.start, source.columns)  # [t, K]
        tile = source.tile(rows, source.blocks[0])
        found = tile_statistics(tile.logits, columns, is_mine, wanted)
        merged = merge_over(Stats(*found.stats), source.columns, shard.group, found.at_ids.t())
        stats = merged.stats
        at_ids = merged.extra.t() - finite(stats.m)[:, None]  # with the maximum at 0, as l has it
        leaves = [leaf.detach().requires_grad_() for leaf in (at_ids, stats.l, stats.neg_entropy) if leaf is not None]
        with torch.enable_grad():
            values = divergence(teacher_logits[rows], *leaves)
            slopes = torch.autograd.grad(values.sum(), leaves, allow_unused=True, materialize_grads=True)
        total.add_(values.detach().sum())
        inside.add_((at_ids - stats.l[:, None]).exp().sum())
        if not tokens.wants_gradient:
            return
        by_ids, by_lse, *by_entropy = slopes
        by_p, by_log_p = by_lse, None
        if stats.neg_entropy is not None:
            by_log_p = by_entropy[0][:, None]
            by_p = by_lse - by_entropy[0] * stats.neg_entropy
        of_rows = RowGradient(by_p[:, None], at_ids=torch.where(is_mine, by_ids, 0), by_log_p=by_log_p)
        lse = torch.stack([stats.m, stats.l], -1)
        grad = gradient_of_logits(
            tile.logits, lse, of_rows, columns, source.scaling, source.gradient_dtype, source.has_own_tiles
        )
        tile = tile.without_logits()
        source.add_gradient(tile, grad)

    for rows in source.indices():
        add(rows)
    return total, inside


def topk_over(logits: Tensor, k: int, group: Group, start: int | Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The k largest of logits [..., V/tp] over all shards, descending, in the compute dtype, and their global ids
    int64, both [..., k] on every rank, the lower of equal ones first. start: this rank's first id; sizes: of every
    rank's shard, of which k is at most the sum. One all-gather."""
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
    ids, order = message[1].sort(-1)  # then what is no token loses against a later rank's −inf too
    values, by_value = message[0].view(values.dtype).gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids.gather(-1, by_value)[..., :k].long()


def local_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of logits [..., v] and their columns [..., k], equal ones by lower column (torch.topk: by any)."""
    if logits.is_cuda or k == logits.shape[-1]:
        values, columns = logits.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], columns[..., :k]
    if not has_values(logits):
        return logits.topk(k, -1)
    # On the CPU a look is free: only rows with equal values are sorted, and of these what is no less than the k-th.
    values, columns = logits.topk(k + 1, -1)
    ties = (values[..., 1:] == values[..., :-1]).any(-1)
    values, columns = values[..., :k], columns[..., :k]
    if ties.any():
        tied = logits[ties]  # [n, v]
        rows, candidates = (~(tied < values[ties][:, -1:])).nonzero().unbind(1)  # by row, then by column
        at_candidates = tied[rows, candidates]
        by_value = at_candidates.sort(descending=True, stable=True).indices
        order = by_value[rows[by_value].sort(stable=True).indices]  # by row, then by value, then by column
        counts = rows.bincount()
        first = order[(counts.cumsum(0) - counts)[:, None] + torch.arange(k)]  # [n, k]
        values[ties], columns[ties] = at_candidates[first], candidates[first]
    return values, columns
