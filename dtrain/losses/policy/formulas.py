"""From log-probabilities and advantages to a policy loss per token: one small function per loss. `options` has
the table of them: how each is normalised, its options and their defaults.

r is π(token)/π_old(token), or a sequence's geometric mean of it (`importance_sampling_level`), A the advantage, and
(ε_low, ε_high) the clip. The gradient through r is that of the probability unless a formula stops it with sg[...]. A
loss is a number per token; a sequence's loss stands at each of its tokens, so that the mean over them is it.

Before the losses: sums over the sequences of a micro-batch, in padded rows, packed rows, and the parts of both that a
context-parallel rank holds. After them: the divergence from a reference, and what corrects for completions that π_old
did not draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.batch import sum_by_document
from dtrain.parallel.collectives import enter_region, leave_region

_SMALLEST_WEIGHT = math.log(1e-8)  # VESPO's floor of a log weight
_LARGEST_LOG = 20.0  # and its ceiling


class RowSequences:
    """Sequences that are the rows of mask [n, S], true at the tokens that count. No collective.

    lengths [sequences]: masked-in tokens of each sequence, int64, whole on every rank.
    """

    def __init__(self, mask: Tensor):
        self._shape = mask.shape
        self.lengths = mask.long().sum(1)

    def sum(self, values: Tensor) -> Tensor:
        """Σ over each sequence, [..., n, S] -> [..., n]"""
        return values.sum(-1)

    def spread(self, values: Tensor) -> Tensor:
        """At each token its sequence's value, [..., n] -> [..., n, S]"""
        return values.unsqueeze(-1).expand(*values.shape[:-1], *self._shape)


class Documents:
    """Sequences that are the documents of packed or padded rows, or the parts of them that a cp rank holds.

    ids [n, S] int64: `batch.document_ids`, −1 on padding; count: documents of the micro-batch, whole. mask [n, S]: true
    at the tokens that count. group: the cp group, None for none. Making one and each `sum` costs an all-reduce over it,
    and the backward of `sum` another: the true derivative where each cp rank's loss is that of its own tokens.
    """

    def __init__(self, ids: Tensor, count: int, mask: Tensor, group: dist.ProcessGroup | None = None):
        self._ids, self._count = ids, count
        self._group = None if group is None or group.size() == 1 else group
        self.lengths = self.sum(mask.long())

    def sum(self, values: Tensor) -> Tensor:
        """Σ over each sequence, [..., n, S] -> [..., count], whole on every rank that has a part of it"""
        sums = sum_by_document(values, self._ids, self._count)
        return sums if self._group is None else enter_region(leave_region(sums, self._group), self._group)

    def spread(self, values: Tensor) -> Tensor:
        """[..., count] -> [..., n, S]"""
        padded = torch.cat([values.new_zeros(*values.shape[:-1], 1), values], -1)  # the first: padding
        return padded[..., self._ids + 1]


Sequences = RowSequences | Documents


@dataclass(frozen=True)
class Tokens:
    """Inputs of a policy loss for a micro-batch, [n, S] each, in max(float32, the dtype of logps); 0 where nothing is
    known. Only logps, what is made of them, and entropies have a gradient.

    logps, log_ratio, ratio: 0 also where the token cannot be drawn any more (π = 0); ratio is of the level asked for,
    log_ratio of the token. correction: weights π_old/π_sampler, None for none.
    """

    logps: Tensor
    old_logps: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    possible: Tensor  # the mask less the tokens with π = 0
    sequences: Sequences
    clip: Sequence[float]
    correction: "Correction | None"
    reference: Tensor | None
    has_reference: Tensor
    sampler: Tensor | None
    is_sampled: Tensor
    entropies: Tensor | None


class Correction(NamedTuple):
    """weights: π_old/π_sampler, bounded, [n, S]; by_sequence: one value for all tokens of a sequence; outside [n, S]:
    where the bounds cut it or made it 0."""

    weights: Tensor
    by_sequence: bool
    outside: Tensor


class Surrogate(NamedTuple):
    """loss [n, S]; clipped_low, clipped_high: where π has moved too far and gets no gradient, None: nowhere."""

    loss: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None


def clipped(tokens: Tokens, *, delta: float | None, dual_clip: float | None) -> Surrogate:
    """−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) (PPO: Schulman et al., arXiv:1707.06347, equation 7; GRPO: Shao et
    al., arXiv:2402.03300). ε_high above ε_low is DAPO's clip-higher (Yu et al., arXiv:2503.14476).

    delta: r in the first term is at most δ > 1 + ε_high (two-sided clipping: INTELLECT-2, arXiv:2505.07291).
    dual_clip: for A < 0 the loss is at most −c·A, c > 1 (Ye et al., arXiv:1912.09729). With δ = c beyond 1 + ε_high the
    two are the same loss.
    """
    low, high = 1 - tokens.clip[0], 1 + tokens.clip[1]
    ratio, advantages = tokens.ratio, tokens.advantages
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -dual_clip * advantages), loss)
    return Surrogate(loss, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def cispo(tokens: Tokens, *, cispo_lower_clip: bool) -> Surrogate:
    """−sg[min(r, ε_high)]·A·log π: the weight is clipped, every token keeps a gradient (CISPO: MiniMax-M1,
    arXiv:2506.13585; ScaleRL, arXiv:2510.13786).

    As in TRL, ε_high is the cap of r itself, not of r − 1; ScaleRL takes 5. With cispo_lower_clip the weight is at
    least 1 − ε_low, as equation 4 of MiniMax-M1 has it; TRL 1.16 has no bound below.
    """
    low = 1 - tokens.clip[0] if cispo_lower_clip else None
    weights = tokens.ratio.detach().clamp(low, tokens.clip[1])
    too_low = None if low is None else tokens.ratio < low
    return Surrogate(-weights * tokens.advantages * tokens.logps, too_low, tokens.ratio > tokens.clip[1])


def sapo(tokens: Tokens, *, sapo_temperature_pos: float, sapo_temperature_neg: float) -> Surrogate:
    """−(4/τ)·σ(τ·(r − 1))·A, τ by the sign of A: a soft gate in the clip's place, whose slope at r = 1 is 1 (SAPO: Gao
    et al., arXiv:2511.20347)."""
    temperature = _by_sign(tokens.advantages > 0, sapo_temperature_pos, sapo_temperature_neg, tokens.advantages)
    gate = torch.sigmoid(temperature * (tokens.ratio - 1)) * 4 / temperature
    return Surrogate(-gate * tokens.advantages)


def vespo(
    tokens: Tokens,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> Surrogate:
    """−sg[φ(W)]·A·log π with φ(W) = W^k · exp(λ·(1 − W)), W = Π π/π_old over the sequence, k and λ by the sign of A
    (VESPO: arXiv:2602.10693).

    A correction of the sampler's probabilities enters W instead of multiplying the loss. As in TRL and the authors'
    code, log r is cut to ±20 and log W to [log 1e-8, 20].
    """
    log_ratio = tokens.log_ratio.detach().clamp(-_LARGEST_LOG, _LARGEST_LOG)
    log_weight = tokens.sequences.spread(tokens.sequences.sum(log_ratio))
    if tokens.correction is not None:
        log_correction = tokens.correction.weights.log().clamp(_SMALLEST_WEIGHT, _LARGEST_LOG)
        if not tokens.correction.by_sequence:
            log_correction = torch.where(tokens.possible, log_correction, 0.0)
            log_correction = tokens.sequences.spread(tokens.sequences.sum(log_correction))
        log_weight = log_weight + log_correction
    log_weight = log_weight.clamp(_SMALLEST_WEIGHT, _LARGEST_LOG)
    is_good = tokens.advantages >= 0
    k = _by_sign(is_good, vespo_k_pos, vespo_k_neg, tokens.advantages)
    rate = _by_sign(is_good, vespo_lambda_pos, vespo_lambda_neg, tokens.advantages)
    phi = bounded_exp(k * log_weight + rate * (1 - log_weight.exp()))
    return Surrogate(-phi * tokens.advantages * tokens.logps)


def dppo_tv(tokens: Tokens, *, dppo_ratio_cap: float) -> Surrogate:
    """−min(r, c)·A where the token's probability has not moved too far, else 0 (DPPO, binary total variation: Qi et
    al., arXiv:2602.04879): π − π_old ≤ ε_high for A > 0, π_old − π ≤ ε_low otherwise.

    Beyond the cap c the gradient is that of c·log π, as in truncated importance sampling. verl writes the same
    gradient as that of −sg[min(r, c)]·A·log π; prime-rl has no cap. Both take 0.2 for ε.
    """
    moved = tokens.logps.detach().exp() - tokens.old_logps.exp()
    return _trust_region(tokens, moved, dppo_ratio_cap)


def dppo_kl(tokens: Tokens, *, dppo_ratio_cap: float) -> Surrogate:
    """Bound moves as `dppo_tv` does, the distance being the KL divergence of "this token or another", from π_old to π
    (DPPO, binary KL: Qi et al., arXiv:2602.04879): only a move in the direction of A's sign is bounded."""
    old, now = tokens.old_logps.exp(), tokens.logps.detach().exp()
    other_old, other = 1 - old, (1 - now).clamp(min=torch.finfo(now.dtype).tiny)
    divergence = -old * tokens.log_ratio.detach() + torch.xlogy(other_old, other_old / other)
    return _trust_region(tokens, torch.where(now < old, -divergence, divergence), dppo_ratio_cap)


def gmpo(tokens: Tokens) -> Surrogate:
    """−A·exp(mean over the sequence of the clipped log r): the geometric mean of ratios that are clipped one by one to
    [exp(−ε_low), exp(ε_high)], on the side that A's sign says (GMPO: Zhao et al., arXiv:2507.20673).

    The clip is that of log r; the paper takes 0.4. The level of importance sampling is this one.
    """
    low, high = tokens.clip
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    mean = mean_by_sequence(bounded, tokens.sequences)
    too_low, too_high = (log_ratio < -low) & (advantages < 0), (log_ratio > high) & (advantages > 0)
    return Surrogate(-bounded_exp(mean) * advantages, too_low, too_high)


def reinforce(tokens: Tokens) -> Surrogate:
    """−A·log π: the policy gradient without a ratio (Williams, 1992; GPG: Chu et al., arXiv:2504.02546). π_old is read
    by the metrics only."""
    return Surrogate(-tokens.advantages * tokens.logps)


def mean_by_sequence(values: Tensor, sequences: Sequences) -> Tensor:
    """values [n, S], 0 at the tokens that do not count -> at each token the mean over its sequence, [n, S]."""
    return sequences.spread(sequences.sum(values) / sequences.lengths.clamp(min=1))


def bounded_exp(values: Tensor) -> Tensor:
    """exp [...] that stays a number: beyond the dtype's range, less a few orders of magnitude, it is constant."""
    return _bounded(values).exp()


def _bounded(exponents: Tensor) -> Tensor:
    return exponents.clamp(max=math.log(torch.finfo(exponents.dtype).max) - 8)


def _by_sign(is_positive: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    return torch.full_like(like, negative).masked_fill(is_positive, positive)


def _trust_region(tokens: Tokens, moved: Tensor, cap: float) -> Surrogate:
    """moved: what ε bounds, negative where the probability fell."""
    too_high = (tokens.advantages > 0) & (moved > tokens.clip[1])
    too_low = (tokens.advantages <= 0) & (-moved > tokens.clip[0])
    capped = tokens.ratio.detach().clamp(max=cap) * (tokens.logps - tokens.logps.detach()).exp()
    ratio = torch.where(tokens.ratio > cap, capped, tokens.ratio)
    loss = torch.where(too_high | too_low, 0.0, -ratio * tokens.advantages)
    return Surrogate(loss, too_low & (tokens.advantages < 0), too_high)


def kl_term(logps: Tensor, ref_logps: Tensor, ratio: Tensor, estimator: str, gradient: str) -> Tensor:
    """The KL divergence KL(π ‖ π_ref) as a term at each token [n, S], before β; ratio [n, S] is π/π_old with its
    gradient.

    Estimators at a token that π_old drew, x = log π/π_ref (Schulman, "Approximating KL divergence", 2020,
    http://joschu.net/blog/kl-approx.html):

        k1  x                    unbiased, may be negative
        k2  x²/2                 biased, never negative
        k3  exp(−x) − 1 + x      unbiased, never negative

    An unbiased value has no unbiased gradient by itself: the derivative of k1 is zero in expectation, that of k3 is the
    forward KL's, that of k2 the reverse KL's (Tang and Munos, arXiv:2506.09477; Liu et al., arXiv:2510.01555; Shah et
    al., arXiv:2512.21852). So the gradient is chosen, r being π/π_old of the level of importance sampling:

        importance  r·k, r with its gradient: the reverse KL's, off-policy too (DeepSeek-V3.2, arXiv:2512.02556,
                    equation 7; TRL 1.16's default)
        direct      k alone: with k3 the loss of GRPO's paper (arXiv:2402.03300, equation 4) and of TRL before
        reward      value k, gradient that of sg[k]·r: as if −β·k had been a part of the token's reward. With k1 the
                    reverse KL's, on-policy and off-policy
        k2          value k, gradient that of k2 (verl's "k3+"): the reverse KL's, on-policy
    """
    kl = estimate(logps, ref_logps, estimator)
    if gradient == "direct":
        return kl
    if gradient == "importance":
        return ratio * kl
    value = kl.detach()
    slope = estimate(logps, ref_logps, "k2") if gradient == "k2" else value * ratio
    return value + (slope - slope.detach())


def estimate(logps: Tensor, ref_logps: Tensor, estimator: str = "k3") -> Tensor:
    """k1, k2 or k3 of KL(π ‖ π_ref) at each token [...], with its own derivative."""
    log_ratio = logps - ref_logps
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return bounded_exp(-log_ratio) - 1 + log_ratio


def k3_of(first: Tensor, second: Tensor) -> Tensor:
    """k3 of KL(first ‖ second) [...], float64, at tokens that `first` drew, without gradient.

    Near 0, exp(−x) − 1 + x is x²/2. In float32 the cancellation leaves nothing of it below x = 1e-4, so it is formed
    with expm1 in float64.
    """
    log_ratio = second.detach().double() - first.detach().double()
    return _bounded(log_ratio).expm1() - log_ratio


def is_known(logps: Tensor | None, mask: Tensor) -> Tensor:
    """mask [n, S] less the tokens whose probability is 0: what a top-k or top-p filter leaves out has log −inf."""
    return mask if logps is None else mask & (logps != -torch.inf)


def correction(
    old_logps: Tensor,
    sampling_logps: Tensor,
    known: Tensor,
    sequences: Sequences,
    mode: str,
    smallest: float | None,
    largest: float | None,
) -> Correction | None:
    """Weights w = π_old/π_sampler by token, or their product over a sequence, as TRL 1.16 has them.

    truncate: w is cut to [smallest, largest] (Yao et al., "Your efficient RL framework secretly brings you off-policy
    RL training", 2025); mask: w is 0 outside (Liu et al., "When speed kills stability", 2025). seq_mask_tis: w by
    token, 0 where its geometric mean over the sequence is outside (NeMo-RL's seq-mask-tis). None is no bound. known
    [n, S]: the tokens with both log-probabilities; the others' weight is 1. No gradient.
    """
    if mode == "none":
        return None
    log_weights = torch.where(known, old_logps - sampling_logps, 0.0).detach()
    by_sequence = mode.startswith("sequence")
    if by_sequence:
        log_weights = sequences.spread(sequences.sum(log_weights))
    weights = bounded_exp(log_weights)
    compared = bounded_exp(mean_by_sequence(log_weights, sequences)) if mode == "seq_mask_tis" else weights
    outside = torch.zeros_like(weights, dtype=torch.bool)
    if smallest is not None:
        outside |= compared < smallest
    if largest is not None:
        outside |= compared > largest
    if mode.endswith("truncate"):
        weights = weights.clamp(smallest or 0.0, math.inf if largest is None else largest)
    else:
        weights = weights.masked_fill(outside, 0.0)
    return Correction(weights, by_sequence, outside)


def off_policy_mask(
    logps: Tensor, sampling_logps: Tensor, advantages: Tensor, known: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """[n, S] bool: true but where A < 0 and log π_sampler/π is above `threshold` in the mean of the sequence (DeepSeek-
    V3.2's off-policy sequence masking, arXiv:2512.02556, equation 9)."""
    drift = mean_by_sequence(torch.where(known, sampling_logps - logps, 0.0).detach(), sequences)
    return (advantages >= 0) | (drift <= threshold)
