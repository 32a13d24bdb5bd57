"""Models by short name, and the overrides that the general recipes need for each of them (models.toml).

Earlier versions of dtrain had a recipe for each model, such as `qwen3-8b-lora-sft`. The message for such a name shows
the command with the general recipe in its place. The tools that plan for models use the table as well.
"""

import shlex
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

IMAGES_PREFIX = "images-"
"""Start of the names of former recipes for chats with images: `images-sft` is `sft` with additional keys."""

_FILE = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
_GROUPS: dict[str, dict[str, str]] = _FILE["models"]  # group -> short name -> id on the hub
MODELS: dict[str, str] = {name: hub_id for group in _GROUPS.values() for name, hub_id in group.items()}
"""Short name -> id on the hub."""


@dataclass(frozen=True)
class SpecialKeys:
    """Overrides that some models need with some general recipes.

    Attributes:
        recipes: Names of the general recipes.
        models: Short names of models, or names of groups of models.
        keys: The overrides.
        why: The reason.
    """

    recipes: tuple[str, ...]
    models: tuple[str, ...]
    keys: tuple[str, ...]
    why: str


SPECIAL = tuple(
    SpecialKeys(tuple(entry["recipes"]), tuple(entry["models"]), tuple(entry["keys"]), entry["why"])
    for entry in _FILE["keys"]
)


def model_overrides(model: str, recipe: str) -> list[str]:
    """Return the overrides of a general recipe for a model.

    Args:
        model: Short name of the model.
        recipe: Name of the general recipe, possibly with IMAGES_PREFIX.

    Returns:
        The overrides, `model.path` first.
    """
    names = {model}  # of the model and its groups
    for group, models in _GROUPS.items():
        if model in models:
            names.add(group)
    recipes = {recipe, recipe.removeprefix(IMAGES_PREFIX)}
    found = [f"model.path={MODELS[model]}"]
    for entry in SPECIAL:
        if recipes.intersection(entry.recipes) and names.intersection(entry.models):
            found += entry.keys
    return found


def split_recipe_name(name: str, recipes: Collection[str]) -> tuple[str, str] | None:
    """Split the name of a former recipe into the short name of its model and the name of a general recipe.

    Args:
        name: The name, such as "qwen3-8b-lora-sft".
        recipes: Names of the general recipes.

    Returns:
        The two names. None if `name` is no former recipe.

    Example:
        >>> split_recipe_name("qwen3-8b-lora-sft", ["sft", "lora-sft"])
        ('qwen3-8b', 'lora-sft')
    """
    for model in MODELS:
        recipe = name.removeprefix(f"{model}-")
        if recipe != name and recipe.removeprefix(IMAGES_PREFIX) in recipes:
            return model, recipe
    return None


def former_recipe_command(name: str, recipes: Collection[str]) -> str | None:
    """Return the command that replaces a former recipe.

    Args:
        name: Name of the recipe.
        recipes: Names of the general recipes.

    Returns:
        A `dtrain run` command. None if `name` is no former recipe.
    """
    names = split_recipe_name(name, recipes)
    if names is None:
        return None
    model, recipe = names
    return shlex.join(["dtrain", "run", recipe.removeprefix(IMAGES_PREFIX), *model_overrides(model, recipe)])
