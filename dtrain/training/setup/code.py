"""Setup of the code that a recipe names by import paths or commands. Nothing of it is imported or run here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.errors import Problem, UserError
from dtrain.base.plugins import REWARDS_KEY, is_import_path, misspelt_key_hint, plugins, registered_path
from dtrain.base.ranges import closest_name
from dtrain.data.sources.files import source_entries
from dtrain.data.sources.reading import PLUGIN_KEY
from dtrain.recipe import spelling
from dtrain.recipe.schema import DataSource
from dtrain.training import eval_sets, metrics
from dtrain.training.inputs import RunInputs

# Kinds of code that are named by a command or a package, not by a dotted path or a file.
COMMANDS = ("server of tools", "environment of verifiers")

# Kinds of code that the checks of the method import, and report if that fails.
IMPORTED_BY_METHODS = ("loss",)
# Keys of registered names that differ from the recipe's key, by kind.
_PLUGIN_KEYS = {"reward": REWARDS_KEY, "sink": metrics.SINKS_KEY, "format": PLUGIN_KEY}


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
        if code.kind in IMPORTED_BY_METHODS:
            continue
        if code.kind in ("sink", "format"):
            continue  # `metrics.option_problems` and the checks of the data import these
        try:
            _origin(code)
        except UserError as error:
            problems.append(Problem(code.key, f"{code.key}: {error}"))
    return problems


def named_code(inputs: RunInputs) -> list[str]:
    """Return a line for each piece of code that the recipe makes a run import: key, import path and file."""
    lines = []
    for code in _codes(inputs):
        try:
            lines.append(f"{code.key}: {code.path}, {_origin(code)}")
        except UserError:  # reported by `check_files`
            continue
    return lines


def unknown_name(key: str, name: str, known: Sequence[str], *, plugin_key: str | None = None) -> list[Problem]:
    """Check that a name is one of `known`, a name of a plugin, or an import path.

    Args:
        key: The recipe's key, such as "optimizer.name" or "scheduler[0].name".
        name: Its value.
        known: dtrain's own names for it.
        plugin_key: Key of the names that installed packages register. None: `key`.
    """
    key_without_index = re.sub(r"\[\d+\]", "", key)
    plugin_key = plugin_key or key_without_index
    names = [*known, *plugins(plugin_key)]
    if name in names or is_import_path(name):
        return []
    text = f"{key}={name} is not one of {', '.join(names)}"
    misspelt_key = misspelt_key_hint(name, plugin_key)
    if misspelt_key:
        return [Problem(key, f"{text}{misspelt_key}")]
    near = spelling.find_dtrain_value(key_without_index, name) or closest_name(name, names)
    if near:
        return [Problem(key, text, f"Did you mean {near}?")]
    return [Problem(key, f"{text}, nor an import path such as package.module.Class")]


def _codes(inputs: RunInputs) -> list[NamedCode]:
    """Return the import paths and commands of the recipe."""
    recipe = inputs.recipe
    named: list[tuple[str, Any, str]] = [("method", recipe.method, "method")]
    is_list = isinstance(recipe.model.family, list)
    for index, family in enumerate(recipe.model.families):
        named.append((f"model.family[{index}]" if is_list else "model.family", family, "family"))
    named.append(("optimizer.name", recipe.optimizer.name, "optimizer"))
    if isinstance(recipe.scheduler, list):
        for index, stage in enumerate(recipe.scheduler):
            named.append((f"scheduler[{index}].name", stage.name, "scheduler"))
    else:
        named.append(("scheduler.name", recipe.scheduler.name, "scheduler"))
    named.append(("parallel.custom_plan", recipe.parallel.custom_plan, "plan"))
    for index, entry in enumerate(recipe.metrics.sinks):
        named.append((f"metrics.sinks[{index}].name", entry.name, "sink"))
    named += inputs.method.code()
    for key, split in (("data.train", recipe.data.train), ("data.val", recipe.data.val)):
        if isinstance(split, DataSource):
            for source, source_key in source_entries(split, key):
                named.append((f"{source_key}.format", source.format, "format"))
    for eval_set in eval_sets.list_eval_sets(recipe.eval):
        named.append((f"{eval_set.key}.format", eval_set.section.format, "format"))
        named += eval_set.code
    codes = []
    for key, path, kind in named:
        if not isinstance(path, str):
            continue
        plugin_key = _PLUGIN_KEYS.get(kind, re.sub(r"\[\d+\]", "", key))
        path = registered_path(path, plugin_key)
        if kind in COMMANDS or "." in path or ":" in path:
            codes.append(NamedCode(key, path, kind))
    return codes


def _origin(code: NamedCode) -> str:
    """Return the location of the code for messages, such as "from /home/me/rewards.py".

    Raises:
        UserError: If there is no such code.
    """
    # Only a recipe that names code needs these modules.
    from dtrain.rl.rewards.catalog import find_function_and_file, find_verifiers
    from dtrain.rl.tools import find_server, tool_schema

    if code.kind == "server of tools":
        return f"by {find_server(code.path)}"
    if code.kind == "environment of verifiers":
        return f"from {find_verifiers(code.path)}"
    _, _, file = find_function_and_file(code.path, code.kind)
    if code.kind == "tool":
        tool_schema(code.path)  # raises UserError if the function's parameters or docstring make no schema
    return f"from {file}"
