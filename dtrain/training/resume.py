"""Resume: which checkpoint a run starts from, what a changed recipe may change, and the run's state in and out.

A checkpoint's `state.json` holds step, cursor (the next row of the global sequence), the resolved recipe, digests of
what the run read at its start (`identities`), what it began from, a mark of the save, the step's metrics and the
scalars of policy and method; its tensors are theirs (the method's under `method.<name>`). Random number generators are
kept rank by rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dtrain import recipe as config
from dtrain.base.errors import UserError, first
from dtrain.base.files import set_aside
from dtrain.base.json_files import digest, read_json
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.base.ranges import shown
from dtrain.base.ranks import Ranks, digests
from dtrain.checkpoint.dcp.origin import Origin
from dtrain.checkpoint.dcp.rng import random_state, set_random_state
from dtrain.checkpoint.dcp.store import CheckpointStore, locate
from dtrain.checkpoint.huggingface.model_files import read_model_config
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.data.sources.sources import packs_by_itself
from dtrain.methods import Method
from dtrain.policy import Policy
from dtrain.training import REWARD_MODEL, model_keys
from dtrain.training.directory import Difference, Misfit, guard
from dtrain.training.host import Host
from dtrain.training.spec import RunSpec

DIGEST_OF_SPLIT = {"train": "data.fingerprint", "val": "data.val.fingerprint"}
# What a resume compares beside the recipe's keys, and `checkpoint.allow_changes` may name.
DIGESTS = ("data.fingerprint", "data.val.fingerprint", "model.weights", "model.config", "model.tokenizer")
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
RESUME, INIT = "checkpoint.resume", "checkpoint.init_from"
NEW_RUN = "or begin anew: delete the run's directory, or choose another run.name"
# Of a source of data: where it lies, and by what names it is read.
WHERE = ("path", "split", "subset", "revision", "columns", "sources")
# A key that says where something lies, and the digest that tells what lies there.
PLACES = {
    "model.path": "model.config",
    **{f"data.train.{name}": "data.fingerprint" for name in WHERE},
    **{f"data.val.{name}": "data.val.fingerprint" for name in WHERE},
    "lora.path": "lora.path",
    "data.chat_template": "data.chat_template",
}

# Keys that decide which tensors a run trains, and of which shapes.
SHAPING = (
    *("lora", "lora.path", "lora.rank", "lora.rank_pattern", "lora.target", "lora.exclude", "lora.modules_to_save"),
    *("lora.dora", "train.vision", "train.train_only", "train.freeze", "model.path", "model.config"),
)


@dataclass(frozen=True)
class Start:
    """Start of a run. A fresh one: step 0, the first row, no store and no state.

    verified: every file of the step has just been read against its checksum. began: what the run began from, RESUME or
    INIT → an `Origin` as JSON. weights: the step whose weights take the place of model.path's before anything else.
    """

    step: int = 0
    cursor: tuple[int, int] = (0, 0)
    store: CheckpointStore | None = None
    state: dict[str, Any] | None = None
    verified: bool = False
    began: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: tuple[CheckpointStore, int] | None = None

    @property
    def saved(self) -> tuple[CheckpointStore, dict[str, Any]]:
        """The store and the state of a start that is not fresh."""
        if self.store is None or self.state is None:
            raise ValueError("a fresh run starts from no checkpoint")
        return self.store, self.state

    @property
    def path(self) -> Path:
        return self.saved[0].path(self.step)


def find_start(spec: RunSpec, host: Host) -> Start:
    """Find what `checkpoint.resume` picks: the run's newest whole checkpoint (auto), none (null), or the one at a path;
    and what `checkpoint.init_from` means, where the run is fresh or its method needs its start.

    Collective. A run that began from a path, wherever it was ended, goes on as it began. auto reads every file of the
    newest checkpoint against its checksum, and takes the one before where one is damaged, which it says. Damaged steps
    beyond the start are set aside as `damaged-step-N`, so that the run can save those steps again; whole ones beyond it
    (a path into this very run) are refused. Where all are damaged, the run does not start over by itself. Raises
    UserError, on every rank.

    In a dry run no file is read whole, only its size is compared, and all stays where it is.
    """
    start, recipe, ranks = _find_step(spec, host), spec.recipe, host.ranks
    path, began = recipe.checkpoint.init_from, start.began
    if path is None or (start.state is not None and spec.method.needs_start is None):
        return start
    if INIT in began and INIT not in recipe.checkpoint.allow_changes:
        otherwise = NEW_RUN
        if start.state is not None:
            keys = f"{INIT},{recipe.method}.reference"
            otherwise = f"or go on with the newest weights there: checkpoint.allow_changes=[{keys}]"
        weights = Origin.read(began[INIT], spec.run.began).again(INIT, path, otherwise, ranks)
    else:
        weights = locate(path, ranks)
        began = {**began, INIT: asdict(Origin.of(*weights))}
    return replace(start, began=began, weights=weights)


def _find_step(spec: RunSpec, host: Host) -> Start:
    resume, run, store, ranks = spec.recipe.checkpoint.resume, spec.run, spec.store, host.ranks
    if resume is None:
        ranks.first(lambda: run.refuse_used(resume))
        return Start()
    left, began = ranks.first(lambda: (run.left, read_json(run.began) if run.began.is_file() else {}))
    origin = Origin.read(began[RESUME], run.began) if RESUME in began else None
    newest = None
    if resume == "auto" or (origin and left and (origin.at(resume, ranks) or origin.lay_at(resume, ranks))):
        newest = _newest(store, host)
        if newest is not None:
            source, step = store, newest
        elif origin is not None:
            source, step = origin.again(RESUME, origin.path if resume == "auto" else resume, NEW_RUN, ranks)
        else:
            return Start(began=began if left else {})
        state = _read_state(source, step)
        began = began if newest is None else state["began"]
    else:

        def refuse_used(is_other: bool) -> None:
            if is_other:
                run.refuse_used(resume, origin.path if origin else None)

        ranks.first(lambda: refuse_used(not Path(resume).is_dir()))
        source, step = locate(resume, ranks)
        source = store if source.directory.resolve() == store.directory.resolve() else source
        ranks.first(lambda: refuse_used(source is not store))
        ranks.first(lambda: _refuse_beyond(store, step))
        state = _read_state(source, step)
        began = {key: origin for key, origin in state["began"].items() if key == INIT}
        began[RESUME] = asdict(Origin.of(source, step))
    if not host.is_dry:
        ranks.first(lambda: _put_damaged_aside(store, step))
    return Start(step, tuple(state["cursor"]), source, state, verified=newest is not None, began=began)


def identities(spec: RunSpec, ranks: Ranks) -> dict[str, str]:
    """Digests of what the run's models are, under the keys that a changed one is refused by. Collective. UserError
    where hosts have other ones, or files cannot be read."""
    recipe, path = spec.recipe, spec.source.path
    wrong = "{}={} is not the same model on every host".format
    weights = weight_files(path) if recipe.model.init == "pretrained" else []
    others = digests(weights, wrong("model.path", path), ranks) if weights else []
    template = spec.source.template
    digest_of = {
        "model.config": digest(read_model_config(path)),  # however its text is laid out
        "model.tokenizer": spec.source.tokenizer.fingerprint,
        "data.chat_template": template.fingerprint if template else "none",
    }
    ranks.same(digest_of["model.config"], wrong("model.path", path))
    ranks.same(digest(digest_of), f"model.path={path}: tokenizer or chat template is not the same on every host")
    if weights:
        digest_of["model.weights"] = digest(others)
    if recipe.lora is not None and recipe.lora.path is not None:
        adapter = Path(recipe.lora.path)
        others = digests([adapter / name for name in ADAPTER_FILES], wrong("lora.path", adapter), ranks)
        digest_of["lora.path"] = digest(others)
    for key, other in spec.others.items():
        others = digests(weight_files(other.path), wrong(key, other.path), ranks)
        kind = digest(read_model_config(other.path))
        ranks.same(kind, wrong(key, other.path))
        digest_of[key] = digest(others) if key.endswith(".reference") else digest(kind, others)
        if key.endswith(REWARD_MODEL):  # it reads text by these
            own = other.template.fingerprint if other.template else "none"
            digest_of[key] = digest(digest_of[key], other.tokenizer.fingerprint, own)
    return digest_of


def compare(spec: RunSpec, allow_changes: Sequence[str], unfit: str | None) -> list[str]:
    """Return the differences between the run that was saved at the start and this one, a line each: its recipe, and
    what it reads (`spec.identities`).

    Another place with the same content makes no difference, nor does `data.packing=auto` in place of what it comes to.

    Args:
        spec: The run. Its start is not fresh.
        allow_changes: Guarded keys that may differ.
        unfit: How the trained tensors differ from those of the checkpoint (`first_misfit`), or None.

    Raises:
        UserError: For differences that make it another run, unless `allow_changes` names them, and for those that no
            resume allows: another method, and a recipe that trains other tensors.
    """
    recipe, digest_of, rows = spec.written, spec.identities, spec.rows.get("train")
    _, state = spec.start.saved
    saved = state["identities"]
    differences = _with_one_line_for_lora(config.diff(state["recipe"], recipe))
    for key, old, new in differences:
        if key == "method":
            raise UserError(
                f"{spec.start.path} was saved with method={old}, and the recipe has method={new}. Another method is a "
                "new run, never a resume, whatever checkpoint.allow_changes names. To start it from these weights, "
                f"set checkpoint.init_from={spec.start.path}, checkpoint.resume=auto and another run.name"
            )
    spec.method.refuse_state(state["method"])
    models = model_keys(recipe.method)
    known = {
        key
        for key, of in {**PLACES, **dict(zip(models, models, strict=True))}.items()
        if of in saved and saved[of] == digest_of.get(of)
    }
    known |= {key for key, _, _ in differences if key.partition(".columns.")[0] + ".columns" in known}
    known -= {key for key, old, new in differences if key.endswith(".sources") and _but_path(old) != _but_path(new)}
    differences += [(key, saved[key], new) for key, new in digest_of.items() if saved.get(key, new) != new]
    of_data = {key: values for key, *values in differences if key.startswith("data.") and key not in known}
    if [*of_data] == ["data.packing"] and "auto" in of_data["data.packing"]:
        automatic = None if rows is None else packs_by_itself(rows, spec.method.kind)
        packed = {automatic if value == "auto" else value for value in of_data["data.packing"]}
        known |= {"data.packing"} if len(packed) == 1 or automatic is None else set()
    details = {}
    for split, key in DIGEST_OF_SPLIT.items():
        if split in spec.rows:
            saved_files = state.get("data_files", {}).get(split)  # older versions did not save them
            details[key] = _changed_files(saved_files, spec.rows[split].samples.file_digests)
    misfit = None if unfit is None else _misfit(spec, unfit, [each for each in differences if each[0] not in known])
    return guard(differences, allow_changes, known, models, misfit, details)


def _changed_files(saved: Mapping[str, str] | None, found: Mapping[str, str]) -> list[str]:
    """Return a line for each data file that is not what it was. Both: digests by path.

    A file that only lies elsewhere, with the same content, is the same.
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
            "every file has the content that it had: the tokenizer, the chat template, the images or another key of "
            "data, such as data.max_length, makes other samples of them"
        )
    return first(lines)


def _with_one_line_for_lora(differences: list[Difference]) -> list[Difference]:
    """Join the keys of `lora` into one difference if one of the two recipes has no such section."""
    section = [each for each in differences if each[0].startswith("lora.")]
    joined: Difference | None = None
    if section and all(old is None for _, old, _ in section):
        joined = ("lora", None, "an adapter")
    elif section and all(new is None for _, _, new in section):
        joined = ("lora", "an adapter", None)
    if joined is None:
        return differences
    return [joined, *(each for each in differences if each not in section)]


def _misfit(spec: RunSpec, unfit: str, differences: Sequence[Difference]) -> Misfit | None:
    """Return the keys by which the recipe trains other tensors than the checkpoint, and advice; None if none does."""
    changed = [(key, old) for key, old, _ in differences if key in SHAPING]
    if not changed:
        return None
    back = [f"{key}={'{...} as it was' if old == 'an adapter' else shown(old)}" for key, old in changed]
    keys = tuple(key for key, _ in changed)
    return Misfit(
        keys,
        f"No resume allows {' and '.join(keys)} to change here: {unfit}. Set {' and '.join(back)} back, or go on from "
        f"these weights in a new run: `dtrain export {spec.start.path} OUT`, then model.path=OUT, checkpoint.resume="
        "auto and another run.name",
    )


def _but_path(sources: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [{**source, **dict.fromkeys(WHERE)} for source in sources or []]


def restore(spec: RunSpec, policy: Policy, method: Method) -> None:
    """Load the start into `policy` and `method`. Collective."""
    start, (store, state) = spec.start, spec.start.saved
    differing = [key for key, _, _ in config.diff(state["recipe"], spec.recipe)]
    options = {key.rsplit(".", 1)[-1] for key in differing if key.startswith("optimizer.")}
    method.load(state["method"])
    beside = _named_for_method(method)
    policy.checkpoint.load(store, start.step, state["policy"], beside=beside, keep=options, verified=start.verified)
    rank_state, copy = store.read_rank_state(start.step)
    if rank_state is not None:
        set_random_state(rank_state, copy)


def contents(
    policy: Policy, method: Method, known: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return the contents of a save: tensors [any shape], the state that is the same on every rank, and this rank's
    own. known: of the state, what is not that of policy and method."""
    state = {**known, "policy": policy.checkpoint.state(), "method": method.state()}
    return policy.checkpoint.tensors() | _named_for_method(method), state, random_state()


def _read_state(store: CheckpointStore, step: int) -> dict[str, Any]:
    state = store.read_state(step)
    kinds: dict[str, type] = {"cursor": list, "recipe": str, "save": str}
    kinds |= dict.fromkeys(("identities", "began", "metrics", "policy", "method"), dict)
    lacking = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if not lacking and [type(place) for place in state["cursor"]] != [int, int]:
        lacking = ["cursor"]
    if lacking:
        raise UserError(
            f"{store.path(step)}: no run of this version of dtrain saved it, it has no {', '.join(lacking)}"
        )
    return state


def _named_for_method(method: Method) -> dict[str, Tensor]:
    return {f"method.{name}": tensor for name, tensor in method.tensors().items()}


def _newest(store: CheckpointStore, host: Host) -> int | None:
    """The newest step without damage, by the content of every file or, in a dry run, by their sizes; None where
    nothing was saved yet. Collective."""
    published = host.ranks.first(store.published)
    for step in reversed(published):
        damage = store.faults(step) if host.is_dry else store.damage(step)
        if not damage:
            return step
        host.say(f"{store.path(step)} is damaged and is left out: {damage[0]}")
    if published:
        raise UserError(
            f"{store.directory}: every checkpoint is damaged, as said above. To start over, move that directory away "
            "together with metrics.jsonl, or choose another run.name"
        )
    return None


def _refuse_beyond(store: CheckpointStore, step: int) -> None:
    whole = [f"step-{later}" for later in store.steps() if later > step]
    if whole:
        raise UserError(
            f"{store.directory} already holds {', '.join(whole)}, which the resumed run would save again, and a saved "
            "step is never overwritten: delete them, or choose another run.name"
        )


def _put_damaged_aside(store: CheckpointStore, step: int) -> None:
    for later in store.published():
        if later > step:
            set_aside(store.path(later), "damaged-")
