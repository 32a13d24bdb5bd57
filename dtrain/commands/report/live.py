"""The page on loopback, following the runs: `/` is the page, `/state?seen=MARK` what has changed since that mark.

A request must name this machine in its header Host, since a page elsewhere may lead its visitors' browsers here by a
name of its own (DNS rebinding).
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dtrain.base.errors import UserError, in_words
from dtrain.base.json_files import digest
from dtrain.commands.report.page import page, state
from dtrain.commands.report.run_files import RunFiles

ADDRESS = "127.0.0.1"
SECONDS = 30.0  # that a client may take to send a request
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
HEADERS |= {"Cross-Origin-Resource-Policy": "same-origin", "Content-Security-Policy": "frame-ancestors 'none'"}
RESTS = 20  # times as long as the last look at the runs took


class Following:
    """The followed runs and their page. One thread at a time reads, and then rests so long that most of the machine's
    time is the runs' own."""

    def __init__(self, runs: Sequence[RunFiles], answers: int, library: str):
        self._runs, self._answers, self._library = runs, answers, library
        self._lock = threading.Lock()
        self._state: tuple[dict[str, Any], dict[str, str]] | None = None
        self._mark = ""
        self._rests_until = 0.0

    def page(self) -> str:
        with self._lock:
            data, html = self._look()
            return page(data, html, self._library, self._mark)

    def state(self, seen: str) -> str | None:
        """Return the state as JSON; None if it is the one that was `seen`."""
        with self._lock:
            data, html = self._look()
            return None if seen == self._mark else json.dumps({"seen": self._mark, "data": data, "html": html})

    def _look(self) -> tuple[dict[str, Any], dict[str, str]]:
        began = time.monotonic()
        if self._state is not None and began < self._rests_until:
            return self._state
        is_new = [run.look() for run in self._runs]
        if self._state is None or any(is_new):
            self._state = state(self._runs, self._answers)
            self._mark = digest(*self._state)[:16]
        self._rests_until = time.monotonic() + RESTS * (time.monotonic() - began)
        return self._state


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    server: "Server"

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            known = " or ".join(sorted(self.server.hosts))
            return self._send(403, f"the header Host must be {known}")
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                return self._send(200, self.server.following.page(), "text/html")
            if url.path == "/state":
                text = self.server.following.state(parse_qs(url.query).get("seen", [""])[0])
                return self._send(204, "") if text is None else self._send(200, text, "application/json")
        except UserError as error:  # a file that is damaged now
            return self._send(503, str(error))
        self._send(404, "there is / and /state here")

    def _send(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Write nothing: a page asks every few seconds."""


class Server(ThreadingHTTPServer):
    """HTTP server of the page. port: 0 takes a free one. `hosts`: the allowed values of the header Host."""

    daemon_threads = True

    def __init__(self, port: int, following: Following):
        super().__init__((ADDRESS, port), _Handler)
        self.following = following
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.hosts |= {ADDRESS, "localhost"} if self.server_port == 80 else set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report faults of the server's own; ignore a client that hangs up."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def follow(runs: Sequence[RunFiles], answers: int, port: int, library: str) -> int:
    """Serve until Ctrl-C. Raises UserError where the port is taken."""
    try:
        server = Server(port, Following(runs, answers, library))
    except (OSError, OverflowError) as error:
        where = f"{ADDRESS}:{port} ({in_words(error)})"
        raise UserError(f"cannot listen at {where}; choose another --port, or 0 for a free one") from error
    names = ", ".join(run.name for run in runs)
    with server, suppress(KeyboardInterrupt):
        print(f"http://{ADDRESS}:{server.server_port} follows {names}; Ctrl-C ends it", flush=True)
        server.serve_forever(0.2)
    return 0
