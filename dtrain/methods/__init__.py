"""Methods: what a batch is, which loss, which metrics. One loop, small methods. README.md says how to add one.

Names are imported when they are used: the specs are read where no torch is.

    spec                         the spec of a method, known beforehand: data, checks, second models
    sft_section, dpo_section, kto_section, grpo_section    each method's spec and checks
    distill_section, reward_section    the same
    registry                     the methods by name
    method, rollouts             the base of the methods; rollouts as the source of batches
    sft, dpo, kto, grpo, distill, reward    how each differs
    precompute                   dpo: the reference's sums, once
    on_policy                    distill: the student's own samples, in rollouts as grpo's
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.methods.method import Method
    from dtrain.methods.registry import METHODS

_HOMES = {"METHODS": "registry", "Method": "method"}
__all__ = ["METHODS", "Method"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
