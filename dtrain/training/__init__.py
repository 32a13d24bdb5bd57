"""A training run: its checks, the loop, resume, evaluations, the table of methods, and what a run writes.

registry              the table of the methods, and recipes of them; imports no torch
trainer               the loop
inputs                a recipe in a world, with everything that follows before a file is read
setup                 a module per topic: its checks and its facts
spec                  the frozen spec of a run, and `resolve`, which builds it on each rank
dry_run, host         the same functions in one process, which collects problems; the table of all checks
step_spec             the spec of one optimizer step, for devices that need not be there
model_facts           facts about a model that follow from its shapes
full_rows             rows of the largest size that a recipe allows
preflight, hub_files  a recipe before a run: its problems, and files that the run would fetch first
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
    build_method,
    convert_recipe,
    load_recipe,
    method_class,
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
    "build_method",
    "model_keys",
    "recipe_and_problems",
    "recipe_keys",
]
