"""Where completions were not drawn from π_old: weights that correct for the sampler's probabilities, and sequences that
are left out because they have become too unlikely.
"""

import math

import torch
from torch import Tensor

from dtrain.losses.policy_losses import Correction, bounded_exp, mean_by_sequence
from dtrain.losses.sequences import Sequences


def correction(
    old_logps: Tensor,
    sampling_logps: Tensor,
    known: Tensor,
    sequences: Sequences,
    *,
    mode: str,
    smallest: float | None,
    largest: float | None,
) -> Correction | None:
    """Weights w = π_old/π_sampler by token, or their product over a sequence, as TRL 1.16 has them.

    truncate: w is cut to [smallest, largest] (Yao et al., "Your efficient RL framework secretly brings you off-policy
    RL training", 2025); mask: w is 0 outside (Liu et al., "When speed kills stability", 2025). None is no bound. known
    [n, S]: the tokens with both log-probabilities; the others' weight is 1. No gradient.
    """
    if mode == "none":
        return None
    log_weights = torch.where(known, old_logps - sampling_logps, 0.0).detach()
    by_sequence = mode.startswith("sequence")
    if by_sequence:
        log_weights = sequences.spread(sequences.sum(log_weights))
    weights = bounded_exp(log_weights)
    if mode.endswith("truncate"):
        weights = weights.clamp(smallest or 0.0, math.inf if largest is None else largest)
    else:
        outside = torch.zeros_like(weights, dtype=torch.bool)
        if smallest is not None:
            outside |= weights < smallest
        if largest is not None:
            outside |= weights > largest
        weights = weights.masked_fill(outside, 0.0)
    return Correction(weights, by_sequence)


def off_policy_mask(
    logps: Tensor, sampling_logps: Tensor, advantages: Tensor, known: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """[n, S] bool: true but where A < 0 and log π_sampler/π is above `threshold` in the mean of the sequence (DeepSeek-
    V3.2's off-policy sequence masking, arXiv:2512.02556, equation 9)."""
    drift = mean_by_sequence(torch.where(known, sampling_logps - logps, 0.0).detach(), sequences)
    return (advantages >= 0) | (drift <= threshold)
