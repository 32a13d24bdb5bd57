"""Symbolic links, to another disk most of all, in the place of what a run writes: written through, or refused first."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.export import export
from dtrain.training.directory import RunDirectory
from tests.running import run
from tests.tiny import tiny_recipe

SHAPE = ("train.steps=2", "checkpoint.every=1", "checkpoint.export=final", "train.global_batch=2")


@pytest.fixture
def disk():
    """A directory of another file system, where there is one."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield root
    shutil.rmtree(root)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("linked", ["run/export", "run/checkpoints", "run/model", "run", ".cache", "."])
def test_a_link_in_a_run_s_place_is_written_through(tmp_path, disk, linked, is_there):
    recipe = tiny_recipe(tmp_path, *SHAPE)
    link, target = Path(recipe.run.dir) / linked, disk / "below" / "target"
    link.parent.mkdir(parents=True, exist_ok=True)
    if is_there:
        target.mkdir(parents=True)
        if linked == "run/export":
            (target / "old").touch()
    link.symlink_to(target)
    run(recipe)
    assert link.is_symlink() and names(target)
    directory = Path(recipe.run.dir) / "run"
    assert {"model.safetensors", "config.json"} <= names(directory / "export") and "old" not in names(target)
    assert names(directory / "checkpoints") >= {"step-2"}
    assert names(target.parent) == {"target"}
    assert not [path for path in tmp_path.rglob(".*") if path.name not in (".cache", ".")]
    run(tiny_recipe(tmp_path, *SHAPE[1:], "train.steps=3"))  # goes on, and takes the export's place again
    assert link.is_symlink() and names(target.parent) == {"target"}


def test_an_export_that_no_directory_could_get_to_is_refused_before_training(tmp_path, disk, monkeypatch):
    recipe = tiny_recipe(tmp_path, *SHAPE)
    place = Path(recipe.run.dir) / "run" / "export"
    place.parent.mkdir(parents=True)

    def refused(match):
        with pytest.raises(UserError, match=match):
            run(recipe)
        assert not (place.parent / "checkpoints").exists()
        place.unlink()

    place.symlink_to(place)
    refused("export.*(loop|circle|Symlink)")
    (disk / "file").touch()
    place.symlink_to(disk / "file")
    refused(f"export, which leads to {disk}/file, is not a directory")
    place.symlink_to("/proc/export")
    refused("which leads to /proc/export, cannot be written: .* /proc does not allow that")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    place.symlink_to(disk)
    refused(f"which leads to {disk}, is the mount point of a disk")


@pytest.mark.parametrize("is_there", [True, False])
def test_dtrain_export_writes_through_links(tmp_path, disk, is_there):
    recipe = run(tiny_recipe(tmp_path, "train.steps=1", "scheduler.warmup_steps=0", "checkpoint.every=1"))
    link, target = tmp_path / "out", disk / "target"
    if is_there:
        target.mkdir()
    link.symlink_to(target)
    export(Path(recipe.run.dir) / "run", link)
    assert link.is_symlink() and "model.safetensors" in names(target) and names(disk) == {"target"}
    with pytest.raises(UserError, match="target is already there"):
        export(Path(recipe.run.dir) / "run", link)
    (tmp_path / "shared").symlink_to(disk / "shared")  # as a publisher's, of weights for servers
    export(Path(recipe.run.dir) / "run", tmp_path / "shared" / "step-1")
    assert names(disk / "shared") == {"step-1"}


def test_a_run_s_links_that_cannot_be_written_are_refused_by_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/proc/there")
    with pytest.raises(UserError, match="run.dir: /proc/there"):
        RunDirectory(tmp_path / "run").acquire()
    (tmp_path / "run" / "checkpoints").unlink()
    (tmp_path / "run" / "checkpoints").symlink_to("/proc/self")
    if not os.access("/proc/self", os.W_OK):
        with pytest.raises(UserError, match="checkpoints, which is /proc/.*, cannot be written"):
            RunDirectory(tmp_path / "run").acquire()
