"""A training run: its checks, the loop, resume, evaluations, and what it writes down.

`dtrain.run` is this package, and a function too: `dtrain.run(recipe, overrides)` trains, as `dtrain run` does.

trainer                       the loop
check                         the problems of a recipe
preflight                     the problems of the files that it names, without torch
preflight_models, preflight_data
                              those of models; of data
lora_section, eval_section    the same of its sections `lora` and `eval`
eval_sets                     the sets of `eval`
spec, stages                  everything that a recipe, its files and a world decide: `resolve`, stage by stage
host, dry_run                 the hosts of `resolve`: a rank of a run; the dry run of `dtrain validate`
resume, directory             the start of a run; its directory and lock
evaluations                   judged answers within a run
summary                       the first and last lines on the terminal
metrics                       rows of metrics.jsonl and their sinks
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
