"""The meeting of ranks that torchrun, SLURM or a job of pods started: a store, and what no rank can begin without.

Each rank brings the problem that it found, if any, so that a mistake on one host is shown on all of them instead of
leaving the others to wait. No process group is up yet. torch's store is all that is used:

    arrived/3    a word that only this start of rank 3 knows         under torchrun one store outlives restarts:
    token/WORD   rank 0's answer, the prefix of all keys below       answers to words keep starts apart
    entry/3      rank 3's host, number of restarts and problem
    outcome      all problems, and the largest number of restarts

Later the first rank that fails writes its reason under `failure`, so that the others name it instead of their lost
connections.
"""

import json
import os
import resource
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn, TypeVar

import torch.distributed as dist

from dtrain.base.addresses import address_to_listen_at, interface_of, is_loopback, listen, loopback, own_address
from dtrain.base.errors import Stopped, StoppedAtStart, Unavailable, UserError, first_line
from dtrain.launch.place import GLOO, NCCL, RankPlace
from dtrain.launch.reports import Report, newest_checkpoint
from dtrain.launch.signals import on_signals
from dtrain.parallel.runtime import StopFlag
from dtrain.recipe import Recipe

T = TypeVar("T")

MEET_SECONDS = 600.0  # for the others to come
PROBLEM_SECONDS = 60.0  # for the others to come, if this rank knows that the run cannot begin
NOTE_SECONDS = 60.0  # until a note says who is waited for
POLL_SECONDS = 0.1
CLAIM_SECONDS = 1.0  # by which a consequence comes after its cause
STORE_SECONDS = 3.0  # for the store to answer, once a rank is lost
ELSEWHERE = ("192.0.2.1", 9)  # an address that nobody has (RFC 5737), to find the route that leads out
FILES = 65536


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met. store: no other start wrote to it. attempt: how often any rank was started again."""

    store: dist.Store
    attempt: int = 0


def meet(place: RankPlace, stop: StopFlag, problem: str | None = None) -> Meeting:
    """Wait for the other ranks. Collective over all ranks, through the store.

    Args:
        problem: Why the run cannot begin, as far as this rank knows.

    Raises:
        UserError: On every rank, if any has a problem; and if the ranks do not find each other.
        StoppedAtStart: If a signal came meanwhile.
    """
    host, port = place.master
    seconds = MEET_SECONDS if problem is None else PROBLEM_SECONDS
    try:
        return _interruptible(partial(_meet, place, problem, seconds), stop, seconds, f"{host}:{port}")
    except (dist.DistError, TimeoutError) as error:
        if problem is not None:
            raise UserError(problem) from error
        raise UserError(
            f"rank {place.rank} on {socket.gethostname()} did not meet the other {place.world_size - 1} ranks at "
            f"{host}:{port}, rank 0's host ({first_line(error)}). Are all hosts up, and are MASTER_ADDR and "
            "MASTER_PORT right?"
        ) from error


def raise_on_all_ranks(place: RankPlace, problem: UserError) -> NoReturn:
    """Raise UserError with the problems of all ranks. One process of each host shows it, the others exit."""
    stop = StopFlag()
    try:
        with on_signals(stop.request):
            meet(place, stop, str(problem))
    except UserError as error:
        Report.of(error, place.rank, None).write(place.environ)
        if place.local_rank == 0:
            raise
    sys.exit(1)


def _interruptible(act: Callable[[], T], stop: StopFlag, seconds: float, where: str) -> T:
    """Return the result of `act`, which waits inside torch, where no Python handler for signals runs."""
    began, is_noted = time.monotonic(), False
    result = _in_thread(act)
    while not wait([result], POLL_SECONDS).done:
        waited = time.monotonic() - began
        if stop.signum:
            raise StoppedAtStart(stop.signum)
        if waited > seconds + PROBLEM_SECONDS:  # torch waits without end for a server that does not answer
            raise TimeoutError(f"no answer for {waited:.0f} s")
        if waited > NOTE_SECONDS and not is_noted:
            print(f"dtrain: note: waiting for other ranks at {where} for {waited:.0f} s", file=sys.stderr)
            is_noted = True
    return result.result()


def _in_thread(act: Callable[[], T]) -> Future[T]:
    """Call `act` in a daemon thread, which does not hold the process back."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # raised where the result is read
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def _meet(place: RankPlace, problem: str | None, seconds: float) -> Meeting:
    store = _open_store(place, seconds)
    store = dist.PrefixStore(_token(place, store, seconds), store)
    entry = {"host": socket.gethostname(), "attempt": place.attempt, "problem": problem}
    store.set(f"entry/{place.rank}", json.dumps(entry))
    if place.rank == 0:
        entries = [json.loads(store.get(f"entry/{rank}")) for rank in range(place.world_size)]
        attempt = max(entry["attempt"] for entry in entries)
        store.set("outcome", json.dumps({"attempt": attempt, "problem": _problems(entries)}))
    outcome = json.loads(store.get("outcome"))
    # Rank 0 may serve the store: it leaves only once all ranks have read the outcome.
    store.set(f"read/{place.rank}", "")
    if place.rank == 0:
        store.wait([f"read/{rank}" for rank in range(place.world_size)])
    if outcome["problem"]:
        raise UserError(outcome["problem"])
    store.set_timeout(dist.default_pg_timeout)
    return Meeting(store, outcome["attempt"])


def _open_store(place: RankPlace, seconds: float) -> dist.Store:
    host, port = place.master
    timeout = timedelta(seconds=seconds)
    if place.rank > 0 or place.agent_store:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    # Left to itself, torch would listen at all addresses of this host.
    address = address_to_listen_at(host, port)
    try:
        listener = listen(address, port)
    except OSError as error:
        raise UserError(
            f"port {port} of {socket.gethostname()}, where the ranks meet: {error.strerror}. Set MASTER_PORT to a free "
            "port, the same for every rank"
        ) from error
    return dist.TCPStore(
        address or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _token(place: RankPlace, store: dist.Store, seconds: float) -> str:
    """Return a prefix that all ranks of this start agree on, and that no earlier start has used.

    torchrun's agent may keep one store over restarts, and its count of restarts may differ between nodes. A word that
    an earlier start left is answered in vain; rank 0 goes on until the ranks of this start have confirmed.
    """
    word = uuid.uuid4().hex
    if place.rank > 0:
        store.set(f"arrived/{place.rank}", word)
        token = store.get(f"token/{word}").decode()
        store.set(f"{token}/{place.rank}", "")
        return token
    missing = set(range(1, place.world_size))
    began = time.monotonic()
    while missing:
        for rank in sorted(missing):
            if store.check([f"arrived/{rank}"]):
                store.set(f"token/{store.get(f'arrived/{rank}').decode()}", word)
            if store.check([f"{word}/{rank}"]):
                missing.remove(rank)
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"ranks {', '.join(map(str, sorted(missing)[:8]))} did not come")
        time.sleep(POLL_SECONDS)
    return word


def _problems(entries: list[dict]) -> str:
    """Return each problem once, with the ranks that have it unless all do. entries: by rank."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, entry in enumerate(entries):
        if entry["problem"]:
            ranks.setdefault((entry["problem"], entry["host"]), []).append(rank)
    texts = {entry["problem"] for entry in entries}
    if len(texts) == 1:
        return entries[0]["problem"] or ""
    lines = []
    for (problem, host), having in ranks.items():
        named = f"rank{'s' if len(having) > 1 else ''} {', '.join(map(str, having))} on {host}"
        lines.append(f"{named}: {problem}")
    return "\n".join(lines)


@contextmanager
def named_interface(place: RankPlace, *, nccl: bool) -> Iterator[None]:
    """Name the network interface of gloo for the time of the block, and of NCCL with `nccl` on one host.

    Ranks of one host use the loopback interface. For several hosts gloo by itself takes the interface of the host's own
    name, which may be a loopback; it is told the one that leads to rank 0. The user's own choice counts.
    """
    named: dict[str, str] = {}
    if place.is_one_host:
        interface = loopback()
        if interface:
            named[GLOO] = interface
            if nccl:
                named[NCCL] = f"={interface}"
    else:
        interface = _interface_to(*place.master)
        if interface:
            named[GLOO] = interface
    environ: MutableMapping[str, str] = place.environ
    missing = {key: value for key, value in named.items() if key not in environ}
    environ.update(missing)
    try:
        yield
    finally:  # a process may run another recipe, or start processes that reach other hosts
        for key in missing:
            environ.pop(key, None)


def _interface_to(host: str, port: int) -> str | None:
    address = own_address(host, port)
    if address is not None and is_loopback(address) and "localhost" not in host and not host.startswith("127."):
        # This host's own name: Debian gives it a loopback address, and the others know it by another one.
        address = own_address(*ELSEWHERE)
    return None if address is None else interface_of(address)


def allow_open_files() -> None:
    """Raise the limit of open files: gloo holds a connection to every other rank in each group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


@contextmanager
def one_failure_shown(place: RankPlace, store: dist.Store, recipe: Recipe, terminal: int | None) -> Iterator[None]:
    """Show the failure that came first, of all hosts, with its rank and host, once on each host.

    If a rank fails in the block, the others lose their connections to it. They raise Unavailable with the reason of the
    first one, which they find in the store.

    Args:
        terminal: On one process of each host, the stderr that it was started with; None if it still has that.
    """
    try:
        yield
    except (Stopped, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        report = Report.of(error, place.rank, recipe)
        lost = _lost_connection(error)
        mine = f"rank {place.rank} on {report.host} failed: {report.reason}"
        if lost is not None:
            mine = f"rank {place.rank} on {report.host} lost another rank: {lost}"
        first = _first_failure(store, mine, _claim_delay(place, error, lost))
        told = f"{first}. {newest_checkpoint(recipe.run.directory)}"
        if terminal is not None:
            os.write(terminal, f"dtrain: {told}\n".encode())
        if place.rank == 0 and not place.agent_store:
            time.sleep(STORE_SECONDS)  # the others read the reason from the store, which ends with this process
        if first != mine or lost is not None:
            raise Unavailable(told) from error
        raise


def _lost_connection(error: BaseException) -> str | None:
    """Return what torch says of a connection to another rank that has broken, or None for any other error."""
    text = first_line(error)
    if isinstance(error, dist.DistError):
        return text
    if isinstance(error, RuntimeError) and "gloo/transport" in text:  # the source file that gloo names first
        return text.partition("] ")[2].partition(". This is typically")[0]
    return None


def _claim_delay(place: RankPlace, error: BaseException, lost: str | None) -> float:
    """Return the seconds after which a rank claims that it failed first, so that causes come before consequences."""
    if place.rank == 0 and isinstance(error, UserError):
        return 0.0  # all ranks may have found the same mistake: rank 0 shows it
    return CLAIM_SECONDS if lost is None else 2 * CLAIM_SECONDS


def _first_failure(store: dist.Store, mine: str, delay: float) -> str:
    """Return the failure that the ranks agree on: `mine`, if no other rank has written one after `delay` seconds."""
    time.sleep(delay)
    claim = _in_thread(partial(store.compare_set, "failure", "", mine))
    with suppress(dist.DistError, RuntimeError):  # the store is gone if its host is the one that failed
        if wait([claim], STORE_SECONDS).done:
            return claim.result().decode()
    return mine
