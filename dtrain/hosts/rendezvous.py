"""The ranks of a start meet, and watch over one another from then on."""

import json
import resource
import secrets
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.addresses import address_to_listen_at, interface_of, is_loopback, listen
from dtrain.errors import Stopped, Unavailable, UserError
from dtrain.hosts import connection
from dtrain.hosts.coordinator import Coordinator, Member, OnLost
from dtrain.hosts.store import (
    NOTE_SECONDS,
    PATIENCE,
    POLL_SECONDS,
    Callbacks,
    Responses,
    check_stop,
    did_not_come,
    listed,
    open_store,
    served,
)
from dtrain.launch.place import RankPlace
from dtrain.launch.rank import GLOO

if TYPE_CHECKING:
    import torch.distributed as dist

PROBLEM_SECONDS = 60.0  # for the others to come where one that has come knows that the run cannot begin
FILES = 65536


@dataclass(frozen=True)
class Rendezvous:
    """What the ranks of one start have once they have met: a store that no other start wrote to, and the attempt that
    it is, by the rank that has counted the most."""

    store: "dist.Store"
    attempt: int = 0


@contextmanager
def rendezvous(
    place: RankPlace, patience: float, callbacks: Callbacks, problem: str | None = None
) -> Iterator[Rendezvous]:
    """Meet, and watch while the block runs: where a rank is lost, from when it has come on, `end(tell(who and why))` is
    called in a thread, at the latest `patience` + 1 seconds after its last sign of life (rank 0's patience counts); or,
    where this rank failed because of it, Unavailable is raised with what `tell` returned. Collective, by sockets alone:
    no process group is up yet.

    Once all have come, the `problem` of any is a UserError on every one. Raises UserError too where ranks do not come
    within PATIENCE, and Stopped where this process is asked to end meanwhile. The interface that leads to the others is
    named to gloo, which takes the one of the host's name, and that may be a loopback.
    """

    def lost(who: str) -> None:
        callbacks.end(callbacks.tell(who))

    _allow_files()
    me = connection.JoinRequest(place.rank, socket.gethostname(), place.attempt, problem)
    if place.rank == 0:
        monitor, token, store = _coordinate(place, me, patience, lost, callbacks)
    else:
        try:
            monitor, token, store = _join(place, me, lost, callbacks)
        except UserError as error:  # rank 0 knows nothing of it
            callbacks.note(str(error))
            raise
    together = monitor.all
    if together.problem:
        monitor.close()
        raise UserError(together.problem)
    if GLOO not in place.environ:
        address = monitor.address if place.rank and not is_loopback(monitor.address) else together.address
        if name := interface_of(address):
            place.environ[GLOO] = name
    try:
        import torch.distributed as dist

        yield Rendezvous(dist.PrefixStore(token, store), together.attempt)
    except Stopped:
        monitor.close()
        raise
    except UserError as error:
        monitor.close(failed=str(error))
        raise
    except BaseException as error:  # a lost rank shows as whatever the collective library makes of it
        lines = str(error).strip().splitlines()
        who = monitor.close(failed=f"{type(error).__name__}: {lines[0] if lines else ''}")
        if who is None:
            raise
        raise Unavailable(callbacks.tell(who)) from error
    monitor.close()


def _allow_files() -> None:
    """Connections to every other rank, of which gloo holds one per group, are more than systems allow at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _coordinate(
    place: RankPlace, me: connection.JoinRequest, patience: float, on_lost: OnLost, callbacks: Callbacks
) -> tuple[Coordinator, str, "dist.Store"]:
    """Rank 0: the coordinator, once all have come, the token of this start, and the store where the ranks meet."""
    store = open_store(place, callbacks)
    own = "127.0.0.1" if place.is_inside else None
    listener, token = listen(own or address_to_listen_at(*place.master), 0), secrets.token_hex(16)
    addresses = (own,) if own else (place.master[0], *connection.addresses(place.master))
    coordinator = Coordinator(me, place.world_size, patience, on_lost, listener, token)
    coordinator.start()
    answers = Responses(store, json.dumps([me.host, addresses, listener.getsockname()[1], token, patience]))
    begun, is_noted = time.monotonic(), False
    try:
        while coordinator.wait(POLL_SECONDS) is None:
            missing, waited = coordinator.missing, time.monotonic() - begun
            answers.give(missing)
            if coordinator.has_problem and waited > PROBLEM_SECONDS:
                coordinator.wait_no_longer()
            elif waited > PATIENCE.total_seconds():
                raise did_not_come(place.world_size, missing, PATIENCE)
            elif waited > NOTE_SECONDS and not is_noted:
                is_noted = True
                callbacks.note(
                    f"note: for {waited:.0f} s, {len(missing)} of {place.world_size} ranks have not come: "
                    f"{listed(missing)}; they look for {me.host} at {place.master[0]}:{place.master[1]}"
                )
            check_stop(callbacks.stop)
    except BaseException as error:
        coordinator.close(failed=str(error))
        raise
    return coordinator, token, store


def _join(
    place: RankPlace, me: connection.JoinRequest, on_lost: OnLost, callbacks: Callbacks
) -> tuple[Member, str, "dist.Store"]:
    """Another rank: its connection to the coordinator, once all have come, and as `_coordinate`."""
    store = open_store(place, callbacks)
    word = uuid.uuid4().hex
    served(place, lambda: store.set(f"here/{place.rank}", word) or word)
    begun = time.monotonic()
    while not served(place, lambda: (store.check([f"answer/{word}"]),))[0]:
        if time.monotonic() - begun > PATIENCE.total_seconds():
            raise UserError(f"rank 0 did not come within {PATIENCE.total_seconds():g} s")
        check_stop(callbacks.stop)
        time.sleep(2 * POLL_SECONDS)
    meeting = connection.CoordinatorAddress(*json.loads(store.get(f"answer/{word}")))
    link = connection.connect(meeting, me)
    if link is None:
        raise UserError(
            f"rank {me.rank} on {me.host} reaches {meeting.host} at port {place.master[1]} but not at port "
            f"{meeting.port}: ranks talk over ports that their systems pick, which no firewall may close between hosts"
        )
    member = Member(me, meeting.host, meeting.patience, on_lost, link)
    member.start()
    try:
        while member.wait(POLL_SECONDS) is None:
            check_stop(callbacks.stop)
    except Stopped as error:
        member.close(failed=str(error))
        raise
    return member, meeting.token, store
