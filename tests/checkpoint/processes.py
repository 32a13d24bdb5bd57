"""`dtrain run` in processes that can be found, signalled and killed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

from dtrain import recipe as config
from dtrain.base.orphans import end_with_parent
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.training.metrics import Recorder
from tests.forked_python import ForkedPython, pids_with

ROOT = Path(__file__).parents[2]
MARK = "DTRAIN_TEST_MARK"


class Processes:
    """A start of a recipe, and every process that comes of it; they are forks.

    starts: as a user starts it, by interpreters of their own.
    """

    def __init__(self, recipe, *overrides, prefix=("-m", "dtrain"), cwd=ROOT, starts=False):
        self.directory = Path(recipe.run.dir) / recipe.run.name
        path = Path(recipe.run.dir) / f"{recipe.run.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(config.to_yaml(recipe))
        self.mark = uuid.uuid4().hex
        environ = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.output = path.with_suffix(f".{self.mark}.txt")
        self._opened = self.output.open("w")
        mark = self._opened.fileno()
        popen = (
            partial(subprocess.Popen, preexec_fn=partial(end_with_parent, os.getpid()))
            if starts
            else partial(ForkedPython, mark=mark)
        )
        self.launcher = popen(
            [sys.executable, *prefix, "run", str(path), *overrides],
            cwd=cwd, env=environ, stdout=mark, stderr=mark, start_new_session=True,
        )  # fmt: skip

    def pids(self):
        """Return those of all living processes of this start: they keep its output open, or have its mark."""
        marked = {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._is_marked(entry)}
        return sorted(marked | set(pids_with(self._opened.fileno())))

    def workers(self):
        """The pids of the ranks, whether the launcher or torchrun started them."""
        return children(self.launcher.pid)

    def wait_for_rows(self, count, seconds=300):
        """Until metrics.jsonl has `count` rows; False if the run ended first."""
        deadline = time.monotonic() + seconds
        while rows(self.directory) < count:
            if self.launcher.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)
        return True

    def kill(self, pids):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def end(self, seconds=300):
        """The launcher's exit status, once it and every process of it is gone."""
        try:
            status = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill(self.pids())
            raise
        deadline = time.monotonic() + 60
        while left := self.pids():
            if time.monotonic() > deadline:
                commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
                self.kill(left)
                raise AssertionError(f"left behind: {commands}")
            time.sleep(0.02)
        return status

    def text(self):
        return self.output.read_text()

    def _is_marked(self, entry):
        """Return whether it was started, not forked, with the mark in its environment."""
        try:
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return False
            return f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
        except OSError:
            return False


def hold_after(monkeypatch, step, go):
    """Have the ranks of every start from here on, which are forks, wait once `step` is logged until the file `go` is
    there."""
    log = Recorder.train_row

    def log_and_wait(recorder, at, **fields):
        log(recorder, at, **fields)
        while at == step and not go.exists():
            time.sleep(0.01)

    monkeypatch.setattr(Recorder, "train_row", log_and_wait)


def children(pid):
    """The living processes that process `pid` started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def rows(directory):
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints(recipe):
    return CheckpointStore(Path(recipe.run.dir) / recipe.run.name / "checkpoints", Ranks(single_process=True))
