"""The life of a server: uvicorn on a thread, the engine on another, and signals on the main one.

A signal first lets the engine finish what is under way, while uvicorn refuses new requests with 503. Then uvicorn shuts
down, once all answers are sent.
"""

import queue
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtrain.base.errors import Stopped, UserError
from dtrain.commands.serve.app import make_app
from dtrain.commands.serve.classify import ClassifyService
from dtrain.commands.serve.fields import ApiError
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.updates import Updates
from dtrain.commands.web import make_server
from dtrain.rl.remote.shared_directory import mark_of, newest

WATCH_SECONDS = 1.0  # between looks at a shared directory, and at whether both threads are alive


def serve(
    sock: socket.socket,
    service: Service | ClassifyService,
    *,
    grace: float,
    watch: Path | None = None,
    access_log: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Must be called on the main thread.

    Args:
        sock: The socket that listens.
        service: The routes. Its worker is started here.
        grace: Seconds to finish what is under way after a signal. The rest is refused. A second signal ends at once.
        watch: Shared directory whose newest complete step-N is read as it appears.
        access_log: Whether each request is logged.
        say: Prints a line.

    Raises:
        Stopped: After a signal.
        UserError: If the engine or the HTTP server failed.
    """
    worker, updates = service.worker, service.updates
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = signal.SIGTERM, signal.SIGINT
    kept = {number: signal.signal(number, lambda signum, frame: signals.put(signum)) for number in numbers}
    server = make_server(make_app(service), access_log=access_log)
    worker.start()
    # uvicorn leaves signals alone if it does not run on the main thread.
    http = threading.Thread(target=server.run, args=([sock],), name="http", daemon=True)
    http.start()
    follower = None if watch is None or updates is None else Follower(watch, updates, say)
    signum = None
    try:
        while signum is None and worker.failure is None and http.is_alive():
            with suppress(queue.Empty):
                signum = signals.get(timeout=WATCH_SECONDS)
            if follower is not None and signum is None:
                follower.look()
        finished = worker.end(grace, hurry=lambda: not signals.empty())
        server.should_exit = True
        http.join()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if signum is None:
        raise UserError(worker.failure or "the HTTP server has failed; the lines above say why")
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
