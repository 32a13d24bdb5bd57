"""Methods: what a batch is, which loss, which metrics. One loop, small methods. README.md says how to add one.

Names are imported when they are used: the specs are read where no torch is.

    facts                        what is known of each method beforehand: data, checks, second models
    dpo_section, grpo_section    what must hold in a section, for the recipe's check
    registry                     the methods by name
    method                       what every method can do
    sft, dpo, kto, grpo, distill, reward    how each differs
    precompute                   dpo: the reference's sums, once
    collect, engines             grpo: a rollout; what draws and judges it
    rollout_buffer               grpo: a rollout as tensors
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
