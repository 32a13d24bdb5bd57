"""One HTTP/1.1 connection: requests read strictly and within limits of size and time, answers written as JSON.

Standard library only: an ASGI server and pydantic would leave these limits, the table of fields and their messages to
us all the same, and be two more things to keep up to date. What is not plainly one request is answered and cut off.
"""

import json
import re
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from dtrain.rollout.serve.fields import ApiError, shown

CHUNK = 1 << 16  # bytes that are received at once
LINGER_SECONDS = 2.0  # that a client may go on sending after it was refused, so that it reads why
_REQUEST = re.compile(rb"([A-Za-z]{1,20}) ([!-~]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
# Read here: two of one of them are two opinions of what is asked.
_SINGLE = {"host", "content-length", "transfer-encoding", "content-type", "authorization", "origin", "expect"}


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes. head_seconds: from a connection's start, or a request's first byte, to the end of its head;
    body_seconds: to the end of its body; both in all, however the bytes trickle."""

    connections: int = 512
    head: int = 1 << 14
    headers: int = 64
    bodies: int = 1 << 28  # of all requests together
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: float = 60.0  # between two requests
    send_seconds: float = 60.0  # that a client may take to read what is sent at once


@dataclass(frozen=True)
class Head:
    """A request without its body, of `length` bytes. headers: by names in small letters."""

    method: str
    path: str
    query: str
    is_old: bool  # HTTP/1.0
    headers: dict[str, str]
    length: int | None  # None: it does not say


class Connection:
    """`is_open` until an answer is the last one. `is_answered`: whether the request that was read last is."""

    def __init__(self, sock: socket.socket, limits: Limits):
        self.is_open = self.is_answered = True
        self._sock, self._limits = sock, limits
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._head: Head | None = None  # of the request that is under way
        self._unread = True  # whether bytes that nobody has taken may still come
        self._start = time.monotonic()
        self._is_new = True

    def head(self) -> Head | None:
        """The next request's; None where none comes. Raises ApiError."""
        self._head, self._unread = None, False
        idle = self._limits.head_seconds if self._is_new else self._limits.idle_seconds
        try:
            while not self._buffer.lstrip(b"\r\n") and len(self._buffer) < 4:
                self._receive((self._start if self._is_new else time.monotonic()) + idle, CHUNK)
        except (TimeoutError, ConnectionError):
            self.is_open = False
            return None
        until = (self._start if self._is_new else time.monotonic()) + self._limits.head_seconds
        self._is_new, self.is_answered, self._unread = False, False, True
        if self._buffer.startswith(b"\r\n"):  # some end a body with it
            del self._buffer[:2]
        while (end := self._buffer.find(b"\r\n\r\n")) < 0 and len(self._buffer) <= self._limits.head:
            if _BARE.search(self._buffer):
                raise ApiError(400, "lines must end with CR LF")
            try:
                self._receive(until, self._limits.head)
            except TimeoutError as error:
                raise ApiError(408, f"the head did not come within {self._limits.head_seconds:g} s") from error
        if not 0 <= end <= self._limits.head:
            line = 0 <= self._buffer.find(b"\r\n") <= self._limits.head
            raise ApiError(431 if line else 414, f"the head may have {self._limits.head} bytes")
        raw = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        self._head = head = self._parsed(raw)
        self._unread = bool(head.length)
        return head

    def body(self) -> bytearray:
        """The body of the request whose head was read. Raises ApiError."""
        length, until = self._head.length or 0, time.monotonic() + self._limits.body_seconds
        if length and "expect" in self._head.headers:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            while len(self._buffer) < length:
                self._receive(until, min(CHUNK, length - len(self._buffer)))
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {self._limits.body_seconds:g} s") from error
        raw, self._buffer = self._buffer, self._buffer[length:]
        del raw[length:]
        self._unread = False
        return raw

    def send(self, status: int, body: dict[str, Any], *, last: bool = False, allow: str | None = None) -> None:
        """An answer; `last`: none comes after it, nor after one whose request was not read whole."""
        data = json.dumps(body).encode()
        headers = ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        headers += ["Retry-After: 1"] if status == 503 else []
        headers += ['WWW-Authenticate: Bearer realm="dtrain"'] if status == 401 else []
        headers += [f"Allow: {allow}"] if allow else []
        is_bare = self._head is not None and self._head.method == "HEAD"
        self._begin(status, headers, last or self._unread or self._head is None)
        self._send(b"" if is_bare else data)

    def begin_events(self) -> None:
        """The head of a stream of server-sent events; `event` after `event`, then `end_events`."""
        headers = ["Content-Type: text/event-stream", "Cache-Control: no-cache"]
        headers += [] if self._head.is_old else ["Transfer-Encoding: chunked"]
        self._begin(200, headers, self._head.is_old)

    def event(self, data: bytes) -> None:
        if data:
            self._send(data if self._head.is_old else b"%x\r\n%b\r\n" % (len(data), data))

    def end_events(self) -> None:
        self._send(b"" if self._head.is_old else b"0\r\n\r\n")

    def is_gone(self) -> bool:
        """Whether the client has hung up."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0)) and self._sock.recv(1, socket.MSG_PEEK) == b""

    def close(self) -> None:
        """Let the client read the last answer: bytes of its own that nobody takes would make the system drop it."""
        with suppress(OSError):
            if self._unread:
                self._sock.shutdown(socket.SHUT_WR)
                until = time.monotonic() + LINGER_SECONDS
                while True:
                    self._buffer.clear()
                    self._receive(until, CHUNK)

    def _begin(self, status: int, headers: list[str], last: bool) -> None:
        self.is_answered = True
        asked = self._head.headers.get("connection", "") if self._head is not None else "close"
        if last or self._head.is_old or "close" in asked.lower():
            self.is_open = False
            headers = [*headers, "Connection: close"]
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Server: dtrain", *headers]
        self._send("\r\n".join([*lines, "", ""]).encode())

    def _send(self, data: bytes) -> None:
        self._sock.settimeout(self._limits.send_seconds)
        self._sock.sendall(data)

    def _receive(self, until: float, most: int) -> None:
        """More bytes. Raises TimeoutError, and ConnectionError where the client has hung up."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        data = self._sock.recv(most)
        if not data:
            raise ConnectionError("the client is gone")
        self._buffer += data

    def _parsed(self, raw: bytes) -> Head:
        first, *lines = raw.split(b"\r\n")
        request = _REQUEST.fullmatch(first)
        if request is None:
            raise ApiError(400, f"the request line {shown(first)[1:]} is none of HTTP/1.1")
        method, target, major, minor = (part.decode() for part in request.groups())
        if major != "1":
            raise ApiError(505, "this server speaks HTTP/1.1")
        if len(lines) > self._limits.headers:
            raise ApiError(431, f"a request may have {self._limits.headers} headers")
        headers: dict[str, str] = {}
        for line in lines:
            found = _HEADER.fullmatch(line)
            if found is None:
                raise ApiError(400, f"the header {shown(line)[1:]} is not sound")
            name = found[1].decode().lower()
            if name in headers and name in _SINGLE:
                raise ApiError(400, f"the header {name} stands twice")
            headers.setdefault(name, found[2].decode("latin-1").strip(" \t"))
        length = headers.get("content-length")
        if length is not None and ("transfer-encoding" in headers or not re.fullmatch("[0-9]{1,18}", length)):
            raise ApiError(400, "Content-Length must be one whole number, without Transfer-Encoding")
        if "transfer-encoding" in headers:
            raise ApiError(411, "send the body whole, with Content-Length")
        if "host" not in headers and minor != "0":
            raise ApiError(400, "the header Host is missing")
        if headers.get("expect", "100-continue").lower() != "100-continue":
            raise ApiError(417, "Expect may be 100-continue")
        path, _, query = target.partition("?")
        return Head(method, path, query, minor == "0", headers, None if length is None else int(length))
