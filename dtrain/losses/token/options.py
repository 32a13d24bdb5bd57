"""The losses of supervised fine-tuning by name: what each computes, and its options with their defaults and ranges. The
one table of them, for the functions and for a recipe's check. No torch.

The functions are in `head.weighted_sum`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dtrain.base.ranges import Range


@dataclass(frozen=True)
class TokenLoss:
    """A loss of `sft.loss`.

    function: its name in `head.weighted_sum`. options: what it reads beside the log-probabilities, with the defaults.
    smooths: whether `sft.label_smoothing` has a meaning: the loss is a cross-entropy, which takes any target.
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
"""What an option may be; one that is not named here is any finite number."""
