"""The recipe: its schema, how it is read, and what must hold between its keys. Imports no torch.

schema                              every key, its type, its default and what it means
load                                YAML, shipped recipes and overrides to a `Recipe`
saved, secrets                      and back, without what is for the run alone; what that is
check, rollouts                     what must hold between keys and in a world; of `grpo`
preference, policy_losses, rewards  what the losses and rewards can do, by name
numbers                             which numbers an option of theirs may be
words                               other tools' words for our keys
"""

from dtrain.config.check import Sizes, check, other_models, sizes
from dtrain.config.load import find, keys, load, read, recipes_dir, shipped
from dtrain.config.saved import diff, hidden, hiding, notes, origins, to_yaml, unsaid, with_origins_of
from dtrain.config.schema import Recipe

__all__ = [
    "Recipe",
    "Sizes",
    "check",
    "diff",
    "find",
    "hidden",
    "hiding",
    "keys",
    "load",
    "notes",
    "origins",
    "other_models",
    "read",
    "recipes_dir",
    "shipped",
    "sizes",
    "to_yaml",
    "unsaid",
    "with_origins_of",
]
