"""The processes that tests start."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dtrain.base.orphans import end_with_parent
from tests import world
from tests.world import fork, join_gloo, run_world

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")


def sleeper(pipe):
    pipe.send(os.getpid())
    time.sleep(60)


def rank_sleeper(rank, pipe):
    sleeper(pipe)


def starts_all(pipe):
    fork(sleeper, pipe)
    with subprocess.Popen(["sleep", "60"], preexec_fn=partial(end_with_parent, os.getpid())) as program:
        pipe.send(program.pid)
        run_world(rank_sleeper, 2, pipe)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_process_that_started_them(signum):
    ours, theirs = multiprocessing.Pipe()
    parent = fork(starts_all, theirs)
    pids = [ours.recv() for _ in range(4)]
    os.kill(parent.pid, signum)
    parent.join()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_may_use_many_threads():
    large = torch.ones(1 << 20)
    large.exp()  # with more than one thread here, their pool would be missing in the child
    child = fork(many_threads, large)
    child.join(30)
    hung = child.exitcode is None
    child.kill()
    assert not hung


def many_threads(large):
    torch.set_num_threads(2)
    large.exp()


JOINED_BEFORE = None  # a file of the test


def _hangs_at_first(rank, world_size, store_path):
    if rank == 1 and not JOINED_BEFORE.exists():
        JOINED_BEFORE.touch()
        time.sleep(1000)
    join_gloo(rank, world_size, store_path)


def test_a_world_whose_rank_does_not_join_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "JOIN_SECONDS", 10.0)
    monkeypatch.setitem(globals(), "JOINED_BEFORE", tmp_path / "joined")
    assert run_world(_size, 2, join=_hangs_at_first) == [2, 2]
    assert JOINED_BEFORE.exists()


def _size(rank):
    return dist.get_world_size()
