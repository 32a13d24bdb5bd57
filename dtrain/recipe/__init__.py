"""Recipes: schema, loading, saving without secrets, and derived sizes. Imports no torch.

schema, rollouts    every key that is not a method's own: type, default, range and documentation
load                reads YAML and overrides, and builds a `Recipe`
sections            converts a tree of values to typed sections, and reports what does not fit
shipped             the recipes that ship with dtrain, by name
models              overrides that general recipes need for some models (models.toml)
saved, secrets      writes a recipe as YAML, with secrets redacted
world               the mesh and the batch for N processes, and keys whose `auto` a plan decides
key_docs            the documentation of keys, for docs/recipe.md and `dtrain help`
spelling            hints for mistakes in YAML and in values (error_hints.toml), and other tools' names of keys and
                    values (key_aliases.toml)
other_tools         converts other tools' files to recipes

Checks of several keys against one another, and against the model and the data, are in `dtrain.training.setup`.
"""

from dtrain.recipe.load import convert_foreign_file, convert_foreign_recipe, load, load_with_problems
from dtrain.recipe.saved import (
    diff_recipes,
    origins,
    redact,
    redacted_errors,
    redacted_values,
    to_yaml,
    with_origins_of,
)
from dtrain.recipe.schema import Recipe
from dtrain.recipe.sections import list_keys
from dtrain.recipe.shipped import find_recipe, list_shipped_recipes, recipes_dir
from dtrain.recipe.world import Sizes, derive_sizes

__all__ = [
    "Recipe",
    "Sizes",
    "convert_foreign_file",
    "convert_foreign_recipe",
    "derive_sizes",
    "diff_recipes",
    "find_recipe",
    "list_keys",
    "list_shipped_recipes",
    "load",
    "load_with_problems",
    "origins",
    "recipes_dir",
    "redact",
    "redacted_errors",
    "redacted_values",
    "to_yaml",
    "with_origins_of",
]
