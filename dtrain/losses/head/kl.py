"""The Kullback-Leibler divergence between two models' next-token distributions, straight from their hidden states and
heads: the logits of either exist one tile of tokens at a time.

Its weights are known before (each token counts the same), so the gradient is formed in the forward as in `hidden`:
three matrix products of the student's head and one of the teacher's, where computing the tiles again in a backward
would take four and two. Three tiles of logits are held at once.

`forward_kl`, `reverse_kl` and `mixed_kl` are the same of log-probabilities.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.losses.head.logprobs import Scaling
from dtrain.losses.head.vocabulary import (
    WHOLE,
    Group,
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


class HeadInput(NamedTuple):
    """Hidden states and the head's weight of a model, this rank's part of the vocabulary."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V/tp, D]
    softcap: float | None = None


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
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> KlSums:
    """Σ over tokens index [T] (flat positions, each at most once) of
    forward_share · KL(p_teacher || p_student) + (1 − forward_share) · KL(p_student || p_teacher),
    p = softmax(logits / temperature) over the whole vocabulary; no factor temperature².

    The models may be of any sizes and dtypes; the vocabulary and its cut are the same. Scalars in max(float32, the
    student's dtype), as are all products and sums. Gradients go to the student only, in its inputs' dtypes, the
    weight's summed in max(float32, the dtype); once: a second backward raises RuntimeError. Positions outside `index`
    cost nothing and get a zero gradient, whatever they hold.

    shard: the weights are this rank's part, index is the same on every rank of the group. The values come back whole on
    every rank, the gradients are the shard's own: hidden's has still to be summed over the group. One all-gather of six
    numbers per token and tile.
    Raises ValueError for a temperature or softcap that is not positive, a share outside [0, 1], and vocabularies of two
    sizes.
    """
    check_share(forward_share)
    tokens, others, group = tiles_of_both(student, teacher, index, shard, rows_per_tile)
    scalings = Scaling(temperature, student.softcap), Scaling(temperature, teacher.softcap)
    forward, reverse = _kl_sums(tokens, others, scalings, forward_share, group).unbind()
    return KlSums(tokens.with_gradient(forward_share * forward + (1 - forward_share) * reverse), forward, reverse)


def tiles_of_both(
    student: HeadInput, teacher: HeadInput, index: Tensor, shard: VocabShard | None, rows: int | None
) -> tuple[TiledSum, TiledSum, Group]:
    """The tokens of either model in tiles of `rows` (None: as many as fit), and the group of the vocabulary's parts.
    Raises ValueError for vocabularies of two sizes."""
    if len(student.weight) != len(teacher.weight):
        held = len(student.weight), len(teacher.weight)
        raise ValueError(f"the student's head has {held[0]} tokens here, the teacher's {held[1]}")
    shard = shard or WHOLE
    rows = rows or tile_rows_of(student.weight, shard)
    dtype = torch.promote_types(compute_dtype(student.hidden.dtype), teacher.hidden.dtype)
    tokens = TiledSum(student.hidden, student.weight, index, rows, dtype)
    with torch.no_grad():
        return tokens, TiledSum(teacher.hidden, teacher.weight, index, rows, dtype), shard.group


def check_share(forward_share: float) -> None:
    if not 0 <= forward_share <= 1:
        raise ValueError(f"forward_share={forward_share}: the forward KL's share lies between 0 and 1")


@torch.no_grad()
def _kl_sums(
    tokens: TiledSum, others: TiledSum, scalings: tuple[Scaling, Scaling], forward_share: float, group: Group
) -> Tensor:
    """The two divergences [2]; leaves the gradient of their mix with `tokens`."""
    sums = torch.zeros(2, dtype=tokens.dtype, device=tokens.hidden.device)
    memory = tokens.memory(3)
    for (tile, mine), (_, theirs) in zip(tokens.tiles(), others.tiles(), strict=True):
        scratch, gap, p = (tensor[: len(mine)] for tensor in memory)  # [t, V/tp]
        logits = scalings[0].logits_(product(mine, tokens.operand.t(), out=scratch))
        slope = scalings[0].slope(logits) if tokens.wants_gradient else None
        students = part_stats(logits, gap)  # gap: log q of the part alone
        logits = scalings[1].logits_(product(theirs, others.operand.t(), out=scratch))
        teachers = part_stats(logits, p)  # p: log p of the part alone
        q = torch.exp(gap, out=scratch)
        gap.sub_(p)  # log q − log p
        p.exp_()
        forward, reverse = -torch.linalg.vecdot(p, gap), torch.linalg.vecdot(q, gap)  # no tensor of products between
        merged = _merge(students, teachers, forward, reverse, group)
        sums += torch.stack([merged.forward.sum(), merged.reverse.sum()])
        if not tokens.wants_gradient:
            continue
        # dKL(p||q)/dz = q − p;  dKL(q||p)/dz = q · (log q − log p − KL(q||p)).
        offset = (merged.log_ratio - merged.reverse) * (1 - forward_share) + forward_share
        grad = gap.mul_(1 - forward_share).add_(offset[:, None]).mul_(q).mul_(merged.student_share[:, None])
        grad.addcmul_(p, merged.teacher_share[:, None], value=-forward_share)
        if slope is not None:
            grad.mul_(slope)
        tokens.add_gradient(grad, tile, mine)
    return sums


class _Merged(NamedTuple):
    """Divergences over the whole vocabulary, [t] each; and this rank's shares of the probability and
    log(student's share / teacher's), by which log q − log p differs from that of the part alone."""

    forward: Tensor
    reverse: Tensor
    student_share: Tensor
    teacher_share: Tensor
    log_ratio: Tensor


def _merge(students: Stats, teachers: Stats, forward: Tensor, reverse: Tensor, group: Group) -> _Merged:
    """Merge the ranks' parts by one all-gather of the two softmaxes' maximum and log-sum and of the divergences of the
    parts alone."""
    if group_size(group) == 1:
        ones = torch.ones_like(forward)
        return _Merged(forward, reverse, ones, ones, torch.zeros_like(forward))
    rank = group_rank(group)
    message = torch.stack([students.m, students.l, teachers.m, teachers.l, forward, reverse])
    gathered = all_gather(message[None], 0, group).transpose(0, 1)  # [6, ranks, t]
    log_student, log_teacher = (merge(Stats(*gathered[i : i + 2].unbind()))[1] for i in (0, 2))
    student, teacher = log_student.exp(), log_teacher.exp()
    log_ratio = torch.where(log_student.isinf() | log_teacher.isinf(), 0, log_student - log_teacher)
    # KL of the whole is each part's share times the part's KL plus the log of the shares' ratio.
    return _Merged(
        (teacher * (gathered[4] - log_ratio)).sum(0),
        (student * (gathered[5] + log_ratio)).sum(0),
        student[rank],
        teacher[rank],
        log_ratio[rank],
    )


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
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight}: the forward KL's share lies between 0 and 1")
    reverse = reverse_kl(student_logprobs, teacher_logprobs, student_neg_entropy, log_outside)
    return weight * forward_kl(student_logprobs, teacher_logprobs) + (1 - weight) * reverse


def generalized_jsd(student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float = 0.5) -> Tensor:
    """beta · KL(teacher || m) + (1 − beta) · KL(student || m), m = beta · teacher + (1 − beta) · student, over the last
    dimension, [..., K] -> [...] (arXiv:2306.13649, equation 1); beta in (0, 1), else ValueError. What the student gives
    to tokens beyond the K meets a teacher of probability 0 there."""
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta}: the teacher's share of the mixture lies between 0 and 1")
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
