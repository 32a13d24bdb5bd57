"""Kullback-Leibler and generalized Jensen-Shannon divergence of a student from a teacher, summed over tokens.

Both models' logits are computed from hidden states and heads, one tile of tokens at a time. All tokens have the same
weight, so the gradient is computed in the forward as in `weighted_sum`. That takes three matrix products with the
student's head and one with the teacher's. A backward that computes the tiles again would take four and two.

With q the student's distribution, p the teacher's, and m = beta · p + (1 - beta) · q, the gradients of a row by the
student's logits z are

    KL(p || q)                                    q - p
    KL(q || p)                                    q · (log q - log p - KL(q || p))
    beta · KL(p || m) + (1 - beta) · KL(q || m)   (1 - beta) · q · (log q - log m - KL(q || m))

Example: p = [1/2, 1/4, 1/4] and q = [1/4, 1/2, 1/4]. KL(p || q) = 1/2 · ln 2 - 1/4 · ln 2 = 0.173 with the gradient
[-1/4, 1/4, 0], and KL(q || p) = 0.173 with the gradient [1/4 · (-0.693 - 0.173), 1/2 · (0.693 - 0.173), 1/4 · (-0.173)]
= [-0.217, 0.260, -0.043]. Over two ranks with the ids 0 1 and 2, the sums of each rank's ids are 0.173 and 0. The
second gradient needs the KL of the full row, so the ranks exchange these sums before the gradient is computed.

`forward_kl`, `reverse_kl`, `mixed_kl` and `generalized_jsd` are the same divergences of given log-probabilities.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.base.fused import Fused
from dtrain.losses.head.softmax import FusedGradientSum, RequestedStatistics, log_softmax_, tile_statistics
from dtrain.losses.head.sources import HeadLogits, Scaling, tile_rows_of
from dtrain.losses.head.vocabulary import (
    UNSHARDED,
    Group,
    HeadInput,
    Stats,
    VocabShard,
    compute_dtype,
    group_size,
    merge,
)
from dtrain.parallel.collectives import all_gather


class KlSums(NamedTuple):
    """Sums over tokens.

    Attributes:
        total: The loss. Differentiable.
        forward: KL(p_teacher || p_student), without gradient.
        reverse: KL(p_student || p_teacher), without gradient.
    """

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
    """Sum a divergence between teacher and student over tokens.

    The divergence is forward_share · KL(p_teacher || p_student) + (1 - forward_share) · KL(p_student || p_teacher) with
    p = softmax(logits / temperature) over the full vocabulary. It is not multiplied by temperature². With `jsd_beta` it
    is beta · KL(p_teacher || m) + (1 - beta) · KL(p_student || m), m = beta · p_teacher + (1 - beta) · p_student.

    The models may have any sizes and dtypes, but must have the same vocabulary with the same sharding. Everything is
    computed in max(float32, the dtypes of both models). Only the student receives gradients, in the dtypes of its
    inputs. A second backward raises RuntimeError.

    Args:
        student: Hidden states and head of the student.
        teacher: Hidden states and head of the teacher.
        index: Flat positions of the tokens, [T], each at most once, the same on every rank of the group. Other
            positions are not computed and have a gradient of 0, even if they are NaN.
        forward_share: The share of the forward KL, in [0, 1].
        jsd_beta: The teacher's share of the mixture, in (0, 1). None: the KLs, not the Jensen-Shannon divergence.
        temperature: Divides the logits of both models.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens per tile of logits. None: `sources.tile_rows_of`.

    Returns:
        The sums, on every rank. The gradient of the student's weight is complete. The gradient of its hidden states is
        this rank's part and must be summed over the group.

    Raises:
        ValueError: If the temperature, a softcap, the share or beta is out of range, or the vocabularies differ.

    Collectives:
        Per tile, two all-gathers of four numbers per token. Also that of `tile_rows_of` if `rows_per_tile` is None.

    Reference:
        Agarwal et al., arXiv:2306.13649, equation 1 (generalized Jensen-Shannon divergence).
    """
    check_share(forward_share)
    if jsd_beta is not None:
        check_beta(jsd_beta, "jsd_beta")
    if len(student.weight) != len(teacher.weight):
        raise ValueError(
            f"the student's head has {len(student.weight)} tokens here, the teacher's {len(teacher.weight)}"
        )
    shard = shard or UNSHARDED
    max_rows = rows_per_tile or tile_rows_of(student.weight, shard)
    dtype = torch.promote_types(compute_dtype(student.hidden.dtype), teacher.hidden.dtype)

    def logits_of(model: HeadInput) -> HeadLogits:
        scaling = Scaling(temperature, model.softcap)
        return HeadLogits(model.hidden, model.weight, index=index, max_rows=max_rows, scaling=scaling, dtype=dtype)

    token_sum = FusedGradientSum(logits_of(student))
    teacher_logits = logits_of(teacher)
    divergence = _Divergence(forward_share, jsd_beta)
    with torch.no_grad():
        totals = torch.zeros(3, dtype=dtype, device=index.device)
        for rows in token_sum.source.indices():
            totals += _add_tile(token_sum, teacher_logits, rows, divergence, shard.group)
    forward, reverse, jensen_shannon = totals.unbind()
    if jsd_beta is None:
        total = forward_share * forward + (1 - forward_share) * reverse
    else:
        total = jensen_shannon
    return KlSums(token_sum.with_gradient(total), forward, reverse)


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
    """Sum the generalized Jensen-Shannon divergence between teacher and student over tokens.

    This is `kl_sum_from_hidden_states` with jsd_beta=beta, which describes gradients, errors and collectives.

    Args:
        student: Hidden states and head of the student.
        teacher: Hidden states and head of the teacher.
        index: Flat positions of the tokens, [T], each at most once.
        beta: The teacher's share of the mixture, in (0, 1).
        temperature: Divides the logits of both models.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens per tile of logits. None: `sources.tile_rows_of`.

    Returns:
        The sums, on every rank.
    """
    return kl_sum_from_hidden_states(
        student, teacher, index, jsd_beta=beta, temperature=temperature, shard=shard, rows_per_tile=rows_per_tile
    )


def check_share(share: float, name: str = "forward_share") -> None:
    """Raise ValueError if the share of the forward KL is not in [0, 1]."""
    if not 0 <= share <= 1:
        raise ValueError(f"{name}={share}: the forward KL's share must be between 0 and 1")


def check_beta(beta: float, name: str = "beta") -> None:
    """Raise ValueError if the teacher's share of the mixture is not in (0, 1)."""
    if not 0 < beta < 1:
        raise ValueError(f"{name}={beta}: the teacher's share of the mixture must be between 0 and 1")


class _Divergence(NamedTuple):
    """The divergence to sum.

    Attributes:
        forward_share: The share of the forward KL.
        jsd_beta: The teacher's share of the mixture. None: the KLs, not the Jensen-Shannon divergence.
    """

    forward_share: float
    jsd_beta: float | None


def _add_tile(
    token_sum: FusedGradientSum, teacher: HeadLogits, index: slice, divergence: _Divergence, group: Group
) -> Tensor:
    """Return the sums over a tile's tokens [3]: KL(p || q), KL(q || p), and the Jensen-Shannon divergence or 0.

    The gradient of the loss is added to `token_sum`.

    Collectives:
        Two all-gathers of four numbers per token.
    """
    student_tile = token_sum.source.tile(index, token_sum.source.blocks[0])
    teacher_tile = teacher.tile(index, teacher.blocks[0])
    student_lse, teacher_lse = _merged_lse(student_tile.logits, teacher_tile.logits, group)
    # Computed before the logits are replaced by log-probabilities, in place.
    slope = token_sum.source.scaling.slope(student_tile.logits) if token_sum.needs_gradient else None
    log_q, log_p = _log_softmax_of_both(student_tile.logits, teacher_tile.logits, student_lse, teacher_lse)
    divergences = _divergences(log_q, log_p, divergence)  # [4, t], sums over this rank's ids
    if group_size(group) > 1:
        # The gradient needs the divergences of full rows. Every rank adds the gathered parts in the same order, so the
        # sums have the same bits on every rank.
        divergences = all_gather(divergences[None], 0, group).sum(0)
    if token_sum.needs_gradient:
        grad = _gradient(log_q, log_p, divergences.unsqueeze(-1), slope, divergence, token_sum.source.gradient_dtype)
        token_sum.source.add_gradient(student_tile, grad)
    forward, reverse, student_to_mixture, teacher_to_mixture = divergences.sum(-1)
    beta = divergence.jsd_beta or 0.0
    jensen_shannon = beta * teacher_to_mixture + (1 - beta) * student_to_mixture
    return torch.stack([forward, reverse, jensen_shannon])


def _merged_lse(student: Tensor, teacher: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return m and l of the full vocabulary for the student's and the teacher's logits [t, V/tp], [t, 2] each."""
    no_ids = torch.zeros(len(student), 0, dtype=torch.int64, device=student.device)
    is_local = no_ids.bool()
    student_stats = tile_statistics(student, no_ids, is_local, RequestedStatistics()).stats
    teacher_stats = tile_statistics(teacher, no_ids, is_local, RequestedStatistics()).stats
    parts = torch.stack([student_stats, teacher_stats], 1)  # [2 (m, l), 2 (models), t]
    if group_size(group) > 1:
        gathered = all_gather(parts[None], 0, group)  # [ranks, 2, 2, t]
        merged, _ = merge(Stats(*gathered.unbind(1)))
        parts = torch.stack([merged.m, merged.l])
    student_lse, teacher_lse = parts.unbind(1)
    return student_lse.t(), teacher_lse.t()


@Fused
def _log_softmax_of_both(
    student: Tensor, teacher: Tensor, student_lse: Tensor, teacher_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Convert logits [t, V/tp] to log-probabilities, in place, given m and l of the full vocabulary, [t, 2] each."""
    return log_softmax_(student, student_lse), log_softmax_(teacher, teacher_lse)


@Fused
def _divergences(log_q: Tensor, log_p: Tensor, divergence: _Divergence) -> Tensor:
    """Return the sums over this rank's ids of KL(p || q), KL(q || p), KL(q || m) and KL(p || m), [4, t].

    The last two are 0 if there is no mixture m. log_q and log_p are the log-probabilities of the student and the
    teacher at this rank's ids, [t, V/tp].
    """
    gap = log_p - log_q
    forward = log_p.exp().mul_(gap).sum(-1)
    reverse = -log_q.exp().mul_(gap).sum(-1)
    if divergence.jsd_beta is None:
        zeros = torch.zeros_like(forward)
        return torch.stack([forward, reverse, zeros, zeros])
    log_m = _log_mixture(log_q, log_p, divergence.jsd_beta)
    student_to_mixture = log_q.exp().mul_(log_q - log_m).sum(-1)
    teacher_to_mixture = log_p.exp().mul_(log_p - log_m).sum(-1)
    return torch.stack([forward, reverse, student_to_mixture, teacher_to_mixture])


@Fused
def _gradient(
    log_q: Tensor,
    log_p: Tensor,
    full_divergences: Tensor,
    slope: Tensor | float | None,
    divergence: _Divergence,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient with respect to the student's hidden · weightᵀ, [t, V/tp]. The module has the formulas.

    Args:
        log_q: The student's log-probabilities, [t, V/tp]. Overwritten.
        log_p: The teacher's, [t, V/tp]. Overwritten.
        full_divergences: Sums over the full vocabulary, in the order of `_divergences`, [4, t, 1].
        slope: d logits / d product of the student, as `Scaling.slope` returns it.
        divergence: The divergence to differentiate.
        dtype: The dtype of the result.
    """
    if divergence.jsd_beta is not None:
        beta, student_to_mixture = divergence.jsd_beta, full_divergences[2]
        grad = (log_q - _log_mixture(log_q, log_p, beta)).sub_(student_to_mixture)
        grad.mul_(log_q.exp_()).mul_(1 - beta)
    else:
        # weight · (q - p) + (1 - weight) · q · (log q - log p - reverse)
        weight, reverse = divergence.forward_share, full_divergences[1]
        if weight < 1:
            grad = (log_q - log_p).sub_(reverse).mul_(1 - weight).add_(weight).mul_(log_q.exp_())
        else:
            grad = log_q.exp_()  # the difference may be infinite, and 0 · inf is NaN
        grad.sub_(log_p.exp_().mul_(weight))
    return (grad if slope is None else grad.mul_(slope)).to(dtype)


def _log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Return log(beta · p + (1 - beta) · q), [t, V/tp]."""
    return torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))


def gather_log_fractions(parts: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the softmax statistics of two models' logits.

    Args:
        parts: m and l of the student's logits at this rank's ids, m and l of the teacher's, and n other numbers,
            [4 + n, ...].
        group: Ranks over which the vocabulary is sharded.

    Returns:
        log of the student's probability that is on each rank's ids, the same of the teacher, [ranks, ...] each, and the
        n other numbers of every rank, [n, ranks, ...].

    Collectives:
        One all-gather.
    """
    gathered = all_gather(parts.contiguous()[None], 0, group).transpose(0, 1)  # [4 + n, ranks, ...]
    _, log_student = merge(Stats(*gathered[:2].unbind()))
    _, log_teacher = merge(Stats(*gathered[2:4].unbind()))
    return log_student, log_teacher, gathered[4:]


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return Σ p_teacher · (log p_teacher - log p_student) over the last dimension, [..., K] to [...].

    A term with p_teacher = 0 is 0.

    Args:
        student_logprobs: log p_student, [..., K].
        teacher_logprobs: log p_teacher, [..., K].

    Example:
        The distributions of the module's docstring:

        >>> p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
        >>> forward_kl(q.log(), p.log())
        tensor(0.1733)

    Reference:
        Hinton et al., arXiv:1503.02531.
    """
    return _expected_difference(teacher_logprobs, teacher_logprobs, student_logprobs)


def reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    student_neg_entropy: Tensor | None = None,
    log_outside: float = -100.0,
) -> Tensor:
    """Return Σ p_student · (log p_student - log p_teacher) over the last dimension, [..., K] to [...].

    Args:
        student_logprobs: log p_student, [..., K].
        teacher_logprobs: log p_teacher, [..., K].
        student_neg_entropy: None if the K tokens are the full vocabulary. If they are the teacher's top-k, Σ p·log p of
            the student over the full vocabulary, [...]. The sum then includes the other tokens.
        log_outside: log p_teacher of each other token.

    Reference:
        Gu et al., arXiv:2306.08543.
    """
    inside = _expected_difference(student_logprobs, student_logprobs, teacher_logprobs)
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
    """Return weight · forward_kl + (1 - weight) · reverse_kl, [..., K] to [...].

    Args:
        student_logprobs: log p_student, [..., K].
        teacher_logprobs: log p_teacher, [..., K].
        weight: The share of the forward KL, in [0, 1].
        student_neg_entropy: See `reverse_kl`.
        log_outside: See `reverse_kl`.

    Raises:
        ValueError: If `weight` is not in [0, 1].
    """
    check_share(weight, "weight")
    reverse = reverse_kl(student_logprobs, teacher_logprobs, student_neg_entropy, log_outside)
    return weight * forward_kl(student_logprobs, teacher_logprobs) + (1 - weight) * reverse


def generalized_jsd(student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float = 0.5) -> Tensor:
    """Return beta · KL(teacher || m) + (1 - beta) · KL(student || m), m = beta · teacher + (1 - beta) · student.

    The sum is over the K tokens of the last dimension, [..., K] to [...], and over all other tokens of the vocabulary,
    for which the teacher's probability counts as 0. Their m is (1 - beta) · student, so each of them has
    log student - log m = -log(1 - beta), and their sum needs only the student's probability outside of the K tokens.

    Args:
        student_logprobs: log p_student, [..., K].
        teacher_logprobs: log p_teacher, [..., K].
        beta: The teacher's share of the mixture, in (0, 1).

    Raises:
        ValueError: If `beta` is not in (0, 1).

    Reference:
        Agarwal et al., arXiv:2306.13649, equation 1.
    """
    check_beta(beta)
    log_student_weight, log_teacher_weight = math.log1p(-beta), math.log(beta)
    mixed = torch.logaddexp(student_logprobs + log_student_weight, teacher_logprobs + log_teacher_weight)
    outside = 1 - student_logprobs.exp().sum(-1)
    student_to_mixed = _expected_difference(student_logprobs, student_logprobs, mixed) - log_student_weight * outside
    teacher_to_mixed = _expected_difference(teacher_logprobs, teacher_logprobs, mixed)
    return beta * teacher_to_mixed + (1 - beta) * student_to_mixed


def _expected_difference(logprobs: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return Σ p · (first - second) over the last dimension, with p = exp(logprobs).

    Terms with p = 0 are 0 and have finite gradients, although their log-probabilities may be -inf.
    """
    p = logprobs.exp()
    is_zero = p == 0
    difference = torch.where(is_zero, 0, first) - torch.where(is_zero, 0, second)
    return (p * difference).sum(-1)
