"""Inputs of a run's spec: everything that follows from a recipe and its world before the first file is read.

The checks of `training.setup` read a `RunInputs`, and so does everything that needs only a part of a spec: `dtrain
preview`, the sizes that are chosen before the ranks meet. Imports no torch.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.errors import UserError
from dtrain.base.ranges import OutOfRange, find_out_of_range
from dtrain.data.model_directory import ModelDirectory
from dtrain.models.common.config import ModelConfig, TransformersModel
from dtrain.recipe import Recipe
from dtrain.recipe.world import num_dp_ranks, replace_auto, resolve_compile
from dtrain.training.directory import RunDirectory
from dtrain.training.registry import REWARD_MODEL, build_method

if TYPE_CHECKING:
    from dtrain.methods import Method


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Attributes:
        size: Number of processes.
        device_type: "cuda" or "cpu".
        is_local: Whether they run on this machine, whose devices and compilers can then be examined.
    """

    size: int
    device_type: str = "cpu"
    is_local: bool = True


@dataclass(frozen=True)
class RunInputs:
    """A recipe in a world, with the objects that follow from both without reading a file.

    Attributes:
        original_recipe: The recipe as it was given.
        recipe: The recipe with values in place of `auto`, except for those that the data decide (data.packing,
            train.global_batch).
        world: The processes.
        method: The recipe's method.
        run: The run's directory.
        source: The directory of model.path.
        other_models: The directories of the method's other models, by key.
        pending_downloads: Keys of files that the run downloads first, and that a dry run therefore cannot read.
    """

    original_recipe: Recipe
    recipe: Recipe
    world: World
    method: "Method"
    run: RunDirectory
    source: ModelDirectory
    other_models: Mapping[str, ModelDirectory]
    pending_downloads: Collection[str] = ()

    @classmethod
    def of(cls, original_recipe: Recipe, world: World, pending_downloads: Collection[str] = ()) -> "RunInputs":
        """Build the inputs of a recipe, which need not be checked yet.

        Args:
            original_recipe: The recipe as it was given.
            world: The processes.
            pending_downloads: Keys of files that the run downloads first.
        """
        recipe = resolve_compile(original_recipe, world.device_type, world.is_local)
        recipe = replace_auto(recipe, num_dp_ranks(recipe, world.size))
        method = build_method(recipe)
        data = recipe.data
        source = ModelDirectory(
            recipe.model.directory,
            method.labels(),
            data.chat_template,
            data.template_kwargs,
            data.special_tokens,
            implementation=recipe.model.implementation,
        )
        other_models = {}
        for key, path in method.other_models():
            # A reward model has a head for labels, not for tokens. 0: its files say how many labels.
            num_labels = 0 if key.endswith(REWARD_MODEL) else None
            # A reference has the config of the trained model, and begins with its numbers.
            implementation = recipe.model.implementation if key.endswith(".reference") else "auto"
            other_models[key] = ModelDirectory(path, num_labels, implementation=implementation)
        run = RunDirectory(recipe.run.directory, recipe.run.lock)
        return cls(original_recipe, recipe, world, method, run, source, other_models, pending_downloads)

    @property
    def cache(self) -> Path:
        """The directory of caches."""
        return self.recipe.cache

    def model_config(self, has_images: bool) -> ModelConfig:
        """Return the config of the trained model, with its vision tower if the data have images.

        Raises:
            UserError: If config.json cannot be read, or if dtrain does not have the model's vision tower.
        """
        return self.source.vision_config if has_images else self.source.config

    @property
    def readable_config(self) -> ModelConfig | None:
        """The model's config without a vision tower. None if it cannot be read, which `model.check_models` reports."""
        with suppress(OSError, UserError):
            return self.source.config
        return None

    @cached_property
    def library_models(self) -> dict[str, TransformersModel]:
        """Models of the transformers library by the recipe's key, of those that are on this machine."""
        sources = {"model.path": self.source, **self.other_models}
        return find_library_models(
            {key: source for key, source in sources.items() if key not in self.pending_downloads}
        )

    @cached_property
    def wrong_values(self) -> list[OutOfRange]:
        """Values of the recipe that are out of range: key, value and the range in words."""
        return find_out_of_range(self.original_recipe)


def find_library_models(sources: Mapping[str, ModelDirectory]) -> dict[str, TransformersModel]:
    """Return the models of the transformers library among a run's models. Those that cannot be read are left out."""
    found = {}
    for key, source in sources.items():
        config = None
        with suppress(OSError):  # for example a name that is too long
            config = source.any_config
        if config is not None and config.transformers is not None:
            found[key] = config.transformers
    return found
