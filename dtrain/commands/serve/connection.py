"""HTTP/1.1 connections: requests read strictly, within limits of size and time, answers as JSON; and their slots.

Standard library only: uvicorn 0.54 has no deadline for a head or a reader, keeps all connections that say nothing, and
h11 reads folded lengths and bare LF, so that an ASGI server would leave all of this to us all the same.
"""

import json
import re
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from dtrain.commands.serve.fields import ApiError, shown

AT_ONCE = 1 << 16  # bytes that are received at once
LINGER_SECONDS = 2.0  # that a client may go on sending after it was refused, so that it reads why
_REQUEST = re.compile(r"([A-Za-z]{1,20}) ([!-~]+) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")
# The headers that are read here: a second one of a name would be ambiguous.
_SINGLE = {"host", "content-length", "transfer-encoding", "content-type", "authorization", "origin", "expect"}
_EXTRA = {401: ['WWW-Authenticate: Bearer realm="dtrain"'], 405: ["Allow: GET, POST"], 503: ["Retry-After: 1"]}


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes. head_seconds, body_seconds: from the first byte to the last, however they trickle. A connection's
    first request begins within head_seconds, the next ones within idle_seconds of the last answer."""

    connections: int = 512
    head: int = 1 << 14
    bodies: int = 1 << 27  # of all requests together
    pixels: int = 1 << 32  # of all requests together, decoded
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: float = 60.0
    room_seconds: float = 60.0  # that a request waits for others to leave room for its body or its images
    send_seconds: float = 60.0  # that a client may take to read what is sent at once


@dataclass(frozen=True)
class RequestHead:
    """A request without its body, which has `length` bytes. headers: by names in small letters."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    length: int


class Connection:
    """Connection of one client. `is_open` until an answer is the last one; `is_answered`: whether the request that
    began last is."""

    def __init__(self, sock: socket.socket, limits: Limits):
        self.is_open = self.is_answered = True
        self.sock, self._limits = sock, limits
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._head: RequestHead | None = None  # of the request that is under way, once it was understood
        self._unread = True  # whether bytes that nobody has taken may still come
        self._patience = limits.head_seconds  # for a request's first byte

    def begins(self) -> bool:
        """Wait for the next request's first byte. Return whether it came."""
        if not self.is_open:
            return False
        self._head, self._unread = None, False
        until, self._patience = time.monotonic() + self._patience, self._limits.idle_seconds
        try:
            while not self._buffer.strip(b"\r\n"):  # some end a body with them
                del self._buffer[:]
                self._receive(until, AT_ONCE)
        except ApiError:
            return False
        self.is_answered, self._unread = False, True
        return True

    def head(self) -> RequestHead:
        """Return the head of the request that begins. Raises ApiError."""
        until = time.monotonic() + self._limits.head_seconds
        self._buffer = self._buffer.lstrip(b"\r\n")
        while (end := self._buffer.find(b"\r\n\r\n", 0, self._limits.head)) < 0:
            if _BARE.search(self._buffer):
                raise ApiError(400, "lines must end with CR LF")
            if len(self._buffer) >= self._limits.head:
                raise ApiError(431 if b"\r\n" in self._buffer else 414, f"the head may have {self._limits.head} bytes")
            self._receive(until, self._limits.head)
        self._head = _parsed(self._buffer[:end].decode("latin-1"))
        del self._buffer[: end + 4]
        self._unread = self._head.length > 0
        return self._head

    def body(self, head: RequestHead) -> bytearray:
        """Return the body of the request whose head was read. Raises ApiError."""
        length, until = head.length, time.monotonic() + self._limits.body_seconds
        if length and "expect" in head.headers:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._buffer) < length:
            self._receive(until, min(AT_ONCE, length - len(self._buffer)))
        raw, self._buffer = self._buffer, self._buffer[length:]
        del raw[length:]
        self._unread = False
        return raw

    def send(self, status: int, body: dict[str, Any]) -> None:
        """Send an answer; the last one if its request was not read whole."""
        data = json.dumps(body).encode()
        self.begin(status, f"Content-Type: application/json\r\nContent-Length: {len(data)}")
        if self._head is None or self._head.method != "HEAD":
            self._send(data)

    def refuse(self, error: ApiError) -> None:
        self.send(error.status, error.body)

    def begin(self, status: int, headers: str) -> None:
        """Send the head of an answer."""
        self.is_answered = True
        connection = "close" if self._head is None else self._head.headers.get("connection", "")
        self.is_open = not (self._unread or "close" in connection.lower())
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Server: dtrain", headers, *_EXTRA.get(status, [])]
        self._send("\r\n".join([*lines, "Connection: close"] if not self.is_open else lines).encode() + b"\r\n\r\n")

    def chunk(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of an answer that began as `Transfer-Encoding: chunked`."""
        self._send((b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if last else b""))

    def is_gone(self) -> bool:
        """Return whether the client has hung up."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0)) and self.sock.recv(1, socket.MSG_PEEK) == b""

    def close(self) -> None:
        """Let the client read the last answer: where bytes of its own are left the system would drop it."""
        with suppress(OSError, ApiError):
            self.sock.shutdown(socket.SHUT_WR)
            until = time.monotonic() + LINGER_SECONDS
            while self._unread:
                self._buffer.clear()
                self._receive(until, AT_ONCE)

    def _send(self, data: bytes) -> None:
        self.sock.settimeout(self._limits.send_seconds)
        self.sock.sendall(data)

    def _receive(self, until: float, most: int) -> None:
        """Receive more bytes. Raises ApiError where none come in time, or the client has hung up."""
        self.sock.settimeout(max(until - time.monotonic(), 0.001))
        data = b""
        try:
            if time.monotonic() >= until:
                raise TimeoutError
            data = self.sock.recv(most)
        except TimeoutError as error:
            raise ApiError(408, "the request did not come in time") from error
        except ConnectionError:
            pass
        if not data:
            raise ApiError(400, "the request breaks off")
        self._buffer += data


class ConnectionSlots:
    """`count` slots for connections. Thread-safe. evicts: whether the oldest connection that has not shown the key is
    closed for a new one, where all slots are taken, so that those without a key cannot keep out a client that has it.
    """

    def __init__(self, count: int, *, evicts: bool):
        self._count, self._evicts = count, evicts
        self._taken: dict[socket.socket, bool] = {}  # whether it has shown the key, the oldest connection first
        self._lock = threading.Lock()

    def take(self, sock: socket.socket) -> bool:
        """Take a slot for this connection until it leaves or is evicted. Return whether there was one."""
        with self._lock:
            if len(self._taken) >= self._count:
                oldest = next((other for other, has_key in self._taken.items() if not has_key), None)
                if oldest is None or not self._evicts:
                    return False
                del self._taken[oldest]
                with suppress(OSError):  # its client has gone
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread, which closes it, reads and writes no more
            self._taken[sock] = False
            return True

    def keep(self, sock: socket.socket) -> None:
        """Mark this connection as one that has shown the key, which is not evicted."""
        with self._lock:
            if sock in self._taken:
                self._taken[sock] = True

    def leave(self, sock: socket.socket) -> None:
        """Give the slot back, before the socket is closed. Without effect if it was evicted."""
        with self._lock:
            self._taken.pop(sock, None)


def _parsed(text: str) -> RequestHead:
    first, *lines = text.split("\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        raise ApiError(505 if re.search(r" HTTP/[02-9]", first) else 400, f"{shown(first)} is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise ApiError(400, f"the header {shown(line)} is not sound")
        name = match[1].lower()
        if name in headers and name in _SINGLE:
            raise ApiError(400, f"the header {shown(line)} stands twice")
        headers[name] = match[2].strip(" \t")
    length = headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,18}", length) or {"content-length", "transfer-encoding"} <= headers.keys():
        raise ApiError(400, "Content-Length must be one whole number, without Transfer-Encoding")
    if "transfer-encoding" in headers or (request[1] == "POST" and "content-length" not in headers):
        raise ApiError(411, "send the body whole, with Content-Length")
    if "host" not in headers and first.endswith(".1"):
        raise ApiError(400, "the header Host is missing")
    if headers.get("expect", "100-continue").lower() != "100-continue":
        raise ApiError(417, "Expect may be 100-continue")
    path, _, query = request[2].partition("?")
    if first.endswith(".0"):
        headers["connection"] = "close"
    return RequestHead(request[1], path, query, headers, int(length))
