"""Checks of a recipe before a run: its problems, and notes for the user.

Importing this module imports no torch. The checks import torch when they are called.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.errors import Problem, RecipeError
from dtrain.base.ranges import find_out_of_range
from dtrain.recipe import Recipe, redact
from dtrain.recipe.saved import origin_notes_of
from dtrain.training import metrics
from dtrain.training.hub_files import missing_problems, with_local_model
from dtrain.training.inputs import RunInputs, World
from dtrain.training.registry import recipe_and_problems

if TYPE_CHECKING:
    from dtrain.training.dry_run import Depth

UNCHECKED = "The model, the data and the values that depend on each other are checked once the recipe can be read."


def load(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe as `load_recipe` does. Hub ids of models that are on this machine become the models' directories.

    Raises:
        RecipeError: For problems of the recipe's text, as in `refuse_text`.
    """
    loaded, problems = recipe_and_problems(recipe, overrides)
    refuse_text(loaded, problems)
    return with_local_model(loaded)


def refuse_text(recipe: Recipe, problems: Sequence[Problem]) -> None:
    """Raise RecipeError if the text of a recipe has problems: unknown keys, wrong types, unknown choices.

    Values out of range are reported with them. The error is raised before torch is imported, which takes seconds. The
    other checks would need torch, and values for the refused keys.

    Args:
        recipe: The recipe, with defaults in place of the refused values.
        problems: The problems of its text.
    """
    if problems:
        out_of_range = [wrong_value.to_problem() for wrong_value in find_out_of_range(recipe)]
        raise RecipeError([*problems, *out_of_range], UNCHECKED)


def print_origin(recipe: Recipe) -> None:
    """Print to stderr that a recipe was converted from a file of another tool, and what was left out."""
    for line in origin_notes_of(recipe):
        print(redact(line, recipe), file=sys.stderr)


def preflight(recipe: Recipe, world_size: int, until: "Depth" = "files") -> list[Problem]:
    """Return every problem of a recipe that can be found without training.

    Files that a run downloads from the hub are not problems.

    Args:
        recipe: The recipe.
        world_size: Number of processes.
        until: The last kind of checks to call, as in `dry_run.find_problems`.
    """
    from dtrain.training.dry_run import find_problems  # loads torch

    problems = find_problems(RunInputs.of(recipe, World(world_size)), until)
    if until == "files":  # `plan` needs no trackers
        problems += metrics.package_problems(recipe.metrics) + metrics.option_problems(recipe.metrics)
    return [redacted(problem, recipe) for problem in problems]


def shape_problems(recipe: Recipe, world_size: int) -> list[Problem]:
    """Return the problems of a recipe's keys and models, without its data and weights.

    These are all problems that affect the memory and the computation of a step. Only each model's config.json is read.
    A model or dataset of the hub that is not on this machine is a problem.
    """
    absent = [redacted(problem, recipe) for problem in missing_problems(recipe)]
    return [*preflight(recipe, world_size, "models"), *absent]


def notes(recipe: Recipe) -> list[str]:
    """Return notes for the user before a run. They are not mistakes."""
    from dtrain.training.dry_run import notes_before  # loads torch

    return notes_before(RunInputs.of(recipe, World(1)))


def redacted(problem: Problem, recipe: Recipe) -> Problem:
    """Return the problem without the secrets of `recipe`."""
    return problem.reworded(lambda text: redact(text, recipe))
