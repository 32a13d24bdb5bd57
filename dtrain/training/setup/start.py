"""Setup of the start: the checkpoint that a run resumes, or whose weights it begins from, and the last step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dtrain import recipe as config
from dtrain.adapters.config import AdapterConfig
from dtrain.base.errors import Problem, UserError
from dtrain.base.json_files import digest
from dtrain.base.model_directory import ADAPTER_CONFIG, CONFIG, is_adapter_directory
from dtrain.base.ranges import directory_hint, name_hint
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.dcp.training_state import find_first_mismatch
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Cursor
from dtrain.models.building import adaptable_shapes
from dtrain.policy.checkpoint import select_weights
from dtrain.recipe import Recipe
from dtrain.recipe.schema import BEST_METRICS
from dtrain.training import model_keys, recipe_keys, resume
from dtrain.training.host import Host
from dtrain.training.inputs import RunInputs
from dtrain.training.resume import Start
from dtrain.training.setup.data import DataFacts
from dtrain.training.setup.model import MetaModel
from dtrain.training.setup.sizes import SizeFacts

NUM_VALIDATIONS = 5  # with train.validate_every=auto: four during the run, and one at the end


@dataclass(frozen=True)
class StartFacts:
    """The start and the end of a run.

    Attributes:
        store: The run's checkpoints.
        start: The checkpoint that the run starts from, or a fresh start.
        identities: Digests of everything that the run reads at its start.
        changes: Lines about differences from the saved recipe.
        total_steps: The last step. None if the rows were not read, in a dry run.
        validate_every: Steps between validations. None: no validation.
    """

    store: CheckpointStore
    start: Start
    identities: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    total_steps: int | None = None
    validate_every: int | None = None


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check the names of `checkpoint.allow_changes`."""
    key = "checkpoint.allow_changes"
    if not inputs.recipe.checkpoint.allow_changes:
        return []
    keys = recipe_keys()
    sections = set()  # "data" and "data.train" for "data.train.path"
    mappings = []  # prefixes such as "optimizer.kwargs.": a mapping may have entries with any name
    for name in keys:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            sections.add(".".join(parts[:depth]))
        if isinstance(_value(inputs.recipe, name), Mapping):
            mappings.append(f"{name}.")
    names = [*sections, *keys, *resume.DIGESTS]
    problems = []
    for name in inputs.recipe.checkpoint.allow_changes:
        if name not in names and not name.startswith(tuple(mappings)):
            near = name_hint(name, names, otherwise="")
            problems.append(Problem(key, f"{key}: {name} is not a key of a recipe{near}"))
    return problems


def _value(recipe: Recipe, key: str) -> object:
    """Return the value at a dotted key; None if a section of the key is switched off."""
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check that `checkpoint.resume` and `checkpoint.init_from` are directories of runs with this model."""
    if any(inputs.run.checkpoints.glob("step-*")):
        return []  # the run resumes its own checkpoint, and `resume.find_start` checks the paths that it still needs
    return _check_resume(inputs) + _check_init_from(inputs)


def _check_resume(inputs: RunInputs) -> list[Problem]:
    """Check that the path of `checkpoint.resume` exists."""
    path = inputs.recipe.checkpoint.resume
    if path in (None, "auto") or Path(path).is_dir():
        return []
    text = f"checkpoint.resume={path}: there is no such directory{directory_hint(path)}"
    return [Problem("checkpoint.resume", text, "Use auto for the run's newest checkpoint")]


def _check_init_from(inputs: RunInputs) -> list[Problem]:
    """Check that `checkpoint.init_from` is a run with this model, whose weights are stored as in this run."""
    recipe, key = inputs.recipe, "checkpoint.init_from"
    if recipe.checkpoint.init_from is None:
        return []
    path = Path(recipe.checkpoint.init_from)
    named = f"{key}={path}"
    problems = []
    if not path.is_dir():
        text = f"{named}: there is no such directory{directory_hint(str(path))}"
        problems.append(Problem(key, text, "Use a run's directory, or a step-N of one"))
    elif is_adapter_directory(path):
        problems.append(Problem(key, f"{named} is an adapter, not a run", f"Set lora.path={path} instead"))
    elif (path / CONFIG).is_file():
        problems.append(Problem(key, f"{named} is a model, not a run", f"Set model.path={path} instead"))
    elif "model.config" not in recipe.checkpoint.allow_changes:
        problems += _check_same_model(inputs, path)
    has_adapter = any(any(path.glob(pattern)) for pattern in ("adapter", "checkpoints/step-*/adapter"))
    export = f"`dtrain export {path} OUT`, then set model.path=OUT and {key}=null"
    if recipe.lora is None and has_adapter:
        text = f"{named} has an adapter, and this run has none"
        problems.append(Problem(key, text, f"Set lora as in that run, or run {export}"))
    config = inputs.readable_config
    is_stored_in_4bit = config is not None and config.unquantized_modules is not None
    if recipe.lora is not None and (recipe.lora.quantize == "nf4" or is_stored_in_4bit) and not has_adapter:
        text = f"{named} has full weights, and this run stores the weights of model.path in 4 bits"
        problems.append(Problem(key, text, f"Run {export}"))
    return problems


def _check_same_model(inputs: RunInputs, path: Path) -> list[Problem]:
    """Check that the run at `path` has the same model and tokens, by the model files in its directory."""
    # The path is a run's directory, its checkpoints/, or a step in it.
    candidates = [path, *path.absolute().parents][:3]
    with_model = [directory for directory in candidates if (directory / "model" / CONFIG).is_file()]
    if not with_model:
        return []
    source, key = inputs.source, "checkpoint.init_from"
    saved = ModelDirectory(with_model[0] / "model", source.labels, implementation=source.implementation)
    if inputs.source.any_config is None or saved.any_config is None:
        return []
    from dtrain.training.setup import other_models  # most runs need no second model

    problems = other_models.reference_problems(inputs.source.config, saved.config, key, str(path))
    problems += other_models.token_problems(saved, inputs.source, key, str(path))
    allowing = "or allow the change with checkpoint.allow_changes=[model.config]"
    return [replace(problem, fix=f"{problem.fix}, {allowing}") for problem in problems]


def resolve(
    inputs: RunInputs,
    data: DataFacts,
    sizes: SizeFacts,
    meta: MetaModel | None,
    identities: Mapping[str, str],
    host: Host,
) -> StartFacts | None:
    """Find the start, compare it with the run that saved it, and count the steps.

    Args:
        inputs: The run's inputs.
        data: The data.
        sizes: The sizes.
        meta: The model on the meta device, on rank 0.
        identities: Digests of the files that the run reads. A dry run has read only some of them.
        host: The ranks.

    Returns:
        The facts. None in a dry run that found a problem with them.

    Raises:
        UserError: On every rank.

    Collectives:
        Over all ranks of `host`.
    """
    recipe = sizes.recipe
    store = CheckpointStore(inputs.run.checkpoints, host.ranks)
    start = host.attempt("checkpoint.resume", partial(resume.find_start, inputs, store, host))
    if start is None:
        return None
    digests = dict(identities)
    required_start_weights = sizes.method.required_start_weights
    if required_start_weights is not None and "model.config" in digests:
        digests[f"{recipe.method_name}.reference"] = _start_identity(recipe, digests, start, required_start_weights)
    if start.init_weights is not None:
        host.on_first_rank("checkpoint.init_from", partial(_check_weights, inputs, recipe, start, digests, meta))
    changes: list[str] = []
    if start.state is not None:
        compare = partial(_compare, inputs, data, sizes, start, digests, meta, host)
        compared = host.attempt("checkpoint.resume", compare)
        if compared is None:
            return None
        changes = compared
    total_steps = recipe.train.steps
    if total_steps is None and "train" in data.rows:
        total_steps = _last_step_of_epochs(sizes, start, data)
    interval = None if total_steps is None else validate_every(recipe, total_steps)
    return StartFacts(store, start, digests, tuple(changes), total_steps, interval)


def validate_every(recipe: Recipe, total_steps: int) -> int | None:
    """Return the number of steps between validations; None if there are no validations.

    `train.validate_every=auto` means a validation at every save if `checkpoint.keep_best` compares a validation metric.
    Otherwise it means NUM_VALIDATIONS validations in the run. For example, a run of 103 steps is validated every 21
    steps and at the end.
    """
    every, checkpoint = recipe.train.validate_every, recipe.checkpoint
    if recipe.data.val is None or every is None:
        return None
    if isinstance(every, int):
        return every
    if checkpoint.keep_best in BEST_METRICS and checkpoint.keep_best != "loss" and checkpoint.every is not None:
        return checkpoint.every
    return -(-total_steps // NUM_VALIDATIONS)


def _start_identity(recipe: Recipe, identities: Mapping[str, str], start: Start, reference: str) -> str:
    """Return the digest of the weights that the run trains from.

    Args:
        recipe: The recipe.
        identities: Digests of the files that the run reads.
        start: The start.
        reference: `Method.required_start_weights`. "base": without the adapter.
    """
    # The weights are those of model.path, or random ones that follow from the seed, or those of init_from.
    weights = identities.get("model.weights") or digest(recipe.run.seed, identities["model.config"])
    if recipe.checkpoint.init_from is not None and resume.INIT_KEY in start.origins:
        weights = start.origins[resume.INIT_KEY]["identity"]
    if recipe.lora is None:
        return weights
    adapter = None if reference == "base" else identities.get("lora.path")
    return digest(weights, adapter, recipe.lora.quantize, reference)


def _check_weights(
    inputs: RunInputs, recipe: Recipe, start: Start, identities: Mapping[str, str], meta: MetaModel | None
) -> None:
    """Check that the weights of `checkpoint.init_from` belong to this model. Only headers are read. Rank 0 only.

    Raises:
        UserError: If names or shapes of tensors do not fit. Also for an adapter with other scales or another
            quantization, and for trained tensors whose run had other frozen weights: these tensors would fit, but they
            would not be the same model.
    """
    assert start.init_weights is not None and meta is not None
    store, step = start.init_weights
    state = store.read_state(step)
    if recipe.lora is not None:
        from dtrain.adapters.lora import adapter_config  # a run without an adapter does not load it

        config_of_run = adapter_config(meta.model)
        assert config_of_run is not None, "the recipe has the section lora"
        adaptable_layers = adaptable_shapes(meta.model.config)
        _check_adapter(recipe, adaptable_layers, config_of_run, state["recipe"], store.path(step))
    weights = select_weights(meta.model, store, step)
    saved_identity = state.get("identities", {}).get("model.weights")
    has_same_base = saved_identity == identities.get("model.weights")
    are_digests_known = "model.config" in identities  # a dry run computes none for large weights
    if not weights.is_complete and are_digests_known and not has_same_base:
        raise UserError(
            f"{resume.INIT_KEY}: {store.path(step)} has only the trained tensors, and the frozen weights of its run "
            "were not those of model.path. Set model.path to the model that its run began from."
        )
    try:
        store.check_fit(step, weights.tensors, weights.cast)
    except UserError as error:
        changed = [key for key, _, _ in config.diff_recipes(state["recipe"], inputs.original_recipe)]
        if "model.implementation" not in changed:
            raise
        fix = f"Use that one, or `dtrain export {store.path(step)} OUT`, and set model.path=OUT"
        raise UserError(f"{error}\n  model.implementation is not that of its run. {fix}") from error


def _check_adapter(
    recipe: Recipe,
    adaptable_layers: Mapping[str, tuple[int, ...]],
    config_of_run: AdapterConfig,
    saved_recipe: str,
    directory: Path,
) -> None:
    """Check that the adapter of a saved step, if it has one, has the same layers, ranks and scales as this run.

    Args:
        recipe: The recipe.
        adaptable_layers: The shape of each layer that can have an adapter.
        config_of_run: The config of this run's adapter.
        saved_recipe: The recipe of the saved step, as YAML.
        directory: The directory of the step.

    Raises:
        UserError: If they differ.
    """
    from dtrain.checkpoint.peft.config import ADAPTER, read_adapter_config  # an optional feature

    adapter = directory / ADAPTER
    if not (adapter / ADAPTER_CONFIG).is_file():
        return
    differing = [key for key, _, _ in config.diff_recipes(saved_recipe, recipe) if key == "lora.quantize"]
    if read_adapter_config(adapter).select_layers(adaptable_layers) != config_of_run.select_layers(adaptable_layers):
        differing.append("its layers, ranks or scales (lora.target, rank, alpha, rslora and the patterns)")
    if differing:
        raise UserError(
            f"{resume.INIT_KEY}: {adapter} is an adapter that was trained with other settings: {', '.join(differing)}. "
            "Set them as in its run."
        )


def _compare(
    inputs: RunInputs,
    data: DataFacts,
    sizes: SizeFacts,
    start: Start,
    identities: Mapping[str, str],
    meta: MetaModel | None,
    host: Host,
) -> list[str]:
    """Return a line for each change since the save that the run resumes (`resume.compare`).

    A dry run does not read all files. It accepts another path for a file that it has not read, because the content may
    be the same.

    Raises:
        UserError: On every rank, if the recipe has changed in a way that no resume allows.

    Collectives:
        One broadcast.
    """
    tensor_difference = host.ranks.run_on_first(lambda: _find_tensor_difference(start, meta))
    allowed = inputs.original_recipe.checkpoint.allow_changes
    if host.is_dry:
        unread = [key for key, digest_key in resume.DIGEST_OF_LOCATION.items() if digest_key not in identities]
        unread += [key for key in model_keys(sizes.recipe.method) if key not in identities]
        allowed = [*allowed, *unread]
    return resume.compare(
        inputs.original_recipe,
        start,
        identities,
        data.rows,
        sizes.method,
        allow_changes=allowed,
        tensor_difference=tensor_difference,
    )


def _find_tensor_difference(start: Start, meta: MetaModel | None) -> str | None:
    """Describe the first difference between the run's trained tensors and those of the start; None without one.

    Rank 0 only.
    """
    assert meta is not None
    store, state = start.checkpoint
    return find_first_mismatch(meta.model, state["policy"].get("optimizer", {}), store.tensor_specs(start.step))


def _last_step_of_epochs(sizes: SizeFacts, start: Start, data: DataFacts) -> int:
    """Return the last step of `train.epochs`: the start's step plus the remaining steps.

    The remaining steps follow from the start's position in the data, not from its step, because it may have been saved
    with another global batch.
    """
    saved = start.state["method"] if start.state else {}
    return start.step + sizes.method.source.remaining_steps(data.rows["train"], Cursor(*start.cursor), saved)
