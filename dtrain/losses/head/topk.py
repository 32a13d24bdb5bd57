"""Distillation from a teacher's top-k tokens: the tokens, and the student's divergence from them.

Both are computed from hidden states and heads, one tile of tokens at a time. The gradient is computed in the forward,
as in `weighted_sum`. If logits are equal, the token with the lower id comes first, on every device and every mesh,
because runs on different meshes must distil from the same tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.torch_functions import has_values
from dtrain.losses.head.kl import check_beta, check_share, forward_kl, generalized_jsd, reverse_kl
from dtrain.losses.head.softmax import (
    FusedGradientSum,
    GradientCoefficients,
    RequestedStatistics,
    finite,
    gradient_of_logits,
    tile_statistics,
)
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
    """Return the k largest logits of tokens, after the softcap, and their ids. No gradient.

    Args:
        model: Hidden states and head.
        k: The number of logits. Values above the size of the vocabulary mean all ids.
        index: Flat positions of the tokens, [T].
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens per tile of logits. None: `sources.head_tile_rows`.

    Returns:
        Logits in descending order, in max(float32, the dtype), and ids of the full vocabulary, int64, both [T, k], on
        every rank.

    Raises:
        ValueError: If k < 1.

    Collectives:
        One exchange of shard sizes on the host. Per tile, one all-gather of k candidates per token.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
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
        tile = source.tile(rows, source.blocks[0])
        values[rows], ids[rows] = topk_over_shards(tile.logits, k, shard.group, shard.start, sizes)
        del tile  # before the next one is computed
    return values, ids


class TopkKlSums(NamedTuple):
    """Sums over tokens.

    Attributes:
        total: The loss. Differentiable.
        topk_probability: The student's probability of the teacher's top-k tokens.
    """

    total: Tensor
    topk_probability: Tensor


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
    """Sum a divergence between a teacher's top-k tokens and a student over positions.

    The divergences are those of `kl_sum_from_hidden_states`, which also describes dtypes and gradients. If K is the
    size of the vocabulary, the results are equal. The teacher is normalised over its K tokens.

    Args:
        student: Hidden states and head of the student.
        teacher_logits: The teacher's logits before temperature, [T, K].
        teacher_ids: The ids of these logits in the full vocabulary, [T, K].
        index: Flat positions of the T rows, [T], each at most once.
        forward_share: The share of the forward KL, in [0, 1].
        jsd_beta: The teacher's share of the mixture, in (0, 1). None: the KLs, not the Jensen-Shannon divergence.
        temperature: Divides the logits of both models.
        zero_outside: True: the teacher is 0 outside its K tokens, the student is normalised over the full vocabulary,
            and log 0 counts as -100 in KL(p_student || p_teacher). False: the student is normalised over the K tokens.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens per tile of logits. None: `sources.tile_rows_of`.

    Returns:
        The sums over all tokens, on every rank. The gradient of the student's weight is complete. The gradient of its
        hidden states is this rank's part and must be summed over the group.

    Raises:
        ValueError: If `forward_share` or `jsd_beta` is out of range.

    Collectives:
        Per tile, one all-gather of K + 2 numbers per token, K + 3 with the reverse KL. Also that of `tile_rows_of` if
        `rows_per_tile` is None.
    """
    check_share(forward_share)
    if jsd_beta is not None:
        check_beta(jsd_beta, "jsd_beta")
    shard = shard or UNSHARDED
    source = HeadLogits(
        student.hidden,
        student.weight,
        index=index,
        max_rows=rows_per_tile or tile_rows_of(student.weight, shard),
        scaling=Scaling(temperature, student.softcap),
        dtype=compute_dtype(student.hidden.dtype),
    )
    token_sum = FusedGradientSum(source)

    def divergence(teacher_logits: Tensor, at_ids: Tensor, lse: Tensor, neg_entropy: Tensor | None = None) -> Tensor:
        """Return the divergence of each row, [t].

        Args:
            teacher_logits: [t, K].
            at_ids: The student's logits at the teacher's ids, [t, K].
            lse: log Σ exp z of the student over the full vocabulary, [t].
            neg_entropy: Σ p·log p of the student over the full vocabulary, [t], if it is needed.
        """
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
    requested = RequestedStatistics(neg_entropy=needs_entropy)
    total, topk_probability = _topk_kl_sums(token_sum, teacher_logits, teacher_ids, divergence, requested, shard)
    return TopkKlSums(token_sum.with_gradient(total), topk_probability)


@torch.no_grad()
def _topk_kl_sums(
    token_sum: FusedGradientSum,
    teacher_logits: Tensor,
    ids: Tensor,
    divergence: Callable[..., Tensor],
    requested: RequestedStatistics,
    shard: VocabShard,
) -> tuple[Tensor, Tensor]:
    """Return the sums of the divergence and of the student's probability of the K tokens.

    The gradient is added to `token_sum`. Autograd differentiates `divergence` by the few numbers per row that it reads,
    and the coefficients of these derivatives give the gradient by all logits.
    """
    source = token_sum.source
    total = torch.zeros((), dtype=source.dtype, device=source.device)
    topk_probability = torch.zeros_like(total)

    # A function, so that every tensor of a tile is freed before the next tile is computed.
    def add_tile(rows: slice) -> None:
        columns, is_local = on_shard(ids[rows], shard.start, source.columns)  # [t, K]
        tile = source.tile(rows, source.blocks[0])
        found = tile_statistics(tile.logits, columns, is_local, requested)
        merged = merge_over(Stats(*found.stats), source.columns, shard.group, found.at_ids.t())
        stats = merged.stats
        at_ids = merged.extra.t() - finite(stats.m)[:, None]  # relative to the maximum, as l is: log p = at_ids - l
        # The numbers of a row that the divergence reads.
        leaves = [at_ids.detach().requires_grad_(), stats.l.detach().requires_grad_()]
        if stats.neg_entropy is not None:
            leaves.append(stats.neg_entropy.detach().requires_grad_())
        with torch.enable_grad():
            values = divergence(teacher_logits[rows], *leaves)
            derivatives = torch.autograd.grad(values.sum(), leaves, allow_unused=True, materialize_grads=True)
        total.add_(values.detach().sum())
        topk_probability.add_((at_ids - stats.l[:, None]).exp().sum())
        if not token_sum.needs_gradient:
            return
        # The chain rule with d lse / dz_v = p_v, and d Σ p·log p / dz_v = p_v · (log p_v - Σ p·log p). The gradient by
        # z_v is p_v · times_p + p_v · log p_v · times_p_log_p, and at the teacher's ids also the derivative by at_ids.
        by_at_ids, by_lse = derivatives[0], derivatives[1]
        times_p, times_p_log_p = by_lse, None
        if stats.neg_entropy is not None:
            by_entropy = derivatives[2]
            times_p = by_lse - by_entropy * stats.neg_entropy
            times_p_log_p = by_entropy[:, None]
        coefficients = GradientCoefficients(
            times_p[:, None], at_ids=torch.where(is_local, by_at_ids, 0), times_p_log_p=times_p_log_p
        )
        lse = torch.stack([stats.m, stats.l], -1)
        grad = gradient_of_logits(
            tile.logits, lse, coefficients, columns, source.scaling, source.gradient_dtype, source.has_own_tiles
        )
        tile = tile.without_logits()
        source.add_gradient(tile, grad)

    for rows in source.indices():
        add_tile(rows)
    return total, topk_probability


def topk_over_shards(
    logits: Tensor, k: int, group: Group, start: int | Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits over all shards of the vocabulary, and their ids.

    Each rank sends its own k largest. For example, k = 2 and shards of 3 and 1 ids:

        rank 0    logits 5 7 5    sends 7 (id 1), 5 (id 0)
        rank 1    logits 5        sends 5 (id 3), -inf (no id)
        sorted by id              5 (id 0), 7 (id 1), 5 (id 3), -inf
        then by value, stable     7 (id 1), 5 (id 0)

    Args:
        logits: This rank's shard, [..., V/tp].
        k: At most the sum of `sizes`.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        start: The first id of this rank's shard.
        sizes: The number of ids of every rank's shard.

    Returns:
        Logits in descending order, in the compute dtype, and ids of the full vocabulary, int64, both [..., k], on every
        rank. The lower id comes first if logits are equal.

    Collectives:
        One all-gather.
    """
    values, ids = local_topk(logits, min(k, logits.shape[-1]))
    values, ids = values.to(compute_dtype(logits.dtype)), ids + start
    if group_size(group) == 1:
        return values, ids
    missing = min(k, max(sizes)) - values.shape[-1]
    if missing:
        # This shard has fewer than k ids. Fill its list with -inf and an id above all real ones.
        values = torch.nn.functional.pad(values, (0, missing), value=-float("inf"))
        ids = torch.nn.functional.pad(ids, (0, missing), value=torch.iinfo(torch.int32).max)
    # To send both in one message, reinterpret the bits of the values as integers of the same width.
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    message = torch.stack([values.contiguous().view(integer), ids.to(integer)])
    gathered = [torch.empty_like(message) for _ in sizes]
    dist.all_gather(gathered, message, group=group)
    message = torch.cat(gathered, -1)  # [2, ..., candidates of all ranks]
    # Sort by id first, so that equal values are in the order of ids for the stable sort by value. A real logit may be
    # -inf, too: sorted by id, it comes before the entries that only fill a list.
    all_values, all_ids = message[0].view(values.dtype), message[1]
    ids, order_by_id = all_ids.sort(-1)
    values_by_id = all_values.gather(-1, order_by_id)
    values, order_by_value = values_by_id.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order_by_value)
    return values[..., :k], ids[..., :k].long()


def local_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits and their columns, with a defined order of equal logits.

    Equal logits are ordered by column. `torch.topk` defines neither the order of equal logits, nor which ones it
    returns if several equal the k-th largest.

    Args:
        logits: [..., v].
        k: At most v.

    Returns:
        Logits in descending order, and their columns, both [..., k].

    Example:
        `torch.topk` may return the columns 1 and 2 here.

        >>> local_topk(torch.tensor([[5.0, 7.0, 5.0]]), 2)
        (tensor([[7., 5.]]), tensor([[1, 0]]))
    """
    if logits.is_cuda or k == logits.shape[-1]:
        values, columns = logits.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], columns[..., :k]
    if not has_values(logits):
        return logits.topk(k, -1)
    # A sort of full rows is slow on a CPU. `torch.topk` of k + 1 shows which rows have equal values. Only in these
    # rows, the logits that are at least as large as the k-th are sorted. (On a GPU the check would wait for the
    # device.)
    values, columns = logits.topk(k + 1, -1)
    has_ties = (values[..., 1:] == values[..., :-1]).any(-1)
    values, columns = values[..., :k], columns[..., :k]
    if has_ties.any():
        values[has_ties], columns[has_ties] = _topk_of_tied_rows(logits[has_ties], values[has_ties][:, -1:], k)
    return values, columns


def _topk_of_tied_rows(logits: Tensor, kth_values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row and their columns, the lower column first if logits are equal.

    Only the candidates are sorted, those that are at least as large as the k-th logit of their row. For example,
    k = 2 and the rows [5, 7, 5] and [3, 3, 1]:

        candidates, by row and column    row 0: 5 (0), 7 (1), 5 (2)    row 1: 3 (0), 3 (1)
        sorted by row, value, column     row 0: 7 (1), 5 (0), 5 (2)    row 1: 3 (0), 3 (1)
        the first two of each row        7 (1), 5 (0)                  3 (0), 3 (1)

    Args:
        logits: [n, v].
        kth_values: The k-th largest logit of each row, [n, 1].
        k: At most v.

    Returns:
        Logits in descending order, and their columns, both [n, k].
    """
    is_candidate = ~(logits < kth_values)  # True for NaN, which `torch.topk` sorts before all numbers
    rows, columns = is_candidate.nonzero().unbind(1)  # sorted by row, then by column
    values = logits[rows, columns]
    # Sort by the least significant key first. A stable sort keeps the former order of equal keys.
    order_by_value = values.sort(descending=True, stable=True).indices
    order_by_row = rows[order_by_value].sort(stable=True).indices
    order = order_by_value[order_by_row]
    # The candidates of row i start at first_candidate[i].
    num_candidates = rows.bincount()
    first_candidate = num_candidates.cumsum(0) - num_candidates
    largest = order[first_candidate[:, None] + torch.arange(k)]  # [n, k]
    return values[largest], columns[largest]
