"""The bounds of `dtrain serve`: key and control, memory, time, connections, and starts that are refused."""

import json
import os
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.http_client import read_api_key
from tests.serve.serving import (
    GREEDY,
    KEY,
    Process,
    ask,
    assert_well,
    controlled,
    key_file,
    make_model,
    post,
    raw,
    serving,
)

OK = {"prompt": [5], "max_tokens": 1}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("limits")


@pytest.fixture(scope="module")
def model(root):
    return make_model(root, 1)


@pytest.fixture(scope="module")
def keyed(model, root):
    """A process of its own, with a key and control."""
    process = Process(model, *controlled(root), "--max-rows", "4")
    yield process
    process.kill()


MEETING = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
CONTROL = [
    ("/pause", {}),
    ("/flush_cache", {}),
    ("/weight_checker", {"action": "checksum"}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/init_weights_update_group", MEETING),
    ("/update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}),
]


@pytest.mark.parametrize("path, body", CONTROL)
def test_control_needs_the_key_and_no_browser(keyed, model, path, body):
    assert ask(keyed.url, path, body, Authorization="")[0] == 401
    assert ask(keyed.url, path, body, Authorization="Bearer secre")[0] == 401
    assert ask(keyed.url, path, body, Authorization="secret")[0] == 401
    assert ask(keyed.url, path, body, Origin="http://localhost:8000")[0] == 403
    assert ask(keyed.url, path, json.dumps(body).encode(), **{"Content-Type": "text/plain"})[0] == 415
    assert ask(keyed.url, path, {**body, "surprise": 1})[0] == 400
    assert ask(keyed.url, "/health")[1]["status"] == "ok"


def test_control_is_not_there_unless_asked_for(model):
    with serving(model, key="secret") as (url, _):
        for path, body in CONTROL:
            status, answer = ask(url, path, body)
            assert status == 404 and "--control" in answer["error"]["message"]
            assert ask(url, path, body, Authorization="")[0] == 401
        with pytest.raises(UserError, match="--control"):
            client = HttpEngine([url], timeout=5, retries=0, api_key_file=key_file(model.parent))
            client.update_from_directory(model, 1)


@pytest.mark.parametrize("kind", ["..", "link", "elsewhere", "a file"])
def test_weights_come_from_below_the_directory_alone(keyed, root, kind, tmp_path):
    outside = make_model(tmp_path, 5)
    (outside / "STABLE").touch()
    path = {"..": f"{root}/../{tmp_path.name}/model", "elsewhere": str(outside), "a file": str(root / "key")}.get(kind)
    if kind == "link":
        path = str(root / f"link-{tmp_path.name}")
        os.symlink(outside, path)
    status, answer = ask(keyed.url, "/update_weights_from_disk", {"model_path": path})
    assert status == (404 if kind == "a file" else 403), answer
    assert ask(keyed.url, "/health")[1]["weight_version"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"master_port": 70000}, {"master_port": "1"}, {"rank_offset": 0}, {"rank_offset": 2}, {"world_size": 2**40},
        {"master_address": 5}, {"master_address": None}, {"backend": "mpi"}, {"group_name": 1},
    ],
)  # fmt: skip
def test_a_group_is_met_with_sound_fields_alone(keyed, changes):
    status, answer = ask(keyed.url, "/init_weights_update_group", {**MEETING, **changes})
    assert status == 400, answer


@pytest.mark.parametrize(
    "changes",
    [{"names": "x"}, {"names": [1]}, {"shapes": [[-1]]}, {"shapes": [["1"]]}, {"shapes": [[True]]},
     {"dtypes": ["int8"]}, {"weight_version": "9" * 5000}, {"weight_version": -1}, {"weight_version": True},
     {"mode": []}, {"names": ["model.norm.weight"] * 2, "dtypes": ["float32"] * 2, "shapes": [[32]] * 2}],
)  # fmt: skip
def test_a_bucket_has_sound_fields_alone(keyed, changes):
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], **changes}
    status, answer = ask(keyed.url, "/update_weights_from_distributed", body)
    assert status == 400, answer
    assert ask(keyed.url, "/health")[1]["status"] == "ok"


def resident(process):
    """MB of a process in memory."""
    status = open(f"/proc/{process.process.pid}/status").read()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@pytest.mark.parametrize("key, status", [(None, 401), ("secret", 413)])
def test_large_bodies_take_no_memory(keyed, model, key, status):
    """40 connections that send 60 MB each: refused by their heads."""
    ask(keyed.url, "/v1/completions", GREEDY)
    before, highest = resident(keyed), [0.0]
    head = post(b"", *([f"Authorization: Bearer {key}"] if key else []), length=60_000_000)
    over = threading.Event()

    def watch():
        while not over.wait(0.02):
            highest[0] = max(highest[0], resident(keyed))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(lambda _: raw(keyed.url, head + bytes(20_000_000), 60)[0], range(40)))
    over.set()
    watching.join()
    assert answers == [status] * 40
    assert highest[0] - before < 100
    assert_well(keyed.url, model, "Authorization: Bearer secret")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "192.0.2.1", "::ffff:0.0.0.0"])
def test_a_public_address_needs_a_key(model, capsys, host):
    assert main(["serve", str(model), "--host", host, "--port", "0", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "--api-key-file" in error or "no such address" in error


@pytest.mark.parametrize(
    "options, words",
    [
        (["--control", "."], "--api-key-file"),
        (["--host", "no.such.host.invalid"], "no such address"),
        (["--host", ""], "no such address"),
        (["--port", "99999"], "99999"),
        (["--host", "a" * 300], "no such address"),
    ],
)
def test_starts_that_are_refused(model, capsys, options, words, monkeypatch):
    key_file(model.parent)
    monkeypatch.chdir(model.parent)
    assert main(["serve", str(model), "--device", "cpu", *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "schlüssel", "a\0b"])
def test_a_key_is_one_word_of_plain_signs(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(UserError, match="one line"):
        read_api_key(tmp_path / "key")


def test_the_key_is_in_no_command_line(keyed):
    assert "secret" not in " ".join(keyed.process.args) and KEY["Authorization"].split()[1] == "secret"


@pytest.mark.parametrize("library", ["starlette", "uvicorn", "httptools"])
def test_a_missing_library_is_named_before_the_model_is_read(tmp_path, capsys, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "config.json").write_text("{")  # which is not looked at
    assert main(["serve", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"dtrain: dtrain serve needs {library}, not installed here: pip install 'dtrain[serve]'\n"
    )


def test_requests_are_logged_unless_that_is_switched_off(model, tmp_path):
    logged, silent = Process(model), Process(model, "--no-access-log")
    for process in (logged, silent):
        assert ask(process.url, "/health")[0] == 200
        assert process.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert any("127.0.0.1:" in line and '"GET /health HTTP/1.1" 200' in line for line in logged.lines), logged.lines
    assert not any("/health" in line for line in silent.lines)


def test_an_ipv6_address_is_served(model):
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    process = Process(model, "--host", "::1")
    try:
        assert process.url.startswith("http://[::1]:")
        assert ask(process.url, "/health")[0] == 200
        assert ask(process.url, "/v1/completions", OK)[0] == 200
    finally:
        process.kill()
