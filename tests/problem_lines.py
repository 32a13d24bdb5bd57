"""Problems of a recipe as the lines that a user reads."""

from collections.abc import Iterable

from dtrain.base.errors import Problem
from dtrain.recipe import Recipe
from dtrain.training import hub_files, preflight as checking
from dtrain.training.registry import build_method


def lines(problems: Iterable[Problem]) -> list[str]:
    return [str(problem) for problem in problems]


def preflight(recipe: Recipe, world_size: int, until: str = "files") -> list[str]:
    return lines(checking.preflight(recipe, world_size, until))


def shapes(recipe: Recipe, world_size: int) -> list[str]:
    return lines(checking.shape_problems(recipe, world_size))


def missing_problems(recipe: Recipe) -> list[str]:
    return lines(hub_files.missing_problems(recipe))


def method_problems(recipe: Recipe) -> list[str]:
    """The problems that the recipe's method finds in its own section."""
    return lines(build_method(recipe).problems())
