"""Table of the losses of SFT: for each name its function, its options, their defaults and ranges.

The losses and the checks of a recipe both read it, so it imports no torch. The functions are in `head.weighted_sum`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dtrain.base.ranges import Range


@dataclass(frozen=True)
class TokenLoss:
    """A loss of `sft.loss`.

    Attributes:
        function: Name of the function in `head.weighted_sum`.
        options: The function's options and their defaults.
        smooths: Whether `sft.label_smoothing` can be used with it. Only a cross entropy has a meaning for a target that
            is a distribution.
    """

    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    smooths: bool = False


LOSSES: Mapping[str, TokenLoss] = MappingProxyType(
    {
        "nll": TokenLoss("nll", smooths=True),
        "dft": TokenLoss("dft"),  # Wu et al., arXiv:2508.05629
    }
)

RANGES: Mapping[str, Range] = MappingProxyType({})
"""Ranges of options. Options that are not listed accept any finite number."""
