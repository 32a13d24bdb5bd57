"""Table of the losses of SFT: for each name its function, its options, their defaults and ranges.

The losses and the checks of a recipe both read it, so it imports no torch. The functions are in `head.weighted_sum`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dtrain.base.ranges import Range
from dtrain.losses.user_losses import import_loss, is_user_loss


@dataclass(frozen=True)
class TokenLoss:
    """A loss of `sft.loss`.

    Attributes:
        function: Key of `head.weighted_sum.FORMULAS`, or a user's function.
        options: The function's options and their defaults.
        smooths: Whether `sft.label_smoothing` can be used with it. Only a cross entropy has a meaning for a target that
            is a distribution.
    """

    function: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    smooths: bool = False


LOSSES: Mapping[str, TokenLoss] = MappingProxyType(
    {
        "nll": TokenLoss("nll", smooths=True),
        "dft": TokenLoss("dft"),  # Wu et al., arXiv:2508.05629
    }
)


def is_loss_name(name: str) -> bool:
    """Check for a value of `sft.loss`: a name of `LOSSES`, or a user's loss."""
    return name in LOSSES or is_user_loss(name, "sft.loss")


def find_loss(name: str) -> TokenLoss:
    """Return the row of a known loss. Raises UserError if a user's loss cannot be used."""
    if name in LOSSES:
        return LOSSES[name]
    return import_loss(name, "sft.loss", TokenLoss)


RANGES: Mapping[str, Range] = MappingProxyType({})
"""Ranges of options. Options that are not listed accept any finite number."""
