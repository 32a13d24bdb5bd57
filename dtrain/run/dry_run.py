"""Dry run of a run's models and optimizer on meta, before it reads its data; `dtrain validate` does the same. Of
weights the headers are read; nothing is allocated.
"""

from pathlib import Path

import torch
from torch.optim import Optimizer

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.methods.spec import REWARD_MODEL, spec_of
from dtrain.models.common.decoder import CausalLM
from dtrain.optim.update import NAMES, WHOLE_PARAMETERS_ONLY, build_optimizer, cannot_step_shards, is_torchs
from dtrain.parallel.apply import find_plan, styles_of
from dtrain.policy.precision import Precision, choose_precision
from dtrain.policy.trained import choose_trained
from dtrain.recipe.schema import Recipe


def dry_run_model(recipe: Recipe, precision: Precision, *, has_weights: bool = True) -> CausalLM:
    """The recipe's model on meta, as every rank builds it, once the headers of its weights fit it; has_weights: False
    where these are not here yet. Raises UserError. No collective."""
    config = models.read_config(recipe.model.directory, spec_of(recipe).labels(recipe))
    model = models.build(config, dtype=precision.master, device="meta")
    choose_trained(model, recipe, precision.compute)
    if recipe.parallel.tp > 1 and not isinstance(recipe.parallel.custom_plan, str):
        plan = find_plan(recipe.parallel.custom_plan, model)
        styles_of(model, plan, sequence_parallel=recipe.parallel.sequence_parallel)
    if recipe.model.init == "pretrained" and has_weights:
        check_fit(model, WeightFiles(recipe.model.directory))
    return model


def dry_run_other_model(path: Path, *, is_classifier: bool) -> None:
    """Do as `dry_run_model`, of a model beside the one that is trained: a reference, a teacher or a reward model."""
    check_fit(models.build(models.read_config(path, 0 if is_classifier else None), device="meta"), WeightFiles(path))


def dry_run_optimizer(recipe: Recipe, model: CausalLM, world_size: int, precision: Precision) -> Optimizer | None:
    """The recipe's optimizer over a model on meta; None where a stranger's code would be needed. Raises UserError, also
    where it cannot step what FSDP shards."""
    if not (recipe.optimizer.name in NAMES or is_torchs(recipe.optimizer.name)):
        return None
    optimizer = build_optimizer(recipe.optimizer, model.named_parameters(), recipe.run.seed)
    is_mixed = precision.compute not in (torch.float32, torch.float64)  # one process mixes by FSDP
    if (world_size > 1 or is_mixed) and isinstance(optimizer, WHOLE_PARAMETERS_ONLY):
        raise UserError(cannot_step_shards(recipe.optimizer.name))
    return optimizer


def dry_run(recipe: Recipe, device_type: str, world_size: int) -> None:
    """Check the models and the optimizer as `dtrain validate` does, for a run before it reads its data. Raises
    UserError. No collective."""
    precision = choose_precision(recipe.train.dtype, device_type, recipe.train.masters)
    model = dry_run_model(recipe, precision)
    for key, path in spec_of(recipe).other_models(recipe):
        dry_run_other_model(Path(path), is_classifier=key == REWARD_MODEL)
    dry_run_optimizer(recipe, model, world_size, precision)
