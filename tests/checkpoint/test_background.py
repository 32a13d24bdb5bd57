"""Saves in the background hold the numbers of their step, run one at a time, and fail aloud."""

import json
import re
import resource
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.background import Saver
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.dcp.training_state import training_tensors
from dtrain.parallel.mesh import Runtime, init_one_process_group
from dtrain.training.trainer import Trainer, train
from tests.checkpoint.tiny import on_mesh, seeded, whole
from tests.running import run, trajectory, weights
from tests.tiny import tiny_recipe
from tests.world import run_world

CPU = torch.device("cpu")


@pytest.fixture
def one_process():
    init_one_process_group("cpu")
    yield
    dist.destroy_process_group()


class Held(CheckpointStore):
    """A store whose saves wait until they are let go."""

    def __init__(self, store):
        super().__init__(store.directory, store.ranks)
        self.go, self.begun = threading.Semaphore(0), []

    def save(self, step, *contents):
        self.begun.append(step)
        assert self.go.acquire(timeout=30)
        return super().save(step, *contents)


def held_saver(directory, retention=Retention()):  # noqa: B008 (immutable)
    saver = Saver(directory, retention, CPU, background=True)
    saver.store = Held(saver.store)
    return saver


def trained_meanwhile(rank, directory):
    """Saves after each of three AdamW steps while the next ones change model, moments and state in place."""
    model = on_mesh(seeded(0), shard=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saver = held_saver(directory)
    counter = {"steps": [0]}
    expected = {}
    for step in range(1, 4):
        model(torch.arange(6).reshape(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counter["steps"][0] = step
        tensors = training_tensors(model, optimizer)
        expected[step] = {name: whole(tensor).detach().clone() for name, tensor in tensors.items()}
        if step > 1:
            saver.store.go.release()
        saver.save(step, tensors, counter, {"rank": rank})
    counter.clear()
    saver.store.go.release()
    saver.finish()
    results = []
    for step, tensors in expected.items():
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        state = CheckpointStore(directory).load(step, loaded)
        results.append(state["steps"] == [step] and all(torch.equal(loaded[name], tensors[name]) for name in tensors))
    return results


@pytest.mark.trap(
    "a save in the background writes other weights than those of its step",
    "NVIDIA-NeMo/RL #3312",
    "every later save is the first one",
    "the saved numbers are those of the step",
)
def test_the_saved_numbers_are_those_of_the_step_though_training_goes_on(tmp_path):
    assert run_world(trained_meanwhile, 2, tmp_path) == [[True] * 3] * 2


def test_one_save_is_in_flight_and_the_next_waits(tmp_path, one_process):
    with held_saver(tmp_path, Retention(keep_last=1)) as saver:
        saver.save(1, {"a": torch.ones(3)}, {})
        assert CheckpointStore(tmp_path).steps() == []
        second = threading.Thread(target=saver.save, args=(2, {"a": torch.ones(3)}, {}))
        second.start()
        second.join(0.3)
        assert second.is_alive() and saver.store.begun == [1]
        saver.store.go.release(2)
        second.join()
    assert saver.store.begun == [1, 2]
    assert CheckpointStore(tmp_path).steps() == [2]


def test_a_failed_save_is_known_at_once_and_raised_when_asked(tmp_path, one_process):
    saver = held_saver(tmp_path)
    (tmp_path / "step-1").mkdir()
    saver.save(1, {"a": torch.ones(3)}, {})
    assert not saver.has_failed
    saver.store.go.release()
    saver._save_in_flight.exception()
    assert saver.has_failed
    with pytest.raises(UserError, match="step-1 is already there"):
        saver.finish()
    assert not saver.has_failed


def test_whatever_ends_the_run_the_save_in_flight_is_whole(tmp_path, one_process):
    with pytest.raises(ZeroDivisionError), held_saver(tmp_path) as saver:
        saver.save(1, {"a": torch.ones(3)}, {})
        threading.Timer(0.2, saver.store.go.release).start()
        raise ZeroDivisionError
    assert CheckpointStore(tmp_path).steps() == [1]
    with pytest.raises(KeyboardInterrupt), held_saver(tmp_path) as saver:
        saver.save(2, {"a": torch.ones(3)}, {})
        raise KeyboardInterrupt
    assert CheckpointStore(tmp_path).steps() == [1]
    saver.store.go.release()
    saver.finish()


@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_with_saves_in_the_background_end_as_those_without(tmp_path, world_size):
    shape = ("checkpoint.every=1", "checkpoint.keep_last=null", "train.steps=4")
    quiet = run(tiny_recipe(tmp_path, *shape, "checkpoint.async_save=false", name="quiet"), world_size)
    busy = run(tiny_recipe(tmp_path, *shape, name="busy"), world_size)
    assert trajectory(busy) == trajectory(quiet)
    for step in range(1, 5):
        expected = weights(quiet, step)
        assert all(torch.equal(value, expected[name]) for name, value in weights(busy, step).items()), step


def full_disk_on_one_rank(rank, recipe, world_size):
    """The last rank can write no large file after step 3; step 5 outlasts the save of step 4. Returns the error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    class Filling(Trainer):
        def _log(self, step, *rest):
            super()._log(step, *rest)
            if step == 3:
                self.saver.finish()
            if step == 3 and rank == world_size - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            if step == 5:
                self.saver._save_in_flight.exception()

    with ExitStack() as stack:
        trainer = Filling.open(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size), stack)
        try:
            trainer.loop(trainer.resume())
        except UserError as error:
            return str(error)


def test_a_failed_background_save_ends_the_run_at_the_next_step_on_every_rank(tmp_path):
    recipe = tiny_recipe(tmp_path, "checkpoint.every=2", "train.steps=30")
    messages = run_world(full_disk_on_one_rank, 2, recipe, 2)
    assert messages[0] == messages[1]
    assert "step-4 could not be saved" in messages[0] and "rank 1" in messages[0] and "File too large" in messages[0]
    first_save = Path(recipe.run.dir) / "run" / "checkpoints" / "step-2"
    parameters = json.loads((recipe.run.directory / "about.json").read_text())["parameters"]
    # Weights and Adam's two moments in float64, and the count of steps of each parameter.
    taken = float(re.search(r"A save takes ([\d.]+) KiB, and [\d.,]+ GiB are free there; ", messages[0])[1])
    assert taken == pytest.approx(parameters * 3 * 8 / 1024, rel=0.01)
    assert f"the last complete step is {first_save}" in messages[0]
    assert len(trajectory(recipe)) == 5
    directory = Path(recipe.run.dir) / "run" / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == ["step-2"]
    train(recipe, Runtime())
    assert len(trajectory(recipe)) == 30
