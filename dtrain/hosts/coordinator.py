"""Heartbeats between hosts: who is there, and still there, and which rank was lost.

torch does not tell: gloo waits half an hour for a host that fell silent, NCCL ten minutes, and neither says which it
was. Rank 0 runs the coordinator, every other rank holds one TCP connection to it. Each end writes a line every
`patience` ÷ 6 seconds, from a thread of its own, since the main thread may be deep in a collective:

    rank → coordinator   `TOKEN {join request}`, then `beat` again and again, at last `done` or `failed REASON`
    coordinator → rank   `TOKEN`, then `beat` again and again, `all {join response}` once all ranks have come, at last
                         `done` or `lost {ranks, text}`

A connection that ends without a last word is a process that died; one that is silent for `patience` seconds is a host
or a network that did. SETTLE_SECONDS after the first such sign the coordinator tells all ranks who it was, the dead
before those that failed in words, which may be the dead's doing. Silence is counted in looks of our own, not by the
clock: a job that was suspended as a whole finds everybody alive. Standard library only.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dtrain.addresses import is_loopback, plain
from dtrain.hosts.connection import LONGEST_PROBLEM, Connection, JoinRequest, read_request

MISSED_BEATS = 6  # beats that may be missed
SETTLE_SECONDS = 1.0  # seconds

OnLost = Callable[[str], None]


@dataclass(frozen=True)
class JoinResponse:
    """What all ranks know once they have come: the problems of all, in words; the attempt that this start is, by the
    rank that has counted the most; and the address at which other hosts reached the
    coordinator's (a loopback address where there is one host)."""

    problem: str | None
    attempt: int
    address: str


@dataclass(frozen=True)
class LostRanks:
    """Who was lost, and that in words."""

    ranks: tuple[int, ...]
    text: str


class Monitor:
    """This rank's end. `lost(text)` is called in the pulse's thread once another rank is lost, unless this rank's main
    thread is in `close` by then, which returns that text."""

    def __init__(self, me: JoinRequest, patience: float, on_lost: OnLost):
        self.rank, self.hosts, self.patience, self.on_lost = me.rank, {me.rank: me.host}, patience, on_lost
        self.all: JoinResponse | None = None  # once all have come
        self.lost: LostRanks | None = None
        self._ended = False
        self._have_come = threading.Event()
        self._lock = threading.Lock()
        self._last: str | None = None  # word of this rank
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="dtrain-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> JoinResponse | None:
        """Wait so long for all ranks to come."""
        self._have_come.wait(seconds)
        return self.all

    def close(self, failed: str | None = None) -> str | None:
        """This rank is done, or has `failed` for that reason; then this waits some seconds for what the coordinator
        says. Returns who else was lost, in words; None: nobody that is known of."""
        with self._lock:
            self._last = "done" if failed is None else f"failed {failed}"
        self._wake.send(b".")
        self._thread.join(SETTLE_SECONDS + 2)
        return self.lost.text if self.lost and self.rank not in self.lost.ranks else None

    def _run(self) -> None:
        step = self.patience / MISSED_BEATS
        look = time.monotonic() + step
        while not self._ended:
            for key, _ in self._selector.select(max(0.0, min(look, self._due()) - time.monotonic())):
                if key.fileobj is self._waker:
                    self._waker.recv(64)
                else:
                    self._hear(key)
            if time.monotonic() >= look:
                look = time.monotonic() + step
                self._look()
            self._act()

    def _decide(self, lost: LostRanks) -> None:
        """This rank knows who was lost. Its main thread tells, where it is in `close`; else this one does."""
        with self._lock:
            self.lost, is_closing = lost, self._last is not None
        if not is_closing:
            self.on_lost(lost.text)

    def _due(self) -> float:
        return float("inf")

    def _hear(self, key: selectors.SelectorKey) -> None:
        raise NotImplementedError

    def _look(self) -> None:
        raise NotImplementedError

    def _act(self) -> None:
        raise NotImplementedError


@dataclass
class _Peer:
    line: Connection
    address: str  # of ours, that it came to
    rank: int | None = None
    missed: int = 0
    is_done: bool = False


@dataclass
class _Failures:
    """What went wrong: silent and died ranks, and the reasons of those that failed in words, in order."""

    silent: set[int] = field(default_factory=set)
    died: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)


class Coordinator(Monitor):
    """Rank 0's end: hears all others, and tells them when all `size` ranks have come, and who is lost."""

    def __init__(
        self, me: JoinRequest, size: int, patience: float, on_lost: OnLost, listener: socket.socket, token: str
    ):
        super().__init__(me, patience, on_lost)
        self.size, self._listener, self._token = size, listener, token
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._peers: list[_Peer] = []
        self._requests, self._twice, self._waits = {0: me}, [], True
        self._signs, self._since = _Failures(), float("inf")

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.size) if rank not in self.hosts]

    @property
    def has_problem(self) -> bool:
        return bool(self._twice) or any(request.problem for request in list(self._requests.values()))

    def wait_no_longer(self) -> None:
        """Those that have come are all that will."""
        self._waits = False
        self._wake.send(b".")

    def _due(self) -> float:
        return self._since + SETTLE_SECONDS if self.lost is None else float("inf")

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            try:
                line = Connection(self._listener.accept()[0])
            except OSError:  # it has gone again
                return
            peer = _Peer(line, plain(line.link.getsockname()[0]))
            self._peers.append(peer)
            self._selector.register(line.link, selectors.EVENT_READ, peer)
            return
        peer = key.data
        for text in peer.line.read():
            peer.missed = 0
            word, _, rest = text.partition(" ")
            if peer.rank is None:
                request = read_request(rest) if word == self._token else None
                if request is None or not self._admit(request):
                    peer.line.is_open = False
                    break
                peer.rank = request.rank
                peer.line.write(self._token)
            elif word == "failed":
                self._signs.failed.setdefault(peer.rank, rest[:1000])
                peer.is_done = True
            elif word == "done":
                peer.is_done = True
        if not peer.line.is_open:
            self._selector.unregister(peer.line.link)
            peer.line.link.close()
            self._peers.remove(peer)
            if peer.rank is not None and not peer.is_done:
                self._signs.died.add(peer.rank)

    def _admit(self, request: JoinRequest) -> bool:
        if not 0 < request.rank < self.size:
            return False
        if request.rank in self._requests:
            first = self._requests[request.rank].host
            self._twice.append(f"two processes came as rank {request.rank}, from {first} and from {request.host}")
            return False
        self._requests[request.rank] = request
        self.hosts[request.rank] = request.host
        return True

    def _tell_all(self) -> None:
        """All have come."""
        outside = [peer.address for peer in self._peers if not is_loopback(peer.address)]
        problem = "\n".join([*self._twice, *_problems(self._requests)])
        attempt = max(request.attempt for request in self._requests.values())
        self.all = JoinResponse(problem or None, attempt, outside[0] if outside else "127.0.0.1")
        for peer in self._peers:
            peer.line.write(f"all {json.dumps([problem[:LONGEST_PROBLEM], attempt, self.all.address])}")
        self._have_come.set()

    def _look(self) -> None:
        for peer in self._peers:
            peer.line.write("beat")
            peer.missed += 1
        silent = {peer.rank for peer in self._peers if peer.missed >= MISSED_BEATS and not peer.is_done}
        self._signs.silent |= silent - {None}

    def _act(self) -> None:
        signs = self._signs
        if self.all is None and (not self.missing or not self._waits):
            self._tell_all()
        if self._last is not None and self._last.startswith("failed "):
            signs.failed.setdefault(0, self._last.removeprefix("failed ")[:1000])
        if (signs.silent or signs.died or signs.failed) and self._since == float("inf"):
            self._since = time.monotonic()
        if time.monotonic() >= self._due():
            if signs.silent:  # those of the same host began to be silent at about the same time
                signs.silent |= {p.rank for p in self._peers if p.missed >= MISSED_BEATS - 1 and not p.is_done} - {None}
            lost = _lost_ranks(signs, self.hosts, self.patience)
            for peer in self._peers:
                peer.line.write(f"lost {json.dumps([lost.ranks, lost.text])}")
            self._decide(lost)
        if self._last is not None and (self._since == float("inf") or self.lost is not None):
            for peer in self._peers:
                if self.lost is None:
                    peer.line.write("done")
            self._ended = True
            self._listener.close()


class Member(Monitor):
    """Another rank's end."""

    def __init__(self, me: JoinRequest, host: str, patience: float, on_lost: OnLost, link: socket.socket):
        super().__init__(me, patience, on_lost)
        self.hosts[0] = host
        self.address = plain(link.getsockname()[0])  # of this host, on the way to the coordinator
        self._line, self._missed, self._is_released, self._has_spoken = Connection(link), 0, False, False
        self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, key: selectors.SelectorKey) -> None:
        for text in self._line.read():
            self._missed = 0
            word, _, rest = text.partition(" ")
            if word == "lost" and self.lost is None:
                ranks, said = json.loads(rest)
                self._decide(LostRanks(tuple(ranks), said))
            elif word == "all":
                problem, attempt, address = json.loads(rest)
                self.all = JoinResponse(problem or None, attempt, address)
                self._have_come.set()
            elif word == "done":
                self._is_released = True
        if not self._line.is_open:
            self._selector.unregister(self._line.link)
            self._end("ended without a word")

    def _look(self) -> None:
        self._line.write("beat")
        self._missed += 1
        if self._missed >= MISSED_BEATS:
            self._end(_silence(self.patience))

    def _end(self, why: str) -> None:
        """The coordinator is gone."""
        if not self._is_released and self.lost is None:
            self._decide(LostRanks((0,), f"{_named({0}, self.hosts)} is lost: {why}"))
        self._ended = True

    def _act(self) -> None:
        if self._last is None or self._has_spoken:
            if self.lost is not None:
                self._ended = True
            return
        self._has_spoken = True
        self._line.write(self._last)
        if self._last == "done" or self.lost is not None:
            self._ended = True


def _problems(requests: Mapping[int, JoinRequest]) -> list[str]:
    """Each problem once, with the ranks that have it where others have not."""
    having: dict[str, set[int]] = {}
    for rank, request in sorted(requests.items()):
        if request.problem:
            having.setdefault(request.problem, set()).add(rank)
    hosts = {rank: request.host for rank, request in requests.items()}
    return [
        problem if ranks == requests.keys() else f"{_named(ranks, hosts)}: {problem}"
        for problem, ranks in having.items()
    ]


def _lost_ranks(signs: _Failures, hosts: Mapping[int, str], patience: float) -> LostRanks:
    said, gone = [], signs.died | signs.silent
    for ranks, why in ((signs.died, "ended without a word"), (signs.silent - signs.died, _silence(patience))):
        if ranks:
            said.append(f"{_named(ranks, hosts)} {'is' if len(ranks) == 1 else 'are'} lost: {why}")
    if not gone:
        rank, reason = next(iter(signs.failed.items()))
        return LostRanks((rank,), f"{_named({rank}, hosts)} failed: {reason}")
    return LostRanks(tuple(sorted(gone)), "; ".join(said))


def _silence(patience: float) -> str:
    return f"no sign of life for {patience:g} s (launch.lost_after)"


def _named(ranks: set[int], hosts: Mapping[int, str]) -> str:
    """`rank 3 on b`, `ranks 2, 3 on b and rank 5 on c`."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} on {host}" for host, of in by_host.items()]
    return " and ".join(named)
