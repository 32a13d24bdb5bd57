"""The Kullback-Leibler and the generalized Jensen-Shannon divergence between two models' next-token distributions,
straight from their hidden states and heads: the logits of either exist one tile of tokens at a time.

The weights are known before (each token counts the same), so the gradient is formed in the forward as in
`weighted_sum`: three matrix products of the student's head and one of the teacher's, where computing the tiles again in
a backward would take four and two. Three tiles of logits are held at once, four for the Jensen-Shannon divergence; two
where their operations are compiled: then these read each twice, and write the gradient.

`forward_kl`, `reverse_kl`, `mixed_kl` and `generalized_jsd` are the same of log-probabilities.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.base.fused import Fused, own
from dtrain.losses.head.logprobs import Scaling
from dtrain.losses.head.vocabulary import (
    WHOLE,
    Group,
    HeadInput,
    Stats,
    VocabShard,
    compute_dtype,
    group_rank,
    group_size,
    merge,
    part_stats,
    product,
)
from dtrain.losses.head.weighted_sum import TiledSum, tile_rows_of
from dtrain.parallel.collectives import all_gather


class KlSums(NamedTuple):
    """Sums over tokens: of the loss, which carries the gradient, and of the divergence in either direction."""

    total: Tensor
    forward: Tensor
    reverse: Tensor


def kl_sum_from_hidden_states(
    student: HeadInput,
    teacher: HeadInput,
    index: Tensor,
    *,
    forward_share: float = 1.0,
    jsd_beta: float | None = None,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> KlSums:
    """Σ over tokens index [T] (flat positions, each at most once) of
    forward_share · KL(p_teacher || p_student) + (1 − forward_share) · KL(p_student || p_teacher),
    p = softmax(logits / temperature) over the whole vocabulary; no factor temperature². jsd_beta: in its place
    beta · KL(p_teacher || m) + (1 − beta) · KL(p_student || m), m = beta · p_teacher + (1 − beta) · p_student (Agarwal
    et al., arXiv:2306.13649, equation 1).

    The models may be of any sizes and dtypes; the vocabulary and its cut are the same. Scalars in max(float32, the
    student's dtype), as are all products and sums. Gradients go to the student only, in its inputs' dtypes, the
    weight's summed in max(float32, the dtype); once: a second backward raises RuntimeError. Positions outside `index`
    cost nothing and get a zero gradient, whatever they hold.

    shard: the weights are this rank's part, index is the same on every rank of the group. The values come back whole on
    every rank, the gradients are the shard's own: hidden's has still to be summed over the group. One all-gather of six
    numbers per token and tile, with jsd_beta two of four.
    Raises ValueError for a temperature or softcap that is not positive, a share outside [0, 1], a beta outside (0, 1),
    and vocabularies of two sizes.
    """
    check_share(forward_share)
    if jsd_beta is not None:
        check_beta(jsd_beta)
    if len(student.weight) != len(teacher.weight):
        held = len(student.weight), len(teacher.weight)
        raise ValueError(f"the student's head has {held[0]} tokens here, the teacher's {held[1]}")
    shard = shard or WHOLE
    scalings = Scaling(temperature, student.softcap), Scaling(temperature, teacher.softcap)
    rows = rows_per_tile or tile_rows_of(student.weight, shard)
    dtype = torch.promote_types(compute_dtype(student.hidden.dtype), teacher.hidden.dtype)
    tokens = TiledSum(student.hidden, student.weight, index, rows, dtype)
    with torch.no_grad():
        others = TiledSum(teacher.hidden, teacher.weight, index, rows, dtype)
        totals = torch.zeros(2 if jsd_beta is None else 3, dtype=dtype, device=index.device)

        def add(tile: slice, mine: Tensor) -> None:  # a function: nothing of a tile lives on in the next
            theirs = others.hidden.index_select(0, index[tile]).to(others.operand.dtype)
            first, second, *memory = tokens.memory(3 if jsd_beta is None else 4, len(mine))
            logits = product(mine, tokens.operand.t(), first), product(theirs, others.operand.t(), second)
            pair = _Pair(*logits, _stats_of_pair(*logits, memory[0], scalings), scalings[0], memory)
            del logits
            grad_dtype = tokens.operand.dtype if tokens.wants_gradient else None
            if jsd_beta is None:
                sums, grad = _kl_of_tile(pair, forward_share, shard.group, grad_dtype)
            else:
                sums, grad = _jsd_of_tile(pair, jsd_beta, shard.group, grad_dtype)
            totals.add_(sums)
            if grad is not None:
                tokens.add_gradient(grad, tile, mine)

        for tile, mine in tokens.tiles():
            add(tile, mine)
    forward, reverse, *of_mixture = totals.unbind()
    total = of_mixture[0] if of_mixture else forward_share * forward + (1 - forward_share) * reverse
    return KlSums(tokens.with_gradient(total), forward, reverse)


def jsd_sum_from_hidden_states(
    student: HeadInput,
    teacher: HeadInput,
    index: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> KlSums:
    """`kl_sum_from_hidden_states` with jsd_beta=beta: the generalized Jensen-Shannon divergence."""
    return kl_sum_from_hidden_states(
        student, teacher, index, jsd_beta=beta, temperature=temperature, shard=shard, rows_per_tile=rows_per_tile
    )


def check_share(share: float, name: str = "forward_share") -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name}={share}: the forward KL's share lies between 0 and 1")


def check_beta(beta: float) -> None:
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta}: the teacher's share of the mixture lies between 0 and 1")


class _Pair(NamedTuple):
    """Tile of the student's and the teacher's logits, [t, V/tp] each; `_kl_sums` and `_jsd_sums` take their memory
    unless they are compiled. stats: as of `_stats_of_pair`. memory: for one or two tiles more; None: new ones are
    made."""

    student: Tensor
    teacher: Tensor
    stats: Tensor
    scaling: Scaling  # the student's
    memory: Sequence[Tensor | None]


@Fused
def _stats_of_pair(
    products: Tensor, others: Tensor, scratch: Tensor | None, scalings: tuple[Scaling, Scaling]
) -> Tensor:
    """Make logits of products [t, V/tp], the student's and the teacher's, and return `Stats.m` and `l` of the student's
    in this rank's part, and of the teacher's, [t, 4]. Overwrites scratch [t, V/tp], if there is one."""
    scratch = torch.empty_like(products) if scratch is None else scratch
    students = part_stats(scalings[0].logits_(products), scratch)
    teachers = part_stats(scalings[1].logits_(others), scratch)
    return torch.stack([students.m, students.l, teachers.m, teachers.l], 1)


def _logprobs(pair: _Pair, shares: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | float | None]:
    """Return log q and log p of this rank's part alone to compute in, or with the logarithms of its shares [t, 2] of
    the whole vocabulary, and the slope of the student's logits by the products."""
    m, l, m_of_teacher, l_of_teacher = pair.stats.split(1, 1)  # noqa: E741
    slope = pair.scaling.slope(pair.student)
    log_q = own(pair.student).sub_(m).sub_(l)
    log_p = own(pair.teacher).sub_(m_of_teacher).sub_(l_of_teacher)
    if shares is not None:
        log_q.add_(shares[:, 0:1])
        log_p.add_(shares[:, 1:2])
    return log_q, log_p, slope


def _kl_of_tile(
    pair: _Pair, forward_share: float, group: Group, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of the two divergences over the tile's tokens [2], and the gradient by products [t, V/tp] in
    `dtype`; None for none."""
    (forward, reverse), terms = _kl_sums(pair)
    forward, reverse, student_share, teacher_share, log_ratio = _merge(pair.stats, forward, reverse, group)
    sums = torch.stack([forward.sum(), reverse.sum()])
    if dtype is None:
        return sums, None
    offset = (log_ratio - reverse) * (1 - forward_share) + forward_share
    of_rows = torch.stack([offset, student_share, teacher_share], 1)
    return sums, _kl_gradient(terms, of_rows, forward_share, dtype)


@Fused
def _kl_sums(pair: _Pair) -> tuple[Tensor, tuple]:
    """Return KL(p || q) and KL(q || p) of this rank's part alone, [2, t], and what `_kl_gradient` takes."""
    log_q, log_p, slope = _logprobs(pair)
    q, gap, p = _kl_terms(log_q, log_p, *pair.memory)
    sums = torch.stack([-_dot(p, gap), _dot(q, gap)])
    return sums, pair if torch.compiler.is_compiling() else (q, gap, p, slope)


@Fused
def _kl_gradient(terms: tuple, of_rows: Tensor, forward_share: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient by products [t, V/tp] in `dtype`. of_rows [t, 3]: what is to be added to log q − log p of
    the part alone, with the share of the forward KL in it, and the part's share of q and of p.

    dKL(p||q)/dz = q − p;  dKL(q||p)/dz = q · (log q − log p − KL(q||p)).
    """
    if isinstance(terms, _Pair):
        log_q, log_p, slope = _logprobs(terms)
        terms = *_kl_terms(log_q, log_p, *terms.memory), slope
    q, gap, p, slope = terms
    offset, student_share, teacher_share = of_rows.split(1, 1)
    grad = gap.mul_(1 - forward_share).add_(offset).mul_(q).mul_(student_share)
    grad.addcmul_(p.mul_(-forward_share), teacher_share)  # torch 2.13 compiles addcmul's own `value` wrongly
    return (grad if slope is None else grad.mul_(slope)).to(dtype)


def _kl_terms(log_q: Tensor, log_p: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, in `memory` if there is some, log q − log p and p in that of log q and log p, [t, V/tp] each."""
    q = torch.exp(log_q, out=memory)
    return q, log_q.sub_(log_p), log_p.exp_()


def _jsd_of_tile(pair: _Pair, beta: float, group: Group, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Return what `_kl_of_tile` does, the sums [3] being those of the KL in either direction and of the divergence."""
    shares = None
    if group_size(group) > 1:
        log_student, log_teacher, _ = gather_pair(pair.stats.t(), group)
        shares = torch.stack([log_student[group_rank(group)], log_teacher[group_rank(group)]], 1)
    parts, terms = _jsd_sums(pair, shares, beta)
    if group_size(group) > 1:
        parts = all_gather(parts[None], 0, group).sum(0)
    forward, reverse, by_student, by_teacher = parts
    sums = torch.stack([forward.sum(), reverse.sum(), (beta * by_teacher + (1 - beta) * by_student).sum()])
    if dtype is None:
        return sums, None
    return sums, _jsd_gradient(terms, shares, by_student[:, None], beta, dtype)


@Fused
def _jsd_sums(pair: _Pair, shares: Tensor | None, beta: float) -> tuple[Tensor, tuple]:
    """Return KL(p || q), KL(q || p), KL(q || m) and KL(p || m), this rank's part of their sums over the vocabulary
    [4, t], and what `_jsd_gradient` takes."""
    log_q, log_p, slope = _logprobs(pair, shares)
    q, above = _beside_mixture(log_q, log_p, beta, *pair.memory)
    gap = log_p.sub_(log_q)  # log p − log q
    reverse, by_student = -_dot(q, gap), _dot(q, above)
    p = log_q.add_(gap).exp_()
    forward = _dot(p, gap)
    by_teacher = _dot(p, gap.add_(above))  # log p − log m
    sums = torch.stack([forward, reverse, by_student, by_teacher])
    return sums, pair if torch.compiler.is_compiling() else (q, above, slope)


@Fused
def _jsd_gradient(terms: tuple, shares: Tensor | None, by_student: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient by products [t, V/tp] in `dtype`; by_student [t, 1] is KL(q || m).

    d/dz = (1 − beta) · q · (log q − log m − KL(q || m)): what the mixture's own change adds sums to nothing.
    """
    if isinstance(terms, _Pair):
        log_q, log_p, slope = _logprobs(terms, shares)
        terms = *_beside_mixture(log_q, log_p, beta, *terms.memory), slope
    q, above, slope = terms
    grad = above.sub_(by_student).mul_(q).mul_(1 - beta)
    return (grad if slope is None else grad.mul_(slope)).to(dtype)


def _beside_mixture(
    log_q: Tensor, log_p: Tensor, beta: float, first: Tensor | None, second: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return q and log q − log m, [t, V/tp] each, in the memory of `second` and of `first` if there is some."""
    mixed, q = torch.add(log_q, math.log1p(-beta), out=first), torch.add(log_p, math.log(beta), out=second)
    torch.logaddexp(mixed, q, out=mixed)
    return torch.exp(log_q, out=q), torch.sub(log_q, mixed, out=mixed)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ a·b over the last dimension, without a tensor of products between."""
    return (a * b).sum(-1) if torch.compiler.is_compiling() else torch.linalg.vecdot(a, b)


def gather_pair(parts: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return every rank's log share of the student's and of the teacher's probability, [ranks, ...] each, and the rest
    of `parts` of every rank, [n, ranks, ...]. parts [4 + n, ...]: m and l of the student's logits in this rank's part,
    of the teacher's, and n numbers more. One all-gather."""
    gathered = all_gather(parts.contiguous()[None], 0, group).transpose(0, 1)  # [4 + n, ranks, ...]
    log_student, log_teacher = (merge(Stats(*gathered[i : i + 2].unbind()))[1] for i in (0, 2))
    return log_student, log_teacher, gathered[4:]


def _merge(
    stats: Tensor, forward: Tensor, reverse: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The divergences over the whole vocabulary from those of the parts alone, [t] each; this rank's shares of the
    student's and the teacher's probability; and log(student's share / teacher's), by which log q − log p differs from
    that of the part alone. stats [t, 4]."""
    if group_size(group) == 1:
        ones = torch.ones_like(forward)
        return forward, reverse, ones, ones, torch.zeros_like(forward)
    rank = group_rank(group)
    parts = torch.cat([stats.t(), torch.stack([forward, reverse])])
    log_student, log_teacher, (forward, reverse) = gather_pair(parts, group)
    student, teacher = log_student.exp(), log_teacher.exp()
    log_ratio = torch.where(log_student.isinf() | log_teacher.isinf(), 0, log_student - log_teacher)
    # KL of the whole is each part's share times the part's KL plus the log of the shares' ratio.
    forward, reverse = (teacher * (forward - log_ratio)).sum(0), (student * (reverse + log_ratio)).sum(0)
    return forward, reverse, student[rank], teacher[rank], log_ratio[rank]


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Σ p_teacher · (log p_teacher − log p_student) over the last dimension, [..., K] -> [...]; 0 where p_teacher is 0
    (Hinton et al., arXiv:1503.02531)."""
    return _expected(teacher_logprobs, teacher_logprobs, student_logprobs)


def reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    student_neg_entropy: Tensor | None = None,
    log_outside: float = -100.0,
) -> Tensor:
    """Σ p_student · (log p_student − log p_teacher) over the last dimension, [..., K] -> [...] (Gu et al.,
    arXiv:2306.08543).

    With student_neg_entropy [...], Σ p·log p over the whole vocabulary, the log-probabilities are those at the
    teacher's top-k, and the rest of the student counts against a teacher whose log-probability there is
    `log_outside`.
    """
    inside = _expected(student_logprobs, student_logprobs, teacher_logprobs)
    if student_neg_entropy is None:
        return inside
    p = student_logprobs.exp()
    rest_entropy = student_neg_entropy - torch.where(p == 0, 0, p * student_logprobs).sum(-1)
    return inside + rest_entropy - log_outside * (1 - p.sum(-1))


def mixed_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    weight: float = 0.5,
    student_neg_entropy: Tensor | None = None,
    log_outside: float = -100.0,
) -> Tensor:
    """weight · forward_kl + (1 − weight) · reverse_kl, [..., K] -> [...]; weight in [0, 1], else ValueError."""
    check_share(weight, "weight")
    reverse = reverse_kl(student_logprobs, teacher_logprobs, student_neg_entropy, log_outside)
    return weight * forward_kl(student_logprobs, teacher_logprobs) + (1 - weight) * reverse


def generalized_jsd(student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float = 0.5) -> Tensor:
    """beta · KL(teacher || m) + (1 − beta) · KL(student || m), m = beta · teacher + (1 − beta) · student, over the last
    dimension, [..., K] -> [...] (arXiv:2306.13649, equation 1); beta in (0, 1), else ValueError. What the student gives
    to tokens beyond the K meets a teacher of probability 0 there."""
    check_beta(beta)
    own, other = math.log1p(-beta), math.log(beta)
    mixed = torch.logaddexp(student_logprobs + own, teacher_logprobs + other)
    outside = 1 - student_logprobs.exp().sum(-1)
    inside = _expected(student_logprobs, student_logprobs, mixed) - own * outside
    return beta * _expected(teacher_logprobs, teacher_logprobs, mixed) + (1 - beta) * inside


def _expected(of: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Σ exp(of) · (first − second) over the last dimension, 0 where exp(of) is 0; gradients finite there too."""
    p = of.exp()
    nowhere = p == 0
    difference = torch.where(nowhere, 0, first) - torch.where(nowhere, 0, second)
    return (p * difference).sum(-1)
