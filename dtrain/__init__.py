"""dtrain: fine-tune open-weight language models; one recipe, any mesh, the same numbers.

`import dtrain` loads no torch: what needs it is loaded when it is first asked for. The core, from top to bottom;
imports run downwards, and config, errors, json_files, patterns and ranges stand beside:

    cli, arguments           the `dtrain` command
    typed                    what to say to words that it does not know
    launch                   the start of a run: in place, in processes of its own, or as a rank of others
    trainer                  the loop
    preflight, preview       what is wrong before anything starts; rows as the model sees them
    check, lora_section      what must hold between a recipe's keys, and in its section `lora`
    eval_section             the same of `eval`, and what its sets measure
    resume                   where a run starts
    summary                  what the terminal is told of a run, first and last
    dry_run                  what is asked of models and optimizer before the data is read
    sizing                   what the data make of the batch; runs that would train nothing
    methods, policy          sft, dpo, kto, grpo, distill, reward; a model on a mesh with its optimizer
    models, rollout          the families; the engine in the training processes, and rewards
    checkpoint, data         what outlives a run; files to batches
    losses, metrics, optim   logits to numbers; what is written down; optimizers and schedules
    attention, parallel      masks, kernels, caches; meshes, FSDP, tensor and context parallel
    batch, randomness        the batch contract; random numbers by logical position
    nucleus                  which tokens top-p keeps, without a sort
    addresses, orphans       where sockets listen; children that end with their parent
    ranges                   what a setting may be
    config, errors           the recipe; what a user can mend
    json_files               JSON that others may have written
    patterns                 regular expressions for names, matched in bounded time

The rooms beside the core, which loads them by name where a command or a recipe asks for them:

    hosts                    the watch over several hosts
    plan                     `dtrain plan`: what each rank would hold and send, without a GPU
    remote                   completions from servers, and new weights to them
    environments             completions in several turns
    serve, evaluation, chat  `dtrain serve`; `dtrain eval`, and a run's `eval`; `dtrain chat`
    push                     `dtrain push`: an export to the hub, with a card
    report                   `dtrain report`, `dtrain compare`: runs as a page, and in the terminal
    faces                    functions for callers from outside: of logits by layout, packed batches
    versions                 `dtrain env`: versions for a bug report
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

__version__ = "0.1.0"

_ROOMS = ("attention", "checkpoint", "config", "data", "losses", "models", "parallel", "policy", "rollout")


@dataclass(frozen=True)
class RunResult:
    """What a run that is done has left.

    directory: the run's own, with checkpoints/, export/ and metrics.jsonl. metrics: the last value of each field of
    metrics.jsonl, of training, validation and evaluation rows (docs/metrics.md).
    """

    directory: Path
    metrics: Mapping[str, int | float]


def run(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> RunResult:
    """Train: what `dtrain run RECIPE key=value ...` does.

    `recipe` is a path, the name of a shipped recipe, or a mapping. Returns when the run is done, the same with any
    number of processes; as a rank of others, metrics as far as rank 0 has written them. Raises
    `dtrain.errors.UserError` for what its user can mend, `Stopped` when a signal ended the run in order, and
    `WorkerFailed`, with the traceback as text, when a process died of anything else.
    """
    from dtrain import launch, preflight
    from dtrain.metrics import records

    directory = launch.launch(lambda: preflight.load(recipe, overrides)).run.directory
    measured: dict[str, int | float] = {}
    for row in records.rows(directory / "metrics.jsonl"):
        measured |= row
    return RunResult(directory, measured)


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"dtrain.{name}")
    raise AttributeError(f"module 'dtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
