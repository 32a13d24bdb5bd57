"""Stage model: precision, the models and the optimizer on meta, digests of what the run reads at its start. Of weights
the headers are read; nothing is allocated.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
from dtrain.run import resume
from dtrain.run.host import DryHost, Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Build the models and the optimizer on meta, on the first rank; read the digests of what the run reads."""
    recipe, world = spec.recipe, spec.world
    if host.known:
        return True
    spec.precision = choose_precision(recipe.train.dtype, world.device_type, recipe.train.masters)

    def build() -> None:
        has_weights = "model.path" not in host.awaited
        spec.model = meta_model(recipe, spec.precision, has_weights=has_weights)

    host.first(build)
    for key, path in spec_of(recipe).other_models(recipe):
        if key not in host.awaited:
            host.first(partial(check_other_model, Path(path), is_classifier=key == REWARD_MODEL))
    host.first(lambda: _optimizer(spec))
    if not isinstance(host, DryHost):
        spec.model_config = models.read_config(recipe.model.directory, spec_of(recipe).labels(recipe))
        spec.identities = resume.identities(recipe, spec.tokenizer, host.ranks)
    return True


def _optimizer(spec: "RunSpec") -> None:
    if spec.model is not None:
        spec.optimizer = meta_optimizer(spec.recipe, spec.model, spec.world.size, spec.precision)


def meta_model(recipe: Recipe, precision: Precision, *, has_weights: bool = True) -> CausalLM:
    """Return the recipe's model on meta, as every rank builds it, once the headers of its weights fit it; has_weights:
    False where these are not here yet. Raises UserError. No collective."""
    config = models.read_config(recipe.model.directory, spec_of(recipe).labels(recipe))
    model = models.build(config, dtype=precision.master, device="meta")
    choose_trained(model, recipe, precision.compute)
    if recipe.parallel.tp > 1 and not isinstance(recipe.parallel.custom_plan, str):
        plan = find_plan(recipe.parallel.custom_plan, model)
        styles_of(model, plan, sequence_parallel=recipe.parallel.sequence_parallel)
    if recipe.model.init == "pretrained" and has_weights:
        check_fit(model, WeightFiles(recipe.model.directory))
    return model


def check_other_model(path: Path, *, is_classifier: bool) -> None:
    """Check a model, as `meta_model` does, beside the one that is trained: a reference, a teacher or a reward model."""
    check_fit(models.build(models.read_config(path, 0 if is_classifier else None), device="meta"), WeightFiles(path))


def meta_optimizer(recipe: Recipe, model: CausalLM, world_size: int, precision: Precision) -> Optimizer | None:
    """Return the recipe's optimizer over a model on meta; None where a stranger's code would be needed. Raises
    UserError, also where it cannot step what FSDP shards."""
    if not (recipe.optimizer.name in NAMES or is_torchs(recipe.optimizer.name)):
        return None
    optimizer = build_optimizer(recipe.optimizer, model.named_parameters(), recipe.run.seed)
    is_mixed = precision.compute not in (torch.float32, torch.float64)  # one process mixes by FSDP
    if (world_size > 1 or is_mixed) and isinstance(optimizer, WHOLE_PARAMETERS_ONLY):
        raise UserError(cannot_step_shards(recipe.optimizer.name))
    return optimizer
