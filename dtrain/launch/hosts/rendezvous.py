"""The ranks of a start meet, and watch over one another from then on."""

import errno
import json
import os
import resource
import secrets
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from dtrain.base.addresses import address_to_listen_at, interface_of, is_loopback, listen, own_address
from dtrain.base.errors import Stopped, Unavailable, UserError
from dtrain.launch.hosts.coordinator import (
    CONNECT_SECONDS,
    Coordinator,
    CoordinatorAddress,
    JoinRequest,
    JoinResponse,
    Member,
    connect,
)
from dtrain.launch.place import GLOO, RankPlace
from dtrain.launch.signals import on_signals
from dtrain.launch.watch import FILE_SECONDS, lost_text, within

if TYPE_CHECKING:
    import torch.distributed as dist

    from dtrain.parallel.runtime import StopFlag

T = TypeVar("T")

MEET_SECONDS = 600.0  # for the others to come
PROBLEM_SECONDS = 60.0  # for the others to come where one that has come knows that the run cannot begin
SERVED_SECONDS = 60.0  # for a store to answer that must be there
NAME_SECONDS = 120.0  # for a host's name to be known; Kubernetes gives names to pods as they come
NOTE_SECONDS = 60.0  # until it is said who is waited for
POLL_SECONDS = 0.1
TOLD_SECONDS = 60.0  # of silence after which a rank is lost, where no recipe could be read that says so
FILES = 65536


@dataclass(frozen=True)
class Callbacks:
    """The ways in which a rank is heard. tell: what there is to say of ranks that are lost, told and returned; end: the
    last of this process, with that; note: a line for its user; stop: set where this process is asked to end."""

    tell: Callable[[str], str]
    end: Callable[[str], None]
    note: Callable[[str], None]
    stop: "StopFlag"


@dataclass(frozen=True)
class Rendezvous:
    """The result of a meeting of the ranks of one start: a store that no other start wrote to, and the attempt that
    it is, by the rank that has counted the most."""

    store: "dist.Store"
    attempt: int = 0


@contextmanager
def rendezvous(
    place: RankPlace, lost_after: float, callbacks: Callbacks, problem: str | None = None
) -> Iterator[Rendezvous]:
    """Meet, and watch while the block runs: where a rank is lost, from when it has come on, `end(tell(who and why))` is
    called in a thread, at the latest `lost_after` + 1 seconds after its last sign of life (rank 0's `lost_after`
    counts); or, where this rank failed because of it, Unavailable is raised with what `tell` returned. Collective, by
    sockets alone: no process group is up yet.

    Once all have come, the `problem` of any is a UserError on every one. Raises UserError too where ranks do not come
    within MEET_SECONDS, and Stopped where this process is asked to end meanwhile. The interface that leads to the
    others is named to gloo, which takes the one of the host's name, and that may be a loopback.
    """
    _allow_files()
    me = JoinRequest(place.rank, socket.gethostname(), place.attempt, problem)
    try:
        member, joined, store = _meet(place, me, lost_after, callbacks)
    except UserError as error:
        if place.rank > 0:  # rank 0 knows nothing of it
            callbacks.note(str(error))
        raise
    if joined.problem:
        member.close()
        raise UserError(joined.problem)
    if GLOO not in place.environ:
        at = member.address if place.rank and not is_loopback(member.address) else joined.address
        if name := interface_of(at):
            place.environ[GLOO] = name
    try:
        yield Rendezvous(store, joined.attempt)
    except BaseException as error:  # a lost rank shows as whatever the collective library makes of it
        first = (str(error).strip().splitlines() or [""])[0]
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
        who = member.close(None if isinstance(error, Stopped) else reason)
        if who is None or isinstance(error, Stopped | UserError):
            raise
        raise Unavailable(callbacks.tell(who)) from error
    member.close()


def _allow_files() -> None:
    """Connections to every other rank, of which gloo holds one per group, are more than systems allow at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _meet(
    place: RankPlace, me: JoinRequest, lost_after: float, callbacks: Callbacks
) -> tuple[Member, JoinResponse, "dist.Store"]:
    """This rank's end of the watch, once all have come; what they know together; and a store of this start alone."""
    import torch.distributed as dist

    store, coordinator = open_store(place, callbacks), None
    if place.rank == 0:
        coordinator, address = _coordinate(place, lost_after)
    else:
        address = _find_coordinator(place, store, callbacks)
    connection = connect(address, me)
    if connection is None:
        raise UserError(
            f"rank {me.rank} on {me.host} reaches {address.host} at port {place.master[1]} but not at port "
            f"{address.port}: ranks talk over ports that their systems pick, which no firewall may close between hosts"
        )
    member = Member(me, address.host, address.lost_after, lambda who: callbacks.end(callbacks.tell(who)), connection)
    member.coordinator = coordinator
    member.start()
    try:
        if coordinator is not None:
            _wait_for_all(place, store, coordinator, address, callbacks)
        while (joined := member.wait(POLL_SECONDS)) is None:
            check_stop(callbacks.stop)
    except BaseException as error:
        member.close(str(error))
        raise
    return member, joined, dist.PrefixStore(address.token, store)


def _coordinate(place: RankPlace, lost_after: float) -> tuple[Coordinator, CoordinatorAddress]:
    """Rank 0: a coordinator that listens at a port of the system's choice."""
    own = "127.0.0.1" if place.is_inside else None
    listener, token = listen(own or address_to_listen_at(*place.master), 0), secrets.token_hex(16)
    addresses = (own,) if own else (place.master[0], *addresses_towards(place.master))
    coordinator = Coordinator(place.world_size, lost_after, listener, token)
    coordinator.start()
    return coordinator, CoordinatorAddress(
        socket.gethostname(), addresses, listener.getsockname()[1], token, lost_after
    )


def addresses_towards(master: tuple[str, int]) -> tuple[str, ...]:
    """Return the addresses of this host for those that reach `master`: its own address on the way there, and its
    name."""
    own = own_address(*master)
    return (*([own] if own else []), socket.gethostname())


def _find_coordinator(place: RankPlace, store: "dist.Store", callbacks: Callbacks) -> CoordinatorAddress:
    """Rank 0's answer to a word of this start, which no earlier start can have answered."""
    word = uuid.uuid4().hex

    def come() -> str:
        store.set(f"here/{place.rank}", word)
        return word

    served(place, come)
    begun = time.monotonic()
    while not served(place, lambda: (store.check([f"answer/{word}"]),))[0]:
        if time.monotonic() - begun > MEET_SECONDS:
            raise UserError(f"rank 0 did not come within {MEET_SECONDS:g} s")
        check_stop(callbacks.stop)
        time.sleep(2 * POLL_SECONDS)
    return CoordinatorAddress(*json.loads(store.get(f"answer/{word}")))


def _wait_for_all(
    place: RankPlace, store: "dist.Store", coordinator: Coordinator, address: CoordinatorAddress, callbacks: Callbacks
) -> None:
    """Rank 0: tell the others where the coordinator is, until all have come, or one knows that the run cannot begin."""
    begun, is_noted = time.monotonic(), False
    while missing := coordinator.missing:
        for rank in missing:
            if store.check([f"here/{rank}"]):
                store.set(f"answer/{store.get(f'here/{rank}').decode()}", json.dumps(astuple(address)))
        waited, size = time.monotonic() - begun, place.world_size
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        if coordinator.has_problem and waited > PROBLEM_SECONDS:
            coordinator.wait_no_longer()
            return
        if waited > MEET_SECONDS:
            raise UserError(f"of {size} ranks, {len(missing)} did not come within {MEET_SECONDS:g} s: {listed}")
        if waited > NOTE_SECONDS and not is_noted:
            is_noted = True
            callbacks.note(
                f"note: for {waited:.0f} s, {len(missing)} of {size} ranks have not come: {listed}; they look for "
                f"{address.host} at {place.master[0]}:{place.master[1]}"
            )
        check_stop(callbacks.stop)
        time.sleep(POLL_SECONDS)


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
    """Return the result of `ask`, a request to the store. torch waits without end for what listens there and does not
    answer."""
    import torch.distributed as dist

    try:
        answer, why = within(SERVED_SECONDS, ask), f"no answer for {SERVED_SECONDS:g} s"
    except dist.DistError as error:
        answer, why = None, str(error).splitlines()[0]
    if answer is None:
        host, port = place.master
        raise UserError(
            f"{host}:{port}, where the ranks meet, is gone, or something else listens there ({why}): is rank 0's host "
            "up, and are MASTER_ADDR and MASTER_PORT right?"
        )
    return answer


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
            sentence = (
                f"rank {place.rank} on {socket.gethostname()} cannot reach rank 0's host at {host}:{port} ({error})"
            )
        waited = time.monotonic() - begun
        if waited > longest:
            raise UserError(f"{sentence} for {waited:.0f} s: is it up, and are MASTER_ADDR and MASTER_PORT right?")
        if waited > NOTE_SECONDS and not is_noted:
            callbacks.note(f"note: {sentence} for {waited:.0f} s")
            is_noted = True
        check_stop(callbacks.stop)
        time.sleep(POLL_SECONDS * 5)


def check_stop(stop: "StopFlag") -> None:
    if stop.signum:
        raise Stopped(stop.signum, "stopped before all ranks had come; there was nothing to save")


def watch(
    run: Path, lost_after: float, place: RankPlace, stop: "StopFlag", terminal: int | None
) -> AbstractContextManager[Rendezvous]:
    """The ranks meet, and watch over one another while the block runs. A lost rank is told of on stderr and on
    `terminal`, a file, with the last checkpoint. run: the run's directory; lost_after: seconds of silence. Raises as
    `rendezvous`."""
    callbacks = Callbacks(partial(tell_lost, run, terminal), _end_lost, partial(_note, terminal), stop)
    return rendezvous(place, lost_after, callbacks)


def fail_together(place: RankPlace, problem: UserError) -> NoReturn:
    """The other ranks are told of `problem`, for which the run cannot begin. Raises UserError with what all have found,
    or SystemExit where another process of this host tells of it."""
    from dtrain.parallel.runtime import StopFlag

    stop = StopFlag()
    callbacks = Callbacks(lambda who: who, _end_lost, partial(_note, None), stop)
    with on_signals(stop.request):
        try:
            with rendezvous(place, TOLD_SECONDS, callbacks, str(problem)):
                pass
        except UserError:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once another process here has ended
            if place.local_rank == 0:
                raise
    sys.exit(1)


def tell_lost(run: Path, terminal: int | None, who: str) -> str:
    """`who` was lost, and what is saved: on the terminal, and returned for whoever tells on stderr."""
    text = lost_text(run, who)
    if terminal is not None:
        os.write(terminal, f"\ndtrain: {text}\n".encode())
    return text


def _end_lost(text: str) -> None:
    """The last of this process, whose main thread waits in a collective for a rank that is lost."""
    within(FILE_SECONDS, partial(os.write, 2, f"\ndtrain: {text}\n".encode()))
    os._exit(1)


def _note(terminal: int | None, text: str) -> None:
    os.write(2 if terminal is None else terminal, f"dtrain: {text}\n".encode())
