"""The table of the methods, and recipes of them. No torch until a recipe names its method.

A method's file is imported when a recipe has its name, or keys of its section.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.errors import Problem
from dtrain.recipe import Recipe, convert, keys, load, read
from dtrain.recipe.saved import Loaded

if TYPE_CHECKING:
    from dtrain.methods.method import Method
    from dtrain.recipe.other_tools import Conversion

METHODS: dict[str, "str | type[Method]"] = {
    "sft": "dtrain.methods.sft:SftMethod",
    "dpo": "dtrain.methods.dpo:DpoMethod",
    "kto": "dtrain.methods.kto:KtoMethod",
    "grpo": "dtrain.rl.grpo:GrpoMethod",
    "distill": "dtrain.methods.distill:DistillMethod",
    "reward": "dtrain.methods.reward:RewardMethod",
}
"""Name -> the method's class, or its module and its name there. The first is a recipe's default."""

VARIANTS: dict[tuple[str, str], "str | type[Method]"] = {
    ("distill", "student"): "dtrain.rl.on_policy:OnPolicyDistillMethod",
    ("reward", "pairs"): "dtrain.methods.reward:RewardPairsMethod",
}
"""(Name of a method, `Method.variant`) -> the class that trains in place of the method's own."""

TEACHER, REWARD_MODEL = ".teacher", ".reward_model.path"
"""The ends of keys that name a model with the trained one's vocabulary, and one with another head than a vocabulary's.
Under the other keys of `Method.models` stand references, of the trained model's shapes."""


class MethodSections(Mapping[str, type]):
    """The sections of the methods of `METHODS` by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> type:
        return method_class(name).Section

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


SECTIONS = MethodSections()


def method_class(name: str) -> "type[Method]":
    """Return the class that `METHODS` has under a name. Raises KeyError for no name of it."""
    return _load(METHODS[name])


def _load(entry: "str | type[Method]") -> "type[Method]":
    """Import the class of an entry of `METHODS` or `VARIANTS`."""
    if not isinstance(entry, str):
        return entry
    module, _, class_name = entry.partition(":")
    return getattr(import_module(module), class_name)


def build_method(recipe: Recipe) -> "Method":
    """Return the method of a recipe, which need not be checked."""
    method = method_class(recipe.method)(recipe)
    variant = method.variant()
    if variant is None:
        return method
    return _load(VARIANTS[recipe.method, variant])(recipe)


def model_keys(*methods: str) -> list[str]:
    """Return the keys that may name models beside the trained one in the sections of `methods`."""
    return [f"{name}.{key}" for name in methods if name in METHODS for key in method_class(name).models]


def load_recipe(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> Loaded:
    """Load a recipe of one of the `METHODS`, as `dtrain.recipe.load` does."""
    return load(recipe, overrides, sections=SECTIONS)


def recipe_and_problems(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()
) -> tuple[Loaded, list[Problem]]:
    """Load as `load_recipe` does, but return the problems too, as `dtrain.recipe.read` does."""
    return read(recipe, overrides, sections=SECTIONS)


def convert_recipe(tree: Mapping) -> "Conversion | None":
    """Convert a recipe of another tool, as `dtrain.recipe.convert` does."""
    return convert(tree, sections=SECTIONS)


def recipe_keys() -> list[str]:
    """Return every dotted key that holds a value in a recipe of any method."""
    return keys(SECTIONS)
