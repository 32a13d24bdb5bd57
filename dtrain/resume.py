"""Resume: which checkpoint a run starts from, what a changed recipe may change, and the run's state in and out.

A checkpoint's `state.json` holds step, cursor (the next row of the global sequence), the resolved recipe, the data's
fingerprint and the policy's scalars; its tensors are the policy's. Random number generators are kept rank by rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain import config
from dtrain.checkpoint.files import set_aside
from dtrain.checkpoint.ranks import Ranks
from dtrain.checkpoint.rng import random_state, set_random_state
from dtrain.checkpoint.rundir import RunDirectory, guard
from dtrain.checkpoint.store import CheckpointStore, locate, step_of
from dtrain.config.schema import Recipe
from dtrain.errors import UserError
from dtrain.policy import Policy


@dataclass(frozen=True)
class Start:
    """Where a run starts. A fresh one: step 0, the first row, no path and no state."""

    step: int = 0
    cursor: tuple[int, int] = (0, 0)
    path: Path | None = None
    state: dict[str, Any] | None = None


def find_start(
    recipe: Recipe, run: RunDirectory, store: CheckpointStore, ranks: Ranks, say: Callable[[str], None]
) -> Start:
    """What `checkpoint.resume` picks: the run's newest whole checkpoint (auto), none (null), or the one at a path.

    Collective. Steps beyond the start that a killed save left damaged are set aside, so that the run can save them;
    whole ones beyond it (a path into this very run) are refused. Raises UserError, on every rank.
    """
    resume = recipe.checkpoint.resume
    if resume is None:
        ranks.first(lambda: run.refuse_used(resume))
        return Start()
    if resume == "auto":
        source, step = store, store.latest()
        if step is None:
            return Start()
    else:
        source, step = locate(resume, ranks)
        if source.directory.resolve() != store.directory.resolve():
            ranks.first(lambda: run.refuse_used(resume))
    ranks.first(lambda: _make_way(store, step, say))
    state = source.read_state(step)
    return Start(step, tuple(state["cursor"]), source.path(step), state)


def restore(recipe: Recipe, policy: Policy, start: Start, fingerprint: str, ranks: Ranks) -> list[str]:
    """Load `start` into `policy`; returns a line per difference between the saved recipe and this one. Collective.

    Raises UserError for differences that make another run of it, unless `checkpoint.allow_changes` names them.
    """
    state = start.state
    differences = config.diff(state["recipe"], recipe)
    if state["data_fingerprint"] != fingerprint:
        differences.append(("data.fingerprint", state["data_fingerprint"], fingerprint))
    changed = guard(differences, recipe.checkpoint.allow_changes)
    source = CheckpointStore(start.path.parent, ranks)
    options = {key.rsplit(".", 1)[-1] for key, _, _ in differences if key.startswith("optimizer.")}
    policy.load(source, step_of(start.path), state["policy"], keep=options)
    rank_state, copy = source.read_rank_state(step_of(start.path))
    if rank_state is not None:
        set_random_state(rank_state, copy)
    return changed


def save(
    recipe: Recipe, policy: Policy, store: CheckpointStore, step: int, cursor: tuple[int, int], fingerprint: str
) -> None:
    """Save the run after `step`, `cursor` being its next row, as `step-N`. Collective."""
    state = {
        "step": step,
        "cursor": list(cursor),
        "recipe": config.to_yaml(recipe),
        "data_fingerprint": fingerprint,
        "policy": policy.state(),
    }
    store.save(step, policy.tensors(), state, random_state())


def _make_way(store: CheckpointStore, step: int, say: Callable[[str], None]) -> None:
    beyond = [entry for entry in store.directory.glob("step-*") if (step_of(entry) or 0) > step]
    whole = [entry for entry in beyond if not store.faults(step_of(entry))]
    if whole:
        names = ", ".join(entry.name for entry in sorted(whole, key=step_of))
        raise UserError(
            f"{store.directory} already holds {names}, which the resumed run would save again, and a saved step is "
            "never overwritten: delete them, or choose another run.name"
        )
    for entry in beyond:
        say(f"{entry} is damaged and is left out: {store.faults(step_of(entry))[0]}")
        set_aside(entry)
