"""The recipe: its schema, loading, saving without secrets, sizes. Imports no torch.

schema, rollouts                every key that is no method's own: its type, its default and what it means
load                            YAML and overrides to a `Recipe`
sections                        the types of its values: problems, near misses, fixes
shipped                         the recipes that ship with dtrain, by name
models                          models whose former recipes are answered, and what is special to them (models.toml)
saved, secrets                  a `Recipe` to YAML, with secrets redacted; which values are secrets
world                           the mesh and the batch in a world of N processes; keys whose `auto` a plan decides
spelling                        hints about mistakes in YAML or in a value (error_hints.toml); other tools' names of
                                our keys and values, and keys that we lack (key_aliases.toml)
other_tools                     conversion of other tools' files to recipes, with those tools' defaults

`dtrain.training.setup`, which know the methods, check keys against one another.
"""

from dtrain.recipe.load import convert_foreign_recipe, load, load_with_problems
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
