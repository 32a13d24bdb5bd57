"""Signals and restarts: a run told to stop saves where it stands; one that is started again goes on by itself."""

import os
import signal

import pytest
import torch

from tests.checkpoint.processes import Processes, checkpoints, hold_after, rows
from tests.running import metrics, run, trajectory, weights
from tests.tiny import tiny_recipe

STEPS = 12
SHAPE = (f"train.steps={STEPS}", "train.dtype=float32", "train.global_batch=2", "train.micro_batch=1")
TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "dtrain",
)  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The same run in one piece, by its number of ranks."""
    root = tmp_path_factory.mktemp("whole")
    return {n: run(tiny_recipe(root, *SHAPE, f"checkpoint.every={STEPS}", name=f"on{n}"), n) for n in (1, 2)}


def assert_equal_to(recipe, whole):
    assert [row["step"] for row in metrics(recipe)] == list(range(1, STEPS + 1))
    assert trajectory(recipe) == trajectory(whole)
    expected = weights(whole, STEPS)
    assert all(torch.equal(value, expected[name]) for name, value in weights(recipe, STEPS).items())


@pytest.mark.parametrize(("signum", "nproc", "num_workers"), [(signal.SIGTERM, 2, 1), (signal.SIGUSR1, 1, 0)])
def test_a_signal_to_every_process_saves_the_step_and_has_a_status_of_its_own(
    tmp_path, monkeypatch, uninterrupted, signum, nproc, num_workers
):
    hold_after(monkeypatch, 3, tmp_path / "go")
    shape = (*SHAPE, "checkpoint.every=1000", f"launch.nproc={nproc}", f"data.num_workers={num_workers}")
    recipe = tiny_recipe(tmp_path, *shape)
    started = Processes(recipe)
    assert started.wait_for_rows(3)
    for pid in started.pids():
        os.kill(pid, signum)
    (tmp_path / "go").touch()
    assert started.end() == 128 + signum, started.text()
    stopped_at = rows(started.directory)
    assert checkpoints(recipe).published_steps() == [stopped_at] and 3 <= stopped_at < STEPS
    assert f"stopped after step {stopped_at}" in started.text()
    again = Processes(recipe)
    assert again.end() == 0 and f"resumed from {checkpoints(recipe).path(stopped_at)}" in again.text()
    assert_equal_to(recipe, uninterrupted[nproc])


def test_a_signal_to_torchrun_saves_the_step(tmp_path, monkeypatch):
    hold_after(monkeypatch, 3, tmp_path / "go")
    recipe = tiny_recipe(tmp_path, *SHAPE, "checkpoint.every=1000")
    started = Processes(recipe, prefix=TORCHRUN)
    assert started.wait_for_rows(3)
    started.launcher.terminate()
    (tmp_path / "go").touch()
    assert started.end() != 0
    assert checkpoints(recipe).published_steps() == [rows(started.directory)]


def test_a_killed_worker_is_started_again_and_the_run_goes_on_by_itself(tmp_path, monkeypatch, uninterrupted):
    """By the launcher; tests/launch/test_clusters.py has torchrun's restart."""
    hold_after(monkeypatch, 5, tmp_path / "go")
    saves = ("checkpoint.every=4", "checkpoint.async_save=false")  # step 4 is saved before step 5 begins
    recipe = tiny_recipe(tmp_path, *SHAPE, *saves, "launch.nproc=2", "launch.max_restarts=1")
    started = Processes(recipe)
    assert started.wait_for_rows(5) and len(workers := started.workers()) == 2
    started.kill(workers[1:])
    (tmp_path / "go").touch()
    assert started.end() == 0 and "resumed from" in started.text(), started.text()
    assert_equal_to(recipe, uninterrupted[2])
