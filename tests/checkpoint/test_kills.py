"""kill -9 at random instants: nothing is lost but the steps since the last whole save, and nothing is left behind."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from dtrain.base.orphans import end_with
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.store import CheckpointStore
from tests.checkpoint.processes import Processes, checkpoints, rows
from tests.running import metrics, run, trajectory, weights
from tests.tiny import tiny_grpo, tiny_recipe

LAST = "checkpoint.every=1000"  # and the last
SHAPE = ("train.dtype=float32", "checkpoint.every=1", "launch.nproc=2")


def recipe_of(method, root, kills, *overrides):
    """Of a run that is long enough for so many kills."""
    if method in ("sft", "lora"):
        adapter = ["lora={rank: 3, dropout: 0.1}"] * (method == "lora")
        sizes = (f"train.steps={20 + 10 * kills}", "train.global_batch=4", "train.micro_batch=1")
        return tiny_recipe(root, *SHAPE, *sizes, *adapter, *overrides)
    # A rollout every fourth step: kills meet the drawing, the rewards and the updates.
    sizes = (f"train.steps={16 + 4 * kills}", "grpo.updates_per_rollout=2", "grpo.beta=0.1")
    return tiny_grpo(root, *SHAPE, *sizes, *overrides)


@pytest.fixture(scope="module")
def uninterrupted(request, tmp_path_factory):
    """A run of a method, long enough for so many kills, in one piece."""
    method, kills = request.param
    return run(recipe_of(method, tmp_path_factory.mktemp("whole"), kills, LAST), 2)


def kill_and_go_on(tmp_path, uninterrupted, draw, targets):
    """Start the run once per target and kill that at a random instant, then let it end; compare it with one piece."""
    recipe = recipe_of("lora" if uninterrupted.lora else uninterrupted.method, tmp_path, len(targets))
    store, steps = checkpoints(recipe), recipe.train.steps
    for target in targets:
        before = max(store.published(), default=0)
        started = Processes(recipe)
        if draw.random() < 0.2:
            time.sleep(draw.uniform(0, 8))  # while it starts
        elif started.wait_for_rows(before + 1 + draw.randrange(8)):
            time.sleep(draw.uniform(0, 0.3))
        workers = started.workers()
        chosen = {
            "launcher": [started.launcher.pid],
            "all": started.pids(),
            "worker": [draw.choice(workers or [started.launcher.pid])],
        }
        started.kill(chosen[target])
        assert started.end(30) != 0 or rows(started.directory) == steps
        assert max(store.published(), default=0) >= before
        for step in store.published():
            assert store.damage(step) == []
    newest = max(store.published(), default=None)
    finished = Processes(recipe)
    assert finished.end(120) == 0, finished.text()
    if newest is not None:
        assert f"step-{newest}" in finished.text() or newest == steps
    assert [row["step"] for row in metrics(recipe)] == list(range(1, steps + 1))
    assert trajectory(recipe) == trajectory(uninterrupted)
    if recipe.method == "grpo":
        drawn, whole = (Path(one.run.dir) / one.run.name / "samples.jsonl" for one in (recipe, uninterrupted))
        assert drawn.read_bytes() == whole.read_bytes()
    expected = weights(uninterrupted, steps)
    assert all(torch.equal(value, expected[name]) for name, value in weights(recipe, steps).items())
    assert len(store.published()) == 3
    hidden = [path.name for path in store.directory.iterdir() if path.name.startswith(".")]
    assert hidden == []


@pytest.mark.parametrize("uninterrupted", [("sft", 1), ("lora", 1), ("grpo", 1)], indirect=True)
@pytest.mark.parametrize("target", ["worker", "launcher", "all"])
def test_killed_runs_go_on(tmp_path, uninterrupted, target):
    kill_and_go_on(tmp_path, uninterrupted, random.Random(0), [target])


@pytest.mark.parametrize("uninterrupted", [("sft", 2), ("lora", 2), ("grpo", 2)], indirect=True)
@pytest.mark.parametrize("seed", range(1, 21))
def test_killed_runs_go_on_whenever(tmp_path, uninterrupted, seed):
    draw = random.Random(seed)
    kill_and_go_on(tmp_path, uninterrupted, draw, draw.choices(["worker", "launcher", "all"], k=2))


# ---- one saver, killed often


def value(step):
    return torch.full((2000,), float(step)), torch.arange(1000.0) + step


def save_for_ever(directory):
    store = CheckpointStore(directory, Ranks(alone=True))
    step = max(store.published(), default=0)
    while True:
        step += 1
        a, b = value(step)
        store.save(step, {"a": a, "b": b}, {"step": step}, {"step": step})
        store.prune(Retention(keep_last=2, keep_every=50))


def seconds_of_a_save(directory):
    """In a process as freshly forked as those that are killed."""
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        a, b = value(1)
        CheckpointStore(directory, Ranks(alone=True)).save(1, {"a": a, "b": b}, {})
        os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - began


def killed_savers(directory, draw, count):
    store = CheckpointStore(directory, Ranks(alone=True))
    longest = 4 * seconds_of_a_save(directory / "clock")
    newest = left = 0
    parent = os.getpid()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            end_with(parent)
            try:
                save_for_ever(directory)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        steps = store.published()
        assert steps == store.steps() and max(steps, default=0) >= newest
        newest = max(steps, default=0)
        # A kill between a save's publication and its pruning leaves one more, until a pruning comes to its end.
        before, left = left, sum(step % 50 != 0 for step in steps)
        assert left <= max(3, before + 1)
        for step in steps[-2:]:
            tensors = {"a": torch.zeros(2000), "b": torch.zeros(1000)}
            assert store.load(step, tensors) == {"step": step}
            assert store.read_rank_state(step) == ({"step": step}, 0)
            assert all(map(torch.equal, tensors.values(), value(step)))
    return newest


@pytest.mark.trap(
    "half a save is taken for the newest one",
    "pytorch/torchtitan PR#315",
    "a resume that fails, or weights of two steps",
    "a step has its name once it is whole",
)
def test_a_saver_killed_anywhere_leaves_whole_steps(tmp_path):
    assert killed_savers(tmp_path, random.Random(0), 60) > 10


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_saver_killed_hundreds_of_times(tmp_path, seed):
    assert killed_savers(tmp_path, random.Random(seed), 200) > 30
