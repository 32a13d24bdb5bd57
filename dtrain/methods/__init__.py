"""Methods: what a batch is, which loss, which metrics. One loop, small methods. README.md says how to add one.

registry                     the table of the methods, and recipes of them; imports no torch
method                       the base of the methods
sft, dpo, kto, grpo, distill, reward    each method with its section
precompute                   dpo: the reference's sums, once
rollouts, student            rollouts as the source of batches; distill: those that the student draws
"""

from typing import TYPE_CHECKING

from dtrain.base.exports import late_names
from dtrain.methods.registry import (
    METHODS,
    REWARD_MODEL,
    SECTIONS,
    TEACHER,
    convert_recipe,
    load_recipe,
    method_class,
    method_of,
    model_keys,
    recipe_and_problems,
    recipe_keys,
)

if TYPE_CHECKING:
    from dtrain.methods.method import Method
else:  # a type checker would accept any name from __getattr__
    __getattr__ = late_names(__name__, {"method": "Method"})

__all__ = [
    "METHODS",
    "REWARD_MODEL",
    "SECTIONS",
    "TEACHER",
    "Method",
    "load_recipe",
    "method_class",
    "method_of",
    "model_keys",
    "recipe_and_problems",
    "recipe_keys",
    "convert_recipe",
]
