"""A dry run of a run that goes on: it passes what the run goes on with, and refuses what the run refuses."""

import json
import os

import pytest

import dtrain
from dtrain.base.errors import RecipeError, UserError
from dtrain.launch.start import launch, validate
from dtrain.recipe.saved import recipe_values
from dtrain.training import load_recipe
from dtrain.training.directory import RunDirectory
from tests.forked_python import forking
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
            launch(load_recipe(recipe, ["train.steps=8", change]))
        assert said in str(caught.value) and str(told.value) in str(caught.value), (caught.value, told.value)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    save_weights(model, seed=3)
    with pytest.raises(RecipeError, match="model.weights"):
        validate(recipe, ["train.steps=8"])
    assert validate(recipe, ["train.steps=8", "checkpoint.allow_changes=[model.weights]"])
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}


def hold(path, ready, done):
    run = RunDirectory(path).acquire()
    os.write(ready, b"1")
    os.read(done, 1)
    run.release()


def test_a_directory_that_another_process_holds(tmp_path):
    recipe = tiny_recipe(tmp_path)
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        hold(recipe.run.directory, tell, wait)
        os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(RecipeError, match=f"is in use by process {child} on"):
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


@pytest.mark.processes
@pytest.mark.parametrize("nproc", [1, 2])
def test_weights_that_do_not_fit_are_told_before_the_data_is_tokenised(tmp_path, nproc):
    """As `validate` tells them, of the model and of a teacher; and so are settings that the optimizer refuses."""
    model, other = (save_weights(write_model(tmp_path / name)) for name in ("m", "t"))
    config_of_other = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config_of_other | {"intermediate_size": 40}))
    shape = ("model.init=pretrained", f"launch.nproc={nproc}", "train.steps=4")
    for overrides in (
        [f"model.path={other}"],
        [f"model.path={model}", "method=distill", f"distill.teacher={other}"],
        [f"model.path={model}", "optimizer.name=torch.optim.Rprop", "optimizer.kwargs={etas: 1}"],
    ):
        recipe = tiny_recipe(tmp_path, *shape, *overrides)
        with pytest.raises(RecipeError) as validated:
            validate(recipe)
        with pytest.raises(UserError) as told, forking():
            launch(recipe)
        assert str(told.value) in str(validated.value)
        assert not (tmp_path / "runs" / ".cache").exists()


@pytest.mark.processes
@pytest.mark.parametrize("nproc", [1, 2])
def test_run_returns_the_directory_and_the_last_metrics(tmp_path, nproc):
    recipe = tiny_recipe(tmp_path, f"launch.nproc={nproc}", "train.steps=3", "checkpoint.every=3")
    validation = [f"data.val.path={recipe.data.train.path}", "train.validate_every=2"]
    with forking():
        result = dtrain.run(recipe_values(recipe), validation)
    assert result.directory == recipe.run.directory and (result.directory / "checkpoints" / "step-3").is_dir()
    rows = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert result.metrics["step"] == 3 and result.metrics["loss"] == rows[-2]["loss"]
    assert result.metrics["val_loss"] == rows[-1]["val_loss"]
    with forking():
        assert dtrain.run(recipe_values(recipe), validation).metrics == result.metrics
