"""How a rank ends early: its answer to signals, and the report of its error.

The first signal asks the run to stop, a second one ends it. The report is an error file that torch's elastic agent, or
our own launcher, reads. torch defines the file's path (TORCHELASTIC_ERROR_FILE) and its entry `message`, which torchrun
prints. Our launcher reads the entry `dtrain`, a `Report`.
"""

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.base.errors import Stopped, UserError
from dtrain.base.files import atomic_write_text
from dtrain.base.orphans import descendants, kill_all
from dtrain.base.processes import STOP_SIGNALS, stop_signals_handled_by
from dtrain.recipe import Recipe, redact

SAME_SECONDS = 1.0  # two signals closer than this are one: `timeout` and torchrun pass on what the group got too
END_SECONDS = 5.0  # for the main thread to unwind after a second signal
LOOK_SECONDS = 0.25

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_GONE = 128 + signal.SIGTERM  # exit status of a worker whose launcher is gone


@contextmanager
def on_stop_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask` with the number of the first stop signal; raise KeyboardInterrupt with the number of a second one.

    If the block does not end by that KeyboardInterrupt, the process ends within seconds. Only the main thread handles
    signals; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    asked_at: list[float] = []
    last: list[int] = []
    ended = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked helper: the run's own process decides for both
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif not asked_at:
            asked_at.append(time.monotonic())
            ask(signum)
        elif time.monotonic() - asked_at[0] > SAME_SECONDS:
            last.append(signum)
            raise KeyboardInterrupt(signum)

    def insist() -> None:
        while not ended.wait(LOOK_SECONDS):
            if last and not ended.wait(END_SECONDS):  # code of the user's may catch everything
                kill_all(descendants(owner))
                os._exit(128 + last[0])

    threading.Thread(target=insist, daemon=True).start()
    try:
        with stop_signals_handled_by(handle):
            yield
    finally:
        ended.set()


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block stop signals in this thread, and in processes that the block starts until they call `unblock_stop_signals`.

    A process that has just been started has no handlers yet, so that a signal would end it without a word. A blocked
    signal stays pending instead.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Unblock stop signals, once this process has handlers; a pending one is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class WorkerFailed(Exception):
    """A process of the run failed for a reason that is not a user's mistake. The message ends with the reason."""


class OutOfMemory(UserError):
    """An allocation failed. Several ranks may fail in this way at once."""


# The first type that fits an error is its kind, so OutOfMemory comes before UserError, its base class.
KINDS = {"stopped": Stopped, "memory": OutOfMemory, "user": UserError, "crash": BaseException}


@dataclass(frozen=True)
class Report:
    """The end of a rank that did not finish.

    Attributes:
        rank: The rank.
        host: Its host's name.
        kind: One of KINDS.
        text: The error's message, or the traceback of a crash. Secrets of the recipe are hidden.
        time: When it ended, in seconds since the epoch.
        signum: The signal that stopped it, or 0.
    """

    rank: int
    host: str
    kind: str
    text: str
    time: float
    signum: int = 0

    @classmethod
    def of(cls, error: BaseException, rank: int, recipe: Recipe | None) -> "Report":
        """Describe `error`, with its traceback if it is neither a user's mistake nor a stop."""
        kind = next(kind for kind, error_type in KINDS.items() if isinstance(error, error_type))
        text = "".join(traceback.format_exception(error)) if kind == "crash" else str(error)
        if recipe is not None:
            text = redact(text, recipe)
        signum = error.signum if isinstance(error, Stopped) else 0
        return cls(rank, socket.gethostname(), kind, text, time.time(), signum)

    def write(self, environ: Mapping[str, str]) -> None:
        """Write the error file, if the environment names one."""
        path = environ.get(ERROR_FILE)
        if path:
            # The format of torch's own ErrorHandler. torchrun prints py_callstack last.
            shown = {"py_callstack": self.text, "timestamp": str(int(self.time))}
            content = {"message": {"message": self.reason, "extraInfo": shown}, "dtrain": asdict(self)}
            atomic_write_text(Path(path), json.dumps(content))

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


def find_cause(reports: Sequence[Report], statuses: Mapping[int, int], recipe: Recipe) -> Exception:
    """Return the one error to show when ranks of this machine have failed.

    One failure causes others, so causes are looked for in this order: a user's mistake, memory, a rank that was killed,
    a crash (which may only be a lost connection to a killed rank), a stop, an exit without a report.

    Args:
        reports: The reports of all ranks that wrote one.
        statuses: Exit statuses of the ranks that failed before the launcher ended the others, by rank.
        recipe: The recipe, for the place of the logs.
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
    ended_by_themselves = [rank for rank, status in statuses.items() if status != LAUNCHER_GONE]
    rank = min(ended_by_themselves or statuses)
    return WorkerFailed(
        f"rank {rank} on {host} ended with status {statuses[rank]} without a word{_see_log(recipe, rank)}"
    )


def log_file(recipe: Recipe, rank: int) -> Path:
    """Return the path of a rank's log."""
    return recipe.run.directory / f"log-rank{rank}.txt"


def newest_checkpoint(run: Path) -> str:
    """Return a sentence about the checkpoint from which the same command continues. run: the run's directory."""
    checkpoints = run / "checkpoints"
    steps = []
    for path in checkpoints.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    if steps:
        return f"The last checkpoint is {checkpoints / f'step-{max(steps)}'}: the same command goes on there"
    return "No checkpoint was saved yet: the same command starts over"


def _see_log(recipe: Recipe, rank: int) -> str:
    return f"; what it printed is in {log_file(recipe, rank)}" if rank > 0 else ""
