"""Formulas of policy losses: log-probabilities and advantages to a loss per token, one function per loss.

Notation: A is the advantage, (ε_low, ε_high) the clip, and r the ratio π(token)/π_old(token), or the geometric mean of
this ratio over the sequence (`importance_sampling_level`). π_old is the policy that the update started from. sg[...]
stops the gradient. Every function returns one number per token, [n, S]. A loss of a sequence is repeated at each of its
tokens, so that the mean over the tokens is the loss of the sequence.

Example: A = 1, log π = -1.0, log π_old = -1.5 and clip (0.2, 0.2). r = exp(0.5) = 1.65, so the clipped loss is
-min(1.65, 1.2) = -1.2, and the token has no gradient.

The file has three parts: sums over sequences (`RowSequences`, `Documents`), the losses (`FORMULAS`), and terms that
are added to losses or multiply them (KL divergence from a reference, correction of the sampler's probabilities).
`options` is the table of the losses: how each is normalised, its options and their defaults.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.batch import sum_by_document
from dtrain.parallel.collectives import all_reduce_in_backward, all_reduce_in_forward

# Bounds of logarithms in VESPO.
_SMALLEST_WEIGHT = math.log(1e-8)
_LARGEST_LOG = 20.0


class RowSequences:
    """Sequences, one per row. No collectives.

    Args:
        mask: [n, S] bool, True at trained tokens.

    Attributes:
        lengths: Number of trained tokens of each sequence, [n] int64.
    """

    def __init__(self, mask: Tensor):
        self._shape = mask.shape
        self.lengths = mask.long().sum(1)

    def sum(self, values: Tensor) -> Tensor:
        """Sum values of tokens over each sequence, [..., n, S] to [..., n]."""
        return values.sum(-1)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each sequence at its tokens, [..., n] to [..., n, S]."""
        return values.unsqueeze(-1).expand(*values.shape[:-1], *self._shape)


class Documents:
    """Sequences that are documents of packed or padded rows, possibly sharded over context-parallel ranks.

    Args:
        ids: The document of each local token, -1 on padding, [n, S] int64 (`batch.document_ids`).
        count: Number of documents in the micro-batch, over all cp ranks.
        mask: [n, S] bool, True at trained tokens.
        group: Ranks over which the sequence is sharded. None if it is not.

    Attributes:
        lengths: Number of trained tokens of each document over all cp ranks, [count] int64.

    Collectives:
        One all-reduce over `group` in the constructor, one in each `sum`, and one in the backward of each `sum`. The
        latter sums the gradients, because each cp rank has the loss of its own tokens.
    """

    def __init__(self, ids: Tensor, count: int, mask: Tensor, group: dist.ProcessGroup | None = None):
        self._ids, self._count = ids, count
        self._group = None if group is None or group.size() == 1 else group
        self.lengths = self.sum(mask.long())

    def sum(self, values: Tensor) -> Tensor:
        """Sum values of tokens over each document and all cp ranks, [..., n, S] to [..., count]."""
        local_totals = sum_by_document(values, self._ids, self._count)
        if self._group is None:
            return local_totals
        totals = all_reduce_in_forward(local_totals, self._group)
        return all_reduce_in_backward(totals, self._group)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each document at its local tokens, [..., count] to [..., n, S]. 0 on padding."""
        padded = torch.cat([values.new_zeros(*values.shape[:-1], 1), values], -1)  # entry 0 is for padding, id -1
        return padded[..., self._ids + 1]


Sequences = RowSequences | Documents


@dataclass(frozen=True)
class Tokens:
    """Inputs of a policy loss for a micro-batch.

    Tensors are [n, S] in max(float32, the dtype of `logps`), or bool. Values at unknown or untrained tokens are 0. Only
    `logps`, `log_ratio`, `ratio` and `entropies` have gradients.

    A token is impossible if π or π_old is 0 for it, because a top-k or top-p filter excludes it now.

    Attributes:
        logps: log π. 0 for impossible tokens.
        old_logps: log π_old. 0 for impossible tokens.
        log_ratio: log π - log π_old of each token.
        ratio: r, at the level of importance sampling.
        advantages: A.
        mask: True at trained tokens.
        possible: `mask` without impossible tokens.
        sequences: Sums over sequences.
        clip: ε_low and ε_high.
        correction: Weights for the mismatch of sampler and π_old. None: no correction.
        reference: log π_ref. None without a reference.
        has_reference: True where `reference` is known.
        sampler: log π_sampler. None if the sampler's log-probabilities are not given.
        is_sampled: True where `sampler` is known.
        entropies: Entropies of the distributions. None if they are not given.
    """

    logps: Tensor
    old_logps: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    possible: Tensor
    sequences: Sequences
    clip: Sequence[float]
    correction: "Correction | None"
    reference: Tensor | None
    has_reference: Tensor
    sampler: Tensor | None
    is_sampled: Tensor
    entropies: Tensor | None


class Correction(NamedTuple):
    """Importance weights π_old/π_sampler within bounds.

    Attributes:
        weights: [n, S].
        by_sequence: Whether all tokens of a sequence have the same weight.
        outside: [n, S] bool, True where the weight was outside the bounds, and was clamped or set to 0.
    """

    weights: Tensor
    by_sequence: bool
    outside: Tensor


class Surrogate(NamedTuple):
    """A policy loss of tokens, and the tokens whose gradient the clip removes.

    Attributes:
        loss: [n, S].
        clipped_low: [n, S] bool, True where π has become too small. None: the loss has no lower bound.
        clipped_high: [n, S] bool, True where π has become too large. None: the loss has no upper bound.
    """

    loss: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None


def clipped(tokens: Tokens, *, delta: float | None, dual_clip: float | None) -> Surrogate:
    """Compute -min(r·A, clip(r, 1 - ε_low, 1 + ε_high)·A).

    ε_high > ε_low is DAPO's clip-higher. `delta` and `dual_clip` are two forms of the same bound for A < 0, if their
    value is the same and above 1 + ε_high.

    Args:
        tokens: Inputs.
        delta: δ > 1 + ε_high, an upper bound of r in the first term (two-sided clipping). None: no bound.
        dual_clip: c > 1. The loss is at most -c·A if A < 0. None: no bound.

    Reference:
        PPO: Schulman et al., arXiv:1707.06347, equation 7. GRPO: Shao et al., arXiv:2402.03300. DAPO: Yu et al.,
        arXiv:2503.14476. Two-sided clipping: INTELLECT-2, arXiv:2505.07291. Dual clip: Ye et al., arXiv:1912.09729.
    """
    low, high = 1 - tokens.clip[0], 1 + tokens.clip[1]
    ratio, advantages = tokens.ratio, tokens.advantages
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -dual_clip * advantages), loss)
    too_low = (ratio < low) & (advantages < 0)
    too_high = (ratio > high) & (advantages > 0)
    return Surrogate(loss, too_low, too_high)


def cispo(tokens: Tokens, *, cispo_lower_clip: bool) -> Surrogate:
    """Compute -sg[min(r, ε_high)]·A·log π. The weight is clipped, so every token keeps a gradient.

    Args:
        tokens: Inputs. As in TRL, ε_high is the upper bound of r, not of r - 1. ScaleRL uses 5.
        cispo_lower_clip: Whether the weight is at least 1 - ε_low, as in equation 4 of MiniMax-M1. TRL 1.16 has no
            lower bound.

    Reference:
        CISPO: MiniMax-M1, arXiv:2506.13585. ScaleRL, arXiv:2510.13786.
    """
    low = 1 - tokens.clip[0] if cispo_lower_clip else None
    weights = tokens.ratio.detach().clamp(low, tokens.clip[1])
    too_low = None if low is None else tokens.ratio < low
    return Surrogate(-weights * tokens.advantages * tokens.logps, too_low, tokens.ratio > tokens.clip[1])


def sapo(tokens: Tokens, *, sapo_temperature_pos: float, sapo_temperature_neg: float) -> Surrogate:
    """Compute -(4/τ)·σ(τ·(r - 1))·A, a smooth gate instead of the clip. Its slope by r is -A at r = 1.

    Args:
        tokens: Inputs.
        sapo_temperature_pos: τ for A > 0.
        sapo_temperature_neg: τ for A <= 0.

    Reference:
        SAPO: Gao et al., arXiv:2511.20347.
    """
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
    """Compute -sg[φ(W)]·A·log π with φ(W) = W^k · exp(λ·(1 - W)) and W = Π π/π_old over the sequence.

    Weights of the sampler's correction are multiplied into W, and not with the loss. As in TRL and the authors' code,
    log r is clamped to ±20 and log W to [log 1e-8, 20].

    Args:
        tokens: Inputs.
        vespo_k_pos: k for A >= 0.
        vespo_lambda_pos: λ for A >= 0.
        vespo_k_neg: k for A < 0.
        vespo_lambda_neg: λ for A < 0.

    Reference:
        VESPO, arXiv:2602.10693.
    """
    log_ratio = tokens.log_ratio.detach().clamp(-_LARGEST_LOG, _LARGEST_LOG)
    log_weight = tokens.sequences.to_tokens(tokens.sequences.sum(log_ratio))
    if tokens.correction is not None:
        log_correction = tokens.correction.weights.log().clamp(_SMALLEST_WEIGHT, _LARGEST_LOG)
        if not tokens.correction.by_sequence:
            log_correction = torch.where(tokens.possible, log_correction, 0.0)
            log_correction = tokens.sequences.to_tokens(tokens.sequences.sum(log_correction))
        log_weight = log_weight + log_correction
    log_weight = log_weight.clamp(_SMALLEST_WEIGHT, _LARGEST_LOG)
    is_good = tokens.advantages >= 0
    k = _by_sign(is_good, vespo_k_pos, vespo_k_neg, tokens.advantages)
    rate = _by_sign(is_good, vespo_lambda_pos, vespo_lambda_neg, tokens.advantages)
    phi = bounded_exp(k * log_weight + rate * (1 - log_weight.exp()))
    return Surrogate(-phi * tokens.advantages * tokens.logps)


def dppo_tv(tokens: Tokens, *, dppo_ratio_cap: float) -> Surrogate:
    """Compute -min(r, c)·A, or 0 for tokens whose probability has changed too much.

    The loss is 0 if A > 0 and π - π_old > ε_high, or if A <= 0 and π_old - π > ε_low.

    If r > c, the gradient is that of -c·A·log π, as in truncated importance sampling. verl has the same gradient,
    written as -sg[min(r, c)]·A·log π. prime-rl has no c. Both use 0.2 for ε.

    Args:
        tokens: Inputs.
        dppo_ratio_cap: c.

    Reference:
        DPPO with binary total variation: Qi et al., arXiv:2602.04879.
    """
    change = tokens.logps.detach().exp() - tokens.old_logps.exp()
    return _trust_region(tokens, change, dppo_ratio_cap)


def dppo_kl(tokens: Tokens, *, dppo_ratio_cap: float) -> Surrogate:
    """Compute `dppo_tv` with a KL divergence in place of π - π_old.

    The divergence is KL(π_old ‖ π) of the binary variable "this token or another token", with the sign of π - π_old. So
    ε bounds only changes in the direction that A demands.

    Args:
        tokens: Inputs.
        dppo_ratio_cap: c.

    Reference:
        DPPO with binary KL: Qi et al., arXiv:2602.04879.
    """
    old, now = tokens.old_logps.exp(), tokens.logps.detach().exp()
    other_old = 1 - old  # the probability of another token
    other_now = (1 - now).clamp(min=torch.finfo(now.dtype).tiny)
    divergence = -old * tokens.log_ratio.detach() + torch.xlogy(other_old, other_old / other_now)
    change = torch.where(now < old, -divergence, divergence)
    return _trust_region(tokens, change, dppo_ratio_cap)


def gmpo(tokens: Tokens) -> Surrogate:
    """Compute -A·exp(mean over the sequence of the clipped log r), the geometric mean of clipped ratios.

    log r of each token is clipped to at most ε_high if A > 0, and to at least -ε_low otherwise. The paper uses 0.4 for
    both. `importance_sampling_level` is not read.

    Reference:
        GMPO: Zhao et al., arXiv:2507.20673.
    """
    low, high = tokens.clip
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    mean = mean_by_sequence(bounded, tokens.sequences)
    too_low = (log_ratio < -low) & (advantages < 0)
    too_high = (log_ratio > high) & (advantages > 0)
    return Surrogate(-bounded_exp(mean) * advantages, too_low, too_high)


def reinforce(tokens: Tokens) -> Surrogate:
    """Compute -A·log π, the policy gradient without a ratio. Only the metrics read π_old.

    Reference:
        Williams, 1992. GPG: Chu et al., arXiv:2504.02546.
    """
    return Surrogate(-tokens.advantages * tokens.logps)


# The functions by name. `options.LOSSES` refers to them by name, because it must not import torch.
FORMULAS: dict[str, Callable[..., Surrogate]] = {
    "clipped": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gmpo": gmpo,
    "reinforce": reinforce,
}


def mean_by_sequence(values: Tensor, sequences: Sequences) -> Tensor:
    """Return the mean over the sequence at each of its tokens, [n, S].

    Args:
        values: [n, S], 0 at untrained tokens.
        sequences: The sequences.
    """
    return sequences.to_tokens(sequences.sum(values) / sequences.lengths.clamp(min=1))


def bounded_exp(values: Tensor) -> Tensor:
    """Return exp(values), [...], which is finite: exponents are at most the dtype's largest, minus 8.

    The margin of e^8 allows products with other factors. For example, in float32 the largest result is 1.1e35.
    """
    return _bounded(values).exp()


def _bounded(exponents: Tensor) -> Tensor:
    """Clamp exponents so that their exponentials are finite."""
    return exponents.clamp(max=math.log(torch.finfo(exponents.dtype).max) - 8)


def _by_sign(is_positive: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    """Return one of two numbers for each token, in the shape and dtype of `like`."""
    return torch.full_like(like, negative).masked_fill(is_positive, positive)


def _trust_region(tokens: Tokens, change: Tensor, cap: float) -> Surrogate:
    """Compute the loss of `dppo_tv` and `dppo_kl`.

    Args:
        tokens: Inputs.
        change: The change of the probability, which ε bounds. Negative if the probability has fallen.
        cap: c, the largest ratio.
    """
    too_high = (tokens.advantages > 0) & (change > tokens.clip[1])
    too_low = (tokens.advantages <= 0) & (-change > tokens.clip[0])
    # Equal to c, with the gradient of c · log π.
    capped = tokens.ratio.detach().clamp(max=cap) * (tokens.logps - tokens.logps.detach()).exp()
    ratio = torch.where(tokens.ratio > cap, capped, tokens.ratio)
    loss = torch.where(too_high | too_low, 0.0, -ratio * tokens.advantages)
    return Surrogate(loss, too_low & (tokens.advantages < 0), too_high)


def kl_term(logps: Tensor, ref_logps: Tensor, ratio: Tensor, estimator: str, gradient: str) -> Tensor:
    """Estimate KL(π ‖ π_ref) at each token, [n, S], before the factor β.

    Estimators for a token that was sampled from π_old, with x = log π/π_ref:

        k1  x                    unbiased, may be negative
        k2  x²/2                 biased, never negative
        k3  exp(-x) - 1 + x      unbiased, never negative

    Example: log π = -1.0 and log π_ref = -1.5, so x = 0.5: k1 = 0.5, k2 = 0.125 and k3 = 0.107.

    The derivative of an unbiased estimator is not an unbiased gradient: the expectation of the derivative is 0 for k1,
    the gradient of the forward KL for k3, and that of the reverse KL for k2. So the gradient is chosen separately:

        importance  r·k, with the gradient of r. This is the gradient of the reverse KL, also off-policy (DeepSeek-V3.2,
                    arXiv:2512.02556, equation 7). TRL 1.16's default.
        direct      k. With k3 it is the loss of GRPO's paper (arXiv:2402.03300, equation 4) and of TRL before 1.16.
        reward      The value of k with the gradient of sg[k]·r, as if -β·k were part of the token's reward. With k1 it
                    is the gradient of the reverse KL, on-policy and off-policy.
        k2          The value of k with the gradient of k2 ("k3+" in verl): that of the reverse KL, on-policy.

    Args:
        logps: log π, [n, S].
        ref_logps: log π_ref, [n, S].
        ratio: r, at the level of importance sampling, with its gradient, [n, S].
        estimator: k1, k2 or k3.
        gradient: importance, direct, reward or k2.

    Reference:
        Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html. Gradients: Tang and Munos,
        arXiv:2506.09477; Liu et al., arXiv:2510.01555; Shah et al., arXiv:2512.21852.
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
    """Return the estimator k1, k2 or k3 of KL(π ‖ π_ref) at each token, [...]. Differentiable.

    Example:
        >>> estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
        tensor([0.1250])
    """
    log_ratio = logps - ref_logps
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return bounded_exp(-log_ratio) - 1 + log_ratio


def k3_of(first: Tensor, second: Tensor) -> Tensor:
    """Return the estimator k3 of KL(first ‖ second) in float64, [...], for tokens sampled from `first`. No gradient.

    Near 0, exp(-x) - 1 + x is x²/2. In float32 its digits are lost by cancellation below x = 1e-4, so it is computed
    with expm1 in float64.
    """
    log_ratio = second.detach().double() - first.detach().double()
    return _bounded(log_ratio).expm1() - log_ratio


def is_known(logps: Tensor | None, mask: Tensor) -> Tensor:
    """Remove tokens with a log-probability of -inf, which top-k or top-p excludes, from a mask.

    Args:
        logps: [n, S]. None: the mask is returned unchanged.
        mask: [n, S] bool.

    Returns:
        [n, S] bool.
    """
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
    """Compute importance weights w = π_old/π_sampler for completions that were not sampled from π_old. No gradient.

    The modes, as in TRL 1.16:

        token_truncate, sequence_truncate    w is clamped to [smallest, largest]
        token_mask, sequence_mask            w is 0 outside [smallest, largest]
        seq_mask_tis                         w of the token, 0 if its geometric mean over the sequence is outside
                                             (seq-mask-tis in NeMo-RL)
        none                                 returns None

    In modes of the sequence, w is the product over the tokens of the sequence. For example, two tokens with w = 2 and
    bounds (None, 3): token_mask leaves both weights at 2, and sequence_mask sets both to 0, because 2 · 2 > 3.

    Args:
        old_logps: log π_old, [n, S].
        sampling_logps: log π_sampler, [n, S].
        known: [n, S] bool, True for tokens with both log-probabilities. The weight of the others is 1.
        sequences: The sequences.
        mode: See above.
        smallest: The lower bound. None: no bound.
        largest: The upper bound. None: no bound.

    Reference:
        Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025 (truncate). Liu et
        al., "When speed kills stability", 2025 (mask).
    """
    if mode == "none":
        return None
    log_weights = torch.where(known, old_logps - sampling_logps, 0.0).detach()
    by_sequence = mode.startswith("sequence")
    if by_sequence:
        log_weights = sequences.to_tokens(sequences.sum(log_weights))
    weights = bounded_exp(log_weights)
    compared_weights = weights  # with the bounds
    if mode == "seq_mask_tis":
        compared_weights = bounded_exp(mean_by_sequence(log_weights, sequences))
    outside = torch.zeros_like(weights, dtype=torch.bool)
    if smallest is not None:
        outside |= compared_weights < smallest
    if largest is not None:
        outside |= compared_weights > largest
    if mode.endswith("truncate"):
        lower_bound = 0.0 if smallest is None else smallest
        upper_bound = math.inf if largest is None else largest
        weights = weights.clamp(lower_bound, upper_bound)
    else:
        weights = weights.masked_fill(outside, 0.0)
    return Correction(weights, by_sequence, outside)


def off_policy_mask(
    logps: Tensor, sampling_logps: Tensor, advantages: Tensor, known: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """Return the tokens to train, [n, S] bool: all but sequences that are bad and that π has moved far away from.

    A token is masked if A < 0 and the mean of log π_sampler/π over its sequence is above the threshold.

    Args:
        logps: log π, [n, S].
        sampling_logps: log π_sampler, [n, S].
        advantages: A, [n, S].
        known: [n, S] bool, True for tokens with both log-probabilities.
        sequences: The sequences.
        threshold: The largest mean.

    Reference:
        Off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, equation 9.
    """
    drift = mean_by_sequence(torch.where(known, sampling_logps - logps, 0.0).detach(), sequences)
    return (advantages >= 0) | (drift <= threshold)
