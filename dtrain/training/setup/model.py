"""Stage model: precision, the model on meta, digests of what the run reads at its start. Of weights the headers are
read; nothing is allocated.
"""

from contextlib import suppress
from functools import partial
from pathlib import Path

from dtrain import models
from dtrain.adapters.nf4 import block_problems, held_by_nf4, holds_codes
from dtrain.base.errors import UserError
from dtrain.base.model_directory import INDEX, files_of_weights, has_weights, is_adapter_directory, read_header
from dtrain.base.name_patterns import unmatched
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles, weight_files
from dtrain.models.common.config import ModelConfig
from dtrain.models.shapes import on_meta
from dtrain.parallel.apply import find_plan, styles_of
from dtrain.policy.precision import choose_precision
from dtrain.policy.trained import choose_trained, frozen_pattern_problems
from dtrain.training import resume
from dtrain.training.host import Host
from dtrain.training.preflight import model_ids
from dtrain.training.spec import RunSpec

SMALL_WEIGHTS = 256 << 20  # bytes that a dry run reads whole


def check_keys(spec: RunSpec) -> list[str]:
    """Check that the recipe names a model."""
    missing = "model.path is missing: set it to a local directory with config.json, weights and tokenizer"
    return [] if spec.recipe.model.path else [missing]


def check_models(spec: RunSpec) -> list[str]:
    """Check config.json, and the keys that choose among what it has. Raises UserError for a file that is no model."""
    recipe, path = spec.recipe, spec.recipe.model.path
    if not path or any(key == "model.path" for key, _, _ in model_ids(recipe)):
        return []
    if is_adapter_directory(path):
        return [_is_an_adapter(spec.source.path)]
    model, problems = spec.model_config, []
    if model.unquantized is not None and recipe.lora is None:
        problems.append(
            f"model.path={path}: its weights are in 4 bits, which take an adapter and are not trained: set lora={{}}, "
            "or use the original checkpoint"
        )
    elif model.unquantized is not None and recipe.model.init == "scratch":
        problems.append(
            f"model.init=scratch draws weights, and config.json of model.path={path} is of a model in 4 bits: set "
            "model.init=pretrained, or use the original checkpoint's config.json"
        )
    elif model.unquantized is None and recipe.lora is not None and recipe.lora.quantize == "nf4":
        problems += block_problems(model, held_by_nf4(model), max(recipe.parallel.tp, 1))
    if model.experts is None and recipe.moe.balance > 0:
        problems.append(f"moe.balance={recipe.moe.balance}: this model has no experts; leave it out")
    if recipe.train.tile == "mlp" and all(map(model.is_sparse, range(model.num_hidden_layers))):
        problems.append(
            "train.tile=mlp: every layer of this model has a mixture of experts, which is not tiled: set "
            "train.tile=none, or all for attention by groups of heads"
        )
    problems += spec.method.model_problems(model)
    model = config_with_tower(spec)
    built = on_meta(model)
    names = [name for name, _ in built.named_parameters(remove_duplicate=False)]
    for tower in built.model.vision:
        problems += frozen_pattern_problems(recipe.train, tower, names)
    if model.vision is None and recipe.train.vision != "frozen":
        problems.append(
            f"train.vision={recipe.train.vision}: this model has no vision tower that dtrain trains: set "
            "train.vision=frozen"
        )
    return problems + unmatched(recipe.train.parameter_patterns, names)


def config_with_tower(spec: RunSpec) -> ModelConfig:
    """Return the model's config, with the vision tower that it is built with where data have images, if it has one that
    dtrain reads. Raises UserError."""
    with suppress(UserError):
        return spec.source.vision_config
    return spec.source.config


def _is_an_adapter(directory: Path) -> str:
    from dtrain.checkpoint.peft.config import base_of

    try:
        base, why = str(base_of(directory)), ""
    except UserError as error:
        base, why = "BASE", f" ({error})"
    return (
        f"model.path={directory} is an adapter in PEFT's layout, not a model: set model.path={base} and "
        f"lora.path={directory} to go on from it{why}"
    )


def check_files(spec: RunSpec) -> list[str]:
    """Check the headers of the weights."""
    is_read = spec.source.any_config is not None and spec.recipe.model.init == "pretrained"
    if not is_read or "model.path" in spec.awaited:
        return []
    return weight_problems(spec.source.path, ", or model.init=scratch to start from random ones")


def weight_problems(directory: Path, otherwise: str = "", key: str = "model.path") -> list[str]:
    """Return what is wrong with the headers of a model's files, one line each; `check_fit` compares them with the
    model."""
    index = directory / INDEX
    if not has_weights(directory):
        bins = " (pytorch_model.bin is a pickle, which dtrain does not open)" if any(directory.glob("*.bin")) else ""
        return [
            f"{directory} has neither model.safetensors nor {index.name}{bins}: "
            f"set {key} to a directory with weights{otherwise}"
        ]
    try:
        wanted = files_of_weights(directory) or {}
    except UserError as error:
        return [str(error)]
    missing = [name for name in sorted(wanted) if not (directory / name).is_file()]
    if missing:
        return [f"{index} names files that are not there: {', '.join(missing)}; download the model again"]
    problems = []
    for name, tensors in wanted.items():
        try:
            lacking = sorted(set(tensors) - read_header(directory / name)[0].keys())
        except UserError as error:
            problems.append(f"{key}: {error}")
            continue
        if lacking:
            first = f"first {lacking[0]}; download the model again"
            problems.append(f"{directory / name} is without {len(lacking)} tensors that {INDEX} places there, {first}")
    return problems


def resolve(spec: RunSpec, host: Host) -> bool:
    """Build the model on meta, on the first rank, unless the stage tower has to; read the digests of what the run
    reads."""
    recipe, world = spec.recipe, spec.world
    if host.known:
        return True
    spec.precision = choose_precision(recipe.train.dtype, world.device_type, recipe.train.masters)
    if not _may_name_tower(spec):
        host.first(partial(build, spec))
        spec.built_for_images = spec.has_images
    host.ask(_identify, spec, host)
    return True


def _may_name_tower(spec: RunSpec) -> bool:
    """Return whether names of the recipe may be of a vision tower that images alone bring, so that the data are read
    first."""
    recipe = spec.recipe
    has_names = recipe.lora is not None or any(recipe.train.parameter_patterns.values())
    return has_names and not spec.has_images and config_with_tower(spec).vision is not None


def build(spec: RunSpec) -> None:
    """Put the model on meta, as every rank builds it, once the headers of its weights fit it. Raises UserError."""
    recipe, compute = spec.recipe, spec.precision.compute
    model = models.build(spec.model_config, dtype=spec.precision.master, device="meta")
    choose_trained(model, recipe, compute)
    coded = [model.config.whole(name) for name, layer in model.named_modules() if holds_codes(layer)]
    if problems := block_problems(model.config, coded, recipe.parallel.tp):
        raise UserError("\n".join(problems))
    if recipe.parallel.tp > 1 and not isinstance(recipe.parallel.custom_plan, str):
        plan = find_plan(recipe.parallel.custom_plan, model)
        styles_of(model, plan, sequence_parallel=recipe.parallel.sequence_parallel)
    if recipe.model.init == "pretrained" and "model.path" not in spec.awaited:
        check_fit(model, WeightFiles(recipe.model.directory))
    spec.model = model


def _identify(spec: RunSpec, host: Host) -> None:
    """Read the digests; a dry run does where the weights are few, and here."""
    if host.is_dry:
        sources = [*spec.others.values(), *([spec.source] if spec.recipe.model.init == "pretrained" else [])]
        if spec.awaited or spec.model is None:
            return
        files = [file for source in sources for file in weight_files(source.path)]
        if sum(file.stat().st_size for file in files) > SMALL_WEIGHTS:
            return
    spec.identities |= resume.identities(spec, host.ranks)
