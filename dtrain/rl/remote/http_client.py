"""Client of an HTTP server with JSON, and the state of a call that is tried again. No torch, only the standard library.

Errors have two kinds. A `RetryableError` may go away: no answer, a timeout, status 503. A `ClientError` would come
again for the same call: status 400 or 404.
"""

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
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds between tries; each pause is twice the last one
MAX_ANSWER_BYTES = 1 << 32  # the routed experts of many long completions take some hundred MB
CHUNK_BYTES = 1 << 20
MIN_SECONDS = 0.1  # the smallest time limit of a call
RETRYABLE_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which the same call may succeed: too many requests, a server that starts or ends, a gateway."""


class RetryableError(Exception):
    """A call that got no usable answer, but may succeed later. The message says what happened."""


class ClientError(Exception):
    """A call that the server refuses, and would refuse again. The message is the server's.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class HttpClient:
    """Calls an HTTP server. Several threads may use it.

    Args:
        url: Address of the server, http or https, perhaps with a path before the routes. "/v1" at the end is ignored.
        key: The API key.

    Raises:
        UserError: If the URL is wrong.
    """

    def __init__(self, url: str, key: str | None = None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UserError(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise UserError(f"{url} is not the address of a server. Write it as http://host:port")
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
        """Make a call and return the JSON of its answer.

        Args:
            path: Path of the route.
            body: JSON to POST. None: GET.
            seconds: Time limit of the whole call.
            is_json: Whether the answer must be JSON. Otherwise a different answer is returned as text.

        Raises:
            RetryableError: If there is no answer in time, it is not JSON, or its status is in RETRYABLE_STATUSES.
            ClientError: If the server answers with another status than 200.
        """
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
                raise RetryableError(f"the answer ended after {len(error.partial)} bytes") from error
            raise RetryableError(describe_error(error) or type(error).__name__) from error
        finally:
            connection.close()
        return _read(response.status, raw, is_json)

    def hang_up(self) -> None:
        """End all calls in progress. They raise RetryableError."""
        with self._lock:
            for sock in self._live:
                _shut_down(sock)

    @contextmanager
    def _cut_off(self, sock: socket.socket, until: float) -> Iterator[None]:
        """Close the socket at the time `until`, or when `hang_up` is called, if the block has not ended.

        A socket's own timeout is not enough: it applies to each part of the answer, and parts may arrive slowly.
        """
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
    while True:
        part = response.read(CHUNK_BYTES)
        if not part:
            break
        raw += part
        if len(raw) > MAX_ANSWER_BYTES:
            raise RetryableError(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    if response.length:  # bytes of the announced length are missing
        raise http.client.IncompleteRead(bytes(raw), response.length)
    return raw


def _read(status: int, raw: bytes | bytearray, is_json: bool) -> Any:
    """Return the answer in a body. Raises RetryableError and ClientError, by the status."""
    try:
        answer = json.loads(raw) if raw else {}
    except ValueError as error:
        answer = raw.decode(errors="replace")[:500]
        if status == 200 and is_json:
            raise RetryableError(f"the answer is not JSON. It begins with {answer[:80]!r}") from error
    if status == 200:
        return answer
    message = f"{status}: {_message(answer)}"
    if status in RETRYABLE_STATUSES:
        raise RetryableError(message)
    raise ClientError(status, message)


def _message(answer: Any) -> str:
    """Return the message in the body of an error.

    Example:
        >>> _message({"error": {"message": "no such model", "code": 404}})  # OpenAI
        'no such model'
        >>> _message({"detail": "Not Found"})  # FastAPI
        'Not Found'
    """
    if isinstance(answer, dict):
        keys = ("error", "detail", "message", "error_message")
        error: Any = answer
        for key in keys:
            if key in answer:
                error = answer[key]
                break
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)
    return str(answer) or "no explanation"


def read_models(answer: Any) -> list[dict[str, Any]]:
    """Return the models in an answer of /v1/models. Empty if the answer has another form.

    Example:
        >>> read_models({"data": [{"id": "policy", "owned_by": "vllm"}]})
        [{'id': 'policy', 'owned_by': 'vllm'}]
    """
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list):
        return []
    return [model for model in models if isinstance(model, dict)]


def with_advice(error: Exception | str, advice: str) -> str:
    """Return an error's text followed by a sentence of advice. Texts of servers may end with a full stop already.

    Example:
        >>> with_advice("The adapter's rank is too large.", "Start the server with --max-lora-rank 16")
        "The adapter's rank is too large. Start the server with --max-lora-rank 16"
    """
    return f"{str(error).rstrip('. ')}. {advice}"


def read_api_key(file: str | Path | None) -> str | None:
    """Return the API key in a file, its only line. None without a file.

    Raises:
        UserError: If the file cannot be read, or contains anything else.
    """
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the API key cannot be read ({error})") from error
    if not re.fullmatch("[!-~]+", key):
        raise UserError(f"{file} is not a file with an API key. It must have one line, the key, without spaces")
    return key


@dataclass
class RetryState:
    """Failed tries of one call, possibly at several servers.

    Attributes:
        until: Time at which the call gives up.
        stop: Set if the call is no longer wanted.
        errors: The errors of each URL.
    """

    until: float
    stop: threading.Event
    errors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds that are left."""
        return max(MIN_SECONDS, self.until - time.monotonic())

    def count(self, url: str) -> int:
        """Return the number of failed tries at a URL."""
        return len(self.errors.get(url, []))

    def record(self, url: str, error: object) -> None:
        """Record a failed try."""
        self.errors.setdefault(url, []).append(str(error))

    def wait(self, url: str, max_tries: float = math.inf) -> bool:
        """Wait before the next try at a URL.

        Returns:
            Whether to try again. False if `max_tries` tries have failed, no time is left, or the call was abandoned.
        """
        pause = pause_after(self.count(url))
        if self.count(url) >= max_tries or self.stop.is_set() or time.monotonic() + pause > self.until:
            return False
        self.stop.wait(pause)
        return True

    def summary(self) -> str:
        """Describe the failures: the number of tries and the last error of each URL."""
        lines = []
        for url, errors in self.errors.items():
            tries = "1 try" if len(errors) == 1 else f"{len(errors)} tries"
            lines.append(f"{url}: {tries}, the last error: {errors[-1]}")
        return "; ".join(lines) or "no server was called"


def pause_after(count: int) -> float:
    """Return the seconds before the next try after `count` failures.

    Example:
        >>> [pause_after(count) for count in (1, 2, 3, 9)]
        [0.25, 0.5, 1.0, 15.0]
    """
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
