"""Stage model: precision, the models and the optimizer on meta, digests of what the run reads at its start. Of weights
the headers are read; nothing is allocated.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.methods.spec import REWARD_MODEL, spec_of
from dtrain.optim.update import NAMES, WHOLE_PARAMETERS_ONLY, build_optimizer, cannot_step_shards, is_torchs
from dtrain.parallel.apply import find_plan, styles_of
from dtrain.policy.precision import choose_precision
from dtrain.policy.trained import choose_trained
from dtrain.run.host import Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Build the models and the optimizer on meta, on the first rank; read the digests of what the run reads."""
    recipe, world = spec.recipe, spec.world
    if host.known:
        return True
    spec.precision = choose_precision(recipe.train.dtype, world.device_type, recipe.train.masters)
    config = host.ask(models.read_config, recipe.model.directory, spec_of(recipe).labels(recipe))
    if config is None:
        return False
    spec.model_config = config
    host.first(partial(_build, spec, "model.path" not in host.awaited))
    for key, path in spec_of(recipe).other_models(recipe):
        if key not in host.awaited:
            host.first(partial(_check_other_model, Path(path), is_classifier=key == REWARD_MODEL))
    host.first(partial(_build_optimizer, spec))
    host.identify(spec)
    return True


def _build(spec: "RunSpec", has_weights: bool) -> None:
    """Put the model on meta, as every rank builds it, once the headers of its weights fit it; has_weights: False where
    these are not here yet. Raises UserError."""
    recipe, compute = spec.recipe, spec.precision.compute
    model = models.build(spec.model_config, dtype=spec.precision.master, device="meta")
    choose_trained(model, recipe, compute)
    if recipe.parallel.tp > 1 and not isinstance(recipe.parallel.custom_plan, str):
        plan = find_plan(recipe.parallel.custom_plan, model)
        styles_of(model, plan, sequence_parallel=recipe.parallel.sequence_parallel)
    if recipe.model.init == "pretrained" and has_weights:
        check_fit(model, WeightFiles(recipe.model.directory))
    spec.model = model


def _check_other_model(path: Path, *, is_classifier: bool) -> None:
    """Check a model as `_build` does, beside the one that is trained: a reference, a teacher or a reward model."""
    check_fit(models.build(models.read_config(path, 0 if is_classifier else None), device="meta"), WeightFiles(path))


def _build_optimizer(spec: "RunSpec") -> None:
    """Put the optimizer over the model on meta, where no stranger's code is needed for it. Raises UserError, also where
    it cannot step what FSDP shards."""
    section, model = spec.recipe.optimizer, spec.model
    if model is None or not (section.name in NAMES or is_torchs(section.name)):
        return
    spec.optimizer = build_optimizer(section, model.named_parameters(), spec.recipe.run.seed)
    is_mixed = spec.precision.compute not in (torch.float32, torch.float64)  # one process mixes by FSDP
    if (spec.world.size > 1 or is_mixed) and isinstance(spec.optimizer, WHOLE_PARAMETERS_ONLY):
        raise UserError(cannot_step_shards(section.name))
