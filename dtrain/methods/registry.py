"""Every method by the name that a recipe calls it by."""

from collections.abc import Callable
from importlib import import_module

from dtrain.config.schema import Recipe
from dtrain.methods.method import Method

Build = Callable[[Recipe], Method]


def _of_module(name: str) -> Build:
    """Return `build` of the module `name` of this package, which is loaded when a recipe asks for the method."""
    return lambda recipe: import_module(f"dtrain.methods.{name}").build(recipe)


METHODS: dict[str, Build] = {name: _of_module(name) for name in ("sft", "dpo", "kto", "grpo", "distill", "reward")}
