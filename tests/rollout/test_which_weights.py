"""Weights that a directory of a run means: `export/` where it is of the newest checkpoint, whatever the times say."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf

from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.model_files import read_saved_step
from dtrain.commands.serve.start import DirectoryWatcher
from dtrain.inference.generate import image_problem, load
from dtrain.models import from_pretrained
from dtrain.rl.remote.publish import MARKER, step_directory, write_marker
from tests.checkpoint.processes import checkpoints
from tests.data.makers import write_jsonl
from tests.pictures import chat, picture_recipe, write_rows
from tests.running import run
from tests.tiny import tiny_recipe

FIXED = ("train.micro_batch=8", "train.dtype=float32", "optimizer.lr=0.1")
FIXED += ("checkpoint.every=2", "checkpoint.keep_last=null")


def recipe_of(root, *overrides, name="run"):
    return tiny_recipe(root, *FIXED, *overrides, name=name)


def source_of(directory):
    """Return the name of the directory that `load` read, and a weight."""
    model, tokenizer = load(Path(directory), torch.float32, torch.device("cpu"))
    return tokenizer.directory.name, model.state_dict()["model.norm.weight"]


def is_step(directory, step):
    name, weight = source_of(directory)
    return name == "model" and torch.equal(weight, source_of(Path(directory) / "checkpoints" / f"step-{step}")[1])


@pytest.fixture
def finished(tmp_path):
    """A run of four steps with its export."""
    run(recipe_of(tmp_path, "train.steps=4", "checkpoint.export=final"))
    return tmp_path / "runs" / "run"


def make_newest(path):
    """As a copy of a directory may leave it."""
    for one in [path, *path.rglob("*")]:
        os.utime(one, ns=(2**60, 2**61))


def make_oldest(path):
    for one in [path, *path.rglob("*")]:
        os.utime(one, ns=(1, 1))


@pytest.mark.parametrize("stamp", [make_newest, make_oldest])
def test_an_export_of_the_newest_checkpoint_is_taken(finished, stamp):
    stamp(finished / "export")
    assert source_of(finished)[0] == "export"
    assert read_saved_step(finished / "export")["step"] == 4
    copy = finished.parent / "copy"
    shutil.copytree(finished, copy, copy_function=shutil.copy)
    stamp(copy / "export")
    assert source_of(copy)[0] == "export"
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(finished / "export", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("stamp", [make_newest, make_oldest])
def test_an_export_of_anything_else_is_passed_over(finished, tmp_path, stamp, capfd):
    old = tmp_path / "old"
    shutil.copytree(finished / "export", old)
    run(recipe_of(tmp_path, "train.steps=6"))  # no export of it
    stamp(finished / "export")
    assert is_step(finished, 6)
    longer = recipe_of(tmp_path, "train.steps=6", "checkpoint.export=final")
    run(longer)  # which sees that one is due
    assert "only the export is left" in capfd.readouterr().err
    assert source_of(finished)[0] == "export" and read_saved_step(finished / "export")["step"] == 6
    run(longer)
    assert "nothing left to do" in capfd.readouterr().err

    run(recipe_of(tmp_path, "train.steps=6", "checkpoint.export=final", "run.seed=4", name="other"))
    shutil.rmtree(finished / "export")
    shutil.copytree(tmp_path / "runs" / "other" / "export", finished / "export")
    stamp(finished / "export")
    assert is_step(finished, 6)
    run(longer)
    assert "only the export is left" in capfd.readouterr().err

    # The same step, trained again in another way.
    shutil.rmtree(finished / "checkpoints" / "step-6")
    assert is_step(finished, 4)
    run(recipe_of(tmp_path, "train.steps=6", "optimizer.lr=0.01", "checkpoint.allow_changes=[optimizer.lr]"))
    stamp(finished / "export")
    assert is_step(finished, 6)
    # One that does not say what it holds.
    (old / "dtrain.json").write_text("[]")
    shutil.rmtree(finished / "export")
    shutil.copytree(old, finished / "export")
    stamp(finished / "export")
    assert is_step(finished, 6)
    shutil.rmtree(finished / "checkpoints")
    assert source_of(finished)[0] == "export"


def test_an_export_beyond_the_last_save_is_taken(tmp_path):
    run(recipe_of(tmp_path, "train.steps=2"))
    run(recipe_of(tmp_path, "train.steps=4", "checkpoint.every=null", "checkpoint.export=final"))
    directory = tmp_path / "runs" / "run"
    assert source_of(directory)[0] == "export" and read_saved_step(directory / "export")["step"] == 4
    unsaved = run(recipe_of(tmp_path, "train.steps=2", "checkpoint.every=null", "checkpoint.export=final", name="un"))
    assert source_of(Path(unsaved.run.dir) / "un")[0] == "export"


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_an_export_with_every_save_is_of_that_save(tmp_path, async_save):
    recipe = run(recipe_of(tmp_path, "train.steps=5", "checkpoint.export=every", f"checkpoint.async_save={async_save}"))
    directory = tmp_path / "runs" / "run"
    assert source_of(directory)[0] == "export"
    states = {step: checkpoints(recipe).read_state(step)["save"] for step in (2, 4, 5)}
    assert read_saved_step(directory / "export") == {"step": 5, "save": states[5]} and len(set(states.values())) == 3
    assert len({save.split("-")[0] for save in states.values()}) == 1  # of one run
    shutil.rmtree(directory / "export")
    export(directory, directory / "export")  # by the command
    assert source_of(directory)[0] == "export"


def test_served_weights_are_read_again_when_they_were_written_again(tmp_path):
    loaded = []
    follower = DirectoryWatcher(
        tmp_path, type("Updates", (), {"load": lambda self, path, version: loaded.append(version)})(), str
    )
    directory = step_directory(tmp_path, 3)
    directory.mkdir()
    write_marker(directory)
    stat = (directory / MARKER).stat()
    follower.look()
    os.utime(directory / MARKER, ns=(1, 1))
    follower.look()
    assert loaded == [3]
    write_marker(directory)
    os.utime(directory / MARKER, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    follower.look()
    assert loaded == [3, 3]
    (directory / MARKER).write_text("")  # another trainer's
    follower.look()
    follower.look()
    os.utime(directory / MARKER, ns=(1, 1))
    follower.look()
    assert loaded == [3] * 4


@pytest.mark.parametrize("shown", [True, False])
def test_a_step_has_the_vision_tower_of_its_run_or_of_its_base(tmp_path, shown):
    """A run on texts has no tower: its step is given the base's, as long as that is there."""
    rows = write_rows(tmp_path)
    if not shown:
        write_jsonl(rows, [chat("What is two and two?")] * 12)
    vision = "all" if shown else "frozen"
    recipe = run(picture_recipe(tmp_path, "checkpoint.every=3", f"train.vision={vision}"))
    directory, base = tmp_path / "runs" / "run", Path(recipe.model.path)
    assert image_problem(directory) is None
    tensors, old = (
        model.state_dict()
        for model in (
            load(directory, torch.float64, torch.device("cpu"), vision=True).model,
            from_pretrained(base, torch.float64, vision=True),
        )
    )
    moved = {name for name, tensor in tensors.items() if not torch.equal(tensor, old[name])}
    assert tensors.keys() == old.keys() and any("visual" in name for name in old)
    assert "model.norm.weight" in moved
    (base / "model.safetensors").unlink()
    problem = image_problem(directory)
    assert (problem is None) == any("visual" in name for name in moved), problem
    if problem is not None:
        assert not shown and "the vision tower is not in" in problem
        assert load(directory, torch.float64, torch.device("cpu")).model.config.vision is None
