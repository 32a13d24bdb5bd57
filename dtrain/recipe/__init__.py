"""The recipe: its schema, how it is read, its sizes. Imports no torch.

schema           every key, its type, its default and what it means
load             YAML, shipped recipes and overrides to a `Recipe`
saved, secrets   and back, without what is for the run alone; what that is
world            the mesh and the batch in a world of so many processes
patterns         which parameters a recipe's patterns mean
slips            what is said to a slip of the pen, in YAML or in a value
words, lacks     other tools' words for our keys; what has no key here, and why
other_tools      a file of another tool as a recipe, with that tool's defaults (other_tools.yaml)

What must hold between keys is `dtrain.run.check`, which knows the methods.
"""

from dtrain.recipe.load import find, keys, load, read, recipes_dir, shipped, translate
from dtrain.recipe.saved import diff, hidden, hiding, origins, to_yaml, unsaid, with_origins_of
from dtrain.recipe.schema import Recipe
from dtrain.recipe.world import Sizes, sizes

__all__ = [
    "Recipe",
    "Sizes",
    "diff",
    "find",
    "hidden",
    "hiding",
    "keys",
    "load",
    "origins",
    "read",
    "recipes_dir",
    "shipped",
    "sizes",
    "to_yaml",
    "translate",
    "unsaid",
    "with_origins_of",
]
