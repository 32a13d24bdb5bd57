"""The command `dtrain convert`: a file of another tool as a recipe. No torch until it runs."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.errors import UserError
from dtrain.base.ranges import plural
from dtrain.commands.arguments import OVERRIDES

if TYPE_CHECKING:
    from dtrain.recipe.other_tools import Conversion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dtrain convert`."""
    tools = (
        "file of TRL, the alignment handbook, axolotl, LLaMA-Factory, Unsloth, torchtune, NeMo-RL, verl or Automodel"
    )
    parser.add_argument("recipe", metavar="FILE", type=Path, help=tools)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=OVERRIDES)
    out = "the new file (default: print the recipe)"
    parser.add_argument("-o", "--output", metavar="RECIPE", type=Path, help=out)


def run(arguments: argparse.Namespace) -> None:
    """Print or write the recipe, and print to stderr what it lacks."""
    from dtrain.training import convert_file

    file, output = arguments.recipe, arguments.output
    conversion = convert_file(file, arguments.overrides)
    batch = "" if conversion.counts_all_gpus else " train.global_batch is that of one GPU."
    text = f"# From {file}, a file of {conversion.source}.{batch}\n{conversion.text()}\n"
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        _write_new(output, text)
        print(f"wrote {output}: {file} of {conversion.source}", flush=True)
    for line in describe_rest(conversion):
        print(line, file=sys.stderr)


def describe_rest(conversion: "Conversion") -> list[str]:
    """Return lines on what could not be carried over. The comments of the recipe say the same at greater length."""
    lines = []
    blocking = conversion.describe_blocking()
    if blocking:
        lines.append("could not be taken, and may change numbers:")
        lines += [f"  {keys}: {reason}" for keys, reason in blocking]
    left_out = conversion.left_out()
    if left_out:
        lines.append(left_out)
    if conversion.notes:
        num_notes = len(conversion.notes)
        lines.append(f"differs otherwise: {num_notes} {plural(num_notes, 'comment')} below the recipe")
    return lines


def _write_new(file: Path, text: str) -> None:
    """Write a file that does not exist yet. Raises UserError if it does, or if it cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"{file} already exists; choose another name") from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
