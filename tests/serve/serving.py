"""`dtrain serve` for tests, as a process or in threads, the tiny model that it serves, and HTTP to talk to it."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit

import torch

from dtrain import models
from dtrain.base.orphans import end_with_parent
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.commands.serve.app import make_app
from dtrain.commands.serve.protocol import Parser
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.updates import Updates
from dtrain.commands.serve.worker import EngineThread
from dtrain.commands.web import listen, make_server
from dtrain.data.text.template import choose_template
from dtrain.inference.engine import Engine
from dtrain.inference.generate import image_problem, load
from tests.forked_python import ForkedPython
from tests.tiny import write_model

KEY = {"Authorization": "Bearer secret"}
PROMPT = [5, 6, 7]
GREEDY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0, "return_token_ids": True}
TEMPLATE = (
    "{% for m in messages %}w8 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    "{% if thinking %} w10{% endif %}"
)


def make_model(directory: Path, seed: int, out: str = "model", family: str = "qwen3", **changes) -> Path:
    """A whole model's directory with random weights of `seed`, its tokenizer, and a chat template."""
    source = write_model(directory / "source", family, **changes)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    model = models.build(models.read_config(source), torch.float32)
    models.init_weights(model, seed)
    with torch.no_grad():  # so that the likeliest token is not the last one again
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor.mul_(4)
    write_directory(model, directory / out, source)
    return directory / out


def naive(directory: Path, prompt: Sequence[int], count: int, stop_ids=(1,)) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs, each from a whole forward of its own, float64."""
    model = models.from_pretrained(directory, torch.float64)
    ids, logprobs = list(prompt), []
    while len(logprobs) < count and not (logprobs and ids[-1] in stop_ids):
        with torch.no_grad():
            row = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs


def key_file(root: Path) -> Path:
    """The key of `KEY`, in a file that is whole for whoever reads it: several ranks may write it."""
    partial = root / f"key-{os.getpid()}"
    partial.write_text("secret\n")
    return partial.replace(root / "key")


def controlled(root: Path) -> tuple[str, ...]:
    """The options of a server whose weights may be changed, from below `root`, with `KEY`."""
    return "--control", str(root), "--api-key-file", str(key_file(root))


class Process:
    """`dtrain serve DIRECTORY ...` on a free port; `url` waits until it listens. `lines` is what it printed.

    starts: by an interpreter of its own, not as a fork.
    """

    def __init__(self, directory: Path, *arguments: str, dtype: str = "float64", starts: bool = False):
        command = [sys.executable, "-m", "dtrain", "serve", str(directory), "--port", "0", "--dtype", dtype]
        popen = partial(subprocess.Popen, preexec_fn=partial(end_with_parent, os.getpid())) if starts else ForkedPython
        self.process = popen(
            [*command, "--device", "cpu", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._start_seconds = 300.0 if starts else 60.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        wait_until(lambda: self._listening() or self.process.poll() is not None, self._start_seconds)
        assert self._listening(), self.lines
        return self._listening()[0].split(" at ")[1].split()[0]

    def _listening(self) -> list[str]:
        return [line for line in self.lines if line.startswith("serving ")]

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        status = self.process.wait(30)
        self._reader.join(5)
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def wait_until(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def ask(url: str, path: str, body: dict | bytes | None = None, **headers: str) -> tuple[int, dict]:
    """(status, JSON) of one call, with `KEY` unless `headers` say otherwise: GET without a body, else POST."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {**KEY, **({} if body is None else {"Content-Type": "application/json"}), **headers}
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def events(url: str, path: str, body: dict) -> tuple[list[dict], str]:
    """The server-sent events of a streamed answer, and the last line."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {**KEY, "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps({**body, "stream": True}).encode(), headers)
    response = connection.getresponse()
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    connection.close()
    return [json.loads(line) for line in lines[:-1]], lines[-1]


@contextmanager
def in_thread(service):
    """uvicorn with the application of `service`, in a thread of this process; its address."""
    sock = listen("127.0.0.1", 0)
    server = make_server(make_app(service), logs=None)
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(directory, key=None, control=None, engine=Engine):
    """A server in threads of this process; its address, and the worker."""
    directory = Path(directory)
    loaded = load(directory, torch.float64, torch.device("cpu"), vision=image_problem(directory) is None)
    net, tokenizer = loaded
    template = choose_template(tokenizer.directory, tokenizer)
    worker = EngineThread(engine(net, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True), max_rows=4))
    parser, updates = Parser(loaded.chats(template, 128, directory), "tiny", 128), Updates(net, worker, control)
    service = Service(parser, worker, updates, key, {"localhost", "127.0.0.1"})
    worker.start()
    with in_thread(service) as url:
        try:
            yield url, worker
        finally:
            worker.end(0.0)


def raw(url, data, seconds=10.0):
    """(status, the answer's JSON) to bytes as they are; both None where the server hung up without a word."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), seconds) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may hang up before all is sent
            sock.sendall(data)
        answer = b""
        with suppress(ConnectionResetError):
            while not (found := re.match(rb"HTTP/1.1 (\d+) (?s:.*?)\r\n\r\n((?s:.*))", answer)) or (
                (size := re.search(rb"content-length: (\d+)", answer)) and len(found[2]) < int(size[1])
            ):
                part = sock.recv(1 << 16)
                if not part:
                    break
                answer += part
    if not answer:
        return None, None
    return int(found[1]), json.loads(found[2]) if found[2] else None


def post(body, *headers, path="/v1/completions", kind="application/json", length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def assert_well(url, model, *headers):
    """A good request gets the tokens of whole forwards."""
    status, answer = raw(url, post(GREEDY, "Connection: close", *headers))
    assert status == 200 and answer["choices"][0]["token_ids"] == naive_ids(model)


@cache
def naive_ids(model):
    return naive(model, PROMPT, 6)[0]
