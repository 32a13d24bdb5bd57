"""Losses of single replies that are wanted or not. They need torch alone."""

from torch import Tensor


def kto(rewards: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """1 − σ(r − z) where the reply is wanted, 1 − σ(z − r) where it is not, [replies] each (Ethayarajh et al.,
    arXiv:2402.01306, equation 8 with λ apart).

    rewards r = β · log(p / p_ref) of the reply [replies]; divergence z = β · KL, a scalar and a constant.
    """
    return (divergence - rewards).sigmoid(), (rewards - divergence).sigmoid()


def apo_zero_unpaired(rewards: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """1 − σ(r) where the reply is wanted, σ(r) where it is not (D'Oosterlinck et al., arXiv:2408.06266, APO-zero's two
    terms). `divergence` is not read."""
    return (-rewards).sigmoid(), rewards.sigmoid()
