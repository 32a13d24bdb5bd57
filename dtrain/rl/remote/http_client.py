"""Client of an HTTP server: JSON in, JSON out, errors with a plain message; and the tries of a call that failed.
Standard library only, no torch."""

import http.client
import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dtrain.base.errors import UserError, describe_error

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds between tries, doubled each time
MAX_ANSWER_BYTES = 1 << 32  # bytes of an answer; the experts of many long completions are some hundred MB
CHUNK_BYTES = 1 << 20  # bytes that are read at once
# Answers after which the same call may succeed: too many at once, starting, ending, or a gateway's bad moment.
RETRYABLE_STATUSES = {408, 425, 429, 500, 502, 503, 504}


class RetryableError(Exception):
    """A call that got no answer, or one that may be better next time; the message says what was seen."""


class ClientError(Exception):
    """A call that the server refuses with `status`, and would refuse again; the message is the server's."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class HttpClient:
    """Calls to the server at `url` (http or https, with a path before the routes or without). For several threads."""

    def __init__(self, url: str, key: str | None = None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UserError(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise UserError(f"{url} is no server's address; write http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.host = host
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._live: set[socket.socket] = set()
        self._lock = threading.Lock()

    def request(self, path: str, body: dict[str, Any] | None, seconds: float, *, is_json: bool = True) -> Any:
        """Return the JSON that the server answers with 200, to a POST of `body`, else to a GET; without `is_json` an
        answer in another form is its text. Raises RetryableError and ClientError."""
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        connection = self._kind(self.host, self._port, timeout=min(CONNECT_SECONDS, seconds))
        until = time.monotonic() + seconds
        try:
            connection.connect()
            with self._cut_off(connection.sock, until):
                connection.sock.settimeout(seconds)
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.request(method, self._base + path, data, self._headers)
                response = connection.getresponse()
                raw = _body(response)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= until:
                raise RetryableError(f"no answer within {seconds:.0f} s") from error
            if isinstance(error, http.client.IncompleteRead):
                raise RetryableError(f"the answer broke off after {len(error.partial)} bytes") from error
            raise RetryableError(describe_error(error) or type(error).__name__) from error
        finally:
            connection.close()
        return _read(response.status, raw, is_json)

    def hang_up(self) -> None:
        """End every call under way; they raise RetryableError."""
        with self._lock:
            for sock in self._live:
                _shut_down(sock)

    @contextmanager
    def _cut_off(self, sock: socket.socket, until: float) -> Iterator[None]:
        """Let `hang_up` and the time end what the block sends and reads: a socket's own timeout is for each part that
        comes, and they may trickle."""
        seconds = min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        timer = threading.Timer(seconds, _shut_down, (sock,))
        timer.daemon = True
        timer.start()
        with self._lock:
            self._live.add(sock)
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._live.discard(sock)


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        sock.shutdown(socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse) -> bytearray:
    """Read a response. Raises RetryableError for more than MAX_ANSWER_BYTES, and as `HTTPResponse.read`."""
    raw = bytearray()
    while part := response.read(CHUNK_BYTES):
        raw += part
        if len(raw) > MAX_ANSWER_BYTES:
            raise RetryableError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    if response.length:  # bytes of the announced length are missing
        raise http.client.IncompleteRead(bytes(raw), response.length)
    return raw


def _read(status: int, raw: bytes | bytearray, is_json: bool) -> Any:
    try:
        answer = json.loads(raw) if raw else {}
    except ValueError as error:
        answer = raw.decode(errors="replace")[:500]
        if status == 200 and is_json:
            raise RetryableError(f"an answer that is no JSON, which begins {answer[:80]!r}") from error
    if status == 200:
        return answer
    message = f"{status}: {_message(answer)}"
    raise RetryableError(message) if status in RETRYABLE_STATUSES else ClientError(status, message)


def _message(answer: Any) -> str:
    """Return the message in an error's body: OpenAI's error object, FastAPI's detail, SGLang's message, or the text."""
    if isinstance(answer, dict):
        keys = ("error", "detail", "message", "error_message")
        error = next((answer[key] for key in keys if key in answer), answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer) or "no explanation"


def read_api_key(file: str | Path | None) -> str | None:
    """Return the API key that is the only line of `file`. Raises UserError."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the API key cannot be read ({error})") from error
    if not re.fullmatch("[!-~]+", key):
        raise UserError(f"{file} must hold one line, the API key, of letters, digits and signs without a space")
    return key


@dataclass
class RetryState:
    """Failed tries of one call, by url. `until` bounds it; `stop` is set where it is not wanted any more."""

    until: float
    stop: threading.Event
    errors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(0.1, self.until - time.monotonic())

    def count(self, url: str) -> int:
        return len(self.errors.get(url, []))

    def record(self, url: str, error: object) -> None:
        self.errors.setdefault(url, []).append(str(error))

    def wait(self, url: str, most: float = math.inf) -> bool:
        """Wait before the next try at `url`; False where there is none: `most` have failed, no time is left, or it is
        not wanted any more."""
        pause = pause_after(self.count(url))
        if self.count(url) >= most or self.stop.is_set() or time.monotonic() + pause > self.until:
            return False
        self.stop.wait(pause)
        return True

    def summary(self) -> str:
        lines = [f"{url}: {len(errors)} tries, the last: {errors[-1]}" for url, errors in self.errors.items()]
        return "; ".join(lines) or "none could be asked"


def pause_after(count: int) -> float:
    """Return the seconds before the next try after `count` failures."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
