"""Data files behind URLs: fsspec's file system in memory, and a server on loopback for https:// (needs aiohttp)."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.sources import urls
from dtrain.data.sources.files import find_files
from dtrain.launch import launch
from dtrain.recipe import to_yaml
from tests.loopback_hub import hub  # noqa: F401 (a fixture)
from tests.problem_lines import preflight
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
    [first] = urls.local_copies(URL, "key", tmp_path)
    assert first.name == "rows.jsonl" and urls.local_copies(URL, "key", tmp_path) == [first] and len(copied) == 1
    memory.pipe("/bucket/rows.jsonl", b'{"text": "other"}\n')
    [second] = urls.local_copies(URL, "key", tmp_path)
    assert second != first and second.read_bytes() == b'{"text": "other"}\n' and len(copied) == 2
    assert first.is_file() and urls.files_to_copy(URL, "key", tmp_path) == []


def test_a_copy_that_is_cut_short_is_none(tmp_path, memory, monkeypatch):
    def break_off(self, path, target, **_):
        Path(target).write_bytes(b"{")
        raise OSError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", break_off)
        with pytest.raises(UserError, match="could not be read: the connection was lost. Check the network and"):
            urls.local_copies(URL, "data.train.path", tmp_path)
    assert len(urls.files_to_copy(URL, "key", tmp_path)) == 1
    [copy] = urls.local_copies(URL, "key", tmp_path)
    assert copy.read_bytes() == memory.cat("/bucket/rows.jsonl")


def test_one_of_several_ranks_downloads_and_the_others_wait(tmp_path, memory, monkeypatch):
    copied = []
    get_file = type(memory).get_file

    def slow(self, path, target, **options):
        copied.append(path)
        Path(target).write_bytes(b"{")
        time.sleep(0.3)
        get_file(self, path, target, **options)

    monkeypatch.setattr(type(memory), "get_file", slow)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(urls.local_copies, URL, "key", tmp_path) for _ in range(4)]
    contents = [future.result()[0].read_bytes() for future in found]
    assert len(copied) == 1 and contents == [memory.cat("/bucket/rows.jsonl")] * 4


def test_a_pattern_means_its_files_in_order(tmp_path, memory):
    for name in ("b.jsonl", "a.jsonl", "deep/a.jsonl"):
        memory.pipe(f"/shards/{name}", name.encode())
    found = find_files("memory://shards/*.jsonl", "key", cache_dir=tmp_path)
    assert [file.read_text() for file in found] == ["a.jsonl", "b.jsonl"]
    both = find_files("memory://shards/**/a.jsonl", "key", cache_dir=tmp_path)
    assert [file.read_text() for file in both] == ["a.jsonl", "deep/a.jsonl"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("memory://bucket/gone.jsonl", "data.train.path: no file is at memory://bucket/gone.jsonl. Check the address"),
        ("memory://bucket/*.csv", "data.train.path: no file matches memory://bucket/*.csv. Check the address"),
        ("memory://bucket", "data.train.path: no file is at memory://bucket. Check the address"),
        ("nope://bucket/a.jsonl", "fsspec cannot read such a URL (Protocol not known: nope"),
        ("memory://bucket/a.txt", "is not one of the files that dtrain reads"),
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
        find_files("gone://bucket/a.jsonl", "data.train.path", cache_dir=tmp_path)


def test_files_of_the_hub(tmp_path, hub):  # noqa: F811
    hub.datasets["a/rows"] = {"main": {"one.jsonl": b'{"text": "1"}\n', "two.jsonl": b'{"text": "2"}\n'}}
    copies = urls.local_copies("hf://datasets/a/rows/*.jsonl", "key", tmp_path)
    assert [copy.read_bytes() for copy in copies] == [b'{"text": "1"}\n', b'{"text": "2"}\n']
    for url in ("hf://datasets/a/none/x.jsonl", "hf://datasets/a/rows/x.jsonl", "hf://datasets/a/rows@v9/x.jsonl"):
        with pytest.raises(UserError, match=f"no file is at {url}. Check the address. .* or set HF_TOKEN"):
            urls.local_copies(url, "key", tmp_path)


class Web(BaseHTTPRequestHandler):
    """files: path -> (etag, content). asked: method and path of each request. cut: whether transfers break off."""

    server: ThreadingHTTPServer
    address: str
    files: dict[str, tuple[str, bytes]]
    asked: list[str]
    cut = False

    def log_message(self, *_):
        pass

    def do_GET(self):  # noqa: N802 (http.server's name)
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path}")
        status = 403 if path == "/secret.jsonl" else 200 if path in self.files else 404
        etag, content = self.files.get(path, ("", b""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:5] if self.cut else content)
        self.close_connection = True

    do_HEAD = do_GET


@pytest.fixture
def web():
    """A server on loopback: its handler and its address."""
    pytest.importorskip("aiohttp", reason="https:// needs aiohttp, of the extra remote-files")
    handler = type("Handler", (Web,), {"files": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    handler.address, handler.server = f"http://127.0.0.1:{server.server_port}", server
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_of_a_web_server_is_copied_again_if_its_etag_changes(tmp_path, web):
    url = f"{web.address}/a%20b.jsonl?signature=1"
    web.files["/a%20b.jsonl"] = ("1", b'{"text": "old"}\n')
    [old] = find_files(url, "key", cache_dir=tmp_path)
    web.asked.clear()
    assert find_files(url, "key", cache_dir=tmp_path) == [old] and web.asked == ["HEAD /a%20b.jsonl"]
    web.files["/a%20b.jsonl"] = ("2", b'{"text": "new"}\n')
    [new] = find_files(url, "key", cache_dir=tmp_path)
    assert (old.name, new.name) == ("a b.jsonl", "a b.jsonl")
    assert (old.read_bytes(), new.read_bytes()) == (b'{"text": "old"}\n', b'{"text": "new"}\n')
    saved = [path for path in tmp_path.rglob("*") if "signature" in str(path) or path.is_file()]
    assert not any(b"signature" in path.read_bytes() for path in saved)  # it lets anybody read the file


def test_what_a_web_server_does_not_give(tmp_path, web):
    web.files["/rows.jsonl"] = ("1", b'{"text": "a"}\n')
    with pytest.raises(UserError, match="key: no file is at .*/gone.jsonl. Check the address"):
        find_files(f"{web.address}/gone.jsonl", "key", cache_dir=tmp_path)
    with pytest.raises(UserError, match="secret.jsonl could not be read: 403.* this machine's credentials for http://"):
        find_files(f"{web.address}/secret.jsonl", "key", cache_dir=tmp_path)
    web.cut = True
    with pytest.raises(UserError, match="rows.jsonl could not be read: Response payload is not completed"):
        find_files(f"{web.address}/rows.jsonl", "key", cache_dir=tmp_path)
    web.cut = False
    [copy] = find_files(f"{web.address}/rows.jsonl", "key", cache_dir=tmp_path)
    assert copy.read_bytes() == b'{"text": "a"}\n'


def test_a_copy_serves_while_a_web_server_is_not_reached(tmp_path, web):
    web.files["/rows.jsonl"] = ("1", b'{"text": "a"}\n')
    [copy] = find_files(f"{web.address}/rows.jsonl", "key", cache_dir=tmp_path)
    web.server.shutdown()
    web.server.server_close()
    assert find_files(f"{web.address}/rows.jsonl", "key", cache_dir=tmp_path) == [copy]
    with pytest.raises(UserError, match="more.jsonl could not be read: Cannot connect to host .* or copy the file to"):
        find_files(f"{web.address}/more.jsonl", "key", cache_dir=tmp_path)
