"""The early end of a rank: its response to signals, and the report of its error.

The first signal asks the run to save and stop, a second one ends it. The report is an error file that torch's elastic
agent, or our own launcher, reads. torch defines the file's path (TORCHELASTIC_ERROR_FILE) and its entry `message`,
which torchrun prints. Our launcher reads the entry `dtrain`, a `Report`.
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

# Signals within this time count as one: `timeout` and torchrun send a signal to a child whose group has received it.
SAME_SECONDS = 1.0
END_SECONDS = 5.0  # time that the main thread gets to unwind after a second signal
LOOK_SECONDS = 0.25  # time between checks for a second signal

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_GONE = 128 + signal.SIGTERM  # exit status of a worker whose launcher has ended


@contextmanager
def on_stop_signals(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Handle stop signals inside the block: the first one requests a stop, a second one raises KeyboardInterrupt.

    If the KeyboardInterrupt does not end the block, for example because user code catches it, a thread ends the process
    within seconds. Only the main thread can handle signals. In other threads this does nothing.

    Args:
        request_stop: Called with the number of the first signal.

    Raises:
        KeyboardInterrupt: With the number of the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    requested_at: list[float] = []
    second_signal: list[int] = []
    block_ended = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if os.getpid() != owner:
            # A forked helper inherited this handler. The run's own process decides for both when to stop.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif not requested_at:
            requested_at.append(time.monotonic())
            request_stop(signum)
        elif time.monotonic() - requested_at[0] > SAME_SECONDS:
            second_signal.append(signum)
            raise KeyboardInterrupt(signum)

    def end_process_if_stuck() -> None:
        while not block_ended.wait(LOOK_SECONDS):
            if second_signal and not block_ended.wait(END_SECONDS):
                kill_all(descendants(owner))
                os._exit(128 + second_signal[0])

    threading.Thread(target=end_process_if_stuck, daemon=True).start()
    try:
        with stop_signals_handled_by(handle):
            yield
    finally:
        block_ended.set()


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block stop signals in this thread, and in processes that the block starts until they call `unblock_stop_signals`.

    A process that has just been started has no handlers yet, so that a signal would end it without a message. A blocked
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

    One failure causes others. For example, if the system kills rank 1, then rank 0 crashes because it lost its
    connection. So causes are looked for in this order: a user's mistake, out of memory, a rank that was killed, a
    crash, a stop, an exit without a report.

    Args:
        reports: The reports of all ranks that wrote one.
        statuses: Exit statuses of the ranks that failed before the launcher ended the others, by rank.
        recipe: The recipe, for the paths of the logs.
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
        f"rank {rank} on {host} ended with status {statuses[rank]} and no error message{_see_log(recipe, rank)}"
    )


def log_file(recipe: Recipe, rank: int) -> Path:
    """Return the path of a rank's log."""
    return recipe.run.directory / f"log-rank{rank}.txt"


def newest_checkpoint(run: Path) -> str:
    """Return a sentence about the checkpoint from which the same command would continue.

    Args:
        run: The run's directory.
    """
    checkpoints = run / "checkpoints"
    steps = []
    for path in checkpoints.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    if steps:
        return f"The last checkpoint is {checkpoints / f'step-{max(steps)}'}: the same command continues from it"
    return "No checkpoint was saved yet: the same command starts over"


def _see_log(recipe: Recipe, rank: int) -> str:
    return f"; what it printed is in {log_file(recipe, rank)}" if rank > 0 else ""
