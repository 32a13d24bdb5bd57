"""dtrain: fine-tune open-weight language models; one recipe, any mesh, the same numbers.

The names in `__all__` are the Python API, which docs/python.md explains. `import dtrain` loads no torch: a name is
imported when it is first used. README.md in this directory describes the packages:

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

from collections.abc import Callable, Mapping, Sequence
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
"""The packages in their order. Each imports only packages after it."""


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
        directory: The run's directory, with checkpoints/, export/ and metrics.jsonl.
        metrics: The last value of each field of metrics.jsonl, from training, validation and evaluation rows
            (docs/metrics.md).
    """

    directory: Path
    metrics: Mapping[str, int | float]


def run(
    recipe: "str | Path | Mapping",
    overrides: Sequence[str] = (),
    *,
    train: "Callable[[Recipe, Runtime], None] | None" = None,
) -> RunResult:
    """Train as `dtrain run RECIPE key=value ...` does, and return when the run is done.

    Args:
        recipe: Path of a recipe, name of a shipped one, or a mapping with its keys.
        overrides: Changes such as "optimizer.lr=1e-5".
        train: A training loop of your own, `train(recipe, runtime)`, in place of dtrain's. It is called on every rank,
            with the process group initialised. Must be a function at the top level of a module, because worker
            processes import it. `data` and `train.steps` are then not required.

    Returns:
        The run's directory and its last metrics. On a rank other than 0 of torchrun or SLURM, the metrics that rank 0
        has written so far.

    Raises:
        UserError: For everything that the user can correct. RecipeError with all mistakes in the recipe, before
            anything starts.
        Stopped: If a signal ended the run after it saved.
        WorkerFailed: If a process died of anything else. Its text has the traceback.

    Example:
        result = dtrain.run("sft", ["model.path=Qwen/Qwen3-0.6B", "data.train.path=chat.jsonl", "launch.nproc=2"])
        print(result.directory, result.metrics["loss"])
    """
    from dtrain.commands.run import start_background_plan
    from dtrain.launch import launch
    from dtrain.training import preflight
    from dtrain.training.metrics import records

    plan = start_background_plan if train is None else None
    directory = launch(lambda: preflight.load(recipe, overrides), train, plan).run.directory
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
    from dtrain.base.batch import collate, complete_batch
    from dtrain.base.errors import RecipeError, Stopped, UserError
    from dtrain.checkpoint.dcp.store import CheckpointStore
    from dtrain.checkpoint.huggingface.export import export
    from dtrain.inference.generate import generate, generate_text
    from dtrain.inference.native import NativeEngine
    from dtrain.inference.request import Completion, Request, SamplingParams
    from dtrain.launch import validate
    from dtrain.launch.exits import WorkerFailed
    from dtrain.losses import (
        TrainingSamplingParams,
        from_parallel_logits_to_logprobs,
        get_next_token_logprobs_from_logits,
        logprobs_from_hidden_states,
        policy_loss,
        preference_loss,
    )
    from dtrain.methods import Method
    from dtrain.models import ModelConfig, from_pretrained, read_config
    from dtrain.parallel import clip_grad_by_total_norm_, get_grad_norm
    from dtrain.parallel.context import create_context_parallel_ctx, get_train_context, make_cp_batch_and_ctx
    from dtrain.parallel.mesh import Mesh, Runtime, build_mesh
    from dtrain.policy import Fixed, Packed, Policy, StepResult, UpdateResult, load_models, save_models
    from dtrain.policy.score import LogprobSource
    from dtrain.recipe import Recipe
    from dtrain.training import METHODS, load_recipe
else:  # a type checker would accept any name from __getattr__
    _HOMES = {
        "CheckpointStore": "dtrain.checkpoint.dcp.store",
        "Completion": "dtrain.inference.request",
        "Fixed": "dtrain.policy",
        "LogprobSource": "dtrain.policy.score",
        "METHODS": "dtrain.training",
        "Mesh": "dtrain.parallel.mesh",
        "Method": "dtrain.methods",
        "ModelConfig": "dtrain.models",
        "NativeEngine": "dtrain.inference.native",
        "Packed": "dtrain.policy",
        "Policy": "dtrain.policy",
        "Recipe": "dtrain.recipe",
        "RecipeError": "dtrain.base.errors",
        "Request": "dtrain.inference.request",
        "Runtime": "dtrain.parallel.mesh",
        "SamplingParams": "dtrain.inference.request",
        "StepResult": "dtrain.policy",
        "Stopped": "dtrain.base.errors",
        "TrainingSamplingParams": "dtrain.losses",
        "UpdateResult": "dtrain.policy",
        "UserError": "dtrain.base.errors",
        "WorkerFailed": "dtrain.launch.exits",
        "build_mesh": "dtrain.parallel.mesh",
        "clip_grad_by_total_norm_": "dtrain.parallel",
        "collate": "dtrain.base.batch",
        "complete_batch": "dtrain.base.batch",
        "create_context_parallel_ctx": "dtrain.parallel.context",
        "export": "dtrain.checkpoint.huggingface.export",
        "from_parallel_logits_to_logprobs": "dtrain.losses",
        "from_pretrained": "dtrain.models",
        "generate": "dtrain.inference.generate",
        "generate_text": "dtrain.inference.generate",
        "get_grad_norm": "dtrain.parallel",
        "get_next_token_logprobs_from_logits": "dtrain.losses",
        "get_train_context": "dtrain.parallel.context",
        "load_models": "dtrain.policy",
        "load_recipe": "dtrain.training",
        "logprobs_from_hidden_states": "dtrain.losses",
        "make_cp_batch_and_ctx": "dtrain.parallel.context",
        "policy_loss": "dtrain.losses",
        "preference_loss": "dtrain.losses",
        "read_config": "dtrain.models",
        "save_models": "dtrain.policy",
        "validate": "dtrain.launch",
    }

    def __getattr__(name: str):
        if name in PACKAGES:
            return importlib.import_module(f"dtrain.{name}")
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'dtrain' has no attribute {name!r}")


__all__ = [
    "CheckpointStore",
    "Completion",
    "Fixed",
    "LogprobSource",
    "METHODS",
    "Mesh",
    "Method",
    "ModelConfig",
    "NativeEngine",
    "PACKAGES",
    "Packed",
    "Policy",
    "Recipe",
    "RecipeError",
    "Request",
    "RunResult",
    "Runtime",
    "SamplingParams",
    "StepResult",
    "Stopped",
    "TrainingSamplingParams",
    "UpdateResult",
    "UserError",
    "WorkerFailed",
    "__version__",
    "adapters",
    "attention",
    "base",
    "build_mesh",
    "checkpoint",
    "clip_grad_by_total_norm_",
    "collate",
    "commands",
    "complete_batch",
    "create_context_parallel_ctx",
    "data",
    "export",
    "from_parallel_logits_to_logprobs",
    "from_pretrained",
    "generate",
    "generate_text",
    "get_grad_norm",
    "get_next_token_logprobs_from_logits",
    "get_train_context",
    "inference",
    "launch",
    "load_models",
    "load_recipe",
    "logprobs_from_hidden_states",
    "losses",
    "make_cp_batch_and_ctx",
    "memory",
    "methods",
    "models",
    "optim",
    "parallel",
    "policy",
    "policy_loss",
    "preference_loss",
    "read_config",
    "recipe",
    "rl",
    "run",
    "save_models",
    "training",
    "validate",
]


def __dir__() -> list[str]:
    return [*globals(), *__all__]
