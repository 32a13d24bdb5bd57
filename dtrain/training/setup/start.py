"""Stage start: the checkpoint that a run goes on from, or whose weights it takes, and the step that it ends with."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from dtrain import recipe as config
from dtrain.adapters.config import AdapterConfig
from dtrain.base.errors import UserError
from dtrain.base.json_files import digest
from dtrain.base.model_directory import ADAPTER_CONFIG, CONFIG, is_adapter_directory
from dtrain.base.ranges import beside, hint
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.dcp.training_state import first_misfit
from dtrain.data import Cursor
from dtrain.models.shapes import adaptable
from dtrain.policy.checkpoint import weights_of
from dtrain.recipe.schema import BEST, Recipe
from dtrain.training import model_keys, recipe_keys, resume
from dtrain.training.host import Host
from dtrain.training.spec import ModelDirectory, RunSpec

VALIDATIONS = 5  # of a run with train.validate_every=auto: four on the way, and one at the end


def check_keys(spec: RunSpec) -> list[str]:
    """Check the names of `checkpoint.allow_changes`."""
    if not spec.recipe.checkpoint.allow_changes:
        return []
    known = recipe_keys()
    parents = {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    names = [*parents, *known, *resume.DIGESTS]
    mappings = tuple(f"{key}." for key in known if isinstance(_value(spec, key), Mapping))  # any name may stand in them
    problems = []
    for name in spec.recipe.checkpoint.allow_changes:
        if name not in names and not name.startswith(mappings):
            meant = hint(name, names, otherwise="")
            problems.append(f"checkpoint.allow_changes: {name} is no key of a recipe{meant}")
    return problems


def _value(spec: RunSpec, key: str) -> object:
    """The value at a dotted key; None where a section on the way is switched off."""
    value: object = spec.recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def check_files(spec: RunSpec) -> list[str]:
    """Check that what `checkpoint.resume` and `checkpoint.init_from` name is there, and of this model."""
    recipe = spec.recipe
    resume, init_from = recipe.checkpoint.resume, recipe.checkpoint.init_from
    problems = []
    if any(spec.run.checkpoints.glob("step-*")):
        return []  # a run that goes on says itself what it needs of them
    if resume not in (None, "auto") and not Path(resume).is_dir():
        problems.append(
            f"checkpoint.resume={resume}: there is no such directory{beside(resume)}; auto takes the run's newest "
            "checkpoint"
        )
    if init_from is None:
        return problems
    if not Path(init_from).is_dir():
        problems.append(
            f"checkpoint.init_from={init_from}: there is no such directory{beside(init_from)}; give a run's, or a "
            "step-N of one"
        )
    elif is_adapter_directory(init_from):
        problems.append(
            f"checkpoint.init_from={init_from} is an adapter's directory, not a run's: set lora.path={init_from} "
            "instead"
        )
    elif (Path(init_from) / "config.json").is_file():
        problems.append(
            f"checkpoint.init_from={init_from} is a model's directory, not a run's: set model.path={init_from} instead"
        )
    elif "model.config" not in recipe.checkpoint.allow_changes:
        problems += _differences(spec, Path(init_from))
    is_adapter = any(any(Path(init_from).glob(place)) for place in ("adapter", "checkpoints/step-*/adapter"))
    if recipe.lora is None and is_adapter:
        problems.append(
            f"checkpoint.init_from={init_from} has an adapter that this run has not: set lora as it was there, or "
            f"`dtrain export {init_from} OUT`, and set model.path=OUT and checkpoint.init_from=null"
        )
    is_stored_so = spec.readable_config is not None and spec.readable_config.unquantized is not None
    if recipe.lora is not None and (recipe.lora.quantize == "nf4" or is_stored_so) and not is_adapter:
        problems.append(
            f"checkpoint.init_from={init_from} holds whole weights, and this run holds those of model.path in 4 bits: "
            f"`dtrain export {init_from} OUT`, and set model.path=OUT and checkpoint.init_from=null"
        )
    return problems


def _differences(spec: RunSpec, path: Path) -> list[str]:
    """Return what makes the model whose weights are taken another one than ours, by the files that its run keeps."""
    above = [path, *path.absolute().parents][:3]  # a run's directory, its checkpoints, a step of them
    kept = next((place / "model" for place in above if (place / "model" / CONFIG).is_file()), None)
    if kept is None:
        return []
    theirs, key = ModelDirectory(kept, spec.source.labels), "checkpoint.init_from"
    if spec.source.any_config is None or theirs.any_config is None:
        return []
    others = import_module("dtrain.training.setup.others")
    differences = others.reference_problems(spec.model_config, theirs.config, key, str(path))
    differences += [f"{key}={path}: {problem}" for problem in others.differing_tokens(theirs, spec.source)]
    return [f"{problem}, or name the change: checkpoint.allow_changes=[model.config]" for problem in differences]


def resolve(spec: RunSpec, host: Host) -> bool:
    """Find the start, compare what it was saved with, and count the steps. Collective."""
    recipe, needs_start = spec.recipe, spec.method.needs_start
    if host.ranks.is_first and spec.model is None:  # in a dry run that has a problem with it
        return False
    spec.store = CheckpointStore(spec.run.checkpoints, host.ranks)
    start = host.ask(resume.find_start, spec, host)
    if start is None:
        return False
    spec.start = start
    if needs_start is not None and "model.config" in spec.identities:
        spec.identities[f"{recipe.method}.reference"] = _identity(spec, needs_start)
    if start.weights is not None:
        host.first(partial(_check_weights, spec))
    if start.state is not None:
        changes = host.ask(_compare, spec, host)
        if changes is None:
            return False
        spec.changes = changes
    if recipe.train.steps or "train" in spec.rows:
        spec.total_steps = recipe.train.steps or _last_step_of_epochs(spec)
        spec.validate_every = validate_every(recipe, spec.total_steps)
    return True


def validate_every(recipe: Recipe, total_steps: int) -> int | None:
    """Return the steps between validations, None for none; `auto` follows the saves that they compare, or the steps."""
    every, checkpoint = recipe.train.validate_every, recipe.checkpoint
    if recipe.data.val is None or every is None:
        return None
    if isinstance(every, int):
        return every
    if checkpoint.keep_best in BEST and checkpoint.keep_best != "loss" and checkpoint.every is not None:
        return checkpoint.every
    return -(-total_steps // VALIDATIONS)


def _identity(spec: RunSpec, named: str) -> str:
    """Return the digest of the weights that the run trains from, or with named="base" of these without an adapter."""
    recipe, digest_of, began = spec.recipe, spec.identities, spec.start.began
    own = digest_of.get("model.weights") or digest(recipe.run.seed, digest_of["model.config"])
    if recipe.checkpoint.init_from is not None and resume.INIT in began:
        own = began[resume.INIT]["identity"]
    if recipe.lora is None:
        return own
    return digest(own, None if named == "base" else digest_of.get("lora.path"), recipe.lora.quantize, named)


def _check_weights(spec: RunSpec) -> None:
    """Check that the weights of `checkpoint.init_from` are of this model. No file is read whole. Raises UserError: also
    for those of an adapter that mean another model here, by other scales or the base in other bits; and where they were
    trained beside other weights."""
    assert spec.start.weights is not None and spec.model is not None
    store, step = spec.start.weights
    state = store.read_state(step)
    if spec.model.adapters is not None:
        from dtrain.adapters.lora import adapter_config  # a run without an adapter does not load it

        config = adapter_config(spec.model)
        assert config is not None
        _check_adapter(spec, config, state["recipe"], store.path(step))
    weights = weights_of(spec.model, store, step)
    saved, ours = state.get("identities", {}).get("model.weights"), spec.identities.get("model.weights")
    if not weights.is_whole and "model.config" in spec.identities and saved != ours:
        raise UserError(
            f"{resume.INIT}: {store.path(step)} holds what was trained alone, and the weights beside it were not those "
            "of model.path: set model.path to the model that its run began from"
        )
    store.refuse_misfit(step, weights.wanted, weights.cast)


def _check_adapter(spec: RunSpec, ours: AdapterConfig, saved: str, directory: Path) -> None:
    """Check that the adapter of a step, if it has one, means what ours does. Raises UserError."""
    from dtrain.checkpoint.peft.config import ADAPTER, read_adapter_config

    folder, layers = directory / ADAPTER, adaptable(spec.model_config)
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    differing = [key for key, _, _ in config.diff(saved, spec.recipe) if key == "lora.quantize"]
    if read_adapter_config(folder).adapted(layers) != ours.adapted(layers):
        differing.append("its layers, ranks or scales (lora.target, rank, alpha, rslora and the patterns)")
    if differing:
        raise UserError(
            f"{resume.INIT}: {folder} is an adapter that was trained with other settings: {', '.join(differing)}. "
            "Set them as its run has them"
        )


def _compare(spec: RunSpec, host: Host) -> list[str]:
    """Return the changes since the save that the run goes on from.

    A dry run allows those of places whose content it has not read: it may be the same. Collective: one broadcast.
    Raises UserError.
    """
    unfit = host.ranks.first(lambda: _unfit(spec))
    section = spec.written.checkpoint
    if host.is_dry:
        unread = [key for key, of in resume.DIGEST_OF_LOCATION.items() if of not in spec.identities]
        unread += [key for key in model_keys(spec.recipe.method) if key not in spec.identities]
        section = replace(section, allow_changes=[*section.allow_changes, *unread])
    return resume.compare(spec, section.allow_changes, unfit)


def _unfit(spec: RunSpec) -> str | None:
    """Return how the tensors that the run would train differ from those of the start. Rank 0 only."""
    assert spec.model is not None
    store, state = spec.start.saved
    return first_misfit(spec.model, state["policy"].get("optimizer", {}), store.tensors(spec.start.step))


def _last_step_of_epochs(spec: RunSpec) -> int:
    """The step that `train.epochs` ends with: those of the start and what is left. Where the start was saved with other
    epochs or another global_batch, its rows are not step × batch."""
    start = spec.start
    saved = start.state["method"] if start.state else {}
    return start.step + spec.method.source.steps_left(spec.rows["train"], Cursor(*start.cursor), saved)
