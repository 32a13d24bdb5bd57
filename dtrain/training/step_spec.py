"""The spec of one optimizer step: the part of a run's spec that decides the memory and the computation of a step.

`resolve_step` builds the spec in any process, also for devices that this machine does not have. It reads each model's
config.json and no weights. If the model accepts images, it also reads the first rows of the data, the tokenizer and the
image processor, as far as they are on this machine. `dtrain plan` uses the spec, and so does the choice of sizes before
a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from dtrain.base.errors import Problem, RecipeError
from dtrain.data.images.processor import Layout
from dtrain.data.model_directory import ModelDirectory
from dtrain.models.common.config import ModelConfig
from dtrain.policy.optimizer import is_torch_optimizer
from dtrain.policy.options import Precision, choose_precision
from dtrain.recipe import Recipe, Sizes
from dtrain.recipe.schema import OPTIMIZERS, Scheduler
from dtrain.recipe.world import MAX_AUTO_BATCH, MIN_STEPS_PER_EPOCH, replace_keys
from dtrain.training.host import DryHost
from dtrain.training.inputs import RunInputs, World
from dtrain.training.model_facts import ModelFacts
from dtrain.training.preflight import shape_problems
from dtrain.training.registry import build_method
from dtrain.training.setup import model as model_setup, sizes as sizes_setup
from dtrain.training.setup.data import DataFacts, images_of_first_rows

if TYPE_CHECKING:
    from dtrain.methods import Method
    from dtrain.models.common.decoder import CausalLM


@dataclass(frozen=True)
class StepSpec:
    """Every decision that the memory and the computation of one optimizer step depend on.

    Attributes:
        original_recipe: The recipe as it was given.
        recipe: The recipe with values in place of `auto`, and with dtrain's own code in place of import paths.
        world: The number and the device type of the ranks.
        source: The directory of model.path.
        other_models: The directories of the method's other models, by key.
        method_class: The class of the method.
        precision: Dtypes of the weights and of the computation.
        model: The model on the meta device.
        model_config: Its config, with the vision tower if rows have images.
        sizes: The mesh and the batch.
        row_images: Layouts of the images of each row.
        notes: Lines about assumptions.
    """

    original_recipe: Recipe
    recipe: Recipe
    world: World
    source: ModelDirectory
    other_models: Mapping[str, ModelDirectory]
    method_class: "type[Method]"
    precision: Precision
    model: "CausalLM"
    model_config: ModelConfig
    sizes: Sizes
    row_images: Sequence[Layout] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def method(self) -> "Method":
        """The method, with this recipe."""
        return self.method_class(self.recipe)

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model."""
        return ModelFacts(self.recipe, self.model_config, self.model)

    @property
    def has_images(self) -> bool:
        return bool(self.row_images)


def resolve_step(
    recipe: Recipe,
    world_size: int,
    device_type: str,
    without_bfloat16: str | None = None,
    problems: Sequence[Problem] = (),
) -> StepSpec:
    """Build the spec of a step of a recipe.

    Code that the recipe names by import path is not imported, because the recipe may be a stranger's. An optimizer of
    other code is replaced by AdamW, and a custom tensor-parallel plan by the model's own. Optimizers of torch.optim
    are kept.

    Args:
        recipe: The recipe. It needs no data, but `data.train` and `train.steps` or `train.epochs` must be set.
        world_size: Number of devices.
        device_type: "cpu" or "cuda".
        without_bfloat16: Name of the devices for messages, if they do not support bfloat16. None if they do. Without
            bfloat16, `model.attention=sdpa` is used.
        problems: Problems of the recipe that are known already. They are reported with the others.

    Raises:
        RecipeError: If the recipe cannot run on such devices, whatever their memory.
    """
    if recipe.train.global_batch == "auto":
        # The value of `auto` depends on the number of rows, which is not known here. But some methods use the same
        # batch for any number of rows, for example the batch of a rollout. For these methods, the batch for no rows is
        # equal to the batch for very many rows, and is the value of `auto`.
        method = build_method(recipe)
        smallest = method.automatic_batch(0)
        largest = method.automatic_batch(MAX_AUTO_BATCH * MIN_STEPS_PER_EPOCH)
        if smallest == largest:
            recipe = replace_keys(recipe, {"train.global_batch": smallest})
    # Models of pending downloads need not be on this machine, since their weights are not read.
    pending_downloads = ["model.path"]
    for key, _ in build_method(recipe).other_models():
        pending_downloads.append(key)
    inputs = RunInputs.of(recipe, World(world_size, device_type, is_local=False), pending_downloads)
    found = [*shape_problems(inputs.recipe, world_size), *problems]
    if found:
        raise RecipeError(found)
    precision = choose_precision(recipe.train.dtype, device_type, recipe.train.masters)
    if without_bfloat16 is not None:
        if precision.compute is torch.bfloat16:
            text = f"train.dtype={recipe.train.dtype} means bfloat16, which a {without_bfloat16} does not support"
            raise RecipeError([Problem("train.dtype", text, "Set train.dtype=float16 or float32")])
        without_varlen = replace_keys(inputs.recipe, {"model.attention": "sdpa"})  # flash attention needs bfloat16 too
        inputs = replace(inputs, recipe=without_varlen)
    images = images_of_first_rows(inputs)
    has_images = bool(images.layouts)
    host = DryHost()
    meta = host.attempt("model", lambda: model_setup.build(inputs, precision, has_images))
    size_facts = sizes_setup.decide(inputs, DataFacts(inputs.recipe), host)
    if meta is None or size_facts is None:
        raise RecipeError(host.problems)
    return StepSpec(
        original_recipe=inputs.original_recipe,
        recipe=_without_foreign_code(size_facts.recipe, size_facts.sizes),
        world=inputs.world,
        source=inputs.source,
        other_models=inputs.other_models,
        method_class=type(size_facts.method),
        precision=precision,
        model=meta.model,
        model_config=inputs.model_config(has_images),
        sizes=size_facts.sizes,
        row_images=images.layouts,
        notes=(*images.notes, *sizes_setup.position_notes(inputs.recipe, inputs.source), *size_facts.notes),
    )


def _without_foreign_code(recipe: Recipe, sizes: Sizes) -> Recipe:
    """Return the recipe with dtrain's own code in place of import paths, and a number for the global batch."""
    overrides: dict[str, Any] = {}
    if recipe.optimizer.name not in OPTIMIZERS and not is_torch_optimizer(recipe.optimizer.name):
        overrides = {"optimizer.name": "adamw", "optimizer.kwargs": {}}
    if isinstance(recipe.parallel.custom_plan, str):
        overrides["parallel.custom_plan"] = None
    if sizes.is_upper_bound:
        overrides["train.global_batch"] = sizes.global_batch
    # The schedule does not change the memory or the computation, and it may be foreign code too.
    return replace(replace_keys(recipe, overrides), scheduler=Scheduler("constant"))


def config_of(recipe: Recipe) -> ModelConfig:
    """Return the config of a recipe's model without a vision tower, with the head that its method trains.

    Raises:
        UserError: If config.json cannot be read.
    """
    labels, implementation = build_method(recipe).labels(), recipe.model.implementation
    return ModelDirectory(recipe.model.directory, labels, implementation=implementation).config
