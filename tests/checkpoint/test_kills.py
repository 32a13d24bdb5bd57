"""kill -9, anywhere: nothing is lost but the steps since the last whole save, and nothing is left behind."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from dtrain.base.orphans import end_with_parent
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.store import CheckpointStore
from tests.checkpoint.processes import Processes, checkpoints, hold_after, rows
from tests.running import metrics, run, trajectory, weights
from tests.tiny import tiny_grpo, tiny_recipe

LAST = "checkpoint.every=1000"  # and the last
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}  # audit events
SHAPE = ("train.dtype=float32", "checkpoint.every=1", "launch.nproc=2")


def recipe_of(method, root, kills, *overrides):
    """Return the recipe of a run that is long enough for so many kills."""
    if method in ("sft", "lora"):
        adapter = ["lora={rank: 3, dropout: 0.1}"] * (method == "lora")
        sizes = (f"train.steps={8 + 6 * kills}", "train.global_batch=2", "train.micro_batch=1")
        return tiny_recipe(root, *SHAPE, *sizes, *adapter, *overrides)
    # A rollout every fourth step: kills meet the drawing, the rewards and the updates.
    sizes = (f"train.steps={8 + 6 * kills}", "grpo.updates_per_rollout=2", "grpo.beta=0.1")
    sizes += ("grpo.prompts_per_step=2", "grpo.group_size=2", "train.global_batch=2", "train.micro_batch=1")
    return tiny_grpo(root, *SHAPE, *sizes, *overrides)


@pytest.fixture(scope="module")
def uninterrupted(request, tmp_path_factory):
    """A run of a method, long enough for so many kills, in one piece."""
    method, kills = request.param
    return run(recipe_of(method, tmp_path_factory.mktemp("whole"), kills, LAST), 2)


def kill_and_go_on(tmp_path, monkeypatch, uninterrupted, draw, targets):
    """Start the run once per target and kill that at a random instant, then let it end; compare it with one piece.

    Before its last step it waits for the kill.
    """
    recipe = recipe_of("lora" if uninterrupted.lora else uninterrupted.method, tmp_path, len(targets))
    store, steps = checkpoints(recipe), recipe.train.steps
    go = tmp_path / "go"
    hold_after(monkeypatch, steps - 1, go)
    for target in targets:
        go.unlink(missing_ok=True)
        before = max(store.published_steps(), default=0)
        started = Processes(recipe)
        if draw.random() < 0.2:
            time.sleep(draw.uniform(0, 8))  # while it starts
        elif started.wait_for_rows(min(before + 1 + draw.randrange(8), steps - 1)):
            time.sleep(draw.uniform(0, 0.3))
        workers = started.workers()
        chosen = {
            "launcher": [started.launcher.pid],
            "all": started.pids(),
            "worker": [draw.choice(workers or [started.launcher.pid])],
        }
        started.kill(chosen[target])
        go.touch()
        assert started.end() != 0 or rows(started.directory) == steps
        assert max(store.published_steps(), default=0) >= before
        for step in store.published_steps():
            assert store.check_contents(step) == []
    newest = max(store.published_steps(), default=None)
    finished = Processes(recipe)
    assert finished.end() == 0, finished.text()
    if newest is not None:
        assert f"step-{newest}" in finished.text() or newest == steps
    assert [row["step"] for row in metrics(recipe)] == list(range(1, steps + 1))
    assert trajectory(recipe) == trajectory(uninterrupted)
    if recipe.method == "grpo":
        drawn, whole = (Path(one.run.dir) / one.run.name / "samples.jsonl" for one in (recipe, uninterrupted))
        assert drawn.read_bytes() == whole.read_bytes()
    expected = weights(uninterrupted, steps)
    assert all(torch.equal(value, expected[name]) for name, value in weights(recipe, steps).items())
    assert len(store.published_steps()) == 3
    hidden = [path.name for path in store.directory.iterdir() if path.name.startswith(".")]
    assert hidden == []


@pytest.mark.parametrize("uninterrupted", [("sft", 1), ("lora", 1), ("grpo", 1)], indirect=True)
def test_killed_runs_go_on(tmp_path, monkeypatch, uninterrupted):
    target = "all" if uninterrupted.lora else {"sft": "launcher", "grpo": "worker"}[uninterrupted.method]
    kill_and_go_on(tmp_path, monkeypatch, uninterrupted, random.Random(0), [target])


@pytest.mark.parametrize("uninterrupted", [("grpo", 2)], indirect=True)
def test_a_run_killed_twice_goes_on(tmp_path, monkeypatch, uninterrupted):
    """It is killed again after it has been started again."""
    kill_and_go_on(tmp_path, monkeypatch, uninterrupted, random.Random(1), ["all", "worker"])


# ---- one saver, killed often


def value(step):
    return torch.full((2000,), float(step)), torch.arange(1000.0) + step


def saved_until(directory, call, parent):
    """Save three steps, pruned to two, and die by SIGKILL just before the call of this number that changes files."""
    end_with_parent(parent)
    calls = 0

    def killing(event, arguments):
        nonlocal calls
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(directory) in str(arguments[0]):
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(killing)
    store = CheckpointStore(directory, Ranks(single_process=True))
    before = max(store.published_steps(), default=0)
    for step in range(before + 1, before + 4):
        a, b = value(step)
        store.save(step, {"a": a, "b": b}, {"step": step}, {"step": step})
        store.prune(Retention(keep_last=2))
    os._exit(0)


@pytest.mark.trap(
    "half a save is taken for the newest one",
    "pytorch/torchtitan PR#315",
    "a resume that fails, or weights of two steps",
    "a step has its name once it is whole",
)
def test_a_saver_killed_before_each_change_of_a_file_leaves_whole_steps(tmp_path):
    """Steps that were published stay whole, and the next saver clears what the killed one left."""
    parent, store = os.getpid(), CheckpointStore(tmp_path / "steps", Ranks(single_process=True))
    kills = newest = 0
    while True:
        child = os.fork()
        if child == 0:
            saved_until(store.directory, kills + 1, parent)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps = store.published_steps()
        assert steps == store.steps() and max(steps, default=0) >= newest
        newest = max(steps, default=0)
        assert len(steps) <= 3, kills
        for step in steps[-2:]:
            tensors = {"a": torch.zeros(2000), "b": torch.zeros(1000)}
            assert store.load(step, tensors) == {"step": step}
            assert store.read_rank_state(step) == ({"step": step}, 0)
            assert all(map(torch.equal, tensors.values(), value(step)))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 30 and len(steps) == 2
    assert not [path for path in store.directory.iterdir() if path.name.startswith(".")]
