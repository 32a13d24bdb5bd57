"""`dtrain run`, and `dtrain.run` from Python: a recipe launched with its plan beside it. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.launch import launch
from dtrain.recipe import Recipe
from dtrain.run import preflight

if TYPE_CHECKING:
    from dtrain.commands.plan.beside import PlannedPeak


def run(recipe: str | Path | Mapping, overrides: Sequence[str] = ()) -> Recipe:
    """Run a recipe (a path, the name of a shipped one, or a mapping) to its end, and return it as it was run.

    Raises as `launch.launch`.
    """
    return launch(lambda: preflight.load(recipe, overrides), plan=plan_beside)


def plan_beside(recipe: Recipe, world_size: int, device_type: str) -> "PlannedPeak":
    """Return the plan of `recipe` on `world_size` devices of a type, which is computed once its context is entered."""
    from dtrain.commands.plan.beside import PlannedPeak

    return PlannedPeak(recipe, world_size, device_type)
