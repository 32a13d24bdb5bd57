"""Losses as a user would write them, which the tests name by import path."""

import torch.nn.functional as F

from dtrain.losses.policy.formulas import Surrogate
from dtrain.losses.preference.options import PreferenceLoss


def focal(logprobs, *, gamma=2.0):
    return -((1 - logprobs.exp()) ** gamma) * logprobs


def same_as_nll(logprobs):
    return -logprobs


def needs_more(logprobs, *, strength):
    return -strength * logprobs


def same_as_sigmoid(pairs, *, beta):
    return -F.logsigmoid(beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def mean_of_pairs(pairs, *, beta):
    return same_as_sigmoid(pairs, beta=beta).mean()


def _odds(pairs, *, beta, offset=0.5):
    chosen, rejected = pairs.chosen / pairs.chosen_lengths, pairs.rejected / pairs.rejected_lengths
    return -F.logsigmoid(beta * (chosen - rejected) - offset)


same_as_simpo = PreferenceLoss(_odds, {"offset": 0.5}, needs_reference=False, needs_lengths=True)


def same_as_reinforce(tokens):
    return -tokens.advantages * tokens.logps


def same_as_clipped(tokens, *, width=0.2):
    ratio, advantages = tokens.ratio, tokens.advantages
    return Surrogate(-(ratio * advantages).minimum(ratio.clamp(1 - width, 1 + width) * advantages))


NOT_A_LOSS = 3


def no_arguments():
    """A mistake: dtrain cannot give it anything."""


def mean_of_tokens(logprobs):
    """A mistake: one number for all tokens."""
    return -logprobs.mean()


def sum_of_ratios(tokens):
    """A mistake: one number for all tokens."""
    return tokens.ratio.sum()


def returns_nothing(logprobs):
    """A mistake: no return."""
