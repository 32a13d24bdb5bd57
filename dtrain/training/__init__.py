"""A training run: the loop, the checks of a recipe, resume, evaluations, metrics and the run's directory.

Start with `trainer` (the loop) and `spec.resolve` (all decisions before the loop).

registry              the table of methods; loading recipes for them; imports no torch
trainer               the training loop
inputs                a recipe and its processes, with everything that follows without reading a file
setup                 the checks of a recipe and the facts that decide a run, a module per topic
spec                  the frozen spec of a run, and `resolve`, which builds it on each rank
dry_run, host         the same checks and decisions in one process, which collects all problems
step_spec             the spec of one optimizer step, also for devices that this machine does not have
model_facts           facts about a model that follow from its shapes
full_rows             rows of the largest size that a recipe allows, for plans and measurements
preflight, hub_files  problems of a recipe before a run; files that the run would download first
sizing                sizes that a recipe leaves to `auto`, the same on all ranks
eval_sets             the sets of `eval`
resume, directory     the start of a run from a checkpoint; the run's directory and its lock
evaluations           evaluations during a run
summary               the first and last lines on the terminal
metrics               the rows of metrics.jsonl and their sinks
"""

from dtrain.training.registry import (
    METHODS,
    REWARD_MODEL,
    SECTIONS,
    TEACHER,
    VARIANTS,
    build_method,
    convert_file,
    convert_recipe,
    load_recipe,
    method_class,
    model_keys,
    recipe_and_problems,
    recipe_keys,
    registered_entries,
    trusted_method_class,
)

__all__ = [
    "METHODS",
    "REWARD_MODEL",
    "SECTIONS",
    "TEACHER",
    "VARIANTS",
    "convert_file",
    "convert_recipe",
    "load_recipe",
    "method_class",
    "build_method",
    "model_keys",
    "recipe_and_problems",
    "recipe_keys",
    "registered_entries",
    "trusted_method_class",
]
