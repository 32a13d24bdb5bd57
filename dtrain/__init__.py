"""dtrain: fine-tune open-weight language models; one recipe, any mesh, the same numbers.

`import dtrain` loads no torch: each package is loaded on first access. README.md beside this file says more of each.

commands                              the `dtrain` command and its sub-commands
launch, training                      a run's start, and its loop
rl, inference                         rollouts and their judges; the generation engine
methods                               what a batch is and which loss
policy, checkpoint                    a model on a mesh with its optimizer; its files
memory, adapters                      trades of time for memory; LoRA, DoRA, NF4
data                                  data files to batches
models, losses, optim, attention      the parts of a model and of its update
parallel                              meshes, placements, FSDP and gradients
recipe, base                          the recipe; helpers that every package may import
"""

import importlib
import os
import sys

# `python -m dtrain` puts the working directory first, and a file there, yaml.py say, would be taken for a library.
# Until the package is found, "-m" is all that stands in argv[0].
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and not __file__.startswith(sys.path[0] + os.sep):
    sys.path.append(sys.path.pop(0))

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

PACKAGES = (
    "commands",
    "launch",
    "training",
    "rl",
    "inference",
    "methods",
    "policy",
    "checkpoint",
    "memory",
    "adapters",
    "data",
    "models",
    "losses",
    "optim",
    "attention",
    "parallel",
    "recipe",
    "base",
)
"""The packages in their order: each imports those after it alone."""


@dataclass(frozen=True)
class RunResult:
    """The outcome of a finished run.

    directory: the run's own, with checkpoints/, export/ and metrics.jsonl. metrics: the last value of each field of
    metrics.jsonl, of training, validation and evaluation rows (docs/metrics.md).
    """

    directory: Path
    metrics: Mapping[str, int | float]


def run(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> RunResult:
    """Train as `dtrain run RECIPE key=value ...` does.

    `recipe` is a path, the name of a shipped recipe, or a mapping. Returns when the run is done, the same with any
    number of processes; as a rank of others, metrics as far as rank 0 has written them. Raises
    `dtrain.base.errors.UserError` for what its user can mend, `Stopped` when a signal ended the run in order, and
    `WorkerFailed`, with the traceback as text, when a process died of anything else.
    """
    from dtrain.commands.run import start_background_plan
    from dtrain.launch import launch
    from dtrain.training import preflight
    from dtrain.training.metrics import records

    directory = launch(lambda: preflight.load(recipe, overrides), plan=start_background_plan).run.directory
    measured: dict[str, int | float] = {}
    for row in records.read_rows(directory / "metrics.jsonl"):
        measured |= row
    return RunResult(directory, measured)


if TYPE_CHECKING:
    from dtrain import (
        adapters,
        attention,
        base,
        checkpoint,
        commands,
        data,
        inference,
        launch,
        losses,
        memory,
        methods,
        models,
        optim,
        parallel,
        policy,
        recipe,
        rl,
        training,
    )
else:  # a type checker would accept any name from __getattr__

    def __getattr__(name: str):
        if name in PACKAGES:
            return importlib.import_module(f"dtrain.{name}")
        raise AttributeError(f"module 'dtrain' has no attribute {name!r}")


__all__ = [
    "adapters",
    "memory",
    "PACKAGES",
    "RunResult",
    "__version__",
    "attention",
    "base",
    "checkpoint",
    "commands",
    "data",
    "inference",
    "launch",
    "losses",
    "methods",
    "models",
    "optim",
    "parallel",
    "policy",
    "recipe",
    "rl",
    "run",
    "training",
]


def __dir__() -> list[str]:
    return [*globals(), *PACKAGES]
