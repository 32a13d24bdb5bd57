"""Setup of the code that a recipe names by import paths or commands. None of it is run here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import closest_name
from dtrain.recipe import spelling
from dtrain.training import eval_sets
from dtrain.training.inputs import RunInputs

# Kinds of code that are named by a command or a package, not by a dotted path or a file.
COMMANDS = ("server of tools", "environment of verifiers")


@dataclass(frozen=True)
class NamedCode:
    """A recipe's import path or command.

    Attributes:
        key: The key that names it.
        path: The import path or command.
        kind: For example "reward" or "optimizer".
    """

    key: str
    path: str
    kind: str


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check that the named code exists."""
    problems = []
    for code in _codes(inputs):
        try:
            _origin(code)
        except UserError as error:
            problems.append(Problem(code.key, f"{code.key}: {error}"))
    return problems


def named_code(inputs: RunInputs) -> list[str]:
    """Return a line for everything that a run imports because the recipe names it: the key, import path and file."""
    lines = []
    for code in _codes(inputs):
        try:
            lines.append(f"{code.key}: {code.path}, {_origin(code)}")
        except UserError:  # reported by `check_files`
            continue
    return lines


def unknown_name(key: str, name: str, known: Sequence[str]) -> list[Problem]:
    """Return the problem of a name that is neither one of `known` nor an import path."""
    if name in known or "." in name:
        return []
    text = f"{key}={name} is none of {', '.join(known)}"
    near = spelling.our_word_for(re.sub(r"\[\d+\]", "", key), name) or closest_name(name, known)
    if near:
        return [Problem(key, text, f"Did you mean {near}?")]
    return [Problem(key, f"{text}, nor an import path such as package.module.Class")]


def _codes(inputs: RunInputs) -> list[NamedCode]:
    """Return the import paths and commands of the recipe."""
    recipe = inputs.recipe
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else []
    named: list[tuple[str, Any, str]] = [
        ("optimizer.name", recipe.optimizer.name, "optimizer"),
        *((f"scheduler[{i}].name", stage.name, "scheduler") for i, stage in enumerate(stages)),
        ("scheduler.name", getattr(recipe.scheduler, "name", None), "scheduler"),
        ("parallel.custom_plan", recipe.parallel.custom_plan, "plan"),
        *inputs.method.code(),
        *(code for each in eval_sets.sets(recipe.eval) for code in each.code),
    ]
    codes = []
    for key, path, kind in named:
        is_code = isinstance(path, str) and (kind in COMMANDS or "." in path or ":" in path)
        if is_code:
            codes.append(NamedCode(key, path, kind))
    return codes


def _origin(code: NamedCode) -> str:
    """Return where the code is, such as "from /home/me/rewards.py". Raises UserError."""
    from dtrain.rl.rewards.catalog import (  # only a recipe that names code needs them
        find_function_and_file,
        find_verifiers,
    )
    from dtrain.rl.tools import find_server, tool_schema

    if code.kind == "server of tools":
        return f"by {find_server(code.path)}"
    if code.kind == "environment of verifiers":
        return f"from {find_verifiers(code.path)}"
    origin = find_function_and_file(code.path, code.kind)[2]
    if code.kind == "tool":
        tool_schema(code.path)
    return f"from {origin}"
