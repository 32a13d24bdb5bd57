"""The launcher's private directory: for its user alone, and swept by the next start where its launcher was killed."""

import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.launch.job import job_directory, sweep
from tests.forked_python import ForkedPython
from tests.launch.processes import Launched, wait_until_gone

HOLDS = """
from dtrain.launch.job import job_directory
with job_directory() as job:
    print(job, flush=True)
    input()
"""
# Directories again and again, each of which must be there until its block ends.
STARTS = """
import time
from dtrain.launch.job import job_directory
while True:
    with job_directory() as job:
        (job / "recipe.yaml").touch()
        time.sleep(0.005)
        assert {path.name for path in job.iterdir()} == {"recipe.yaml", "lock"}, list(job.iterdir())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The temporary folder of this process and of those that it starts."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setenv("TMPDIR", str(found))
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def holder():
    process = ForkedPython([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_the_next_start_sweeps_what_a_killed_launcher_has_left(tmp_path, folder):
    launched = Launched(tmp_path, "hangs", "launch.nproc=2")
    pids = launched.pids(2)
    (left,) = folder.glob("dtrain-*")
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    other, living = holder()
    launched.process.kill()
    launched.end()
    wait_until_gone(pids)
    assert left.exists()
    shutil.rmtree(launched.runs)
    assert Launched(tmp_path, "ends", "launch.nproc=2").end()[0] == 0
    assert list(folder.glob("dtrain-*")) == [living]
    other.communicate("\n")
    assert list(folder.iterdir()) == []


def test_what_is_not_provably_a_dead_launcher_s_stays(folder, tmp_path):
    process, dead = holder()
    process.kill()
    process.wait()
    marker = (dead / "lock").read_bytes()
    (precious := tmp_path / "precious").mkdir()
    (precious / "lock").write_bytes(marker)
    (folder / "dtrain-link").symlink_to(precious)
    for name, content in [("dtrain-bare", None), ("dtrain-other", b"{}"), ("dtrain-away", marker[:-5] + b'abc"}')]:
        (folder / name).mkdir(mode=0o700)
        if content is not None:
            (folder / name / "lock").write_bytes(content)
    (folder / "dtrain-linked").mkdir()
    (folder / "dtrain-linked" / "lock").symlink_to(precious / "lock")
    (folder / "dtrain-file").touch()
    stays = set(folder.iterdir()) - {dead}
    with job_directory() as mine:
        assert set(folder.iterdir()) == stays | {mine}
        with job_directory() as other:  # of the same process
            sweep(folder)
            assert mine.is_dir() and other.is_dir()
    assert set(folder.iterdir()) == stays and (precious / "lock").exists()


def test_starts_and_kills_side_by_side_leave_the_living_alone(folder):
    processes = [ForkedPython([sys.executable, "-c", STARTS], stderr=subprocess.PIPE, text=True) for _ in range(4)]
    deadline = time.monotonic() + 300
    while not any(folder.iterdir()):
        assert time.monotonic() < deadline
    time.sleep(3)
    for process in processes:
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with job_directory() as mine:
        whole = {path for path in folder.iterdir() if (path / "lock").exists()}
        assert whole == {mine}


def test_a_temporary_folder_that_is_of_no_use_is_named(folder):
    folder.rmdir()
    with pytest.raises(UserError, match=f"the temporary folder {folder}: No such file or directory; set TMPDIR"):
        with job_directory():
            pass
