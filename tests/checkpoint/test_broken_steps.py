"""A newest step whose files are no JSON, or not what dtrain writes, with checksums that agree: a resume takes the one
before it."""

import json
import shutil
from pathlib import Path

import pytest

from dtrain.checkpoint.dcp.store import _text_checksum
from tests.checkpoint.processes import checkpoints
from tests.checkpoint.test_crafted import forge
from tests.running import run
from tests.tiny import tiny_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 3 steps, each saved."""
    root = tmp_path_factory.mktemp("finished")
    return run(tiny_recipe(root, "train.steps=3", "checkpoint.every=1", "checkpoint.keep_last=null"))


@pytest.fixture
def saved(tmp_path, finished):
    """A copy of `finished` that may be crafted."""
    shutil.copytree(finished.run.dir, tmp_path, dirs_exist_ok=True)
    root = Path(finished.run.dir).parent
    shape = ("train.steps=3", "checkpoint.every=1", "checkpoint.keep_last=null", f"run.dir={tmp_path}")
    return tiny_recipe(root, *shape)


NOT_JSON = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "500 deep": '{"a":' * 500 + "1" + "}" * 500,
    "a list": "[]",
    "no UTF-8": b"\xff{}",
    "nothing": "",
    "a long number": '{"step": ' + "9" * 10**6 + "}",
    "a name twice": '{"step": 3, "step": 3}',
}


def put(saved, name, content):
    """`content` in a file of step 3; the checksums agree: whoever wrote the file wrote the manifest too."""
    directory = checkpoints(saved).path(3)
    (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if name != "manifest.json":
        forge(directory)
    return directory / name


FILES = ["manifest.json", "state.json", "tensors.json", "rank-0.json"]


@pytest.mark.parametrize("content", NOT_JSON)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_json_is_damage(saved, name, content):
    path, store = put(saved, name, NOT_JSON[content]), checkpoints(saved)
    assert str(path) in store.check_contents(3)[0] and store.check_contents(2) == []


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json"])
def test_auto_takes_the_checkpoint_before_one_whose_json_is_too_deep(saved, capfd, name):
    path = put(saved, name, NOT_JSON["deep"])
    run(saved)
    said = capfd.readouterr().err
    assert f"{path.parent} is damaged and is left out: {path}" in said
    assert f"resumed from {checkpoints(saved).path(2)}" in said


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_auto_takes_the_checkpoint_before_one_with_a_directory_for_a_file(saved, capfd, name):
    path = checkpoints(saved).path(3) / name
    path.unlink()
    path.mkdir()
    run(saved)
    assert f"resumed from {checkpoints(saved).path(2)}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": "1"},
        {"world_size": 0},
        {"files": []},
        {"files": {"../state.json": {"bytes": 1, "crc32": "0"}}},
        {"files": {"state.json": 3, "tensors.json": 3}},
    ],
)
def test_a_crafted_manifest_is_damage(saved, change):
    path = checkpoints(saved).path(3) / "manifest.json"
    content = {**json.loads(path.read_text())["content"], **change}
    path.write_text(json.dumps({"content": content, "crc32": _text_checksum(content)}))
    assert str(path) in checkpoints(saved).check_contents(3)[0]


def test_a_manifest_that_was_changed_is_damage(saved):
    path = checkpoints(saved).path(3) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["world_size"] += 1
    path.write_text(json.dumps(manifest))
    assert "its checksum does not match" in checkpoints(saved).check_contents(3)[0]
