"""Setup of the kernels: attention, linear attention, and other requirements of the method on the device."""

from typing import TYPE_CHECKING

import torch

from dtrain.base.errors import Problem
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.policy.build import choose_attention, choose_delta
from dtrain.policy.options import Precision
from dtrain.recipe import Recipe
from dtrain.training.host import DryHost
from dtrain.training.inputs import RunInputs

if TYPE_CHECKING:
    from dtrain.methods import Method


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check that a kernel for CUDA is not combined with the CPU or with full precision."""
    recipe = inputs.recipe
    problems = []
    if recipe.run.deterministic and recipe.model.linear_attention == "fla":
        text = "model.linear_attention=fla sums in no fixed order, and run.deterministic=true needs a fixed order"
        problems.append(Problem("model.linear_attention", text, "Set model.linear_attention=torch"))
    conflicts = []
    if recipe.launch.device == "cpu":
        conflicts.append("launch.device=cpu")
    if recipe.train.dtype in ("float32", "float64"):
        conflicts.append(f"train.dtype={recipe.train.dtype}")
    if not conflicts:
        return problems
    for key, value, cuda_only in (
        ("model.attention", recipe.model.attention, "varlen"),
        ("model.linear_attention", recipe.model.linear_attention, "fla"),
    ):
        if value == cuda_only:
            text = f"{key}={value} needs CUDA and bfloat16 or float16, and the recipe has {' and '.join(conflicts)}"
            problems.append(Problem(key, text, f"Set {key}=auto, which uses {value} if it can"))
    return problems


def check_models(inputs: RunInputs) -> list[Problem]:
    """Check that a kernel for linear attention is requested only, and shared prompts never, for models that have it."""
    config = inputs.readable_config
    if config is None:
        return []
    problems = shared_prompts_problems(inputs.recipe, config, "this model")
    if config.linear_attention is not None or inputs.recipe.model.linear_attention != "fla":
        return problems
    text = "model.linear_attention=fla: this model has no linear attention"
    if config.transformers is not None:
        text = (
            "model.linear_attention=fla: the transformers library chooses the kernels of this model's linear attention"
        )
    return [*problems, Problem("model.linear_attention", text, "Leave it out")]


def shared_prompts_problems(recipe: Recipe, config: ModelConfig, named: str) -> list[Problem]:
    """Check that prompts are not shared in a model with linear attention.

    Args:
        recipe: The recipe.
        config: Config of the trained model or of a teacher.
        named: The model in a message, such as "this model".
    """
    if recipe.train.share_prompts is not True or LINEAR not in config.layer_types:
        return []
    text = (
        f"train.share_prompts=true: {named} has linear attention, whose state would have to be copied for each "
        "completion"
    )
    return [Problem("train.share_prompts", text, "Leave it out")]


def check_device(
    recipe: Recipe, method: "Method", config: ModelConfig, precision: Precision, device: torch.device, host: DryHost
) -> None:
    """Report the requirements that this machine's device does not meet.

    Only a dry run calls this function. The ranks of a run choose their kernels when they build the model, because the
    choice has to be the same on all ranks.

    Args:
        recipe: The recipe, with values in place of `auto`.
        method: The recipe's method.
        config: The model's config.
        precision: Dtypes of the run.
        device: A device of this machine.
        host: Collects the problems.
    """
    longest = method.max_row_length()
    host.attempt("model.attention", lambda: choose_attention(recipe, config, precision, device, longest))
    host.attempt("model.linear_attention", lambda: choose_delta(recipe, config, precision, device))
    host.attempt("launch.device", lambda: method.check_device_supported(device))
