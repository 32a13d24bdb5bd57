"""Resume: finding the checkpoint that a run starts from, comparing the saved run, and saving and loading its state.

A run calls these functions in this order:

    find_start    finds the step to start from
    identities    computes digests of the files that the run reads now
    compare       checks that this recipe and these files may resume the saved run
    restore       loads the checkpoint

For example, a run with checkpoint.resume=auto whose directory has step-10 and a damaged step-20 prints that step-20 is
damaged, renames it to damaged-step-20, and resumes from step-10. If `optimizer.lr` is then different from the value in
the checkpoint's recipe, the resume is refused unless checkpoint.allow_changes=[optimizer.lr].

A checkpoint contains:

    tensors        of the policy, and of the method under `method.<name>`
    rank state     the random number generators of each rank
    state.json     cursor       the next row of the global sequence: [epoch, row]
                   recipe       the resolved recipe, as YAML
                   identities   digests of the files that the run read at its start: weights, tokenizer, data, ...
                   began        the checkpoints that the run began from, see `Origin`
                   save         a random mark of this save
                   metrics      the metrics of this step
                   policy, method   the state of policy and method that is not in tensors
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dtrain import recipe as config
from dtrain.base.errors import UserError, limit_problems
from dtrain.base.files import set_aside
from dtrain.base.json_files import digest, read_json
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.base.ranges import format_value
from dtrain.base.ranks import Ranks, file_digests
from dtrain.checkpoint.dcp.store import CheckpointStore, Origin, locate_step
from dtrain.checkpoint.dcp.training_state import random_state, set_random_state
from dtrain.checkpoint.huggingface.model_files import read_model_config
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Rows
from dtrain.data.sources.sources import should_pack
from dtrain.methods import Method
from dtrain.policy import Policy
from dtrain.recipe import Recipe
from dtrain.training.directory import Difference, TensorMismatch, check_changes
from dtrain.training.host import Host
from dtrain.training.inputs import RunInputs
from dtrain.training.registry import REWARD_MODEL, model_keys

DIGEST_OF_SPLIT = {"train": "data.fingerprint", "val": "data.val.fingerprint"}
# Digests that a resume compares next to the recipe's keys. `checkpoint.allow_changes` may name them.
DIGESTS = ("data.fingerprint", "data.val.fingerprint", "model.weights", "model.config", "model.tokenizer")
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
RESUME_KEY, INIT_KEY = "checkpoint.resume", "checkpoint.init_from"
NEW_RUN = "or begin anew: delete the run's directory, or choose another run.name"
# Keys of a data source that only name the location of its rows. A copy of the data elsewhere has the same fingerprint.
LOCATION_KEYS = ("path", "split", "subset", "revision", "columns", "sources")
# Keys of a recipe that name the location of files, with the digest of the files' content. If the digest is the same as
# in the saved run, the key may differ.
DIGEST_OF_LOCATION = {
    "model.path": "model.config",
    **{f"data.train.{name}": "data.fingerprint" for name in LOCATION_KEYS},
    **{f"data.val.{name}": "data.val.fingerprint" for name in LOCATION_KEYS},
    "lora.path": "lora.path",
    "data.chat_template": "data.chat_template",
}

# Keys that decide which tensors a run trains, and their shapes.
SHAPE_KEYS = (
    *("lora", "lora.path", "lora.rank", "lora.rank_pattern", "lora.target", "lora.exclude", "lora.modules_to_save"),
    *("lora.dora", "train.vision", "train.train_only", "train.freeze", "model.path", "model.config"),
)


@dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint, or a fresh start without one.

    Attributes:
        step: The checkpoint's step. 0 for a fresh start.
        cursor: The next row of the global sequence: epoch and row.
        store: The checkpoints. None for a fresh start.
        state: The content of state.json. None for a fresh start.
        verified: Whether every file of the step has just been compared with its checksum.
        origins: The checkpoints that the run began from: an `Origin` as JSON under RESUME_KEY, INIT_KEY or both. It is
            stored as began.json, and as `began` in state.json.
        init_weights: The store and step whose weights replace those of model.path (`checkpoint.init_from`), or None.
    """

    step: int = 0
    cursor: tuple[int, int] = (0, 0)
    store: CheckpointStore | None = None
    state: dict[str, Any] | None = None
    verified: bool = False
    origins: dict[str, dict[str, Any]] = field(default_factory=dict)
    init_weights: tuple[CheckpointStore, int] | None = None

    @property
    def checkpoint(self) -> tuple[CheckpointStore, dict[str, Any]]:
        """The store and the content of state.json of a start from a checkpoint."""
        if self.store is None or self.state is None:
            raise ValueError("a fresh run starts from no checkpoint")
        return self.store, self.state

    @property
    def path(self) -> Path:
        """The directory of the checkpoint."""
        return self.checkpoint[0].path(self.step)


def find_start(inputs: RunInputs, store: CheckpointStore, host: Host) -> Start:
    """Find the checkpoint of `checkpoint.resume`, and the weights of `checkpoint.init_from`.

    `checkpoint.resume` is one of:

    - auto: The run's newest checkpoint. Every file is compared with its checksum. If a checkpoint is damaged, this is
      printed and the previous checkpoint is used. If all are damaged, the run is refused, so that it does not start
      over by accident.
    - null: No checkpoint. The run's directory must be new.
    - A path: The checkpoint there. If this run began from that path before and was ended, it resumes its own newest
      checkpoint.

    Damaged steps after the start are renamed to `damaged-step-N`, so that the run can save those steps again. Complete
    steps after the start, which a path into this run's own checkpoints may leave, are refused.

    `checkpoint.init_from` is read if the run is fresh, or if its method needs the weights that it began from.

    In a dry run only the sizes of files are compared, and nothing is renamed.

    Args:
        inputs: The run's inputs.
        store: The run's own checkpoints.
        host: Ranks and terminal.

    Raises:
        UserError: On every rank, if there is no checkpoint at a path, if all checkpoints are damaged, or if the run's
            directory is used already.

    Collectives:
        Over all ranks of `host`.
    """
    start = _find_step(inputs, store, host)
    recipe = inputs.recipe
    ranks = host.ranks
    path = recipe.checkpoint.init_from
    origins = start.origins
    if path is None or (start.state is not None and inputs.method.required_start_weights is None):
        return start
    if INIT_KEY in origins and INIT_KEY not in recipe.checkpoint.allow_changes:
        alternative = NEW_RUN
        if start.state is not None:
            keys = f"{INIT_KEY},{recipe.method_name}.reference"
            alternative = f"or go on with the newest weights there: checkpoint.allow_changes=[{keys}]"
        weights = Origin.read(origins[INIT_KEY], inputs.run.began).require_store(INIT_KEY, path, alternative, ranks)
    else:
        weights = locate_step(path, ranks, INIT_KEY)
        origins = {**origins, INIT_KEY: asdict(Origin.from_step(*weights))}
    return replace(start, origins=origins, init_weights=weights)


class _EarlierStart(NamedTuple):
    """The traces of an earlier start of this run in its directory.

    Attributes:
        has_files: Whether it left metrics or checkpoints.
        origins: The checkpoints that it began from, as in `Start.origins`.
    """

    has_files: bool
    origins: dict[str, dict[str, Any]]


def _read_earlier_start(inputs: RunInputs) -> _EarlierStart:
    """Read the traces of an earlier start. Rank 0 only."""
    origins = read_json(inputs.run.began) if inputs.run.began.is_file() else {}
    return _EarlierStart(inputs.run.leftovers is not None, origins)


def _find_step(inputs: RunInputs, run_store: CheckpointStore, host: Host) -> Start:
    """Find the checkpoint of `checkpoint.resume`. Collective."""
    resume = inputs.recipe.checkpoint.resume
    if resume is None:
        host.ranks.run_on_first(lambda: inputs.run.refuse_used(resume))
        return Start()
    earlier = host.ranks.run_on_first(lambda: _read_earlier_start(inputs))
    origin: Origin | None = None
    if RESUME_KEY in earlier.origins:
        origin = Origin.read(earlier.origins[RESUME_KEY], inputs.run.began)
    if resume == "auto":
        return _continue_run(inputs, run_store, host, origin, earlier)
    if origin is not None and earlier.has_files:
        # If the run was started with this path before and was ended, it continues instead of starting over.
        is_same_path = origin.find_store(resume, host.ranks) or origin.was_at(resume, host.ranks)
        if is_same_path:
            return _continue_run(inputs, run_store, host, origin, earlier)
    return _start_from_path(inputs, run_store, host, resume, origin)


def _continue_run(
    inputs: RunInputs, run_store: CheckpointStore, host: Host, origin: Origin | None, earlier: _EarlierStart
) -> Start:
    """Start from the run's newest checkpoint, or else from its origin, or else fresh. Collective.

    Args:
        inputs: The run's inputs.
        run_store: The run's own checkpoints.
        host: Ranks and terminal.
        origin: The checkpoint at a path that the run began from, or None.
        earlier: The traces of the earlier start.
    """
    step = _newest(run_store, host)
    if step is not None:
        state = _read_state(run_store, step)
        start = Start(step, tuple(state["cursor"]), run_store, state, verified=True, origins=state["began"])
    elif origin is not None:
        # The run was ended before its first save, so it begins again from the same checkpoint.
        resume = inputs.recipe.checkpoint.resume
        path = origin.path if resume in (None, "auto") else resume
        store, step = origin.require_store(RESUME_KEY, path, NEW_RUN, host.ranks)
        state = _read_state(store, step)
        start = Start(step, tuple(state["cursor"]), store, state, origins=earlier.origins)
    else:
        return Start(origins=earlier.origins if earlier.has_files else {})
    if not host.is_dry:
        host.ranks.run_on_first(lambda: _put_damaged_aside(run_store, start.step))
    return start


def _start_from_path(
    inputs: RunInputs, run_store: CheckpointStore, host: Host, path: str, origin: Origin | None
) -> Start:
    """Start from the checkpoint at a path. It may be one of this run's own. Collective.

    Args:
        inputs: The run's inputs.
        run_store: The run's own checkpoints.
        host: Ranks and terminal.
        path: A checkpoint, or a directory of checkpoints.
        origin: The checkpoint at another path that the run began from, for an error message.

    Raises:
        UserError: If the path is another run's and this run's directory is used already, or if this run has complete
            checkpoints after the step.
    """
    ranks = host.ranks

    def refuse_used() -> None:
        inputs.run.refuse_used(path, origin.path if origin else None)

    # If the path does not exist and this run's directory is used, the error is about the directory, which helps more.
    if not ranks.run_on_first(lambda: Path(path).is_dir()):
        ranks.run_on_first(refuse_used)
    store, step = locate_step(path, ranks, RESUME_KEY)
    if store.directory.resolve() == run_store.directory.resolve():
        store = run_store
    else:
        ranks.run_on_first(refuse_used)
    ranks.run_on_first(lambda: _refuse_later_steps(run_store, step))
    state = _read_state(store, step)
    # The run now begins from this checkpoint. The weights of `init_from` that the checkpoint began from stay the same.
    origins = {key: origin_json for key, origin_json in state["began"].items() if key == INIT_KEY}
    origins[RESUME_KEY] = asdict(Origin.from_step(store, step))
    if not host.is_dry:
        ranks.run_on_first(lambda: _put_damaged_aside(run_store, step))
    return Start(step, tuple(state["cursor"]), store, state, origins=origins)


def identities(inputs: RunInputs, ranks: Ranks) -> dict[str, str]:
    """Return digests of the run's models, adapter, tokenizer and template, by the keys that `compare` uses.

    Raises:
        UserError: If hosts have different files, or if files cannot be read.

    Collectives:
        Over `ranks`. Each rank reads a part of the files.
    """
    recipe = inputs.recipe
    path = inputs.source.path
    template = inputs.source.template
    found = {
        "model.config": digest(read_model_config(path)),  # of the parsed values: the layout of the text does not count
        "model.tokenizer": inputs.source.tokenizer.fingerprint,
        "data.chat_template": template.fingerprint if template else "none",
    }
    weights = weight_files(path) if recipe.model.init == "pretrained" else []
    weight_digests: list[str] = []
    if weights:
        weight_digests = file_digests(weights, _differs_between_hosts("model.path", path), ranks)
    ranks.check_same(found["model.config"], _differs_between_hosts("model.path", path))
    ranks.check_same(digest(found), f"model.path={path}: tokenizer or chat template is not the same on every host")
    if weight_digests:
        found["model.weights"] = digest(weight_digests)
    if recipe.lora is not None and recipe.lora.path is not None:
        adapter = Path(recipe.lora.path)
        files = [adapter / name for name in ADAPTER_FILES]
        found["lora.path"] = digest(file_digests(files, _differs_between_hosts("lora.path", adapter), ranks))
    for key, model in inputs.other_models.items():
        found[key] = _identity_of_other_model(key, model, ranks)
    return found


def _identity_of_other_model(key: str, model: ModelDirectory, ranks: Ranks) -> str:
    """Return the digest of a reference, a teacher or a reward model. Collective over `ranks`.

    Args:
        key: The model's key in the recipe.
        model: Its directory.
        ranks: All ranks of the run. Each one reads a part of the files.
    """
    weight_digests = file_digests(weight_files(model.path), _differs_between_hosts(key, model.path), ranks)
    config_digest = digest(read_model_config(model.path))
    ranks.check_same(config_digest, _differs_between_hosts(key, model.path))
    if key.endswith(".reference"):  # a reference has the config of the trained model
        return digest(weight_digests)
    identity = digest(config_digest, weight_digests)
    if key.endswith(REWARD_MODEL):  # a reward model encodes text with its own tokenizer and template
        template_digest = model.template.fingerprint if model.template else "none"
        identity = digest(identity, model.tokenizer.fingerprint, template_digest)
    return identity


def _differs_between_hosts(key: str, path: str | Path) -> str:
    """Return the error for a model whose files differ between hosts."""
    return f"{key}={path} is not the same model on every host"


def compare(
    original_recipe: Recipe,
    start: Start,
    identities: Mapping[str, str],
    rows: Mapping[str, Rows],
    method: Method,
    *,
    allow_changes: Sequence[str],
    tensor_difference: str | None,
) -> list[str]:
    """Compare the recipe and the files of this run with those of the saved run, and return a line for each difference.

    Some differences are always allowed: the path of a file whose content is the same (for example, `model.path` was
    moved to another disk), and `data.packing=auto` in place of the value that it means.

    Args:
        original_recipe: The recipe as it was given.
        start: The start, which is a checkpoint.
        identities: Digests of the files that this run reads.
        rows: Rows by split, as far as they were read.
        method: The recipe's method.
        allow_changes: Guarded keys that may differ.
        tensor_difference: The first difference between the trained tensors and those of the checkpoint
            (`find_first_mismatch`). None if there is no difference.

    Raises:
        UserError: For guarded differences that `allow_changes` does not name, and for differences that no resume
            allows: another method, or a recipe that trains other tensors.
    """
    _, state = start.checkpoint
    saved_identities = state["identities"]
    differences = [Difference(*entry) for entry in config.diff_recipes(state["recipe"], original_recipe)]
    differences = _with_one_line_for_lora(differences)
    _refuse_other_method(differences, start)
    method.check_state(state["method"])
    models = model_keys(original_recipe.method)
    same_content = _keys_with_same_content(differences, saved_identities, identities, models)
    differences += _changed_identities(saved_identities, identities)
    if _has_same_packing(rows.get("train"), method, _without_keys(differences, same_content)):
        same_content.add("data.packing")
    mismatch = None
    if tensor_difference is not None:
        mismatch = _explain_mismatch(start, tensor_difference, _without_keys(differences, same_content))
    details = _changed_data_files(state, rows)
    return check_changes(differences, allow_changes, same_content, models, mismatch, details)


def _refuse_other_method(differences: Sequence[Difference], start: Start) -> None:
    """Raise UserError if the saved run has another method."""
    for key, old, new in differences:
        if key == "method":
            raise UserError(
                f"{start.path} was saved with method={old}, and the recipe has method={new}. Another method is a "
                "new run, never a resume, whatever checkpoint.allow_changes names. To start it from these weights, "
                f"set checkpoint.init_from={start.path}, checkpoint.resume=auto and another run.name"
            )


def _changed_identities(saved: Mapping[str, str], found: Mapping[str, str]) -> list[Difference]:
    """Return the digests of files that are not those of the saved run. Digests that it did not save are left out."""
    changed = []
    for key, new in found.items():
        if key in saved and saved[key] != new:
            changed.append(Difference(key, saved[key], new))
    return changed


def _without_keys(differences: Sequence[Difference], keys: Collection[str]) -> list[Difference]:
    """Return the differences of all keys but `keys`."""
    return [difference for difference in differences if difference.key not in keys]


def _changed_data_files(state: Mapping[str, Any], rows: Mapping[str, Rows]) -> dict[str, list[str]]:
    """Return lines on the changed data files, by the key of their split's digest.

    Args:
        state: The content of the checkpoint's state.json.
        rows: Rows by split, as far as they were read.
    """
    lines_by_key = {}
    for split, key in DIGEST_OF_SPLIT.items():
        if split in rows:
            saved_files = state.get("data_files", {}).get(split)  # older versions did not save them
            lines_by_key[key] = _changed_files(saved_files, rows[split].samples.file_digests)
    return lines_by_key


def _keys_with_same_content(
    differences: Sequence[Difference], saved: Mapping[str, str], found: Mapping[str, str], models: Sequence[str]
) -> set[str]:
    """Return the keys that name files whose content is the same as in the saved run. They may differ.

    Args:
        differences: The differences of the recipes.
        saved: Digests of the saved run.
        found: Digests of this run.
        models: Keys of the method's section that name models. Their digests have the same keys.
    """
    digest_of_location = dict(DIGEST_OF_LOCATION)
    for key in models:
        digest_of_location[key] = key
    same = set()
    for key, digest_key in digest_of_location.items():
        if digest_key in saved and saved[digest_key] == found.get(digest_key):
            same.add(key)
    for key, old, new in differences:
        # Entries of a mapping are keys of their own: `data.train.columns.prompt`.
        section, is_column, _ = key.partition(".columns.")
        if is_column and f"{section}.columns" in same:
            same.add(key)
        # The fingerprint of data does not cover how several sources are mixed.
        if key.endswith(".sources") and _without_location(old) != _without_location(new):
            same.discard(key)
    return same


def _has_same_packing(rows: Rows | None, method: Method, differences: Sequence[Difference]) -> bool:
    """Check whether the data differ only in `data.packing`, between auto and the value that auto means."""
    data_differences = [difference for difference in differences if difference.key.startswith("data.")]
    if len(data_differences) != 1:
        return False
    key, old, new = data_differences[0]
    if key != "data.packing" or "auto" not in (old, new):
        return False
    if rows is None:  # a dry run may not have read the rows; the run itself compares them
        return True
    automatic = should_pack(rows, method.kind)
    old_value = automatic if old == "auto" else old
    new_value = automatic if new == "auto" else new
    return bool(old_value == new_value)


def _changed_files(saved: Mapping[str, str] | None, found: Mapping[str, str]) -> list[str]:
    """Return a line for each data file whose content has changed. A moved file with the same content has not.

    Args:
        saved: Digests of the saved run by path. None if an older version saved none.
        found: Digests of this run by path.
    """
    if saved is None:
        return []
    lines = []
    for path in sorted({*saved, *found}):
        if path in saved and path in found:
            if saved[path] != found[path]:
                lines.append(f"{path}: its content has changed")
        elif path in found and found[path] not in saved.values():
            lines.append(f"{path}: was not among the files")
        elif path in saved and saved[path] not in found.values():
            lines.append(f"{path}: is no longer among the files")
    if not lines:
        lines.append(
            "no file has changed: the tokenizer, the chat template, the images or another key of data, such as "
            "data.max_length, makes other samples of the same files"
        )
    return limit_problems(lines)


def _with_one_line_for_lora(differences: list[Difference]) -> list[Difference]:
    """Merge the keys of `lora` into one difference if only one of the two recipes has the section."""
    of_lora = [difference for difference in differences if difference.key.startswith("lora.")]
    other_differences = [difference for difference in differences if not difference.key.startswith("lora.")]
    if of_lora and all(old is None for _, old, _ in of_lora):
        return [Difference("lora", None, "an adapter"), *other_differences]
    if of_lora and all(new is None for _, _, new in of_lora):
        return [Difference("lora", "an adapter", None), *other_differences]
    return differences


def _explain_mismatch(start: Start, tensor_difference: str, differences: Sequence[Difference]) -> TensorMismatch | None:
    """Return the changed keys because of which the recipe trains other tensors, with advice.

    Args:
        start: The start of the run.
        tensor_difference: The first difference between the trained tensors and those of the checkpoint.
        differences: The differences of the recipes.

    Returns:
        The keys and the advice. None if no changed key explains it.
    """
    keys = []
    settings = []  # settings that restore the saved recipe, such as "lora.rank=8"
    for key, old, _ in differences:
        if key in SHAPE_KEYS:
            keys.append(key)
            setting = f"{key}={{...}} as it was" if old == "an adapter" else f"{key}={format_value(old)}"
            settings.append(setting)
    if not keys:
        return None
    advice = (
        f"No resume allows {' and '.join(keys)} to change here: {tensor_difference}. Set {' and '.join(settings)} "
        f"back, or continue from these weights in a new run: `dtrain export {start.path} OUT`, then model.path=OUT, "
        "checkpoint.resume=auto and another run.name"
    )
    return TensorMismatch(tuple(keys), advice)


def _without_location(sources: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return `data.train.sources` without the keys that only name where the rows are."""
    return [{**source, **dict.fromkeys(LOCATION_KEYS)} for source in sources or []]


def restore(start: Start, recipe: Recipe, policy: Policy, method: Method) -> None:
    """Load the checkpoint of the start into `policy` and `method`, and restore the random number generators.

    Args:
        start: The start, which is a checkpoint.
        recipe: The recipe of this run.
        policy: The policy, with its optimizer.
        method: The recipe's method.

    Raises:
        UserError: If the checkpoint does not fit.

    Collectives:
        Those of `PolicyCheckpoint.load`.
    """
    store, state = start.checkpoint
    # A checkpoint also has the optimizer's options, such as "lr". Options that the recipe has changed since the save
    # keep the recipe's values.
    changed_options = set()
    for key, _, _ in config.diff_recipes(state["recipe"], recipe):
        if key.startswith("optimizer."):
            changed_options.add(key.rpartition(".")[2])
    method.load(state["method"])
    policy.checkpoint.load(
        store,
        start.step,
        state["policy"],
        extra_tensors=_named_for_method(method),
        keep_options=changed_options,
        verified=start.verified,
    )
    rank_state, copy = store.read_rank_state(start.step)
    if rank_state is not None:
        set_random_state(rank_state, copy)


class SaveContents(NamedTuple):
    """The contents of a save.

    Attributes:
        tensors: Tensors by name, [any shape], as this rank stores them.
        state: The content of state.json, the same on every rank.
        rank_state: This rank's random number generators.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    rank_state: dict[str, Any]


def contents(policy: Policy, method: Method, run_state: Mapping[str, Any]) -> SaveContents:
    """Return the contents of a save.

    Args:
        policy: The policy.
        method: The recipe's method.
        run_state: The entries of state.json other than those of policy and method.
    """
    state = {**run_state, "policy": policy.checkpoint.state(), "method": method.state()}
    tensors = policy.checkpoint.tensors() | _named_for_method(method)
    return SaveContents(tensors, state, random_state())


def _read_state(store: CheckpointStore, step: int) -> dict[str, Any]:
    """Read a step's state.json.

    Raises:
        UserError: If entries are missing or of another type.
    """
    state = store.read_state(step)
    types: dict[str, type] = {"cursor": list, "recipe": str, "save": str}
    for key in ("identities", "began", "metrics", "policy", "method"):
        types[key] = dict
    missing = [key for key, expected in types.items() if not isinstance(state.get(key), expected)]
    if not missing and [type(entry) for entry in state["cursor"]] != [int, int]:
        missing = ["cursor"]
    if missing:
        raise UserError(
            f"{store.path(step)}: this checkpoint was written by an incompatible version of dtrain, or it is damaged: "
            f"its state.json has no valid {', '.join(missing)}"
        )
    return state


def _named_for_method(method: Method) -> dict[str, Tensor]:
    """Return the method's tensors under their names in a checkpoint."""
    return {f"method.{name}": tensor for name, tensor in method.tensors().items()}


def _newest(store: CheckpointStore, host: Host) -> int | None:
    """Return the newest undamaged step, or None if nothing was saved yet. Collective.

    Files are compared with their checksums. In a dry run only their sizes are compared.
    """
    published = host.ranks.run_on_first(store.published_steps)
    for step in reversed(published):
        damage = store.check_files(step) if host.is_dry else store.check_contents(step)
        if not damage:
            return step
        host.print_line(f"{store.path(step)} is damaged and is left out: {damage[0]}")
    if published:
        raise UserError(
            f"{store.directory}: every checkpoint is damaged (see above). To start over, move this directory and "
            "metrics.jsonl away, or choose another run.name"
        )
    return None


def _refuse_later_steps(store: CheckpointStore, step: int) -> None:
    """Raise UserError if there are complete steps after `step`."""
    later_steps = [f"step-{later}" for later in store.steps() if later > step]
    if later_steps:
        raise UserError(
            f"{store.directory} already has {', '.join(later_steps)}, which the resumed run would save again, and a "
            "saved step is never overwritten. Delete them, or choose another run.name"
        )


def _put_damaged_aside(store: CheckpointStore, step: int) -> None:
    """Rename the steps after `step`, which are all damaged, so that the run can save these steps again."""
    for later in store.published_steps():
        if later > step:
            set_aside(store.path(later), "damaged-")
