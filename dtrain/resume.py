"""Resume: which checkpoint a run starts from, what a changed recipe may change, and the run's state in and out.

A checkpoint's `state.json` holds step, cursor (the next row of the global sequence), the resolved recipe, the data's
fingerprint, the step's metrics and the scalars of policy and method; its tensors are theirs (the method's under
`method.<name>`). Random number generators are kept rank by rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dtrain import config
from dtrain.checkpoint.files import set_aside
from dtrain.checkpoint.ranks import Ranks
from dtrain.checkpoint.rng import random_state, set_random_state
from dtrain.checkpoint.rundir import RunDirectory, guard
from dtrain.checkpoint.store import CheckpointStore, locate
from dtrain.config.schema import Recipe
from dtrain.errors import UserError
from dtrain.methods import Method
from dtrain.policy import Policy


@dataclass(frozen=True)
class Start:
    """Where a run starts. A fresh one: step 0, the first row, no store and no state.

    verified: every file of the step has just been read against its checksum.
    """

    step: int = 0
    cursor: tuple[int, int] = (0, 0)
    store: CheckpointStore | None = None
    state: dict[str, Any] | None = None
    verified: bool = False

    @property
    def path(self) -> Path:
        return self.store.path(self.step)


def find_start(
    recipe: Recipe, run: RunDirectory, store: CheckpointStore, ranks: Ranks, say: Callable[[str], None]
) -> Start:
    """What `checkpoint.resume` picks: the run's newest whole checkpoint (auto), none (null), or the one at a path.

    Collective. auto reads every file of the newest checkpoint against its checksum, and takes the one before where one
    is damaged, which it says. Damaged steps beyond the start are set aside as `damaged-step-N`, so that the run can
    save those steps again; whole ones beyond it (a path into this very run) are refused. Where all are damaged, the run
    does not start over by itself. Raises UserError, on every rank.
    """
    resume = recipe.checkpoint.resume
    if resume is None:
        ranks.first(lambda: run.refuse_used(resume))
        return Start()
    if resume == "auto":
        source, step = store, _newest(store, ranks, say)
        if step is None:
            return Start()
    else:
        source, step = locate(resume, ranks)
        if source.directory.resolve() != store.directory.resolve():
            ranks.first(lambda: run.refuse_used(resume))
        ranks.first(lambda: _refuse_beyond(store, step))
    ranks.first(lambda: _put_damaged_aside(store, step))
    state = _read_state(source, step)
    return Start(step, tuple(state["cursor"]), source, state, verified=resume == "auto")


def restore(recipe: Recipe, policy: Policy, method: Method, start: Start, fingerprint: str, ranks: Ranks) -> list[str]:
    """Load `start` into `policy` and `method`; returns a line per difference between the saved recipe and this one.
    Collective.

    Raises UserError for differences that make another run of it, unless `checkpoint.allow_changes` names them.
    """
    state = start.state
    differences = config.diff(state["recipe"], recipe)
    if state["data_fingerprint"] != fingerprint:
        differences.append(("data.fingerprint", state["data_fingerprint"], fingerprint))
    changed = guard(differences, recipe.checkpoint.allow_changes)
    options = {key.rsplit(".", 1)[-1] for key, _, _ in differences if key.startswith("optimizer.")}
    method.load(state["method"])
    policy.load(
        start.store,
        start.step,
        state["policy"],
        beside=_named_for_method(method),
        keep=options,
        verified=start.verified,
    )
    rank_state, copy = start.store.read_rank_state(start.step)
    if rank_state is not None:
        set_random_state(rank_state, copy)
    return changed


def start_from(path: str, policy: Policy, ranks: Ranks) -> Path:
    """`checkpoint.init_from`: the weights of a checkpoint of another run, saved on whatever mesh, and nothing else.

    Returns the checkpoint's directory. Collective. Raises UserError where there is none, or it is of another model.
    """
    store, step = locate(path, ranks)
    policy.load_weights(store, step)
    return store.path(step)


def contents(
    recipe: Recipe,
    policy: Policy,
    method: Method,
    step: int,
    cursor: tuple[int, int],
    fingerprint: str,
    measured: Mapping[str, float],
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """What a save of the run after `step` holds, `cursor` being its next row and `measured` the step's metrics:
    tensors, the state that is the same on every rank, and this rank's own."""
    state = {
        "step": step,
        "cursor": list(cursor),
        "recipe": config.to_yaml(recipe),
        "data_fingerprint": fingerprint,
        "metrics": dict(measured),
        "policy": policy.state(),
        "method": method.state(),
    }
    return policy.tensors() | _named_for_method(method), state, random_state()


def _read_state(store: CheckpointStore, step: int) -> dict[str, Any]:
    state = store.read_state(step)
    kinds = {"cursor": list, "recipe": str, "data_fingerprint": str, "metrics": dict, "policy": dict, "method": dict}
    lacking = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if not lacking and [type(place) for place in state["cursor"]] != [int, int]:
        lacking = ["cursor"]
    if lacking:
        raise UserError(f"{store.path(step)}: no run of this version of dtrain saved it, it lacks {', '.join(lacking)}")
    return state


def _named_for_method(method: Method) -> dict[str, Tensor]:
    return {f"method.{name}": tensor for name, tensor in method.tensors().items()}


def _newest(store: CheckpointStore, ranks: Ranks, say: Callable[[str], None]) -> int | None:
    """The newest step without damage; None where nothing was saved yet. Collective."""
    published = ranks.first(store.published)
    for step in reversed(published):
        damage = store.damage(step)
        if not damage:
            return step
        say(f"{store.path(step)} is damaged and is left out: {damage[0]}")
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
