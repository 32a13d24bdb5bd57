"""The bounds of `dtrain serve`: key and control, memory, time, connections, and starts that are refused."""

import http.client
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.commands.serve.connection import Limits
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.http_client import read_key
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
    wait_until,
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


def test_bodies_under_way_are_bounded_together(model):
    with serving(model, limits=Limits(bodies=2000, room_seconds=0.1)) as (url, _):
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10) as slow:
            slow.sendall(post(b"{", length=1500))
            answers = []
            wait_until(lambda: answers.append(raw(url, post({**OK, "user": "x" * 1000}))) or answers[-1][0] == 503)
            assert "reading" in answers[-1][1]["error"]["message"]
            assert_well(url, model)
        wait_until(lambda: raw(url, post({**OK, "user": "x" * 1000}))[0] == 200)


SLOW = Limits(head_seconds=0.6, body_seconds=0.6, idle_seconds=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX-", b"", post(b'{"a": "', length=5000)])
def test_a_slow_client_meets_its_deadline(model, start):
    """A byte now and then does not move the deadline."""
    with serving(model, limits=SLOW) as (url, _):
        begun = time.monotonic()
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10) as sock:
            answer = b""
            sock.sendall(start)
            sock.settimeout(0.1)
            with suppress(ConnectionResetError, BrokenPipeError):
                while time.monotonic() < begun + 8:
                    if start:
                        sock.sendall(b"a")
                    with suppress(TimeoutError):
                        part = sock.recv(1 << 16)
                        answer += part
                        if not part:
                            break
        assert time.monotonic() - begun < 5
        assert answer.startswith(b"HTTP/1.1 408 ") if start else answer == b""
        assert_well(url, model)


def test_connections_are_bounded_and_told(model):
    with serving(model, limits=Limits(connections=3, head_seconds=1.5)) as (url, _):
        held = [socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10) for _ in range(3)]
        wait_until(lambda: raw(url, GET)[0] == 503)
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert answer.status == 503 and answer.headers["Retry-After"] and b"connections" in answer.read()
        for sock in held[:2]:
            sock.close()
        wait_until(lambda: raw(url, GET)[0] == 200)
        held[2].close()


def connect(url):
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10)


def test_connections_without_the_key_make_way_for_others(model):
    """The oldest first; one that has shown the key stays, also while it says nothing."""
    with serving(model, key="secret", limits=Limits(connections=3)) as (url, _):
        known = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        known.request("GET", "/v1/models", headers=KEY)
        assert known.getresponse().read()
        silent, half_open, wrong = connect(url), connect(url), http.client.HTTPConnection(urlsplit(url).netloc)
        half_open.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        wrong.request("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})
        assert wrong.getresponse().status == 401
        assert silent.recv(1) == b""  # evicted for the third of them
        for _ in range(3):
            assert_well(url, model, "Authorization: Bearer secret")
        assert half_open.recv(1) == b""
        known.request("GET", "/v1/models", headers=KEY)
        assert known.getresponse().read()
        flood = [connect(url) for _ in range(20)]
        assert_well(url, model, "Authorization: Bearer secret")
        known.request("GET", "/v1/models", headers=KEY)
        assert known.getresponse().read()
        for sock in (*flood, silent, half_open, known, wrong):
            sock.close()


def test_connections_with_the_key_are_bounded_all_the_same(model):
    with serving(model, key="secret", limits=Limits(connections=2)) as (url, _):
        held = [http.client.HTTPConnection(urlsplit(url).netloc, timeout=10) for _ in range(2)]
        for one in held:
            one.request("GET", "/v1/models", headers=KEY)
            assert one.getresponse().read()
        assert raw(url, GET)[0] == 503
        for one in held:
            one.close()
        wait_until(lambda: raw(url, GET)[0] == 200)


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
        read_key(tmp_path / "key")


def test_the_key_is_in_no_command_line(keyed):
    assert "secret" not in " ".join(keyed.process.args) and KEY["Authorization"].split()[1] == "secret"
