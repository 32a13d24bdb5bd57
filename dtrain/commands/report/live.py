"""The live page on loopback: `/` is the page, `/state?seen=MARK` returns a newer state than that mark, if there is one.

The header Host of a request must name this machine. Otherwise a page elsewhere could make its visitors' browsers read
this one through a host name of its own (DNS rebinding). Starlette and uvicorn are in the extra `serve`.
"""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from dtrain.base.errors import UserError
from dtrain.base.json_files import digest
from dtrain.commands.report.page import page, page_state
from dtrain.commands.report.run_files import RunFiles
from dtrain.commands.web import listen, make_server

ADDRESS = "127.0.0.1"
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
HEADERS |= {"Cross-Origin-Resource-Policy": "same-origin", "Content-Security-Policy": "frame-ancestors 'none'"}
REST_FACTOR = 20  # the runs are read again after this many times the duration of the last read


class LiveReport:
    """The watched runs and their page.

    One thread at a time reads the runs. After each read it waits, so that reading takes only a small share of the
    machine's time.
    """

    def __init__(self, runs: Sequence[RunFiles], answers: int, library: str):
        self._runs, self._answers, self._library = runs, answers, library
        self._lock = threading.Lock()
        self._state: tuple[dict[str, Any], dict[str, str]] | None = None
        self._mark = ""
        self._rests_until = 0.0

    def page(self) -> str:
        """Return the page with the current state."""
        with self._lock:
            data, html = self._look()
            return page(data, html, self._library, self._mark)

    def state(self, seen: str) -> str | None:
        """Return the current state as JSON. None if its mark is `seen`."""
        with self._lock:
            data, html = self._look()
            if seen == self._mark:
                return None
            return json.dumps({"seen": self._mark, "data": data, "html": html})

    def _look(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the content of the page. Reads the runs again only after a rest since the last read.

        Returns:
            The data and the HTML of `page_state`.
        """
        began = time.monotonic()
        if self._state is not None and began < self._rests_until:
            return self._state
        is_new = [run.look() for run in self._runs]  # reads all runs before `any`
        if self._state is None or any(is_new):
            self._state = page_state(self._runs, self._answers)
            self._mark = digest(*self._state)[:16]
        duration = time.monotonic() - began
        self._rests_until = time.monotonic() + REST_FACTOR * duration
        return self._state


def make_app(following: LiveReport) -> Starlette:
    """Return the application. Starlette runs these functions on its threads, because they read files."""

    def show_page(request: Request) -> Response:
        return HTMLResponse(following.page(), headers=HEADERS)

    def show_state(request: Request) -> Response:
        text = following.state(request.query_params.get("seen", ""))
        if text is None:
            return Response(status_code=204, headers=HEADERS)
        return Response(text, media_type="application/json", headers=HEADERS)

    def show_damage(request: Request, error: Exception) -> Response:
        message = str(error).encode(errors="replace")  # a path may contain bytes that are not valid text
        return PlainTextResponse(message, 503, headers=HEADERS)

    def show_paths(request: Request, error: Exception) -> Response:
        return PlainTextResponse("this server has only / and /state", 404, headers=HEADERS)

    return Starlette(
        routes=[Route("/", show_page), Route("/state", show_state)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"], www_redirect=False)],
        exception_handlers={UserError: show_damage, 404: show_paths},
    )


def follow(runs: Sequence[RunFiles], answers: int, port: int, library: str) -> None:
    """Serve until Ctrl-C. Raises UserError if the port is taken."""
    sock = listen(ADDRESS, port)
    names = ", ".join(run.name for run in runs)
    print(f"http://{ADDRESS}:{sock.getsockname()[1]} shows {names}; Ctrl-C ends it", flush=True)
    server = make_server(make_app(LiveReport(runs, answers, library)))
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has shut down
        server.run(sockets=[sock])
