"""Launchers as processes of their own, and how to see that processes are gone."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from dtrain.base.orphans import end_with_parent
from tests.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]


class Launched:
    """`tests.launch.launched` in a session of its own, as from a terminal of its own; it and its ranks are forks.

    starts: as a user starts it, by interpreters of their own.
    """

    def __init__(self, directory: Path, training: str, *overrides: str, prefix: tuple[str, ...] = (), starts=False):
        self.runs = directory / "runs"
        command = [sys.executable, *prefix, "-m", "tests.launch.launched", str(directory), training, *overrides]
        popen = partial(subprocess.Popen, preexec_fn=partial(end_with_parent, os.getpid())) if starts else ForkedPython
        self.process = popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def pids(self, count: int) -> list[int]:
        """Return the process ids of the ranks, once all of them have begun to train."""
        deadline = time.monotonic() + 300
        while True:
            marks = sorted(self.runs.glob("mark-*"))
            if len(marks) == count and all(mark.read_text() for mark in marks):
                return [int(mark.read_text()) for mark in marks]
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.05)

    def end(self, seconds: float = 300) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


def wait_until_gone(pids: list[int], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
