"""Arguments and argument types that several commands share, and prompts from standard input, one per line."""

import argparse
import io
import sys
from collections.abc import Callable

RECIPE = "a recipe's file, or the name of a shipped one (`dtrain ls`)"
OVERRIDES = "what to change in it, such as optimizer.lr=1e-5 or data.train.path=[a.jsonl,b.jsonl]"
DIRECTORY = "a model's directory, or a run's; or the hub id of a model that `dtrain download` fetched"
PROCESSES = "processes in all (default: launch.nproc)"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=OVERRIDES)


def add_sampling(parser: argparse.ArgumentParser, temperature: float = 0.0) -> None:
    """Add the arguments of a draw. temperature: the default."""
    meaning = (
        "0 takes the likeliest token (default: {})" if temperature else "0, the default, takes the likeliest token"
    )
    parser.add_argument("--temperature", type=float, default=temperature, help=meaning.format(temperature))
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this sum")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of where and in which dtype a model computes."""
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16, float32 or float64")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


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


def keep_carriage_returns() -> None:
    r"""Let only `\n` end a line of standard input, before anything is read from it.

    Python's default also ends a line at a lone `\r`, which may be part of a prompt, as in a captured progress bar.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")
