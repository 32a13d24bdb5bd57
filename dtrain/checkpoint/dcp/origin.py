"""The origin of a run: a step of another run, chosen once and known by what it holds.

`began.json` in the run's directory, and the state of each of its saves, keep one record for `checkpoint.resume` and one
for `checkpoint.init_from`. A path may mean another step later, when the run there has trained on; the record may not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore, locate, step_of


@dataclass(frozen=True)
class Origin:
    """A step, what its tensors hold (`CheckpointStore.identity`) and its save's own mark, None for old ones.

    path: where it lay, for messages, and to look there where no other path is given.
    """

    path: str
    step: int
    identity: str
    save: str | None

    @classmethod
    def read(cls, record: Any, file: Path) -> "Origin":
        """Read what JSON has in `file`. Raises UserError."""
        kinds = {"path": str, "step": int, "identity": str, "save": str | None}
        is_whole = isinstance(record, dict) and record.keys() == kinds.keys()
        if not is_whole or not all(isinstance(record[key], kind) for key, kind in kinds.items()):
            raise UserError(f"{file} is damaged: it does not say what the run began from; delete it to begin anew")
        return cls(**record)

    @classmethod
    def of(cls, store: CheckpointStore, step: int) -> "Origin":
        """Collective."""
        path = str(store.path(step).absolute())
        return store.ranks.first(lambda: cls(path, step, store.identity(step), store.read_state(step).get("save")))

    def at(self, path: str | Path, ranks: Ranks) -> CheckpointStore | None:
        """The store that a user means by `path`, if it holds this very step. Collective."""
        try:
            store, _ = locate(path, ranks)
        except UserError:  # on every rank
            return None
        if step_of(Path(path).absolute()) not in (None, self.step):
            return None
        same = ranks.first(lambda: not store.faults(self.step) and store.identity(self.step) == self.identity)
        return store if same else None

    def lay_at(self, path: str | Path, ranks: Ranks) -> bool:
        """Return whether this step is gone from `path`: the run there trained on, or nothing is left. Collective."""
        place = Path(path).absolute()
        try:
            store, newest = locate(path, ranks)
        except UserError:  # on every rank
            return place in [Path(self.path), *Path(self.path).parents][:3]
        save: str | None = ranks.first(lambda: store.read_state(newest).get("save"))
        if step_of(place) is not None or save is None or self.save is None:
            return False
        return run_of(save) == run_of(self.save)

    def again(self, key: str, path: str | Path, otherwise: str, ranks: Ranks) -> tuple[CheckpointStore, int]:
        """The store at `path`, which `key` gives, and this step. Collective. UserError where that is gone or another;
        `otherwise` says what may be done beside putting it back."""
        store = self.at(path, ranks)
        if store is None:
            raise UserError(
                f"{key}={path}: this run began from step {self.step} there ({self.path}), which is gone or holds "
                f"something else by now: put it back, {otherwise}"
            )
        return store, self.step


def run_of(save: str) -> str:
    """The mark of a run in that of one of its saves, `RUN-SAVE`."""
    return save.split("-")[0]
