"""A teacher's likeliest tokens straight from its hidden states, and a student's divergence from them straight from its
own: the logits of either exist one tile of tokens at a time. The gradient is formed in the forward, as in
`weighted_sum`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.fused import Fused, own
from dtrain.base.torch_functions import has_values
from dtrain.losses.head.kl import check_share, forward_kl, generalized_jsd, reverse_kl
from dtrain.losses.head.logprobs import Scaling
from dtrain.losses.head.vocabulary import (
    WHOLE,
    Group,
    HeadInput,
    Stats,
    VocabShard,
    add_at_,
    compute_dtype,
    group_size,
    merge_over,
    on_shard,
    part_stats,
    pick,
    product,
    shard_sizes,
)
from dtrain.losses.head.weighted_sum import TiledSum, head_tile_rows, tile_rows_of


@torch.no_grad()
def topk_logits_from_hidden_states(
    model: HeadInput, k: int, index: Tensor, *, shard: VocabShard | None = None, rows_per_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest logits (after the softcap) of tokens index [T], descending, max(float32, the dtype), and their
    global ids int64, both [T, k], on every rank; equal logits by ascending id, k > V means V. No gradient.

    One all-gather of k candidates per token and tile, one exchange of shard sizes on the host.
    Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"k={k}: at least one token is asked for")
    shard = shard or WHOLE
    sizes = shard_sizes(len(model.weight), shard.group, model.weight.device)
    k, rows = min(k, sum(sizes)), rows_per_tile or head_tile_rows(max(sizes), model.weight.device.type)
    tokens = TiledSum(model.hidden, model.weight, index, rows, compute_dtype(model.hidden.dtype))
    scaling = Scaling(1.0, model.softcap)
    values = torch.empty(len(index), k, dtype=tokens.dtype, device=index.device)
    ids = torch.empty(len(index), k, dtype=torch.int64, device=index.device)
    for tile, mine in tokens.tiles():
        logits = scaling.logits_(product(mine, tokens.operand.t()))  # [t, V/tp]
        values[tile], ids[tile] = topk_over(logits, k, shard.group, shard.start, sizes)
    return values, ids


class TopkKlSums(NamedTuple):
    """Sums over tokens: of the loss, which carries the gradient, and of the probability that the student gives to the
    teacher's tokens."""

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
    """Σ over tokens index [T] (flat positions, each at most once) of forward_share · KL(p_teacher || p_student)
    + (1 − forward_share) · KL(p_student || p_teacher), p = softmax(logits / temperature), from the teacher's raw logits
    [T, K] at its ids [T, K]; no factor temperature². jsd_beta: `generalized_jsd` in its place.

    The teacher is normalised over its K tokens. zero_outside: elsewhere it is zero, and the student is normalised over
    the whole vocabulary; log 0 counts as −100 in KL(p_student || p_teacher). Otherwise the student is normalised over
    the K tokens too. With all tokens among the K both are `kl_sum_from_hidden_states`.

    Values, gradients, `shard` and errors as there; one all-gather of K + 3 numbers per token and tile.
    """
    check_share(forward_share)
    shard = shard or WHOLE
    rows = rows_per_tile or tile_rows_of(student.weight, shard)
    tokens = TiledSum(student.hidden, student.weight, index, rows, compute_dtype(student.hidden.dtype))

    def divergence(teacher_logits: Tensor, at_ids: Tensor, lse: Tensor, neg_entropy: Tensor | None = None) -> Tensor:
        """The student's logits at the ids [t, K], log Σ exp of all of them [t] and negative entropy [t] -> [t]."""
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
    scaling = Scaling(temperature, student.softcap)
    sums = _topk_kl_sums(tokens, teacher_logits, teacher_ids, scaling, divergence, needs_entropy, shard)
    total, inside = sums.unbind()
    return TopkKlSums(tokens.with_gradient(total), inside)


@torch.no_grad()
def _topk_kl_sums(
    tokens: TiledSum,
    teacher_logits: Tensor,
    ids: Tensor,
    scaling: Scaling,
    divergence: Callable[..., Tensor],
    needs_entropy: bool,
    shard: VocabShard,
) -> Tensor:
    """Return the divergence and the probability inside [2]; its gradient is left with `tokens`."""
    sums = torch.zeros(2, dtype=tokens.dtype, device=tokens.hidden.device)

    def add(tile: slice, mine: Tensor) -> None:  # a function: nothing of a tile lives on in the next
        columns, is_mine = on_shard(ids[tile], shard.start, len(tokens.operand))  # [t, K]
        first, *memory = tokens.memory(3 if needs_entropy else 2, len(mine))
        logits = product(mine, tokens.operand.t(), first)
        part, at_ids = _stats_of_tile(logits, memory, columns, is_mine, scaling)
        stats = Stats(*part.unbind(1))
        whole, log_share, summed, *_ = merge_over(stats, logits.shape[1], shard.group, at_ids.t())
        at_ids, share = summed.t() - whole.m[:, None], log_share.exp()  # with the maximum at 0, as l has it
        leaves = [leaf.detach().requires_grad_() for leaf in (at_ids, whole.l, whole.neg_entropy) if leaf is not None]
        with torch.enable_grad():
            values = divergence(teacher_logits[tile], *leaves)
            slopes = torch.autograd.grad(values.sum(), leaves, allow_unused=True, materialize_grads=True)
        by_ids, by_lse, *by_entropy = slopes
        inside = (at_ids - whole.l[:, None]).exp().sum()
        sums.add_(torch.stack([values.detach().sum(), inside]))
        if not tokens.wants_gradient:
            return
        of_rows = [by_lse * share]
        if whole.neg_entropy is not None:
            of_rows = [by_lse, share, by_entropy[0], whole.m + whole.l + whole.neg_entropy]
        at_columns = torch.where(is_mine, by_ids, 0)
        more = torch.stack(of_rows, 1), columns, at_columns, scaling, tokens.operand.dtype, memory[0]
        tokens.add_gradient(_gradient_of_tile(logits, part, *more), tile, mine)

    for tile, mine in tokens.tiles():
        add(tile, mine)
    return sums


@Fused
def _stats_of_tile(
    products: Tensor, memory: Sequence[Tensor | None], columns: Tensor, is_mine: Tensor, scaling: Scaling
) -> tuple[Tensor, Tensor]:
    """Make logits of products [t, V/tp]. Return their statistics [t, 2 or 3], m and l, and E = Σ p·log p where `memory`
    has a second tile; and the logits at `columns` [t, K], 0 where they are not mine."""
    logits = scaling.logits_(products)
    logp, *more = [torch.empty_like(logits) if tile is None else own(tile) for tile in memory]
    at_ids = pick(logits, columns, is_mine, logits.dtype)
    return part_stats(logits, logp, *more).pack().t(), at_ids


@Fused
def _gradient_of_tile(
    logits: Tensor,
    stats: Tensor,
    of_rows: Tensor,
    columns: Tensor,
    at_columns: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    memory: Tensor | None,
) -> Tensor:
    """Return the gradient by products [t, V/tp] in `dtype`. logits, stats: as `_stats_of_tile` left and gave them.
    of_rows [t, 1 or 4]: what p of the part alone is multiplied by; or the gradients by lse and by Σ p·log p, this
    part's share between them, and lse + Σ p·log p. at_columns [t, K]: what is added there. memory: for p; None: new.

    d lse / dz = p;  d Σ p·log p / dz = p · (log p − Σ p·log p).
    """
    slope = scaling.slope(logits)
    p = torch.sub(logits, stats[:, 0:1], out=memory).sub_(stats[:, 1:2]).exp_()
    if of_rows.shape[1] == 1:
        grad = p.mul_(of_rows)
    else:
        by_lse, share, by_entropy, offset = of_rows.split(1, 1)
        grad = own(logits).sub_(offset).mul_(by_entropy).add_(by_lse).mul_(p).mul_(share)
    add_at_(grad, columns, at_columns)
    return (grad if slope is None else grad.mul_(slope)).to(dtype)


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
