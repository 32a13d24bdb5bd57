"""Methods: what a batch is, which loss, which metrics. One loop, small methods. README.md says how to add one.

Names are imported when they are used: the facts are read where no torch is.

    registry                     the methods by name
    spec                         what is known of a method beforehand: data, checks, second models
    sft_section, dpo_section, kto_section, grpo_section, distill_section, reward_section
                                 the same of each method, and what must hold in its section of the recipe
    method, rollout_method       the base of all methods; of those that draw completions
    sft, dpo, kto, grpo, distill, reward    how each differs
    on_policy                    distill: the student's own samples, in rollouts as grpo's
    precompute                   dpo: the reference's sums, once
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
