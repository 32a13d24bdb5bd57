"""`dtrain completion bash|zsh`, and the completions of commands, options, recipes, keys, values and runs.

The printed script registers `dtrain` with the shell. At each press of TAB the shell calls `dtrain` with the line in an
environment variable. argcomplete writes the script, parses the line and prints the completions. This module adds the
completions of arguments that argparse does not know. Imports no torch, because TAB must be fast.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import argcomplete

from dtrain.commands.run_list import is_run
from dtrain.recipe import list_shipped_recipes
from dtrain.recipe.schema import OPTIMIZERS, SCHEDULES, make_recipe_type
from dtrain.recipe.sections import find_type, type_alternatives
from dtrain.training import METHODS, SECTIONS, recipe_keys

SHELLS = ("bash", "zsh")
LOADING = {
    "bash": 'eval "$(dtrain completion bash)"      # in ~/.bashrc',
    "zsh": 'eval "$(dtrain completion zsh)"       # in ~/.zshrc, after compinit',
}

# Names that a key accepts besides import paths. Its type does not list them.
_NAMES: Mapping[str, tuple[str, ...]] = {"optimizer.name": OPTIMIZERS, "scheduler.name": SCHEDULES}
# Values of options by the name of their attribute.
_OPTION_VALUES: Mapping[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "bfloat16", "float16", "float32", "float64"),
    "type": ("f16", "bf16", "f32", "q8_0"),
}
_RUN_METAVARS = ("RUN", "DIR", "RUN_OR_CHECKPOINT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain completion`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Print a script that completes dtrain's command line. Load it when the shell starts:\n\n  "
    parser.description += "\n  ".join(LOADING.values())
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    print(argcomplete.shellcode(["dtrain"], shell=arguments.shell))


def complete(parser: argparse.ArgumentParser, commands: Mapping[str, Any], line: str) -> None:
    """Print the completions that a shell asks for, and end the process.

    Args:
        parser: The top-level parser.
        commands: Parsers of the commands by name.
        line: The line, as far as the shell has it.
    """
    for word in line.split():
        if word in commands:
            commands[word].add_late_arguments()
            _add_completers(commands[word], commands)
            break
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=cast(Any, _complete_path))


def _add_completers(command: argparse.ArgumentParser, commands: Mapping[str, Any]) -> None:
    """Set the functions that complete a command's arguments."""

    def complete_topic(prefix: str, **_: Any) -> list[str]:
        return [*complete_key(prefix, ending=""), *(name for name in commands if name.startswith(prefix))]

    for action in command._actions:
        completer: Callable[..., Any] | None = None
        if action.dest == "overrides":
            completer = _complete_override
        elif action.dest == "topics":
            completer = complete_topic
        elif action.metavar == "RECIPE":
            completer = _complete_recipe
        elif action.metavar in _RUN_METAVARS:
            completer = _complete_run
        elif action.dest in _OPTION_VALUES:
            completer = argcomplete.ChoicesCompleter(cast(Any, _OPTION_VALUES[action.dest]))
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]


def complete_key(prefix: str, ending: str = "=") -> list[str]:
    """Return the continuations of the beginning of a key: the sections or keys of the next level.

    Args:
        prefix: The beginning.
        ending: Text after a key that is complete.

    Example:
        >>> complete_key("optimizer.l")
        ['optimizer.lr=']
        >>> complete_key("la")
        ['launch.nproc=', 'launch.device=', 'launch.max_restarts=', 'launch.collective_timeout=']
    """
    keys = [key for key in recipe_keys() if key.startswith(prefix)]
    depth = prefix.count(".") + 1
    while True:
        names: dict[str, None] = {}
        for key in keys:
            parts = key.split(".")
            if len(parts) <= depth:
                names[f"{key}{ending}"] = None
            else:
                section = ".".join(parts[:depth])
                names[f"{section}."] = None
        # A shell puts a blank after a single completion, so the keys of a single section are returned instead.
        is_single_section = len(names) == 1 and next(iter(names)).endswith(".")
        if not is_single_section:
            return list(names)
        depth += 1


def _complete_override(prefix: str, **_: Any) -> list[str]:
    """Complete `key=value`."""
    key, has_value, value = prefix.partition("=")
    if not has_value:
        return complete_key(prefix)
    return [f"{key}={completion}" for completion in _complete_value(key, value)]


def _complete_value(key: str, prefix: str) -> Iterator[str]:
    """Yield the values of a key that begin with `prefix`: choices, or paths for a text."""
    alternatives = type_alternatives(find_type(make_recipe_type(SECTIONS, SECTIONS), key))
    values = list(_NAMES.get(key, ()))
    for alternative in alternatives:
        if get_origin(alternative) is Literal:
            values += get_args(alternative)
    if bool in alternatives:
        values += ["true", "false"]
    has_number = any(kind in alternatives for kind in (int, float, bool))
    if str in alternatives and has_number:  # the only text that such a key accepts
        values.append("auto")
    if type(None) in alternatives:
        values.append("null")
    for value in values:
        if str(value).startswith(prefix):
            yield str(value)
    if str in alternatives and not has_number and key not in _NAMES:
        yield from _complete_path(prefix)


def _complete_recipe(prefix: str, **_: Any) -> Iterator[str]:
    """Complete the name of a shipped recipe, or the path of a YAML file."""
    for name, _text in list_shipped_recipes([*METHODS]):
        if name.startswith(prefix):
            yield name
    yield from _complete_path(prefix, lambda path: path.suffix in (".yaml", ".yml"))


def _complete_run(prefix: str, **_: Any) -> Iterator[str]:
    """Complete the directory of a run or of a model. Without a slash, the runs in `runs/` come first."""
    runs = Path("runs")
    if "/" not in prefix and runs.is_dir():
        for path in sorted(runs.iterdir()):
            if is_run(path) and str(path).startswith(prefix):
                yield str(path)
    yield from _complete_path(prefix, lambda path: False)


def _complete_path(prefix: str, accept: Callable[[Path], bool] = lambda path: True, **_: Any) -> Iterator[str]:
    """Complete a path. Directories end with a slash.

    Args:
        prefix: The beginning of the path.
        accept: Whether a file is completed. Directories always are.
    """
    folder, begun = os.path.split(prefix)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:  # there is no such directory
        return
    for entry in entries:
        is_hidden = entry.name.startswith(".") and not begun
        if is_hidden or not entry.name.startswith(begun):
            continue
        path = os.path.join(folder, entry.name)
        if entry.is_dir():
            yield f"{path}/"
        elif accept(Path(path)):
            yield path
