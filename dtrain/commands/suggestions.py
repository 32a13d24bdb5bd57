"""Suggestions for words on the command line that dtrain does not know, from the table `suggestions.toml`.

Imported only after such an error, so that it costs no start-up time.
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

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COMMANDS = invert_table(_FILE["commands"])
"""Command of another tool -> suggestion, in which `{word}` stands for the command."""
OPTIONS = invert_table(_FILE["options"])
"""Option of another tool -> option of dtrain, if the command has it."""


def no_command(typed: Sequence[str], known: Collection[str]) -> str:
    """Return the error message for a first word that is not a command.

    Args:
        typed: Words after `dtrain`.
        known: dtrain's commands.
    """
    first = typed[0]
    if _is_recipe(first):
        return (
            f"{first} is a recipe, not a command: `dtrain run {first}` trains it, `dtrain validate {first}` checks it"
        )
    word = first
    if first in TOOLS:
        # For example, `dtrain axolotl train` asks for `train`.
        other_words = [word for word in typed if word not in TOOLS]
        if other_words:
            word = other_words[0]
    answer: str | None
    if word == "run":
        answer = COMMANDS["train"]
    elif word in known:
        answer = f"`dtrain {word}` is it"
    else:
        answer = COMMANDS.get(word)
    if answer is None:
        own_command = closest_name(word, known)
        other_command = closest_name(word, [command for command in COMMANDS if command.isalpha()])
        if own_command:
            answer = f"did you mean `dtrain {own_command}`?"
        elif other_command:
            word, answer = other_command, COMMANDS[other_command]
        else:
            answer = f"the commands are {', '.join(known)}"
    return f"there is no command {first}: {answer.replace('{word}', word)}"


def unknown_words(parser: ArgumentParser, takes_keys: bool, typed: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return an error message for each word that a command does not accept.

    Args:
        parser: Parser of the command.
        takes_keys: Whether the command accepts `key=value`.
        typed: Words after the command.
        rest: Words that argparse did not accept.
    """
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    answers: dict[str, str] = {}
    if not takes_keys:
        for before, word in zip(["", *typed], typed, strict=False):
            # A word after an option is its value, and a file may have "=" in its name.
            is_value = before.startswith("-")
            if re.fullmatch(r"[A-Za-z_][\w.]*=.*", word) and not is_value and not Path(word).exists():
                key, _, value = word.partition("=")
                answers[word] = _suggest_option(key, value, options)
    for word in rest:
        if not word.startswith("-"):
            continue
        name, _, value = word.partition("=")
        if not value:
            value = _value_after(word, typed)
        suggest = _suggest_key if takes_keys else _suggest_option
        answers[word] = suggest(name.lstrip("-"), value, options)
    messages = [f"{word}: {answer}" for word, answer in answers.items()]
    hint = "; the user message comes after --prompt" if "--prompt" in options else ""
    for before, word in zip(["", *rest], rest, strict=False):
        if word not in answers and before not in answers:  # otherwise it is the value of an unknown option
            messages.append(f"{word}: one word too many{hint}")
    return messages


def _value_after(word: str, typed: Sequence[str]) -> str:
    """Return the word after an option if it is its value, otherwise ""."""
    if word not in typed:
        return ""
    index = typed.index(word) + 1
    if index == len(typed) or "=" in typed[index] or typed[index].startswith("-"):
        return ""
    return typed[index]


def _suggest_option(key: str, value: str, options: Sequence[str]) -> str:
    """Return the advice for an unknown option of a command that has no keys."""
    option = _similar_option(key, options)
    if option:
        return f"write {option} {value}".rstrip()
    if key in recipe_keys() or spelling.explain_unknown_key(key):
        return "keys of a recipe are for `dtrain run` and `dtrain validate`; this command has options (--help)"
    return f"there is no such option; there are {', '.join(options)}" if options else "this command takes no options"


def _suggest_key(key: str, value: str, options: Sequence[str]) -> str:
    """Return the advice for an unknown option of a command that has a recipe and keys."""
    if key in ("config", "recipe", "c", "file", "config-file", "config_file"):
        file = f": {value}" if value else ""
        return f"write the recipe's file without an option{file}"
    if key in ("dry-run", "dry_run", "check"):
        return "`dtrain validate RECIPE` starts nothing"
    return f"keys of a recipe are written key=value, without dashes: {_key_hint(key, value, options)}"


def _key_hint(key: str, value: str, options: Sequence[str]) -> str:
    """Return the key or option that the user may mean."""
    name = key.replace("-", "_")
    keys = [full_key for full_key in recipe_keys() if full_key == name or full_key.rpartition(".")[2] == name]
    is_option = f"--{key.replace('_', '-')}" in options
    # Another tool's name for a setting is explained, unless dtrain has the same name.
    if name not in keys and not is_option:
        explanation = spelling.explain_unknown_key(key)
        if explanation is not None:
            return explanation
    option = _similar_option(key, options)
    if option:
        return f"write {option} {value}".rstrip()
    if keys:
        full_keys = [name] if name in keys else keys
        return " or ".join(f"{full_key}={value or '...'}" for full_key in full_keys)
    similar_key = closest_name(name, recipe_keys())
    return f"did you mean {similar_key}={value or '...'}?" if similar_key else "such as optimizer.lr=1e-5"


def _similar_option(key: str, options: Sequence[str]) -> str | None:
    """Return the option that another tool calls `key`, or whose name is similar. None if there is none."""
    option = OPTIONS.get(key.replace("_", "-"))
    if option and option.split()[0] in options:
        return option
    similar = closest_name(key, [option.removeprefix("--") for option in options])
    return f"--{similar}" if similar else None


def _is_recipe(word: str) -> bool:
    if not word.endswith((".yaml", ".yml")) and "-" not in word:
        return False
    try:
        return find_recipe(word).is_file()
    except UserError:
        return word.endswith((".yaml", ".yml"))
