"""Models by short name, and what a general recipe should say for each of them: `models.toml`, looked up.

Loaded for the answer to a model's former recipe, and by the tools that plan for models.
"""

import shlex
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

IMAGES_PREFIX = "images-"
"""Begins the name of a recipe for chats with images: `images-sft` is `sft` with the keys of both."""

_FILE = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
MODELS: dict[str, str] = {name: path for group in _FILE["models"].values() for name, path in group.items()}
"""Short name → id on the hub."""


@dataclass(frozen=True)
class SpecialKeys:
    """Overrides that `models`, short names or groups of them, take beside these general `recipes`."""

    recipes: tuple[str, ...]
    models: tuple[str, ...]
    keys: tuple[str, ...]
    why: str


SPECIAL = tuple(
    SpecialKeys(tuple(entry["recipes"]), tuple(entry["models"]), tuple(entry["keys"]), entry["why"])
    for entry in _FILE["keys"]
)


def model_overrides(model: str, recipe: str) -> list[str]:
    """Return the overrides of the general recipe `recipe` for a short name: model.path first."""
    groups = {model, *(group for group, names in _FILE["models"].items() if model in names)}
    recipes = {recipe, recipe.removeprefix(IMAGES_PREFIX)}
    special = [entry for entry in SPECIAL if recipes & {*entry.recipes} and groups & {*entry.models}]
    return [f"model.path={MODELS[model]}", *(key for entry in special for key in entry.keys)]


def split_recipe_name(name: str, recipes: Collection[str]) -> tuple[str, str] | None:
    """Return the short name and the recipe of a former recipe's `name`, "qwen3-8b-lora-sft"; None where it is none.

    recipes: the names of the general ones.
    """
    for model in MODELS:
        recipe = name.removeprefix(f"{model}-")
        if recipe != name and recipe.removeprefix(IMAGES_PREFIX) in recipes:
            return model, recipe
    return None


def former_recipe_command(name: str, recipes: Collection[str]) -> str | None:
    """Return the command in place of a former recipe's `name`; None where it is none."""
    both = split_recipe_name(name, recipes)
    if both is None:
        return None
    return shlex.join(["dtrain", "run", both[1].removeprefix(IMAGES_PREFIX), *model_overrides(*both)])
