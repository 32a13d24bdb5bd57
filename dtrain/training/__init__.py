"""A training run: its checks, the loop, resume, evaluations, the table of methods, and what a run writes.

registry              the table of the methods, and recipes of them; imports no torch
trainer               the loop
spec, setup           everything that a recipe, its files and a world decide: `resolve`, topic by topic
host                  the hosts of `resolve`: a rank of a run; a dry run
preflight             a recipe before a run: its problems, and what the run would fetch first
sizing                sizes that a recipe leaves to `auto`, the same on all ranks
eval_sets             the sets of `eval`
resume, directory     the start of a run; its directory and lock
evaluations           judged answers within a run
summary               the first and last lines on the terminal
metrics               rows of metrics.jsonl and their sinks
"""

from dtrain.training.registry import (
    METHODS,
    REWARD_MODEL,
    SECTIONS,
    TEACHER,
    VARIANTS,
    convert_recipe,
    load_recipe,
    method_class,
    method_of,
    model_keys,
    recipe_and_problems,
    recipe_keys,
)

__all__ = [
    "METHODS",
    "REWARD_MODEL",
    "SECTIONS",
    "TEACHER",
    "VARIANTS",
    "convert_recipe",
    "load_recipe",
    "method_class",
    "method_of",
    "model_keys",
    "recipe_and_problems",
    "recipe_keys",
]
