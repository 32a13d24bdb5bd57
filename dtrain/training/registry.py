"""The table of training methods, and recipes for them.

Importing this module imports no torch. The sections of dtrain's own methods do not need torch either, so a recipe with
a wrong key is refused before torch is imported. The file of a method is imported when the method is built.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dtrain.base.errors import Problem, RecipeError, UserError
from dtrain.base.plugins import import_object, import_path_of, importable_module, is_import_path, plugins
from dtrain.methods import sections
from dtrain.models.registry import FAMILY_KEY, register_family
from dtrain.recipe import Recipe, convert_foreign_file, convert_foreign_recipe, list_keys, load, load_with_problems
from dtrain.recipe.saved import LoadedRecipe
from dtrain.recipe.schema import MethodSections

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


class RegisteredSections(MethodSections):
    """The recipe sections of all `METHODS`, and that of one other method. Reading a section imports its method.

    Args:
        other: The method outside of `METHODS`: a plugin's name or an import path. None: there is none.
    """

    def __init__(self, other: str | None = None):
        self._other = other

    def __getitem__(self, name: str) -> type:
        if name in METHODS:
            entry = METHODS[name]
            if isinstance(entry, str) and entry in OWN_SECTIONS:
                return OWN_SECTIONS[entry]
            return method_class(name).Section
        if self._other is not None and name == self.name_of(self._other):
            return method_class(self._other).Section
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        others = [] if self._other is None else [self.name_of(self._other)]
        return iter(dict.fromkeys([*METHODS, *others]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def choices(self) -> tuple[str, ...]:
        other = [] if self._other is None else [self._other]
        return tuple(dict.fromkeys([*METHODS, *plugins("method"), *other]))

    def name_of(self, method: str) -> str:
        if method in METHODS or not is_import_path(method):
            return method
        return section_name(method_class(method))

    def with_method(self, method: str) -> MethodSections:
        if method in METHODS or not (method in plugins("method") or is_import_path(method)):
            return self
        extended = RegisteredSections(method)
        name = extended.name_of(method)
        cls = method_class(method)
        # The module of the method may have added it to `METHODS`, too.
        is_taken = name in Recipe.__annotations__ or (name in METHODS and method_class(name) is not cls)
        if is_taken or not name.isidentifier():
            raise UserError(f"method={method}: its section cannot be named {name}. Set {cls.__name__}.name to another")
        return extended


SECTIONS = RegisteredSections()


def section_name(method: "type[Method]") -> str:
    """Return the name of a method's section: `Method.name`, or the name of the class in snake case without "Method".

    Example:
        >>> from dtrain.methods import Method
        >>> class TokenPolyMethod(Method): ...
        >>> section_name(TokenPolyMethod)
        'token_poly'
    """
    if method.name is not None:
        return method.name
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", method.__name__.removesuffix("Method"))
    return "_".join(words).lower()


def method_class(method: str) -> "type[Method]":
    """Import the class of a method.

    Args:
        method: A value of the recipe's key `method`: a key of `METHODS`, a plugin's name or an import path.

    Raises:
        UserError: If there is no such method.
    """
    if method in METHODS:
        return _load(METHODS[method])
    from dtrain.methods.method import Method  # loads torch

    found = import_object(method, "method", METHODS)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"method={method} is not a method. Derive a class from dtrain.methods.Method")
    return found


def trusted_method_class(method: str) -> "type[Method]":
    """Return the class of a method of dtrain or of an installed plugin, else `Method`.

    For commands that read the run of another person: they import nothing that its recipe names by an import path.
    """
    from dtrain.methods.method import Method  # loads torch

    return method_class(method) if method in METHODS or method in plugins("method") else Method


def registered_entries(method: str) -> dict[str, str]:
    """Return `METHODS` with an import path in place of each class, for another process of the same run.

    Classes that another process cannot import are left out, unless they are the run's method.

    Args:
        method: The recipe's method.

    Raises:
        UserError: If another process cannot import the run's method.
    """
    entries = {}
    for name, entry in METHODS.items():
        if isinstance(entry, str):
            module, _, class_name = entry.partition(":")
            entries[name] = f"{importable_module(module, f'method {name}')}:{class_name}"
            continue
        try:
            entries[name] = import_path_of(entry, f"method {name}")
        except UserError:
            if name == method:
                raise
    return entries


def _load(entry: "str | type[Method]") -> "type[Method]":
    """Import the class of an entry of `METHODS` or `VARIANTS`."""
    if not isinstance(entry, str):
        return entry
    if entry.startswith("dtrain."):
        module, _, class_name = entry.partition(":")
        return getattr(import_module(module), class_name)
    return import_object(entry, "method")


def build_method(recipe: Recipe) -> "Method":
    """Build the method of a recipe. The recipe need not be checked."""
    method = method_class(recipe.method)(recipe)
    variant = method.variant()
    if variant is None:
        return method
    if (recipe.method, variant) not in VARIANTS:
        raise UserError(f"method={recipe.method} has no variant {variant}. Add it to dtrain.training.VARIANTS")
    return _load(VARIANTS[recipe.method, variant])(recipe)


def model_keys(*methods: str) -> list[str]:
    """Return the keys in the sections of `methods` that may name other models than the trained one.

    >>> model_keys("dpo", "distill")
    ['dpo.reference', 'distill.teacher']
    """
    found = []
    for method in methods:
        found += [f"{SECTIONS.name_of(method)}.{key}" for key in method_class(method).models]
    return found


def load_recipe(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe as `dtrain.recipe.load` does, and register its model families."""
    loaded = load(recipe, overrides, sections=SECTIONS)
    problems = _register_families(loaded)
    if problems:
        raise RecipeError(problems)
    return loaded


def recipe_and_problems(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()
) -> tuple[LoadedRecipe, list[Problem]]:
    """Load a recipe as `load_recipe` does, and return its problems, as `dtrain.recipe.load_with_problems` does."""
    loaded, problems = load_with_problems(recipe, overrides, sections=SECTIONS)
    return loaded, [*problems, *_register_families(loaded)]


def _register_families(recipe: Recipe) -> list[Problem]:
    """Register the model families of `model.family`, or return why they cannot be."""
    problems = []
    for family in recipe.model.families:
        try:
            register_family(family)
        except UserError as error:
            problems.append(Problem(FAMILY_KEY, str(error)))
    return problems


def convert_recipe(tree: Mapping) -> "Conversion | None":
    """Convert a recipe of another tool, as `dtrain.recipe.convert_foreign_recipe` does."""
    return convert_foreign_recipe(tree, sections=SECTIONS)


def convert_file(path: str | Path, overrides: Sequence[str] = ()) -> "Conversion":
    """Convert a file of another tool, as `dtrain.recipe.convert_foreign_file` does."""
    return convert_foreign_file(path, overrides, sections=SECTIONS)


def recipe_keys() -> list[str]:
    """Return every dotted key that can have a value in a recipe for any method."""
    return list_keys(SECTIONS)
