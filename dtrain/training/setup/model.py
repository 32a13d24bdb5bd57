"""Setup of the model: checks of config.json and of weight files, and the model on the meta device.

`build` returns a `MetaModel`: the model and its optimizer as every rank will build them, but without memory, so that a
mistake in either is found before any work. Only the headers of weight files are read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from dtrain import models
from dtrain.adapters.nf4 import find_block_problems, has_nf4_weight, nf4_layer_shapes
from dtrain.base.errors import Problem, RecipeError, UserError, problems_of_error
from dtrain.base.model_directory import (
    WEIGHTS_INDEX,
    find_weight_files,
    has_weights,
    is_adapter_directory,
    read_safetensors_header,
)
from dtrain.base.name_patterns import unmatched_patterns
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles, weight_files
from dtrain.models.building import build_on_meta
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.apply import find_plan, match_styles
from dtrain.policy.build import frozen_pattern_problems, select_trained_parameters
from dtrain.policy.options import Precision
from dtrain.recipe import Recipe
from dtrain.training.hub_files import model_ids
from dtrain.training.inputs import RunInputs
from dtrain.training.setup import optimizer

if TYPE_CHECKING:
    from dtrain.models.common.decoder import CausalLM

SMALL_WEIGHTS = 256 << 20  # bytes of weights up to which a dry run computes digests


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device with its optimizer.

    Attributes:
        model: The model, with adapters and frozen parameters as in the run.
        optimizer: Its optimizer. None if the recipe names one by an import path, since only a run imports that.
    """

    model: "CausalLM"
    optimizer: Optimizer | None


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check that the recipe names a model."""
    if inputs.recipe.model.path:
        return []
    fix = "Set it to a local directory with config.json, weights and tokenizer"
    return [Problem("model.path", "model.path is missing", fix, is_missing=True)]


def check_models(inputs: RunInputs) -> list[Problem]:
    """Check config.json, and the keys that depend on the parts of the model.

    Raises:
        UserError: If dtrain cannot train a model with this config.json.
    """
    recipe, path = inputs.recipe, inputs.recipe.model.path
    is_on_hub = any(model.key == "model.path" for model in model_ids(recipe))
    if not path or is_on_hub:
        return []
    if is_adapter_directory(path):
        return [_adapter_problem(inputs.source.path)]
    config = inputs.source.config
    problems = _check_4bit_weights(recipe, config)
    if config.experts is None and config.transformers is None and recipe.moe.balance > 0:
        text = f"moe.balance={recipe.moe.balance} is for mixtures of experts, and this model has no experts"
        problems.append(Problem("moe.balance", text, "Leave it out"))
    has_dense_layer = not all(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    if recipe.train.tile == "mlp" and not has_dense_layer:
        text = "train.tile=mlp: every layer of this model is a mixture of experts, which is not tiled"
        fix = "Set train.tile=none, or train.tile=all to tile attention by groups of heads"
        problems.append(Problem("train.tile", text, fix))
    problems += inputs.method.model_problems(config)
    return problems + _check_trained_parameters(inputs)


def _check_4bit_weights(recipe: Recipe, config: ModelConfig) -> list[Problem]:
    """Check that weights in 4 bits are trained only with an adapter, and that their blocks fit the mesh."""
    path = recipe.model.path
    is_4bit = config.unquantized_modules is not None
    if is_4bit and recipe.lora is None:
        text = f"model.path={path} has weights in 4 bits, which cannot be trained without an adapter"
        return [Problem("model.path", text, "Set lora={}, or use the original checkpoint")]
    if is_4bit and recipe.model.init == "scratch":
        text = f"model.init=scratch does not go with model.path={path}, whose config.json is of a model in 4 bits"
        fix = "Set model.init=pretrained, or use the original checkpoint's config.json"
        return [Problem("model.init", text, fix)]
    is_native = config.transformers is None  # `transformers_models.check_models` refuses the others
    if is_native and not is_4bit and recipe.lora is not None and recipe.lora.quantize == "nf4":
        return find_block_problems(config, nf4_layer_shapes(config), max(recipe.parallel.tp, 1))
    return []


def _check_trained_parameters(inputs: RunInputs) -> list[Problem]:
    """Check that `train.vision` and the patterns of `train.train_only` and `train.freeze` match parameters."""
    recipe, config = inputs.recipe, inputs.source.config_with_tower
    model = build_on_meta(config)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    problems: list[Problem] = []
    for tower in model.model.vision:
        problems += frozen_pattern_problems(recipe.train, tower, names)
    if config.vision is None and recipe.train.vision != "frozen":
        text = f"train.vision={recipe.train.vision}: this model has no vision tower that dtrain trains"
        problems.append(Problem("train.vision", text, "Set train.vision=frozen"))
    return problems + unmatched_patterns(recipe.train.parameter_patterns, names)


def _adapter_problem(directory: Path) -> Problem:
    """Return the problem of a `model.path` that is an adapter's directory."""
    from dtrain.checkpoint.peft.config import base_of  # an optional feature

    try:
        base, reason = str(base_of(directory)), ""
    except UserError as error:
        base, reason = "BASE", f" ({error})"
    text = f"model.path={directory} is an adapter in PEFT's layout, not a model{reason}"
    fix = f"To continue training it, set model.path={base} and lora.path={directory}"
    return Problem("model.path", text, fix)


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check the headers of the weights."""
    reads_weights = inputs.source.any_config is not None and inputs.recipe.model.init == "pretrained"
    if not reads_weights or "model.path" in inputs.pending_downloads:
        return []
    return weight_problems(inputs.source.path, ", or model.init=scratch for random weights")


def weight_problems(directory: Path, alternative: str = "", key: str = "model.path") -> list[Problem]:
    """Check that a model's weight files are complete. `build` compares their shapes with the model.

    Args:
        directory: The model's directory.
        alternative: An addition to the fix if there are no weights.
        key: The recipe's key for the directory.
    """
    index = directory / WEIGHTS_INDEX
    if not has_weights(directory):
        pickle = " (pytorch_model.bin is a pickle, which dtrain does not open)" if any(directory.glob("*.bin")) else ""
        text = f"{key}={directory} has neither model.safetensors nor {index.name}{pickle}"
        return [Problem(key, text, f"Set {key} to a directory with weights{alternative}")]
    try:
        tensors_of_file = find_weight_files(directory) or {}
    except UserError as error:
        return problems_of_error(key, error)
    missing = [name for name in sorted(tensors_of_file) if not (directory / name).is_file()]
    again = "Download the model again"
    if missing:
        return [Problem(key, f"{index} names files that do not exist: {', '.join(missing)}", again)]
    problems = []
    for name, tensors in tensors_of_file.items():
        try:
            stored = read_safetensors_header(directory / name)[0].keys()
        except UserError as error:
            problems.append(Problem(key, f"{key}: {error}"))
            continue
        lacking = sorted(set(tensors) - stored)
        if lacking:
            text = (
                f"{directory / name} lacks {len(lacking)} tensors that {WEIGHTS_INDEX} expects there, "
                f"first {lacking[0]}"
            )
            problems.append(Problem(key, text, again))
    return problems


def may_name_tower(inputs: RunInputs) -> bool:
    """Check whether patterns of names in the recipe may mean a vision tower.

    A model is built with its vision tower only if the data have images. So such patterns can be checked only after the
    data were read.

    Raises:
        UserError: If config.json cannot be read.
    """
    recipe = inputs.recipe
    has_patterns = recipe.lora is not None or any(recipe.train.parameter_patterns.values())
    return has_patterns and inputs.source.config_with_tower.vision is not None


def build(inputs: RunInputs, precision: Precision, has_images: bool) -> MetaModel:
    """Build the model on the meta device, and its optimizer, as every rank will build them.

    Args:
        inputs: The run's inputs.
        precision: Dtypes of the run.
        has_images: Whether the model is built with its vision tower.

    Raises:
        UserError: If the headers of the weights do not fit the model, or if the optimizer cannot be used.
    """
    recipe = inputs.recipe
    model = models.build(inputs.model_config(has_images), dtype=precision.master, device="meta")
    select_trained_parameters(model, recipe, precision.compute)
    in_4bit = []  # the names in the files of layers with 4-bit weights
    for name, layer in model.named_modules():
        if has_nf4_weight(layer):
            in_4bit.append(model.config.file_module(name))
    problems = find_block_problems(model.config, in_4bit, recipe.parallel.tp)
    if problems:
        raise RecipeError(problems)
    if recipe.parallel.tp > 1 and not isinstance(recipe.parallel.custom_plan, str):
        plan = find_plan(recipe.parallel.custom_plan, model)
        shards_sequence = recipe.parallel.shards_sequence(model.config.transformers is None)
        # This raises if the plan does not fit the model.
        match_styles(model, plan, sequence_parallel=shards_sequence)
    if recipe.model.init == "pretrained" and "model.path" not in inputs.pending_downloads:
        check_fit(model, WeightFiles(recipe.model.directory))
    return MetaModel(model, optimizer.build(inputs, model, precision))


def refuse_unused_tower(recipe: Recipe, has_images: bool) -> None:
    """Refuse a recipe that trains a vision tower on data without images.

    Raises:
        RecipeError: If the recipe does.
    """
    vision = recipe.train.vision
    if vision != "frozen" and not has_images:
        text = f"train.vision={vision}: no data have images, so the model is built without its vision tower"
        raise RecipeError([Problem("train.vision", text, "Set train.vision=frozen")])


def has_small_weights(inputs: RunInputs) -> bool:
    """Check whether the weights that the run reads are so small that a dry run computes their digests."""
    sources = list(inputs.other_models.values())
    if inputs.recipe.model.init == "pretrained":
        sources.append(inputs.source)
    size = 0
    for source in sources:
        size += sum(file.stat().st_size for file in weight_files(source.path))
    return size <= SMALL_WEIGHTS
