"""The recipe: its schema, how it is read, and what must hold between its keys. Imports no torch."""

from dtrain.config.check import Sizes, check, sizes
from dtrain.config.load import diff, find, keys, load, read, recipes_dir, shipped, to_yaml
from dtrain.config.schema import Recipe

__all__ = [
    "Recipe",
    "Sizes",
    "check",
    "diff",
    "find",
    "keys",
    "load",
    "read",
    "recipes_dir",
    "shipped",
    "sizes",
    "to_yaml",
]
