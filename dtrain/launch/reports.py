"""Why a rank ended: the error file that torch's elastic agent, or our own launcher, reads once a rank has failed.

torch defines the file's path (TORCHELASTIC_ERROR_FILE) and its entry `message`, which torchrun prints. The entry
`dtrain` is ours.
"""

import json
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.base.errors import Stopped, UserError
from dtrain.base.files import replace_text
from dtrain.recipe import Recipe, redact

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ENDED = 128 + signal.SIGTERM  # exit status of a worker whose launcher is gone


class WorkerFailed(Exception):
    """A process of the run died of something that is not its user's mistake; the message ends with the reason."""


class OutOfMemory(UserError):
    """An allocation failed; every rank that got so far may have one of its own."""


# In the order in which they are looked up: OutOfMemory is a UserError too.
KINDS = {"stopped": Stopped, "memory": OutOfMemory, "user": UserError, "crash": BaseException}


@dataclass(frozen=True)
class Report:
    """The end of a rank that did not finish. kind: one of KINDS; signum: the signal that stopped it, or 0."""

    rank: int
    host: str
    kind: str
    text: str
    time: float
    signum: int = 0

    @classmethod
    def of(cls, error: BaseException, rank: int, recipe: Recipe | None) -> "Report":
        """Describe `error`, with its traceback if it is neither its user's mistake nor a stop."""
        kind = next(kind for kind, error_type in KINDS.items() if isinstance(error, error_type))
        text = "".join(traceback.format_exception(error)) if kind == "crash" else str(error)
        if recipe is not None:
            text = redact(text, recipe)
        signum = error.signum if isinstance(error, Stopped) else 0
        return cls(rank, socket.gethostname(), kind, text, time.time(), signum)

    def write(self, environ: Mapping[str, str]) -> None:
        """Write the error file, if whoever started this process has named one."""
        path = environ.get(ERROR_FILE)
        if path:
            # As torch's own ErrorHandler writes it. torchrun shows py_callstack last: for a mistake, only our
            # text.
            shown = {"py_callstack": self.text, "timestamp": str(int(self.time))}
            content = {"message": {"message": self.reason, "extraInfo": shown}, "dtrain": asdict(self)}
            replace_text(Path(path), json.dumps(content))

    @classmethod
    def read(cls, path: Path) -> "Report | None":
        """Read the error file of a rank; None if the rank wrote none."""
        if not path.exists():
            return None
        return cls(**json.loads(path.read_text())["dtrain"])

    @property
    def reason(self) -> str:
        """The text, or the last line of a traceback."""
        return self.text.strip().splitlines()[-1] if self.kind == "crash" else self.text


def cause_of(reports: Sequence[Report], statuses: Mapping[int, int], recipe: Recipe) -> Exception:
    """Return the one error to show for ranks of this machine of which one or more failed.

    A mistake of the user comes first: the other ranks fail because of it. A rank that was killed comes before the
    crashes of those that waited for it.

    Args:
        reports: The reports of all ranks that wrote one.
        statuses: Exit statuses of the ranks that failed before the launcher ended the others.
    """
    in_order = sorted(reports, key=lambda report: report.time)
    mistakes = [report.text for report in in_order if report.kind == "user"]
    if mistakes:
        return UserError("\n".join(dict.fromkeys(mistakes)))
    for report in in_order:
        if report.kind == "memory":
            return OutOfMemory(report.text)
    host = socket.gethostname()
    killed = [rank for rank, status in statuses.items() if status < 0 and -status != signal.SIGABRT]
    if killed:
        rank = min(killed)
        name = signal.Signals(-statuses[rank]).name
        why = ", as the system does when memory runs out (see dmesg)" if name == "SIGKILL" else ""
        return WorkerFailed(f"rank {rank} on {host} was killed by {name}{why}{_see_log(recipe, rank)}")
    for report in in_order:
        if report.kind == "crash":
            reason = f"rank {report.rank} on {host} failed: {report.reason}{_see_log(recipe, report.rank)}"
            return WorkerFailed(f"{report.text}\n{reason}")
    for report in in_order:
        if report.kind == "stopped":
            return Stopped(report.signum, report.text)
    rank = min((rank for rank, status in statuses.items() if status != ENDED), default=min(statuses))
    return WorkerFailed(
        f"rank {rank} on {host} ended with status {statuses[rank]} without a word{_see_log(recipe, rank)}"
    )


def log_file(recipe: Recipe, rank: int) -> Path:
    return recipe.run.directory / f"log-rank{rank}.txt"


def newest_checkpoint(run: Path) -> str:
    """Return a sentence that says where the same command goes on. run: the run's directory."""
    checkpoints = run / "checkpoints"
    steps = [int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()]
    if steps:
        return f"The last checkpoint is {checkpoints / f'step-{max(steps)}'}: the same command goes on there"
    return "No checkpoint was saved yet: the same command starts over"


def _see_log(recipe: Recipe, rank: int) -> str:
    return f"; what it printed is in {log_file(recipe, rank)}" if rank > 0 else ""
