"""The spec of a planned step: the part of a run's spec that decides what one optimizer step stores and computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.data.images.processor import Layout
from dtrain.data.model_directory import ModelDirectory
from dtrain.models.common.config import ModelConfig
from dtrain.policy.precision import Precision
from dtrain.recipe import Recipe, Sizes
from dtrain.training.inputs import World

if TYPE_CHECKING:
    from dtrain.methods import Method
    from dtrain.models.common.decoder import CausalLM


@dataclass(frozen=True)
class PlanSpec:
    """Everything that decides a planned step.

    Attributes:
        written: The recipe as it was given.
        recipe: The recipe with values in place of `auto`.
        world: The processes that are planned for.
        source: The directory of model.path.
        method: The method of the recipe.
        precision: Dtypes of the weights and of the computation.
        model: The model on the meta device.
        model_config: Its config, with the vision tower if rows have images.
        sizes: The mesh and the batch.
        row_images: Layouts of the images of each row.
        notes: Lines on what is assumed.
    """

    written: Recipe
    recipe: Recipe
    world: World
    source: ModelDirectory
    method: "Method"
    precision: Precision
    model: "CausalLM"
    model_config: ModelConfig
    sizes: Sizes
    row_images: Sequence[Layout] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_images(self) -> bool:
        return bool(self.row_images)
