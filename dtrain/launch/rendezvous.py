"""The rendezvous of ranks that torchrun, SLURM or a job of pods started, before any process group exists.

Each rank reports the problem that it found, if any, so that a mistake on one host is shown on all of them, and the
others do not wait. The ranks communicate through torch's key-value store:

    arrived/3    a random word of rank 3, new in each start
    token/WORD   rank 0's reply to the rank with this word: the prefix of all keys below
    entry/3      rank 3's host, number of restarts and problem
    outcome      all problems, and the largest number of restarts

The words are needed because torchrun keeps one store over restarts: a reply to an old word is ignored.

Later the first rank that fails writes its reason to the key `failure`, so that the other ranks can report it instead of
their lost connections.
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

from dtrain.base.addresses import (
    choose_listen_address,
    find_interface,
    find_loopback_interface,
    is_loopback,
    listen,
    local_address_towards,
)
from dtrain.base.errors import ServiceUnavailable, Stopped, StoppedAtStart, UserError, first_line
from dtrain.launch.exits import Report, newest_checkpoint, on_stop_signals
from dtrain.launch.rank_info import GLOO, NCCL, RankInfo
from dtrain.parallel.mesh import StopFlag
from dtrain.recipe import Recipe

T = TypeVar("T")

MEET_SECONDS = 600.0  # timeout for the other ranks to arrive
PROBLEM_SECONDS = 60.0  # shorter timeout for a rank that already knows that the run cannot begin
NOTE_SECONDS = 60.0  # after this time a note says that the rank waits
POLL_SECONDS = 0.1
CLAIM_SECONDS = 1.0  # delay before a rank claims that it failed first, so that causes come before consequences
STORE_SECONDS = 3.0  # timeout of the store once a rank is lost
UNUSED_ADDRESS = ("192.0.2.1", 9)  # reserved by RFC 5737: no packet is sent, only the outgoing route is looked up
MAX_OPEN_FILES = 65536


@dataclass(frozen=True)
class RendezvousResult:
    """The result of `join_rendezvous`.

    Attributes:
        store: A store to which only the ranks of this start write.
        attempt: The largest number of restarts that any rank reports.
    """

    store: dist.Store
    attempt: int = 0


def join_rendezvous(rank_info: RankInfo, stop: StopFlag, problem: str | None = None) -> RendezvousResult:
    """Wait for the other ranks.

    Args:
        rank_info: This rank.
        stop: Set by a stop signal.
        problem: A reason why the run cannot begin. None if this rank knows of none.

    Returns:
        The store of this start, and the number of restarts.

    Raises:
        UserError: On every rank, if any rank has a problem, or if the ranks do not find each other.
        StoppedAtStart: If a stop signal arrived meanwhile.

    Collectives:
        Through the store, over all ranks.
    """
    host, port = rank_info.master
    seconds = MEET_SECONDS if problem is None else PROBLEM_SECONDS
    try:
        return _run_interruptibly(
            partial(_exchange_entries, rank_info, problem, seconds), stop, seconds, f"{host}:{port}"
        )
    except (dist.DistError, TimeoutError) as error:
        if problem is not None:
            raise UserError(problem) from error
        raise UserError(
            f"rank {rank_info.rank} on {socket.gethostname()} did not meet the other {rank_info.world_size - 1} ranks "
            f"at {host}:{port}, rank 0's host ({first_line(error)}). Are all hosts up, and are MASTER_ADDR and "
            "MASTER_PORT right?"
        ) from error


def raise_on_all_ranks(rank_info: RankInfo, problem: UserError) -> NoReturn:
    """Raise UserError with the problems of all ranks. One process of each host shows it, the others exit."""
    stop = StopFlag()
    try:
        with on_stop_signals(stop.request):
            join_rendezvous(rank_info, stop, str(problem))
    except UserError as error:
        Report.of(error, rank_info.rank, None).write(rank_info.environ)
        if rank_info.local_rank == 0:
            raise
    sys.exit(1)


def _run_interruptibly(function: Callable[[], T], stop: StopFlag, seconds: float, where: str) -> T:
    """Run `function` in a thread, and raise StoppedAtStart if a stop signal arrives before it ends.

    The function waits inside torch, where Python's signal handlers do not run. In a thread of its own it does not block
    the main thread, which handles signals.

    Args:
        function: The function.
        stop: Set by a stop signal.
        seconds: Time after which the function itself gives up.
        where: Address of the store, for a note.
    """
    began = time.monotonic()
    is_noted = False
    result = _in_thread(function)
    while not wait([result], POLL_SECONDS).done:
        waited = time.monotonic() - began
        if stop.signum:
            raise StoppedAtStart(stop.signum)
        if waited > seconds + PROBLEM_SECONDS:  # torch has no timeout for a server that accepts and does not reply
            raise TimeoutError(f"no answer for {waited:.0f} s")
        if waited > NOTE_SECONDS and not is_noted:
            print(f"dtrain: note: waiting for other ranks at {where} for {waited:.0f} s", file=sys.stderr)
            is_noted = True
    return result.result()


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Call `function` in a daemon thread, which does not keep the process alive."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised where the result is read
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def _exchange_entries(rank_info: RankInfo, problem: str | None, seconds: float) -> RendezvousResult:
    """Exchange entries through the store.

    Collectives:
        Through the store: every rank writes its entry and reads the outcome. Rank 0 reads all entries and writes the
        outcome.
    """
    store = _open_store(rank_info, seconds)
    store = dist.PrefixStore(_token(rank_info, store, seconds), store)
    entry = {"host": socket.gethostname(), "attempt": rank_info.attempt, "problem": problem}
    store.set(f"entry/{rank_info.rank}", json.dumps(entry))
    if rank_info.rank == 0:
        entries = [json.loads(store.get(f"entry/{rank}")) for rank in range(rank_info.world_size)]
        attempt = max(entry["attempt"] for entry in entries)
        store.set("outcome", json.dumps({"attempt": attempt, "problem": _problems(entries)}))
    outcome = json.loads(store.get("outcome"))
    # Rank 0 may serve the store: it leaves only once all ranks have read the outcome.
    store.set(f"read/{rank_info.rank}", "")
    if rank_info.rank == 0:
        store.wait([f"read/{rank}" for rank in range(rank_info.world_size)])
    if outcome["problem"]:
        raise UserError(outcome["problem"])
    store.set_timeout(dist.default_pg_timeout)
    return RendezvousResult(store, outcome["attempt"])


def _open_store(rank_info: RankInfo, seconds: float) -> dist.Store:
    """Connect to the store of torchrun's agent, or to one that rank 0 serves."""
    host, port = rank_info.master
    timeout = timedelta(seconds=seconds)
    if rank_info.rank > 0 or rank_info.agent_store:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    # By default torch would listen at all addresses of this host.
    address = choose_listen_address(host, port)
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


def _token(rank_info: RankInfo, store: dist.Store, seconds: float) -> str:
    """Return a prefix that all ranks of this start agree on, and that no earlier start has used.

    torchrun's agent may keep one store over restarts, and its count of restarts may differ between nodes. So rank 0
    replies to whatever word it finds under `arrived/3`. If the word is from an earlier start, nobody reads the reply.
    Rank 3 of this start overwrites it with its own word, and rank 0 repeats until every rank has confirmed its token.
    """
    word = uuid.uuid4().hex
    if rank_info.rank > 0:
        store.set(f"arrived/{rank_info.rank}", word)
        token = store.get(f"token/{word}").decode()  # waits for rank 0
        store.set(f"{token}/{rank_info.rank}", "")  # the confirmation
        return token
    token = word
    missing = set(range(1, rank_info.world_size))
    began = time.monotonic()
    while missing:
        for rank in sorted(missing):
            if store.check([f"arrived/{rank}"]):
                arrived_word = store.get(f"arrived/{rank}").decode()
                store.set(f"token/{arrived_word}", token)
            if store.check([f"{token}/{rank}"]):
                missing.remove(rank)
        if time.monotonic() - began > seconds:
            first_missing = ", ".join(str(rank) for rank in sorted(missing)[:8])
            raise TimeoutError(f"ranks {first_missing} did not arrive")
        time.sleep(POLL_SECONDS)
    return token


def _problems(entries: list[dict]) -> str:
    """Return each problem once, with the ranks that have it unless all ranks do.

    For example: "ranks 0, 1 on node-a: the problem".

    Args:
        entries: The entries of all ranks, by rank.
    """
    different_problems = {entry["problem"] for entry in entries}
    if len(different_problems) == 1:
        return entries[0]["problem"] or ""
    ranks_by_problem: dict[tuple[str, str], list[int]] = {}
    for rank, entry in enumerate(entries):
        if entry["problem"]:
            ranks_by_problem.setdefault((entry["problem"], entry["host"]), []).append(rank)
    lines = []
    for (problem, host), ranks in ranks_by_problem.items():
        word = "rank" if len(ranks) == 1 else "ranks"
        numbers = ", ".join(str(rank) for rank in ranks)
        lines.append(f"{word} {numbers} on {host}: {problem}")
    return "\n".join(lines)


@contextmanager
def network_interface_set(rank_info: RankInfo, *, nccl: bool) -> Iterator[None]:
    """Set the environment variables that name the network interface of gloo and NCCL, and unset them at the end.

    Ranks of one host use the loopback interface. On several hosts gloo would choose the interface of the host's own
    name, which may be the loopback. So it gets the interface that leads to rank 0. Variables that the user has set are
    not changed.

    Args:
        rank_info: This rank, with its environment.
        nccl: Whether NCCL should use the loopback interface too, if all ranks are on one host.
    """
    chosen: dict[str, str] = {}
    if rank_info.is_single_host:
        interface = find_loopback_interface()
        if interface:
            chosen[GLOO] = interface
            if nccl:
                chosen[NCCL] = f"={interface}"
    else:
        interface = _interface_to(*rank_info.master)
        if interface:
            chosen[GLOO] = interface
    environ: MutableMapping[str, str] = rank_info.environ
    missing = {key: value for key, value in chosen.items() if key not in environ}
    environ.update(missing)
    try:
        yield
    finally:  # a process may run another recipe, or start processes that reach other hosts
        for key in missing:
            environ.pop(key, None)


def _interface_to(host: str, port: int) -> str | None:
    """Return the network interface that leads to rank 0's host, or None if it is not known."""
    address = local_address_towards(host, port)
    if address is not None and is_loopback(address) and "localhost" not in host and not host.startswith("127."):
        # `host` is this host's own name. Debian gives it a loopback address, which other hosts cannot reach.
        address = local_address_towards(*UNUSED_ADDRESS)
    return None if address is None else find_interface(address)


def allow_open_files() -> None:
    """Raise the limit of open files, because gloo has a connection to every other rank in each group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


@contextmanager
def first_failure_reported(
    rank_info: RankInfo, store: dist.Store, recipe: Recipe, terminal: int | None
) -> Iterator[None]:
    """Show the first failure of all ranks once on each host, with its rank and host.

    If a rank fails inside the block, the other ranks lose their connections to it. They raise ServiceUnavailable with
    the reason of the first failure, which they read from the store.

    Args:
        rank_info: This rank.
        store: The store of the rendezvous.
        recipe: The recipe, for its secrets and the run's directory.
        terminal: On one process of each host whose stderr goes to a log, a descriptor of its former stderr.
    """
    try:
        yield
    except (Stopped, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        report = Report.of(error, rank_info.rank, recipe)
        connection_error = _find_connection_error(error)
        rank_failure = f"rank {rank_info.rank} on {report.host} failed: {report.reason}"
        if connection_error is not None:
            rank_failure = f"rank {rank_info.rank} on {report.host} lost another rank: {connection_error}"
        failure = _first_failure(store, rank_failure, _claim_delay(rank_info, error, connection_error))
        message = f"{failure}. {newest_checkpoint(recipe.run.directory)}"
        if terminal is not None:
            os.write(terminal, f"dtrain: {message}\n".encode())
        if rank_info.rank == 0 and not rank_info.agent_store:
            time.sleep(STORE_SECONDS)  # the others read the reason from the store, which ends with this process
        if failure != rank_failure or connection_error is not None:
            raise ServiceUnavailable(message) from error
        raise


def _find_connection_error(error: BaseException) -> str | None:
    """Return torch's message about a broken connection to another rank, or None for any other error."""
    text = first_line(error)
    if isinstance(error, dist.DistError):
        return text
    if isinstance(error, RuntimeError) and "gloo/transport" in text:  # the source file that gloo names first
        return text.partition("] ")[2].partition(". This is typically")[0]
    return None


def _claim_delay(rank_info: RankInfo, error: BaseException, connection_error: str | None) -> float:
    """Return the delay in seconds before a rank claims that it failed first.

    A lost connection is a consequence, so its claim comes later than other claims.
    """
    if rank_info.rank == 0 and isinstance(error, UserError):
        return 0.0  # all ranks may have found the same mistake: rank 0 shows it
    return CLAIM_SECONDS if connection_error is None else 2 * CLAIM_SECONDS


def _first_failure(store: dist.Store, rank_failure: str, delay: float) -> str:
    """Write `rank_failure` to the store if no rank has written a failure yet. Return the failure that is stored.

    Args:
        store: The store of the rendezvous.
        rank_failure: Description of this rank's failure. It is returned if the store is not reachable any more.
        delay: Seconds to wait before writing.
    """
    time.sleep(delay)
    # compare_set with "" as the expected value writes only if the key does not exist, and returns the stored value.
    claim = _in_thread(partial(store.compare_set, "failure", "", rank_failure))
    with suppress(dist.DistError, RuntimeError):  # the store is gone if its host is the one that failed
        if wait([claim], STORE_SECONDS).done:
            return claim.result().decode()
    return rank_failure
