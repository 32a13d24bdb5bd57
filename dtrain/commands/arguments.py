"""Arguments and argument types that several commands share."""

import argparse
import io
import sys
from collections.abc import Callable

RECIPE = "file of a recipe, or name of a shipped recipe (`dtrain ls` lists them)"
OVERRIDES = "changes to the recipe, such as optimizer.lr=1e-5 or data.train.path=[a.jsonl,b.jsonl]"
DIRECTORY = "directory of a model or of a run, or the hub id of a model that `dtrain download` fetched"
PROCESSES = "total number of processes (default: launch.nproc)"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=OVERRIDES)


def add_sampling(parser: argparse.ArgumentParser, temperature: float = 0.0) -> None:
    """Add the sampling arguments.

    Args:
        parser: Parser of a command.
        temperature: Default temperature.
    """
    meaning = f"sampling temperature; 0 always picks the most likely token (default: {temperature:g})"
    parser.add_argument("--temperature", type=float, default=temperature, help=meaning)
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    nucleus = "sample from the most likely tokens whose probabilities add up to P (default: 1.0)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=nucleus)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the device and the dtype of a model."""
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16, float32 or float64 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add the option for model families outside of dtrain."""
    family = "import path of a model family outside of dtrain (default: model.family of the run that DIR belongs to)"
    parser.add_argument("--family", action="append", default=[], metavar="MODULE:CLASS", help=family)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type for whole numbers of at least `minimum`.

    Example:
        >>> at_least(1)("8")
        8
    """

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Parse a finite number above 0. Raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def keep_carriage_returns() -> None:
    r"""Let only `\n` end a line of standard input. Must be called before anything is read.

    By default Python also ends a line at a lone `\r`, which may be part of a prompt, as in a captured progress bar.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")
