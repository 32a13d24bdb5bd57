"""The store where the ranks of one start find one another."""

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dtrain.addresses import address_to_listen_at, listen
from dtrain.errors import Stopped, UserError
from dtrain.hosts.coordinator import CONNECT_SECONDS
from dtrain.launch.place import RankPlace
from dtrain.launch.rank import within

if TYPE_CHECKING:
    import torch.distributed as dist

    from dtrain.parallel.runtime import StopFlag

T = TypeVar("T")

MEET_SECONDS = 600.0  # for the others to come
SERVED_SECONDS = 60.0  # for a store to answer that must be there
NAME_SECONDS = 120.0  # for a host's name to be known; Kubernetes gives names to pods as they come
NOTE_SECONDS = 60.0  # until it is said who is waited for
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Callbacks:
    """How a rank is heard. tell: what there is to say of ranks that are lost, told and returned; end: the last of this
    process, with that; note: a line for its user; stop: set where this process is asked to end."""

    tell: Callable[[str], str]
    end: Callable[[str], None]
    note: Callable[[str], None]
    stop: "StopFlag"


def open_store(place: RankPlace, callbacks: Callbacks) -> "dist.Store":
    """The store where the ranks meet."""
    import torch.distributed as dist

    host, port = place.master
    if place.rank > 0 or place.agent_store:
        _reach(place, callbacks)
        return served(place, lambda: dist.TCPStore(host, port, is_master=False, timeout=dist.default_pg_timeout))
    address = address_to_listen_at(host, port)
    if not address:
        callbacks.note(
            f"note: {host} is no address of this host that others know: port {port} is open at all of its addresses; "
            "MASTER_ADDR=<the address that leads to the other hosts> opens it there alone"
        )
    try:
        listener = listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UserError(f"port {port} of {socket.gethostname()}, where the ranks meet: {error.strerror}") from error
        raise UserError(
            f"port {port} of {socket.gethostname()}, where the ranks meet, is taken by another process: set "
            "MASTER_PORT to a free one, the same for every rank"
        ) from error
    return dist.TCPStore(
        address or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=dist.default_pg_timeout,
        master_listen_fd=listener.detach(),
    )


def served(place: RankPlace, ask: Callable[[], T]) -> T:
    """What `ask` gets from the store. torch waits without end for what listens there and does not answer."""
    import torch.distributed as dist

    try:
        got, why = within(SERVED_SECONDS, ask), f"no answer for {SERVED_SECONDS:g} s"
    except dist.DistError as error:
        got, why = None, str(error).splitlines()[0]
    if got is None:
        host, port = place.master
        raise UserError(
            f"{host}:{port}, where the ranks meet, is gone, or something else listens there ({why}): is rank 0's host "
            "up, and are MASTER_ADDR and MASTER_PORT right?"
        )
    return got


def _reach(place: RankPlace, callbacks: Callbacks) -> None:
    """Wait until something listens where the ranks meet, for at most MEET_SECONDS; torchrun's agent has listened since
    before it started this process. Raises UserError."""
    host, port = place.master
    begun, is_noted = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            return
        except OSError as error:
            longest = SERVED_SECONDS if place.agent_store else MEET_SECONDS
            longest = NAME_SECONDS if isinstance(error, socket.gaierror) else longest
            said = f"rank {place.rank} on {socket.gethostname()} cannot reach rank 0's host at {host}:{port} ({error})"
        waited = time.monotonic() - begun
        if waited > longest:
            raise UserError(f"{said} for {waited:.0f} s: is it up, and are MASTER_ADDR and MASTER_PORT right?")
        if waited > NOTE_SECONDS and not is_noted:
            callbacks.note(f"note: {said} for {waited:.0f} s")
            is_noted = True
        check_stop(callbacks.stop)
        time.sleep(POLL_SECONDS * 5)


def check_stop(stop: "StopFlag") -> None:
    if stop.signum:
        raise Stopped(stop.signum, "stopped before all ranks had come; there was nothing to save")
