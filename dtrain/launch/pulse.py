"""Who is there, and still there: the ranks of a run on several hosts come to a hub, tell one another that they live,
and a lost one is named.

torch does not: gloo waits half an hour for a host that fell silent, NCCL ten minutes, and neither says which it was.
Rank 0 runs the hub, every other rank holds one TCP connection to it, and each end writes a line every `patience` ÷ 6
seconds, from a thread of its own, since the main thread may be deep in a collective:

    rank → hub   `TOKEN {who it is}`, then `beat` again and again, at last `done` or `failed REASON`
    hub → rank   `TOKEN`, then `beat` again and again, `all {what they know together}` once all ranks have come, at last
                 `done` or `lost {ranks, text}`

A connection that ends without a last word is a process that died; one that is silent for `patience` seconds is a host
or a network that did. `SETTLE` seconds after the first such sign the hub tells all ranks who it was, the dead before
those that failed in words, which may be the dead's doing. Silence is counted in looks of our own, not by the clock: a
job that was suspended as a whole finds everybody alive. Standard library only.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dtrain.addresses import is_loopback, plain
from dtrain.launch.contact import LONGEST_PROBLEM, Guest, Line, read_guest

LOOKS = 6  # beats that may be missed
SETTLE = 1.0  # seconds

Lost = Callable[[str], None]


@dataclass(frozen=True)
class All:
    """What all ranks know once they have come: the problems of all, in words; the attempt that this start is, by the
    rank that has counted the most; and the address at which other hosts reached the hub's (a loopback address where
    there is one host)."""

    problem: str | None
    attempt: int
    address: str


@dataclass(frozen=True)
class Verdict:
    """Who was lost, and that in words."""

    ranks: tuple[int, ...]
    text: str


class Pulse:
    """This rank's end. `lost(text)` is called in the pulse's thread once another rank is lost, unless this rank's main
    thread is in `close` by then, which returns that text."""

    def __init__(self, me: Guest, patience: float, lost: Lost):
        self.rank, self.hosts, self.patience, self.lost = me.rank, {me.rank: me.host}, patience, lost
        self.all: All | None = None  # once all have come
        self.verdict: Verdict | None = None
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

    def wait(self, seconds: float) -> All | None:
        """Wait so long for all ranks to come."""
        self._have_come.wait(seconds)
        return self.all

    def close(self, failed: str | None = None) -> str | None:
        """This rank is done, or has `failed` for that reason; then this waits some seconds for what the hub says.
        Returns who else was lost, in words; None: nobody that is known of."""
        with self._lock:
            self._last = "done" if failed is None else f"failed {failed}"
        self._wake.send(b".")
        self._thread.join(SETTLE + 2)
        return self.verdict.text if self.verdict and self.rank not in self.verdict.ranks else None

    def _run(self) -> None:
        step = self.patience / LOOKS
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

    def _decide(self, verdict: Verdict) -> None:
        """This rank knows who was lost. Its main thread tells, where it is in `close`; else this one does."""
        with self._lock:
            self.verdict, is_closing = verdict, self._last is not None
        if not is_closing:
            self.lost(verdict.text)

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
    line: Line
    address: str  # of ours, that it came to
    rank: int | None = None
    missed: int = 0
    is_done: bool = False


@dataclass
class _Signs:
    """What went wrong: silent and died ranks, and the reasons of those that failed in words, in order."""

    silent: set[int] = field(default_factory=set)
    died: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)


class Hub(Pulse):
    """Rank 0's end: hears all others, and tells them when all `size` ranks have come, and who is lost."""

    def __init__(self, me: Guest, size: int, patience: float, lost: Lost, listener: socket.socket, token: str):
        super().__init__(me, patience, lost)
        self.size, self._listener, self._token = size, listener, token
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._peers: list[_Peer] = []
        self._guests, self._twice, self._waits = {0: me}, [], True
        self._signs, self._since = _Signs(), float("inf")

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.size) if rank not in self.hosts]

    @property
    def has_problem(self) -> bool:
        return bool(self._twice) or any(guest.problem for guest in list(self._guests.values()))

    def wait_no_longer(self) -> None:
        """Those that have come are all that will."""
        self._waits = False
        self._wake.send(b".")

    def _due(self) -> float:
        return self._since + SETTLE if self.verdict is None else float("inf")

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            try:
                line = Line(self._listener.accept()[0])
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
                guest = read_guest(rest) if word == self._token else None
                if guest is None or not self._admit(guest):
                    peer.line.is_open = False
                    break
                peer.rank = guest.rank
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

    def _admit(self, guest: Guest) -> bool:
        if not 0 < guest.rank < self.size:
            return False
        if guest.rank in self._guests:
            first = self._guests[guest.rank].host
            self._twice.append(f"two processes came as rank {guest.rank}, from {first} and from {guest.host}")
            return False
        self._guests[guest.rank] = guest
        self.hosts[guest.rank] = guest.host
        return True

    def _tell_all(self) -> None:
        """All have come."""
        outside = [peer.address for peer in self._peers if not is_loopback(peer.address)]
        problem = "\n".join([*self._twice, *_problems(self._guests)])
        attempt = max(guest.attempt for guest in self._guests.values())
        self.all = All(problem or None, attempt, outside[0] if outside else "127.0.0.1")
        for peer in self._peers:
            peer.line.write(f"all {json.dumps([problem[:LONGEST_PROBLEM], attempt, self.all.address])}")
        self._have_come.set()

    def _look(self) -> None:
        for peer in self._peers:
            peer.line.write("beat")
            peer.missed += 1
        silent = {peer.rank for peer in self._peers if peer.missed >= LOOKS and not peer.is_done}
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
                signs.silent |= {p.rank for p in self._peers if p.missed >= LOOKS - 1 and not p.is_done} - {None}
            verdict = _verdict(signs, self.hosts, self.patience)
            for peer in self._peers:
                peer.line.write(f"lost {json.dumps([verdict.ranks, verdict.text])}")
            self._decide(verdict)
        if self._last is not None and (self._since == float("inf") or self.verdict is not None):
            for peer in self._peers:
                if self.verdict is None:
                    peer.line.write("done")
            self._ended = True
            self._listener.close()


class Spoke(Pulse):
    """Another rank's end."""

    def __init__(self, me: Guest, host: str, patience: float, lost: Lost, link: socket.socket):
        super().__init__(me, patience, lost)
        self.hosts[0] = host
        self.address = plain(link.getsockname()[0])  # of this host, on the way to the hub
        self._line, self._missed, self._is_released, self._has_spoken = Line(link), 0, False, False
        self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, key: selectors.SelectorKey) -> None:
        for text in self._line.read():
            self._missed = 0
            word, _, rest = text.partition(" ")
            if word == "lost" and self.verdict is None:
                ranks, said = json.loads(rest)
                self._decide(Verdict(tuple(ranks), said))
            elif word == "all":
                problem, attempt, address = json.loads(rest)
                self.all = All(problem or None, attempt, address)
                self._have_come.set()
            elif word == "done":
                self._is_released = True
        if not self._line.is_open:
            self._selector.unregister(self._line.link)
            self._end("ended without a word")

    def _look(self) -> None:
        self._line.write("beat")
        self._missed += 1
        if self._missed >= LOOKS:
            self._end(_silence(self.patience))

    def _end(self, why: str) -> None:
        """The hub is gone."""
        if not self._is_released and self.verdict is None:
            self._decide(Verdict((0,), f"{_named({0}, self.hosts)} is lost: {why}"))
        self._ended = True

    def _act(self) -> None:
        if self._last is None or self._has_spoken:
            if self.verdict is not None:
                self._ended = True
            return
        self._has_spoken = True
        self._line.write(self._last)
        if self._last == "done" or self.verdict is not None:
            self._ended = True


def _problems(guests: Mapping[int, Guest]) -> list[str]:
    """Each problem once, with the ranks that have it where others have not."""
    having: dict[str, set[int]] = {}
    for rank, guest in sorted(guests.items()):
        if guest.problem:
            having.setdefault(guest.problem, set()).add(rank)
    hosts = {rank: guest.host for rank, guest in guests.items()}
    return [
        problem if ranks == guests.keys() else f"{_named(ranks, hosts)}: {problem}" for problem, ranks in having.items()
    ]


def _verdict(signs: _Signs, hosts: Mapping[int, str], patience: float) -> Verdict:
    said, gone = [], signs.died | signs.silent
    for ranks, why in ((signs.died, "ended without a word"), (signs.silent - signs.died, _silence(patience))):
        if ranks:
            said.append(f"{_named(ranks, hosts)} {'is' if len(ranks) == 1 else 'are'} lost: {why}")
    if not gone:
        rank, reason = next(iter(signs.failed.items()))
        return Verdict((rank,), f"{_named({rank}, hosts)} failed: {reason}")
    return Verdict(tuple(sorted(gone)), "; ".join(said))


def _silence(patience: float) -> str:
    return f"no sign of life for {patience:g} s (launch.lost_after)"


def _named(ranks: set[int], hosts: Mapping[int, str]) -> str:
    """`rank 3 on b`, `ranks 2, 3 on b and rank 5 on c`."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} on {host}" for host, of in by_host.items()]
    return " and ".join(named)
