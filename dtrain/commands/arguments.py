"""Arguments that several commands share, and argument types, whose errors argparse reports."""

import argparse
from collections.abc import Callable

RECIPE = "a recipe's file, or the name of a shipped one (`dtrain ls`)"
OVERRIDES = "what to change in it, such as optimizer.lr=1e-5 or data.train.path=[a.jsonl,b.jsonl]"
DIRECTORY = "a model's directory, or a run's; or the hub id of a model that `dtrain download` fetched"
PROCESSES = "processes in all (default: launch.nproc)"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=OVERRIDES)


def at_least(least: int) -> Callable[[str], int]:
    """Return the argument type of whole numbers of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Return the finite number above 0 that `text` spells."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value
