"""Data files behind URLs, from fsspec's file system in memory: copied once, by what is said of their content."""

import json
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.sources import urls
from dtrain.data.sources.files import resolve
from dtrain.launch import launch
from dtrain.recipe import to_yaml
from dtrain.training.preflight import preflight
from tests.tiny import tiny_recipe, write_rows

URL = "memory://bucket/rows.jsonl"


@pytest.fixture
def memory(tmp_path):
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/rows.jsonl", write_rows(tmp_path / "source.jsonl").read_bytes())
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def losses(recipe):
    lines = map(json.loads, (recipe.run.directory / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss") for line in lines]


def test_a_run_of_a_url_is_one_of_the_file(tmp_path, memory, capsys):
    shape = ["train.steps=3", f"data.train.path={URL}"]
    recipe = tiny_recipe(tmp_path, *shape)
    (tmp_path / "url.yaml").write_text(to_yaml(recipe))
    assert main(["validate", str(tmp_path / "url.yaml")]) == 0
    told = capsys.readouterr().out
    assert f"data.train.path={URL}: the run copies {URL} into {tmp_path}/runs/.cache, 0.0 MiB" in told
    assert not (tmp_path / "runs").exists()
    launch(recipe)
    local = tiny_recipe(tmp_path, shape[0], f"data.train.path={tmp_path / 'source.jsonl'}", name="local")
    launch(local)
    assert losses(recipe) == losses(local) and len(losses(local)) == 3
    assert main(["validate", str(tmp_path / "url.yaml")]) == 0 and "copies" not in capsys.readouterr().out
    memory.store.clear()  # it goes on without the server
    launch(tiny_recipe(tmp_path, *shape, name="offline"))
    assert losses(tiny_recipe(tmp_path, *shape, name="offline")) == losses(local)


def test_copied_once_until_the_content_is_another(tmp_path, memory, monkeypatch):
    copied = []
    get_file = type(memory).get_file
    monkeypatch.setattr(type(memory), "get_file", lambda *a, **k: copied.append(a[1]) or get_file(*a, **k))
    [first] = urls.copies(URL, "key", tmp_path)
    assert first.name == "rows.jsonl" and urls.copies(URL, "key", tmp_path) == [first] and len(copied) == 1
    memory.pipe("/bucket/rows.jsonl", b'{"text": "other"}\n')
    [second] = urls.copies(URL, "key", tmp_path)
    assert second != first and second.read_bytes() == b'{"text": "other"}\n' and len(copied) == 2
    assert first.is_file() and urls.away(URL, "key", tmp_path) == []


def test_a_copy_that_is_cut_short_is_none(tmp_path, memory, monkeypatch):
    def get_file(self, path, target, **_):
        Path(target).write_bytes(b"{")

    monkeypatch.setattr(type(memory), "get_file", get_file)
    with pytest.raises(UserError, match="could not be read: 1 bytes came of"):
        urls.copies(URL, "data.train.path", tmp_path)
    assert not [path for path in (tmp_path / "files").rglob("*") if path.suffix != ".lock"]


def test_a_pattern_means_its_files_in_order(tmp_path, memory):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        memory.pipe(f"/shards/{name}", name.encode())
    found = resolve("memory://shards/*.jsonl", "key", cache_dir=tmp_path)
    assert [file.read_text() for file in found] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("memory://bucket/gone.jsonl", "data.train.path: no file is at memory://bucket/gone.jsonl"),
        ("memory://bucket/*.csv", "data.train.path: no file matches memory://bucket/*.csv"),
        ("memory://bucket", "data.train.path: no file is at memory://bucket"),
        ("nope://bucket/a.jsonl", "fsspec cannot read such a URL (Protocol not known: nope"),
        ("memory://bucket/a.txt", "is none of the files that dtrain reads"),
    ],
)
def test_what_cannot_be_read_is_said_before_the_run(tmp_path, memory, path, said):
    memory.pipe("/bucket/a.txt", b"x")
    [problem] = preflight(tiny_recipe(tmp_path, f"data.train.path='{path}'"), 1)
    assert said in problem


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(known_implementations, "gone", {"class": "gone_s3.S3", "err": "Install s3fs"})
    with pytest.raises(
        UserError, match=r"gone:// needs a package that is not installed: pip install 'dtrain\[remote-files"
    ):
        resolve("gone://bucket/a.jsonl", "data.train.path", cache_dir=tmp_path)


def test_marks_that_change_with_the_content(tmp_path):
    """An etag alone, a time alone, as servers have them; what says nothing of the content plays no part."""

    def place(**info):
        return urls._remote(None, "p", info, "https://host/a%20b.jsonl?signature=1", tmp_path).copy

    base = place(size=5, ETag="x", mimetype="text")
    assert base.name == "a b.jsonl" and base == place(size=5, ETag="x", mimetype="other")
    assert len({base, place(size=5, ETag="y"), place(size=6, ETag="x"), place(size=5, LastModified="z")}) == 4
