"""The checks of a recipe: every function of `training.setup` that looks for problems, in the order of the report.

There are three kinds. `check_keys` reads the recipe only. `check_models` also reads each model's config.json.
`check_files` also reads the headers of weights, tokenizers, and the first rows of data. A check returns its problems;
an error that it raises is one problem. The checks of all topics of one kind are called before those of the next kind.

Imports torch, and the packages of optional features only for a recipe that uses them.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Literal

from dtrain.base.problems import Problem, problems_in
from dtrain.recipe import saved
from dtrain.training.inputs import RunInputs
from dtrain.training.setup import (
    code,
    data,
    kernels,
    mesh,
    model,
    optimizer,
    outputs,
    schedule,
    sizes,
    start,
    tokenizer,
)

Depth = Literal["keys", "models", "files"]
Check = Callable[[RunInputs], list[Problem]]


def find_problems(inputs: RunInputs, until: Depth = "files") -> list[Problem]:
    """Return every problem of a recipe that can be found before a run.

    Args:
        inputs: The recipe and its world.
        until: The last kind of checks to call.
    """
    problems = _call(_checks_of_keys(inputs), inputs)
    if until in ("models", "files"):
        problems += _call(_checks_of_models(inputs), inputs)
    if until == "files":
        problems += _call(_checks_of_files(inputs), inputs)
    return problems


def _call(checks: list[tuple[str, Check]], inputs: RunInputs) -> list[Problem]:
    problems = []
    for key, check in checks:
        problems += problems_in(key, partial(check, inputs))
    return problems


def _checks_of_keys(inputs: RunInputs) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [("run", outputs.check_keys), ("model", model.check_keys)]
    if inputs.recipe.lora is not None:
        checks.append(("lora", _optional("adapter").check_keys))
    checks += [("parallel", mesh.check_keys), ("optimizer", optimizer.check_keys), ("data", data.check_keys)]
    if inputs.recipe.evals:
        checks.append(("eval", _optional("evals").check_keys))
    checks += [("train", sizes.check_keys), ("model.attention", kernels.check_keys)]
    checks += [("scheduler", schedule.check_keys), ("checkpoint", start.check_keys)]
    return checks


def _checks_of_models(inputs: RunInputs) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [("model.path", model.check_models)]
    if inputs.others:
        checks.append((inputs.recipe.method, _optional("others").check_models))
    if inputs.recipe.lora is not None:
        checks.append(("lora", _optional("adapter").check_models))
    checks += [("parallel", mesh.check_models), ("model.linear_attention", kernels.check_models)]
    return checks


def _checks_of_files(inputs: RunInputs) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [
        ("run", outputs.check_files),
        ("model.path", tokenizer.check_files),
        ("model.path", model.check_files),
    ]
    if inputs.others:
        checks.append((inputs.recipe.method, _optional("others").check_files))
    checks += [("", code.check_files), ("data", data.check_files)]
    if inputs.recipe.evals:
        checks.append(("eval", _optional("evals").check_files))
    checks += [("train", sizes.check_files), ("checkpoint", start.check_files)]
    return checks


def notes_before(inputs: RunInputs) -> list[str]:
    """Return notes for the user before a run, which are no mistakes."""
    lines = saved.notes(inputs.written)
    if inputs.recipe.lora is not None:
        lines += _optional("adapter").notes(inputs)
    return [*lines, *optimizer.notes(inputs), *data.notes(inputs)]


def _optional(name: str) -> ModuleType:
    """Return a module of `training.setup` that only recipes with an optional feature load."""
    return import_module(f"dtrain.training.setup.{name}")
