"""HTTP: routes, bodies in and out, server-sent events, and how the server starts and ends.

A thread for each connection, all of them waiting for the one that owns the engine (worker.py). Standard library only.
"""

import hmac
import json
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dtrain.errors import Stopped, UserError
from dtrain.rollout.serve.answers import Answer, Piece
from dtrain.rollout.serve.protocol import ApiError, Ask, Parser
from dtrain.rollout.serve.updates import Updates
from dtrain.rollout.serve.worker import MODES, Job, Worker
from dtrain.rollout.shared_directory import mark_of, newest

MOST_BYTES = 1 << 26  # of a request's body
IDLE_SECONDS = 600  # that a connection may stay open between two requests
LOOK_SECONDS = 1.0  # between looks at whether a client is still there
WATCH_SECONDS = 1.0  # between looks at a shared directory


class Service:
    """What the routes do. key: what clients must send as `Authorization: Bearer`, or None."""

    def __init__(self, parser: Parser, worker: Worker, updates: Updates, key: str | None = None):
        self.parser, self.worker, self.updates, self.key = parser, worker, updates, key
        self.started = int(time.time())
        self.get: dict[str, Callable[[], dict[str, Any]]] = {
            "/health": self.health,
            "/v1/models": self.models,
            "/weight_info": lambda: {"weight_version": worker.version},
            "/get_world_size": lambda: {"world_size": 1},
            "/is_paused": lambda: {"is_paused": worker.paused},
        }
        self.post: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": lambda body: {"success": True, "message": "no keys outlive their completion"},
            "/update_weights_from_disk": updates.from_disk,
            "/init_weights_update_group": updates.meet,
            "/destroy_weights_update_group": updates.part,
            "/update_weights_from_distributed": updates.receive,
            "/check_weights": updates.check,
            "/weight_checker": updates.checksums,
        }
        self.ask: dict[str, Callable[[Mapping[str, Any]], Ask]] = {
            "/v1/completions": parser.completion,
            "/v1/chat/completions": parser.chat,
        }

    def health(self) -> dict[str, Any]:
        if self.worker.failure is not None:
            raise ApiError(503, self.worker.failure)
        if self.worker.torn:
            raise ApiError(503, "an update of the weights began and did not end")
        running, waiting = self.worker.load
        return {
            "status": "paused" if self.worker.paused else "ok",
            "weight_version": self.worker.version,
            "running": running,
            "waiting": waiting,
        }

    def models(self) -> dict[str, Any]:
        card = {
            "id": self.parser.model,
            "object": "model",
            "created": self.started,
            "owned_by": "dtrain",
            "max_model_len": self.parser.max_length,
        }
        return {"object": "list", "data": [card]}

    def pause(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"mode"}: keep (SGLang: in_place), wait or abort, vLLM's and SGLang's default."""
        mode = {"in_place": "keep"}.get(body.get("mode"), body.get("mode", "abort"))
        if mode not in MODES:
            raise ApiError(400, f"mode={mode!r} is unknown; choose {', '.join(MODES)}", "mode")
        self.worker.pause(mode)
        return {"status": "paused"}

    def resume(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.worker.resume()
        return {"status": "resumed"}


class Handler(BaseHTTPRequestHandler):
    """One connection. `server` is the `Server` below."""

    protocol_version = "HTTP/1.1"
    server_version = "dtrain"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the answers say what they are to those who asked."""

    def _answered(self, answer: Callable[[], None]) -> None:
        with self.server.answering():
            try:
                answer()
            except ApiError as error:
                self._send(error.status, error.body)
            except UserError as error:
                self._send(400, ApiError(400, str(error)).body)
            except (ConnectionError, TimeoutError):
                self.close_connection = True

    def _get(self) -> None:
        path = urlsplit(self.path).path
        self._check_key(path)
        route = self.server.service.get.get(path)
        if route is None:
            raise self._unknown(path)
        self._send(200, route())

    def _post(self) -> None:
        parts = urlsplit(self.path)
        body = self._body()
        self._check_key(parts.path)
        service = self.server.service
        if parts.path in service.ask:
            self._complete(service.ask[parts.path](body))
        elif parts.path in service.post:
            given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            self._send(200, service.post[parts.path]({**given, **body}))
        else:
            raise self._unknown(parts.path)

    def _unknown(self, path: str) -> ApiError:
        service = self.server.service
        known = [*service.get, *service.ask, *service.post]
        if path in known:
            return ApiError(405, f"{path} wants {'GET' if path in service.get else 'POST'}")
        return ApiError(404, f"there is no {path} here, only {', '.join(known)}")

    def _check_key(self, path: str) -> None:
        key = self.server.service.key
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key is not None and path != "/health" and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "the key is wrong or missing: send `Authorization: Bearer KEY`")

    def _body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise ApiError(411, "send the body with Content-Length")
        if int(length) > MOST_BYTES:
            self.close_connection = True
            raise ApiError(413, f"the body has {length} bytes, and at most {MOST_BYTES} are taken")
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            raise ConnectionError("the client is gone")
        try:
            body = json.loads(raw) if raw else {}
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return body

    def _complete(self, ask: Ask) -> None:
        service = self.server.service
        job = service.worker.submit(ask.requests, ask.stream)
        answer = Answer(ask, service.parser.tokenizer, service.parser.model)
        try:
            if ask.stream:
                self._stream(job, answer)
            else:
                self._send(200, answer.whole([self._next(job) for _ in ask.requests]))
        except (ConnectionError, TimeoutError):
            service.worker.drop(job)
            raise

    def _stream(self, job: Job, answer: Answer) -> None:
        piece = self._next(job)  # an error before the first token still has a status of its own
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        left = len(job.requests)
        try:
            while True:
                self._chunk(answer.event(piece))
                left -= piece.finish is not None
                if not left:
                    break
                piece = self._next(job)
            self._chunk(answer.last_events())
        except ApiError as error:
            self._chunk(b"data: " + json.dumps(error.body).encode() + b"\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _next(self, job: Job) -> Piece:
        """The next piece of a job. Raises ApiError as the worker says, and ConnectionError where the client is gone."""
        while True:
            with suppress(queue.Empty):
                piece = job.pieces.get(timeout=LOOK_SECONDS)
                if isinstance(piece, ApiError):
                    raise piece
                return piece
            if self._is_gone():
                raise ConnectionError("the client is gone")

    def _is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection or self.server.ending:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Listens at (host, port); port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], service: Service):
        self.service = service
        self.ending = False
        self._answering = 0
        self._idle = threading.Condition()
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, Handler)

    def answering(self) -> "_Answering":
        return _Answering(self)

    def wait_until_answered(self, seconds: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._answering == 0, seconds)

    def handle_error(self, request, client_address) -> None:
        """A connection that breaks is its client's affair; anything else is told on the terminal."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Answering:
    """Counts the requests that are being answered: the server ends when there is none."""

    def __init__(self, server: Server):
        self._server = server

    def __enter__(self) -> None:
        with self._server._idle:
            self._server._answering += 1

    def __exit__(self, *_) -> None:
        with self._server._idle:
            self._server._answering -= 1
            self._server._idle.notify_all()


def serve(server: Server, *, grace: float, watch: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what is under way within `grace` seconds and refuse the rest.

    watch: a shared directory whose newest whole step-N is read as it appears. Called on the main thread; always raises:
    Stopped after a signal, UserError where the engine failed. A second signal ends at once.
    """
    worker = server.service.worker
    asked: queue.SimpleQueue = queue.SimpleQueue()
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in kept:
        signal.signal(number, lambda signum, frame: asked.put(signum))
    worker.start()
    accepting = threading.Thread(target=server.serve_forever, args=(0.1,), name="http", daemon=True)
    accepting.start()
    follower = None if watch is None else Follower(watch, server.service.updates, say)
    signum = None
    try:
        while signum is None and worker.failure is None:
            with suppress(queue.Empty):
                signum = asked.get(timeout=WATCH_SECONDS)
            if follower is not None and signum is None:
                follower.look()
        server.ending = True
        worker.refuse("the server is ending")
        finished = _end(worker, asked, grace)
        server.wait_until_answered(5.0)
        server.shutdown()
    finally:
        server.server_close()
        for number, handler in kept.items():
            signal.signal(number, handler)
    if signum is None:
        raise UserError(worker.failure)
    rest = "every completion under way was answered" if finished else "completions under way were refused"
    raise Stopped(signum, f"the server has ended; {rest}")


def _end(worker: Worker, asked: queue.SimpleQueue, grace: float) -> bool:
    """End the worker, at once where a second signal comes. Whether everything was finished."""
    until = time.monotonic() + grace
    while time.monotonic() < until and asked.empty() and worker.failure is None:
        if worker.load == (0, 0):
            break
        time.sleep(0.05)
    return worker.end(0.0)


class Follower:
    """Reads the newest whole step-N of a shared directory, each one once."""

    def __init__(self, shared: Path, updates: Updates, say: Callable[[str], None]):
        self.shared, self.updates, self.say = shared, updates, say
        self._seen: tuple[int, str] | None = None

    def look(self) -> None:
        found = newest(self.shared)
        if found is None:
            return
        version, directory = found
        with suppress(FileNotFoundError):  # it was pruned just now
            seen = version, mark_of(directory)
            if self._seen == seen:
                return
            self._seen = seen
            try:
                self.updates.load(directory, version)
                self.say(f"version {version} of the weights, from {directory}")
            except (UserError, ApiError) as error:
                self.say(f"{directory} is left alone: {error}")
