"""A training run: its checks, the loop, resume, evaluations, and what it writes down.

`dtrain.run` is this package, and a function too: `dtrain.run(recipe, overrides)` trains, as `dtrain run` does.

trainer               the loop
spec, stages          everything that a recipe, its files and a world decide: `resolve`, stage by stage
host                  the hosts of `resolve`: a rank of a run; a dry run
preflight             a recipe before a run: its problems, and what the run would fetch first
sizing                sizes that a recipe leaves to `auto`, the same on all ranks
eval_sets             the sets of `eval`
resume, directory     the start of a run; its directory and lock
evaluations           judged answers within a run
summary               the first and last lines on the terminal
metrics               rows of metrics.jsonl and their sinks
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import dtrain


class _RunPackage(ModuleType):
    """The package as a function: `import dtrain.run.trainer` binds the name `dtrain.run` to the package."""

    def __call__(self, recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Any:
        return dtrain.run_recipe(recipe, overrides)


sys.modules[__name__].__class__ = _RunPackage
