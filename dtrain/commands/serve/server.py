"""The server: connections side by side, bodies to answers and server-sent events, and how it starts and ends.

A thread for each connection (connection.py), all of them waiting for the one that owns the engine (worker.py).
"""

import queue
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dtrain.base.errors import Stopped, UserError
from dtrain.commands.serve.answers import Answer, StreamChunk, server_sent_event
from dtrain.commands.serve.classify import ClassifyService
from dtrain.commands.serve.connection import Connection, ConnectionSlots, Limits, RequestHead
from dtrain.commands.serve.fields import ApiError, check, read_object
from dtrain.commands.serve.protocol import Ask
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.updates import Updates
from dtrain.commands.serve.worker import Job
from dtrain.rl.remote.shared_directory import mark_of, newest

STREAM = "Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked"
LOOK_SECONDS = 1.0  # between looks at whether a client is still there
WATCH_SECONDS = 1.0  # between looks at a shared directory
REFUSING = 64  # connections beyond the limit that are answered with 503; those beyond these are cut off


class HttpServer(socketserver.TCPServer):
    """HTTP server at an address as of `socket.getaddrinfo`; port 0 takes a free one."""

    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, address: tuple, service: Service | ClassifyService, limits: Limits | None = None):
        self.service, self.limits = service, limits or Limits()
        self.ending = False
        self._answering = 0
        self._idle = threading.Condition()
        self._held = 0  # bytes of bodies that are being read
        self._pixels = 0  # bytes of images that are being answered
        self._reading = threading.Lock()  # of one body at a time: it may take many times its size
        self._slots = ConnectionSlots(self.limits.connections, evicts=service.key is not None)
        self._refusing = ConnectionSlots(REFUSING, evicts=False)
        self.address_family = socket.AF_INET if len(address) == 2 else socket.AF_INET6
        super().__init__(address, socketserver.BaseRequestHandler)  # never made: `process_request` answers

    @property
    def server_port(self) -> int:
        return self.server_address[1]

    def wait_until_answered(self, seconds: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._answering == 0, seconds)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, if there is a slot for it."""
        for slots, act in ((self._slots, self._converse), (self._refusing, self._refuse)):
            if slots.take(request):
                threading.Thread(target=self._held_by, args=(request, slots, act), name="http", daemon=True).start()
                return
        self.shutdown_request(request)

    def _held_by(self, request: socket.socket, slots: ConnectionSlots, act: Callable[[Connection], None]) -> None:
        try:
            connection = Connection(request, self.limits)
            act(connection)
            connection.close()
        except OSError:
            pass  # a connection that breaks is its client's affair
        finally:
            slots.leave(request)
            self.shutdown_request(request)

    def _refuse(self, connection: Connection) -> None:
        connection.refuse(ApiError(503, f"the server has {self.limits.connections} connections; come again later"))

    def _converse(self, connection: Connection) -> None:
        """Answer one request after the other."""
        while not self.ending and connection.begins():
            with self._counted(0):
                try:
                    self._answer(connection, connection.head())
                except ApiError as error:
                    connection.refuse(error)
                except UserError as error:
                    connection.refuse(ApiError(400, str(error)))
                finally:
                    if not connection.is_answered and not isinstance(sys.exc_info()[1], OSError):
                        # A fault of the server's own; threading writes its traceback to the terminal.
                        connection.refuse(ApiError(500, "the server has a fault, which its terminal tells"))

    @contextmanager
    def _counted(self, length: int, pixels: int = 0) -> Iterator[None]:
        """Count a request that is being answered, and the bytes of its body that are being read, or of its images: the
        server ends when there is none."""
        limits = self.limits
        with self._idle:
            if not self._wait_for(lambda: self._held + length <= limits.bodies, length <= limits.bodies):
                raise ApiError(503, "the server is reading as much as it may; ask again")
            if not self._wait_for(lambda: self._pixels + pixels <= limits.pixels, pixels <= limits.pixels):
                raise ApiError(503, "the server holds as many images as it may; ask again")
            self._answering, self._held, self._pixels = self._answering + 1, self._held + length, self._pixels + pixels
        try:
            yield
        finally:
            with self._idle:
                self._answering, self._held = self._answering - 1, self._held - length
                self._pixels -= pixels
                self._idle.notify_all()

    def _wait_for(self, has_room: Callable[[], bool], can_have: bool) -> bool:
        """Wait within `_idle` until there is room; return whether there is. can_have: whether there ever can be."""
        return has_room() or (can_have and self._idle.wait_for(has_room, self.limits.room_seconds))

    def _answer(self, connection: Connection, head: RequestHead) -> None:
        service, path = self.service, head.path
        service.admit(head)
        if service.has_key(head):
            self._slots.keep(connection.sock)
        with self._counted(head.length):
            raw = connection.body(head)
            with self._reading if raw else nullcontext():
                body = read_object(raw) if raw else {}
                ask = service.ask[path](body) if path in service.ask else None
        if ask is not None:
            assert isinstance(service, Service)
            with self._counted(0, ask.pixel_bytes):
                self._complete(connection, ask, service)
        elif path in service.get:
            connection.send(200, service.get[path]())
        else:
            query = parse_qsl(head.query) if path in service.control else ()
            table, act = (service.act | service.control)[path]
            connection.send(200, act(check({**dict(query), **body}, table)))

    def _complete(self, connection: Connection, ask: Ask, service: Service) -> None:
        job = service.worker.submit(ask)
        answer = Answer(ask, service.parser.tokenizer)
        try:
            if ask.fields["stream"]:
                self._stream(connection, job, answer)
            else:
                connection.send(200, answer.whole(list(_pieces(connection, job))))
        except OSError:
            service.worker.drop(job)
            raise

    def _stream(self, connection: Connection, job: Job, answer: Answer) -> None:
        pieces = _pieces(connection, job)
        first = next(pieces)  # an error before the first token still has a status of its own
        connection.begin(200, STREAM)
        try:
            for piece in chain([first], pieces):
                connection.chunk(answer.event(piece))
            connection.chunk(answer.last_events(), last=True)
        except ApiError as error:
            connection.chunk(server_sent_event(error.body), last=True)


def _pieces(connection: Connection, job: Job) -> Iterator[StreamChunk]:
    """Yield all pieces of a job. Raises the worker's ApiError, and ConnectionError soon after the client is gone, also
    while pieces keep coming: an answer that is sent whole writes nothing to the client before its end."""
    left, look = len(job.ask.requests), time.monotonic() + LOOK_SECONDS
    while left:
        if time.monotonic() >= look:
            if connection.is_gone():
                raise ConnectionError("the client is gone")
            look = time.monotonic() + LOOK_SECONDS
        with suppress(queue.Empty):
            piece = job.pieces.get(timeout=max(look - time.monotonic(), 0.0))
            if isinstance(piece, ApiError):
                raise piece
            left -= piece.finish is not None
            yield piece


def serve(server: HttpServer, *, grace: float, watch: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what is under way within `grace` seconds and refuse the rest.

    watch: a shared directory whose newest whole step-N is read as it appears. Called on the main thread; always raises:
    Stopped after a signal, UserError where the engine failed. A second signal ends at once.
    """
    worker = server.service.worker
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = signal.SIGTERM, signal.SIGINT
    kept = {number: signal.signal(number, lambda signum, frame: signals.put(signum)) for number in numbers}
    worker.start()
    accepting = threading.Thread(target=server.serve_forever, args=(0.1,), name="http", daemon=True)
    accepting.start()
    updates = server.service.updates
    follower = None if watch is None or updates is None else Follower(watch, updates, say)
    signum = None
    try:
        while signum is None and worker.failure is None:
            with suppress(queue.Empty):
                signum = signals.get(timeout=WATCH_SECONDS)
            if follower is not None and signum is None:
                follower.look()
        server.ending = True
        finished = worker.end(grace, hurry=lambda: not signals.empty())
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


class Follower:
    """Follower of a shared directory: reads its newest whole step-N, each one once."""

    def __init__(self, shared: Path, updates: Updates, say: Callable[[str], None]):
        self.shared, self.updates, self.say = shared, updates, say
        self._seen: tuple[int, str] | None = None

    def look(self) -> None:
        latest = newest(self.shared)
        if latest is None:
            return
        version, directory = latest
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
