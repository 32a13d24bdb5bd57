"""Suggestions for words after `dtrain` that are none of its commands or options, by the table `suggestions.toml`.

Loaded only for an error, so that it costs no start-up time.
"""

import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.ranges import closest_name
from dtrain.recipe import find_recipe, spelling
from dtrain.recipe.spelling import invert_table
from dtrain.training import recipe_keys

TOOLS = "tune llamafactory-cli lmf axolotl trl unsloth accelerate deepspeed torchrun python dtrain -m launch".split()
"""They start others' commands; the word after them counts."""

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COMMANDS = invert_table(_FILE["commands"])
"""Their command → the suggestion; `{word}` is the word itself."""
OPTIONS = invert_table(_FILE["options"])
"""Their option → ours, where the command has it."""


def no_command(typed: Sequence[str], known: Collection[str]) -> str:
    """Return the error message for a first word that is none of the commands `known`."""
    first = typed[0]
    if _is_recipe(first):
        return (
            f"{first} is a recipe, and no command: `dtrain run {first}` trains it, `dtrain validate {first}` checks it"
        )
    of_a_tool = [word for word in typed if word not in TOOLS]
    word = of_a_tool[0] if first in TOOLS and of_a_tool else first
    answer = COMMANDS["train"] if word == "run" else f"`dtrain {word}` is it" if word in known else COMMANDS.get(word)
    if answer is None and (near := closest_name(word, known)):
        answer = f"did you mean `dtrain {near}`?"
    elif answer is None and (theirs := closest_name(word, [command for command in COMMANDS if command.isalpha()])):
        word, answer = theirs, COMMANDS[theirs]
    answer = answer or f"the commands are {', '.join(known)}"
    return f"there is no command {first}: {answer.replace('{word}', word)}"


def unknown_words(parser: ArgumentParser, takes_keys: bool, typed: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return an error message for each word among those `typed` after the command of `parser` that it does not take.

    takes_keys: whether it takes keys of a recipe; where it does not, each `key=value` has a message. rest: words that
    argparse left over.
    """
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    answers: dict[str, str] = {}
    for before, word in zip(["", *typed], typed, strict=False):
        is_key = re.fullmatch(r"[A-Za-z_][\w.]*=.*", word) and not before.startswith("-") and not Path(word).exists()
        if is_key and not takes_keys:
            key, _, value = word.partition("=")
            answers[word] = _of_command(key, value, options)
    for word in rest:
        name, _, value = word.partition("=")
        if not value and word in typed:
            after = typed[typed.index(word) + 1 : typed.index(word) + 2]
            value = after[0] if after and "=" not in after[0] and not after[0].startswith("-") else ""
        if word.startswith("-"):
            answers[word] = (_of_recipe if takes_keys else _of_command)(name.lstrip("-"), value, options)
    speaks = "; what the user says stands after --prompt" if "--prompt" in options else ""
    pairs = zip(["", *rest], rest, strict=False)
    left = [word for before, word in pairs if word not in answers and before not in answers]  # nor an option's value
    too_many = [f"{word}: one word too many{speaks}" for word in left]
    return [f"{word}: {answer}" for word, answer in answers.items()] + too_many


def _of_command(key: str, value: str, options: Sequence[str]) -> str:
    meant = _option(key, options)
    if meant:
        return f"write {meant}{' ' + value if value else ''}"
    if key in recipe_keys() or spelling.explain_unknown_key(key):
        return "keys of a recipe are for `dtrain run` and `dtrain validate`; this command has options (--help)"
    return f"there is no such option; there are {', '.join(options)}" if options else "this command takes no options"


def _of_recipe(key: str, value: str, options: Sequence[str]) -> str:
    if key in ("config", "recipe", "c", "file", "config-file", "config_file"):
        return f"the recipe's file stands alone, without an option{': ' + value if value else ''}"
    if key in ("dry-run", "dry_run", "check"):
        return "`dtrain validate RECIPE` starts nothing"
    plain = key.replace("-", "_")
    leaves = [name for name in recipe_keys() if name == plain or name.rpartition(".")[2] == plain]
    is_ours = plain in leaves or f"--{key.replace('_', '-')}" in options
    answer = None if is_ours else spelling.explain_unknown_key(key)
    if answer is None and (meant := _option(key, options)):
        return f"write {meant}{' ' + value if value else ''}"
    if answer is None and leaves:
        full = [plain] if plain in leaves else leaves
        answer = " or ".join(f"{name}={value or '...'}" for name in full)
    near = None if answer else closest_name(plain, recipe_keys())
    hint = answer or (f"did you mean {near}={value or '...'}?" if near else "such as optimizer.lr=1e-5")
    return f"keys of a recipe are written key=value, without dashes: {hint}"


def _option(key: str, options: Sequence[str]) -> str | None:
    """Return the option among `options` that another tool calls `key`, or whose name is near it; None for none."""
    meant = OPTIONS.get(key.replace("_", "-"))
    near = closest_name(key, [option.removeprefix("--") for option in options])
    return meant if meant and meant.split()[0] in options else f"--{near}" if near else None


def _is_recipe(word: str) -> bool:
    if not word.endswith((".yaml", ".yml")) and "-" not in word:
        return False
    try:
        return find_recipe(word).is_file()
    except UserError:
        return word.endswith((".yaml", ".yml"))
