"""Checks of a recipe before a run: its problems, and notes for the user.

Importing this module imports no torch. The checks import torch when they are called.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.errors import Problem, RecipeError, merge_problems
from dtrain.recipe import Recipe, redact
from dtrain.training.hub_files import missing_problems, with_local_model
from dtrain.training.inputs import RunInputs, World
from dtrain.training.registry import recipe_and_problems

if TYPE_CHECKING:
    from dtrain.training.dry_run import Depth


def load(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe as `load_recipe` does.

    Raises:
        RecipeError: For problems of the recipe's text. It also lists the problems that `preflight` finds in the rest.
    """
    local, problems = load_with_problems(recipe, overrides)
    if problems:
        raise RecipeError(preflight(local, local.launch.num_processes, refused=problems))
    return local


def load_with_problems(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> tuple[Recipe, list[Problem]]:
    """Load a recipe, and return the problems of its text instead of raising them.

    Hub ids of models that are on this machine are replaced by the models' directories.
    """
    loaded, problems = recipe_and_problems(recipe, overrides)
    return with_local_model(loaded), problems


def preflight(
    recipe: Recipe, world_size: int, until: "Depth" = "files", refused: Iterable[Problem] = ()
) -> list[Problem]:
    """Return every problem of a recipe that can be found without training.

    Files that a run downloads from the hub are not problems.

    Args:
        recipe: The recipe.
        world_size: Number of processes.
        until: The last kind of checks to call, as in `dry_run.find_problems`.
        refused: Problems of the recipe's text, which are reported with the others.
    """
    from dtrain.training.dry_run import find_problems  # loads torch

    inputs = RunInputs.of(recipe, World(world_size))
    problems = merge_problems(refused, find_problems(inputs, until))
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
