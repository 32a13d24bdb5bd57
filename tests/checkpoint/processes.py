"""`dtrain run` as its users start it, in processes that can be found, signalled and killed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

from dtrain import recipe as config
from dtrain.base.orphans import end_with
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import CheckpointStore

ROOT = Path(__file__).parents[2]
MARK = "DTRAIN_TEST_MARK"


class Processes:
    """One start of a recipe, and every process that comes of it."""

    def __init__(self, recipe, *overrides, prefix=("-m", "dtrain"), cwd=ROOT):
        self.directory = Path(recipe.run.dir) / recipe.run.name
        path = Path(recipe.run.dir) / f"{recipe.run.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(config.to_yaml(recipe))
        self.mark = uuid.uuid4().hex
        environ = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.output = path.with_suffix(f".{self.mark}.txt")
        with self.output.open("w") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, *prefix, "run", str(path), *overrides],
                cwd=cwd, env=environ, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
            )  # fmt: skip

    def pids(self):
        """Of all living processes of this start."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self._is_ours(entry):
                found.append(int(entry.name))
        return found

    def workers(self):
        """The pids of the ranks, whether the launcher or torchrun started them."""
        ranks = []
        for pid in self.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue
            if any(item.startswith(b"RANK=") for item in environ) and int(parent) == self.launcher.pid:
                ranks.append(pid)
        return ranks

    def wait_for_rows(self, count, seconds=90):
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

    def end(self, seconds=90):
        """The launcher's exit status, once it and every process of it is gone."""
        try:
            status = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill(self.pids())
            raise
        deadline = time.monotonic() + 15
        while left := self.pids():
            if time.monotonic() > deadline:
                commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
                self.kill(left)
                raise AssertionError(f"left behind: {commands}")
            time.sleep(0.02)
        return status

    def text(self):
        return self.output.read_text()

    def _is_ours(self, entry):
        try:
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return False
            return f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
        except OSError:
            return False


def rows(directory):
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints(recipe):
    return CheckpointStore(Path(recipe.run.dir) / recipe.run.name / "checkpoints", Ranks(alone=True))
