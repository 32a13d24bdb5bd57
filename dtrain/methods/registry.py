"""Registry of the methods, by the name that a recipe calls it by."""

from collections.abc import Callable
from importlib import import_module

from dtrain.methods.method import Method
from dtrain.recipe.schema import Recipe

Build = Callable[[Recipe], Method]


def _of_module(name: str) -> Build:
    """Return `build` of the module `name` of this package, which is loaded when a recipe asks for the method."""
    return lambda recipe: import_module(f"dtrain.methods.{name}").build(recipe)


def _distill(recipe: Recipe) -> Method:
    """Return distillation on the data's completions, or on those that the student draws."""
    return _of_module("on_policy" if recipe.distill.samples == "student" else "distill")(recipe)


METHODS: dict[str, Build] = {
    "sft": _of_module("sft"),
    "dpo": _of_module("dpo"),
    "kto": _of_module("kto"),
    "grpo": _of_module("grpo"),
    "distill": _distill,
    "reward": _of_module("reward"),
}
