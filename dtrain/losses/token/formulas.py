"""Losses of tokens by the log-probability of their label: the functions. `options` has their names and options.

A loss takes log-probabilities [t] and gives losses [t], each by its own log-probability alone. The sum over the global
batch's trained tokens is divided by their number. `head.weighted_sum.token_loss_sums` calls it tile by tile and asks
autograd for its derivative, so it is written as any differentiable function; what is detached is a constant.
"""

from collections.abc import Callable

from torch import Tensor

TokenLossFn = Callable[[Tensor], Tensor]


def nll(logprobs: Tensor) -> Tensor:
    """−log p."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """−p · log p, p a constant (DFT: Wu et al., arXiv:2508.05629, equation 9)."""
    return -logprobs.exp().detach() * logprobs
