"""Stage code: what the recipe names by an import path or a command. Nothing of it is run."""

import re
from collections.abc import Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranges import nearest
from dtrain.recipe import key_aliases
from dtrain.training import eval_sets
from dtrain.training.spec import RunSpec

COMMANDS = ("server of tools", "environment of verifiers")  # whatever their characters


def check_files(spec: RunSpec) -> list[str]:
    """Check that what is named is there."""
    return [text for text, is_problem in _code(spec) if is_problem]


def named_code(spec: RunSpec) -> list[str]:
    """Return what a run imports because the recipe names it, a line each: the key, its import path, its file."""
    return [text for text, is_problem in _code(spec) if not is_problem]


def unknown_name(key: str, name: str, known: Sequence[str]) -> list[str]:
    """Return the problem of a name that is none of `known`, nor an import path."""
    if name in known or "." in name:
        return []
    near = key_aliases.meant(re.sub(r"\[\d+\]", "", key), name) or nearest(name, known)
    hint = f"; did you mean {near}?" if near else ", nor an import path such as package.module.Class"
    return [f"{key}={name} is none of {', '.join(known)}{hint}"]


def _code(spec: RunSpec) -> list[tuple[str, bool]]:
    """Return for each import path or command of the recipe where it leads, or why it leads nowhere (True)."""
    recipe = spec.recipe
    stages = recipe.scheduler if isinstance(recipe.scheduler, list) else []
    named: list[tuple[str, Any, str]] = [
        ("optimizer.name", recipe.optimizer.name, "optimizer"),
        *((f"scheduler[{i}].name", stage.name, "scheduler") for i, stage in enumerate(stages)),
        ("scheduler.name", getattr(recipe.scheduler, "name", None), "scheduler"),
        ("parallel.custom_plan", recipe.parallel.custom_plan, "plan"),
        *spec.method.code(),
        *(code for each in eval_sets.sets(recipe.eval) for code in each.code),
    ]
    lines = []
    for key, path, what in named:
        if isinstance(path, str) and (what in COMMANDS or set(".:") & set(path)):
            try:
                lines.append((f"{key}: {path}, {_origin(key, path, what)}", False))
            except UserError as error:
                lines.append((str(error), True))
    return lines


def _origin(key: str, path: str, what: str) -> str:
    """Return where a path or command leads. Raises UserError."""
    from dtrain.rl.rewards.find import find_file, find_verifiers
    from dtrain.rl.tools import find_server, tool_schema

    try:
        if what == "server of tools":
            return f"by {find_server(path)}"
        origin = find_verifiers(path) if what == "environment of verifiers" else find_file(path, what)[2]
        if what == "tool":
            tool_schema(path)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    return f"from {origin}"
