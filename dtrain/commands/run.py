"""Starts the plan that `dtrain run` and `dtrain.run` compute in the background of their run. Imports no torch."""

from typing import TYPE_CHECKING

from dtrain.recipe import Recipe

if TYPE_CHECKING:
    from dtrain.commands.plan.background import PlannedPeak


def start_background_plan(recipe: Recipe, world_size: int, device_type: str) -> "PlannedPeak":
    """Start to plan a recipe in a process of its own.

    Args:
        recipe: The recipe.
        world_size: Number of devices.
        device_type: "cpu" or "cuda".
    """
    from dtrain.commands.plan.background import PlannedPeak

    return PlannedPeak(recipe, world_size, device_type)
