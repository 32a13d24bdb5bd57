"""The plan that `dtrain run` and `dtrain.run` compute next to their run. Imports no torch."""

from typing import TYPE_CHECKING

from dtrain.recipe import Recipe

if TYPE_CHECKING:
    from dtrain.commands.plan.background import PlannedPeak


def start_background_plan(recipe: Recipe, world_size: int, device_type: str) -> "PlannedPeak":
    """Return the plan of `recipe` on `world_size` devices of a type, which is computed once its context is entered."""
    from dtrain.commands.plan.background import PlannedPeak

    return PlannedPeak(recipe, world_size, device_type)
