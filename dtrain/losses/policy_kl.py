"""The KL divergence KL(π ‖ π_ref) as a term of a policy loss: its estimators, and what its gradient is.

Estimators at a token that π_old drew, x = log π/π_ref (Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html):

    k1  x                    unbiased, may be negative
    k2  x²/2                 biased, never negative
    k3  exp(−x) − 1 + x      unbiased, never negative

An unbiased value has no unbiased gradient by itself: the derivative of k1 is zero in expectation, that of k3 is the
forward KL's, that of k2 the reverse KL's (Tang and Munos, arXiv:2506.09477; Liu et al., arXiv:2510.01555; Shah et al.,
arXiv:2512.21852). So the gradient is chosen, r being π/π_old of the level of importance sampling:

    importance  r·k, r with its gradient: the reverse KL's, off-policy too (DeepSeek-V3.2, arXiv:2512.02556, equation 7;
                TRL 1.16's default)
    direct      k alone: with k3 the loss of GRPO's paper (arXiv:2402.03300, equation 4) and of TRL before
    reward      value k, gradient that of sg[k]·r: as if −β·k had been a part of the token's reward. With k1 the reverse
                KL's, on-policy and off-policy
    k2          value k, gradient that of k2 (verl's "k3+"): the reverse KL's, on-policy
"""

import torch
from torch import Tensor

from dtrain.losses.policy_losses import bounded_exp


def estimate(logps: Tensor, ref_logps: Tensor, estimator: str = "k3") -> Tensor:
    """k1, k2 or k3 of KL(π ‖ π_ref) at each token, of the arguments' shape, with its own derivative."""
    log_ratio = logps - ref_logps
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return bounded_exp(-log_ratio) - 1 + log_ratio


def kl_term(logps: Tensor, ref_logps: Tensor, ratio: Tensor, estimator: str, gradient: str) -> Tensor:
    """The term at each token, before β; ratio [n, S] is π/π_old with its gradient."""
    kl = estimate(logps, ref_logps, estimator)
    if gradient == "direct":
        return kl
    if gradient == "importance":
        return ratio * kl
    value = kl.detach()
    slope = estimate(logps, ref_logps, "k2") if gradient == "k2" else value * ratio
    return value + (slope - slope.detach())


def k3_of(first: Tensor, second: Tensor) -> Tensor:
    """k3 of KL(first ‖ second) at tokens that `first` drew, without gradient."""
    return estimate(first.detach(), second.detach(), "k3")


def is_known(logps: Tensor | None, mask: Tensor) -> Tensor:
    """mask [n, S] less the tokens whose probability is 0: what a top-k or top-p filter leaves out has log −inf."""
    return mask if logps is None else mask & (logps != -torch.inf)
