"""Slots of a server's connections: where none is free, the oldest connection that has not shown the key makes way."""

import socket
import threading
from contextlib import suppress


class ConnectionSlots:
    """`count` slots for connections. Thread-safe.

    evicts: whether a connection that has not shown the key is closed for a new one, where all slots are taken, so that
    those without a key cannot keep out a client that has it.
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
