"""The table of training methods, and recipes for them.

Importing this module imports no torch. The sections of dtrain's own methods do not need torch either, so a recipe with
a wrong key is refused before torch is imported. The file of a method is imported when the method is built.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dtrain.base.errors import Problem
from dtrain.methods import sections
from dtrain.recipe import Recipe, convert_foreign_file, convert_foreign_recipe, list_keys, load, load_with_problems
from dtrain.recipe.saved import LoadedRecipe

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
"""Name -> the method's class, or "module:class". The first method is the default of a recipe."""

VARIANTS: dict[tuple[str, str], "str | type[Method]"] = {
    ("distill", "student"): "dtrain.rl.on_policy:OnPolicyDistillMethod",
    ("reward", "pairs"): "dtrain.methods.reward:RewardPairsMethod",
}
"""(Name of a method, `Method.variant`) -> the class that replaces the method's own class."""

OWN_SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "dtrain.methods.sft:SftMethod": sections.Sft,
        "dtrain.methods.dpo:DpoMethod": sections.Dpo,
        "dtrain.methods.kto:KtoMethod": sections.Kto,
        "dtrain.rl.grpo:GrpoMethod": sections.Grpo,
        "dtrain.methods.distill:DistillMethod": sections.Distill,
        "dtrain.methods.reward:RewardMethod": sections.RewardKeys,
    }
)
"""Entry of `METHODS` -> `Method.Section` of that class, for methods whose section is known without importing torch."""

TEACHER, REWARD_MODEL = ".teacher", ".reward_model.path"
"""Suffixes of the keys that name a teacher, which has the trained model's vocabulary, and a reward model, which has a
head with one output. All other keys of `Method.models` name references, which have the trained model's shapes."""


class MethodSections(Mapping[str, type]):
    """The recipe sections of all `METHODS` by name. A method of a user is imported when its section is read."""

    def __getitem__(self, name: str) -> type:
        entry = METHODS[name]
        if isinstance(entry, str) and entry in OWN_SECTIONS:
            return OWN_SECTIONS[entry]
        return method_class(name).Section

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


SECTIONS = MethodSections()


def method_class(name: str) -> "type[Method]":
    """Import the class of a method.

    Raises:
        KeyError: If `METHODS` has no such name.
    """
    return _load(METHODS[name])


def _load(entry: "str | type[Method]") -> "type[Method]":
    """Import the class of an entry of `METHODS` or `VARIANTS`."""
    if not isinstance(entry, str):
        return entry
    module, _, class_name = entry.partition(":")
    return getattr(import_module(module), class_name)


def build_method(recipe: Recipe) -> "Method":
    """Build the method of a recipe. The recipe need not be checked."""
    method = method_class(recipe.method)(recipe)
    variant = method.variant()
    if variant is None:
        return method
    return _load(VARIANTS[recipe.method, variant])(recipe)


def model_keys(*methods: str) -> list[str]:
    """Return the keys in the sections of `methods` that may name other models than the trained one.

    >>> model_keys("dpo", "distill")
    ['dpo.reference', 'distill.teacher']
    """
    found = []
    for name in methods:
        if name in METHODS:
            found += [f"{name}.{key}" for key in method_class(name).models]
    return found


def load_recipe(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe for one of the `METHODS`, as `dtrain.recipe.load` does."""
    return load(recipe, overrides, sections=SECTIONS)


def recipe_and_problems(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()
) -> tuple[LoadedRecipe, list[Problem]]:
    """Load a recipe, and return its problems instead of raising them, as `dtrain.recipe.load_with_problems` does."""
    return load_with_problems(recipe, overrides, sections=SECTIONS)


def convert_recipe(tree: Mapping) -> "Conversion | None":
    """Convert a recipe of another tool, as `dtrain.recipe.convert_foreign_recipe` does."""
    return convert_foreign_recipe(tree, sections=SECTIONS)


def convert_file(path: str | Path, overrides: Sequence[str] = ()) -> "Conversion":
    """Convert a file of another tool, as `dtrain.recipe.convert_foreign_file` does."""
    return convert_foreign_file(path, overrides, sections=SECTIONS)


def recipe_keys() -> list[str]:
    """Return every dotted key that can have a value in a recipe for any method."""
    return list_keys(SECTIONS)
