"""The watch over ranks: by the launcher of one machine, and by the coordinator of many hosts (`hosts.coordinator`); and
where a run that has lost one goes on.

Either counts silence in looks of its own, not by clocks: a job that was suspended as a whole finds everybody alive.

Launcher and rank hold the two ends of a pair of sockets. A thread of the rank writes a heartbeat into it a few times a
second: that the process lives, and what its main thread has got done. A process that was stopped, or a main thread that
hangs where the run is asked to stop, shows by that. The other way the launcher asks the rank to stop, and what the rank
reads last is its launcher's end.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dtrain.base.orphans import descendants, kill

if TYPE_CHECKING:
    from dtrain.parallel.runtime import StopFlag

LOOK_SECONDS = 0.25  # between two heartbeats, and two looks
START_SECONDS = 600.0  # of silence until a main thread gets something done: imports and drivers hold the interpreter
SAVE_SECONDS = 600.0  # that a save may go without a byte written: a disk syncs what it was given before
LAST_SECONDS = 5.0  # for a killed process to be gone
SETTLE_SECONDS = 1.0  # for the others to say why they end too
FILE_SECONDS = 3.0  # for the file system to answer, once a rank is lost
OWN_IO = Path("/proc/self/io")
T = TypeVar("T")


@dataclass(eq=False)
class Watched:
    """A rank as its watcher has it. most: looks in a row without a sign of life after which it is lost; silent: looks
    so far, which the watcher counts."""

    most: float
    silent: int = field(default=0, init=False)

    def is_silent(self, early: int = 0) -> bool:
        """Return whether it is lost by its silence, or will be in `early` looks if that goes on."""
        return self.silent >= self.most - early


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life. progress: a number that changes with what the main thread gets done; signum: of the signal that
    asked it to stop; place: where in the code it is."""

    progress: int = 0
    is_saving: bool = False
    signum: int = 0
    place: str = ""


def heartbeat(stop: "StopFlag", main: int) -> Heartbeat:
    """Return the heartbeat of this process, whose thread `main` counts in `stop`. A save's progress is what is
    written to files: what is sent through a socket, as heartbeats are, does not count."""
    frame, progress = sys._current_frames().get(main), stop.progress
    if stop.is_saving:
        with suppress(OSError):
            progress += int(OWN_IO.read_text().split("wchar:")[1].split()[0])
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    return Heartbeat(progress, stop.is_saving, stop.signum, place[-1000:])


class StallTimer:
    """Time for which heartbeats have shown no progress, by their reader's looks."""

    def __init__(self, lost_after: float):
        self.lost_after = lost_after
        self.last = Heartbeat()
        self.seconds = 0.0

    def look(self, beat: Heartbeat) -> None:
        self.seconds = 0.0 if beat.progress != self.last.progress else self.seconds + LOOK_SECONDS
        self.last = beat

    @property
    def is_over(self) -> bool:
        """True if a main thread that was asked to stop has had its time."""
        return self.seconds >= (max(SAVE_SECONDS, self.lost_after) if self.last.is_saving else self.lost_after)


class RankProcess(Watched):
    """The process of `rank`, in a session of its own, started by `command` with the number of its socket as a last
    word.

    stalled: how long its main thread has shown no progress.
    """

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str], lost_after: float):
        super().__init__(lost_after / LOOK_SECONDS)
        self.rank, self.stalled, self.is_asked = rank, StallTimer(lost_after), False
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen([*command, str(fd)], env=environ, pass_fds=[fd], start_new_session=True)
        self.name = f"rank {rank} (process {self.process.pid})"

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        return self.process.poll()

    def ask(self, signum: int) -> None:
        """Ask it to end in order."""
        if not self.is_asked:
            self.is_asked = True
            with suppress(OSError):  # it has ended
                self._link.send(str(int(signum)).encode())

    def look(self) -> None:
        """Read its heartbeats. To be called every LOOK_SECONDS."""
        self.silent += 1
        beat = self.stalled.last
        with suppress(OSError, ValueError, TypeError):  # nothing came, or a heartbeat that was cut
            lines = self._link.recv(1 << 20).split(b"\n")
            if len(lines) > 1:
                beat = Heartbeat(*json.loads(lines[-2]))
                self.silent = 0
        self.stalled.look(beat)

    def lost(self, early: int = 0) -> str | None:
        """Return a sentence on how this process is lost, or will be in `early` looks if it stays silent."""
        if self.status is not None or not self.is_silent(early):
            return None
        is_stopped, seconds = _is_stopped(self.process.pid), self.silent * LOOK_SECONDS
        if not is_stopped and not self.stalled.last.progress and seconds < START_SECONDS:
            return None
        how = "it is stopped, " if is_stopped else ""
        return f"{self.name} is lost: {how}no sign of life for {seconds:.0f} s (launch.lost_after)"

    @property
    def stood(self) -> str | None:
        """Sentence that says where its main thread has hung for longer than a sign of life may take."""
        still = self.stalled
        if still.seconds < still.lost_after:
            return None
        return f"{self.name} has stood at {still.last.place} for {still.seconds:.0f} s"

    def end(self) -> None:
        """End the process, if it has not ended, and what it started."""
        if self.status is None:
            kill([self.process.pid, *descendants(self.process.pid)])
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot be killed
                self.process.wait(LAST_SECONDS)
        self._link.close()


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "t")
    return False


def newest_checkpoint(run: Path) -> str:
    """Return a sentence that says where the same command goes on. run: the run's directory."""
    checkpoints = run / "checkpoints"
    saved = within(FILE_SECONDS, partial(_newest, checkpoints))
    return saved or f"{checkpoints} does not answer: the same command goes on at the last checkpoint there"


def lost_text(run: Path, lost: str) -> str:
    """Return the text of a run that ends because ranks are `lost`, a sentence."""
    return f"{lost}; the run cannot go on without. {newest_checkpoint(run)}"


def within(seconds: float, act: Callable[[], T]) -> T | None:
    """Return what `act` gives or raise what it raises; None where it takes longer: it then goes on in its thread, which
    does not hold the process back."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # raised below
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result() if wait([done], seconds).done else None


def _newest(checkpoints: Path) -> str:
    steps = [int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()]
    if steps:
        return f"The last checkpoint is {checkpoints / f'step-{max(steps)}'}: the same command goes on there"
    return "No checkpoint was saved yet: the same command starts over"
