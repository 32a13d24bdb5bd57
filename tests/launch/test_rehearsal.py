"""A rehearsal of a run that goes on: it passes what the run goes on with, and refuses what the run refuses."""

import os

import pytest

from dtrain import config
from dtrain.checkpoint.rundir import RunDirectory
from dtrain.errors import RecipeError, UserError
from dtrain.launch import launch, validate
from tests.tiny import save_weights, tiny_recipe, write_model, write_rows


def test_a_run_that_goes_on(tmp_path):
    model = save_weights(write_model(tmp_path / "m"))
    shape = (f"model.path={model}", "model.init=pretrained", "train.steps=6", "checkpoint.every=6")
    recipe = tiny_recipe(tmp_path, *shape)
    launch(recipe)
    assert validate(recipe, ["train.steps=8"])[0].startswith("ok: run, sft on 1 process, 8 steps")
    for change, said in {
        "optimizer.weight_decay=0.5": "optimizer.weight_decay: 0.1 -> 0.5",
        "run.seed=4": "run.seed: 0 -> 4",
        f"data.train.path={write_rows(tmp_path / 'others.jsonl', seed=5)}": "data.fingerprint",
        "checkpoint.resume=null": "holds the metrics of an earlier run",
    }.items():
        with pytest.raises(RecipeError) as caught:
            validate(recipe, ["train.steps=8", change])
        with pytest.raises(UserError) as told:
            launch(config.load(recipe, ["train.steps=8", change]))
        assert said in str(caught.value) and str(told.value) in str(caught.value), (caught.value, told.value)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    save_weights(model, seed=3)
    with pytest.raises(RecipeError, match="model.weights"):
        validate(recipe, ["train.steps=8"])
    assert validate(recipe, ["train.steps=8", "checkpoint.allow_changes=[model.weights]"])
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}


def hold(path, ready, done):
    with RunDirectory(path).hold():
        os.write(ready, b"1")
        os.read(done, 1)


def test_a_directory_that_another_process_holds(tmp_path):
    recipe = tiny_recipe(tmp_path)
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        hold(recipe.run.directory, tell, wait)
        os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(RecipeError, match=f"is held by process {child} on"):
            validate(recipe)
    finally:
        os.write(end, b"1")
        os.waitpid(child, 0)
    assert validate(recipe)


def test_devices_play_no_part_where_the_world_is_elsewhere(tmp_path):
    recipe = tiny_recipe(tmp_path, "launch.device=cuda", "launch.nproc=2")
    with pytest.raises(RecipeError, match="launch.device=cuda"):
        validate(recipe)
    assert validate(recipe, world_size=4)
