"""Conversion of other tools' files to recipes, with those tools' defaults where they differ from dtrain's.

`convert` finds the tool by the file's keys and returns a `Conversion`: the recipe, comments on values that the file
leaves to its tool, notes on what differs, and the keys that are not carried over, each with a reason.

conversion            the result, and its text
draft                 a conversion while it is being made; every tool's module reads and writes one; lists of data
                      sets, chat templates
effects               which keys of these tools change no number, and so do not stop a run
hugging_face          what tools on transformers' TrainingArguments share
trl, unsloth, axolotl, llama_factory, torchtune, verl, nemo_rl, automodel
                      a tool each: its tables of keys and defaults, and what takes more than a name

A converted value must have the same effect in dtrain as in the other tool. Each module names the source files and the
version of the tool that it was compared with.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtrain.recipe.other_tools.automodel import AUTOMODEL
from dtrain.recipe.other_tools.axolotl import AXOLOTL
from dtrain.recipe.other_tools.conversion import Conversion, LostKey
from dtrain.recipe.other_tools.draft import Draft, RecipeKeys, Tool
from dtrain.recipe.other_tools.llama_factory import LLAMA_FACTORY
from dtrain.recipe.other_tools.nemo_rl import NEMO_RL
from dtrain.recipe.other_tools.torchtune import TORCHTUNE
from dtrain.recipe.other_tools.trl import HANDBOOK, TRL
from dtrain.recipe.other_tools.unsloth import UNSLOTH
from dtrain.recipe.other_tools.verl import VERL

__all__ = ["TOOLS", "Conversion", "LostKey", "RecipeKeys", "Tool", "convert", "detect_tool"]

TOOLS = (TRL, HANDBOOK, AXOLOTL, LLAMA_FACTORY, UNSLOTH, TORCHTUNE, NEMO_RL, VERL, AUTOMODEL)
"""The tools whose files are converted. A file that several of them know is the last one's."""


def detect_tool(file: Mapping[str, Any]) -> Tool | None:
    """Return the tool that a file with these dotted keys is written for; None if no key indicates one."""
    found = None
    for tool in TOOLS:
        if any(re.fullmatch(mark, key) for mark in tool.marks for key in file):
            found = tool
    return found


def convert(file: Mapping[str, Any], keys: RecipeKeys, method: str | None = None) -> Conversion:
    """Convert a file of another tool to a recipe.

    Args:
        file: The file's values by dotted key.
        keys: The keys of recipes.
        method: The recipe's method, if it is known from elsewhere. None reads it from the file.
    """
    tool = detect_tool(file)
    draft = Draft(tool, file, keys, method)
    if tool is None:
        draft.carry_aliases()
    else:
        tool.convert(draft)
    return draft.finish()
