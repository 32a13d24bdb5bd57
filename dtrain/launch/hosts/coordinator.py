"""Heartbeats between hosts: who is there, and still there, and which rank was lost.

torch does not tell: gloo waits half an hour for a host that fell silent, NCCL ten minutes, and neither says which it
was. Rank 0's process runs the coordinator, every rank holds one TCP connection to it. The coordinator writes a line
every `lost_after` ÷ MISSED_BEATS seconds, and every rank answers it; each in a thread of its own, since the main thread
may be deep in a collective:

    rank → coordinator   `TOKEN {join request}`, `beat` for each that came, at last `done` or `failed REASON`
    coordinator → rank   `TOKEN`, `beat` again and again, `all {join response}` once all ranks have come, at last
                         `done` or `lost {ranks, text}`

A connection that ends without a last word is a process that died; one that is silent for `lost_after` seconds is a host
or a network that did. SETTLE_SECONDS after the first such sign the coordinator tells all ranks who it was, the dead
before those that failed in words, which may be the dead's doing.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field

from dtrain.base.addresses import is_loopback, plain
from dtrain.launch.watch import SETTLE_SECONDS, Watched

MISSED_BEATS = 6  # in a row: lost
CONNECT_SECONDS = 5.0
JOIN_SECONDS = 2 * CONNECT_SECONDS  # for the first line of a connection
LONGEST_PROBLEM = 4000  # characters, of which JSON may make six bytes each

OnLost = Callable[[str], None]


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of the coordinator: rank 0's host, addresses of it to try, in order, and a token that only this
    start's ranks know; and the seconds of silence after which a rank is lost, which count for all."""

    host: str
    addresses: tuple[str, ...]
    port: int
    token: str
    lost_after: float


@dataclass(frozen=True)
class JoinRequest:
    """A rank that comes. problem: what it has found that the run cannot begin with; attempt: as it counts them."""

    rank: int
    host: str
    attempt: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class JoinResponse:
    """The answer to all ranks once they have come: the problems of all, in words; the attempt that this start is, by
    the rank that has counted the most; and the address at which other hosts reached the coordinator's (a loopback
    address where there is one host)."""

    problem: str | None
    attempt: int
    address: str


@dataclass(frozen=True)
class LostRanks:
    """The ranks that were lost, and a text that says so."""

    ranks: list[int]
    text: str


def connect(coordinator: CoordinatorAddress, me: JoinRequest) -> socket.socket | None:
    """A connection to the coordinator that has answered with the token; None where no address leads to it."""
    request = [me.rank, me.host, me.attempt, me.problem and me.problem[:LONGEST_PROBLEM]]
    token = f"{coordinator.token}\n".encode()
    for address in dict.fromkeys(coordinator.addresses):
        with suppress(OSError):
            connection = socket.create_connection((address, coordinator.port), timeout=CONNECT_SECONDS)
            with suppress(OSError):
                connection.sendall(f"{coordinator.token} {json.dumps(request)}\n".encode())
                if connection.recv(len(token), socket.MSG_WAITALL) == token:
                    return connection
            connection.close()
    return None


class Member(threading.Thread):
    """A rank's end of the watch. `on_lost(text)` is called in this thread once another rank is lost, unless the rank's
    main thread is in `close` by then, which returns that text."""

    def __init__(self, me: JoinRequest, host: str, lost_after: float, on_lost: OnLost, connection: socket.socket):
        super().__init__(name="dtrain-heartbeat", daemon=True)
        self.rank, self.coordinator_host, self.lost_after, self.on_lost = me.rank, host, lost_after, on_lost
        self.address = plain(connection.getsockname()[0])  # of this host, on the way to the coordinator
        self.coordinator: Coordinator | None = None  # where this process runs it
        self.joined: JoinResponse | None = None  # once all have come
        self.lost: LostRanks | None = None
        self._is_closing = self._is_released = False
        self._have_joined, self._lock = threading.Event(), threading.Lock()
        self._connection = connection
        connection.settimeout(lost_after / MISSED_BEATS)

    def wait(self, seconds: float) -> JoinResponse | None:
        """Wait so long for all ranks to come."""
        self._have_joined.wait(seconds)
        return self.joined

    def close(self, failed: str | None = None) -> str | None:
        """This rank is done, or has `failed` for that reason; then this waits some seconds for what the coordinator
        says. Returns who else was lost, in words; None: nobody that is known of."""
        with self._lock:
            self._is_closing = True
        self._say("done" if failed is None else f"failed {failed}".replace("\n", " ")[:LONGEST_PROBLEM])
        if failed is None:
            self._is_released = True
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        for thread in (self, self.coordinator):
            if thread is not None:
                thread.join(SETTLE_SECONDS + 2)
        return self.lost.text if self.lost and self.rank not in self.lost.ranks else None

    def _say(self, text: str) -> None:
        with suppress(OSError), self._lock:  # where the coordinator is gone, its last word is still to be read
            self._connection.sendall(f"{text}\n".encode())

    def run(self) -> None:
        rest, coordinator = b"", Watched(MISSED_BEATS)
        while self.lost is None:
            try:
                data = self._connection.recv(65536)
            except TimeoutError:
                coordinator.silent += 1
                if coordinator.is_silent():
                    self._coordinator_lost(_silence(self.lost_after))
                continue
            except OSError:
                data = b""
            if not data:
                self._coordinator_lost("ended without a word")
                break
            coordinator.silent = 0
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(*line.decode().partition(" ")[::2])

    def _hear(self, word: str, rest: str) -> None:
        if word == "beat":
            self._say("beat")
        elif word == "all":
            self.joined = JoinResponse(*json.loads(rest))
            self._have_joined.set()
        elif word == "done":
            self._is_released = True
        elif word == "lost":
            self._tell(LostRanks(*json.loads(rest)))

    def _coordinator_lost(self, why: str) -> None:
        if not self._is_released:
            self._tell(LostRanks([0], f"{_named([0], {0: self.coordinator_host})} is lost: {why}"))

    def _tell(self, lost: LostRanks) -> None:
        """This rank's main thread tells, where it is in `close`; else this one does."""
        with self._lock:
            self.lost, is_closing = lost, self._is_closing
        if not is_closing:
            self.on_lost(lost.text)


@dataclass(eq=False)
class _Peer(Watched):
    """A rank that has come. is_done: whether it has had its last word."""

    writer: asyncio.StreamWriter
    is_done: bool = field(default=False, init=False)

    def write(self, text: str) -> None:
        if not self.writer.is_closing():
            self.writer.write(f"{text}\n".encode())


class Coordinator(threading.Thread):
    """Hears all `size` ranks, that of its own process too, and tells them when all have come, and who is lost. The
    thread ends when rank 0 has had its last word, or when a rank is lost."""

    def __init__(self, size: int, lost_after: float, listener: socket.socket, token: str):
        super().__init__(name="dtrain-coordinator", daemon=True)
        self.size, self.lost_after, self._listener, self._token = size, lost_after, listener, token
        self._requests: dict[int, JoinRequest] = {}
        self._peers: dict[int, _Peer] = {}
        self._twice: list[str] = []
        self._gone: dict[int, str] = {}  # silent and dead ranks, and which they are, in words
        self._failed: dict[int, str] = {}  # in words of their own

    def run(self) -> None:
        asyncio.run(self._run())

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.size) if rank not in self._requests]

    @property
    def has_problem(self) -> bool:
        return bool(self._twice) or any(request.problem for request in list(self._requests.values()))

    def wait_no_longer(self) -> None:
        """Respond to the ranks that have come; no others will."""
        self._loop.call_soon_threadsafe(self._respond)

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._server = await asyncio.start_server(self._serve, sock=self._listener, backlog=4096, start_serving=False)
        await self._server.start_serving()
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), self.lost_after / MISSED_BEATS)
            except TimeoutError:
                self._beat()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection from its first line to its last."""
        peer, rank = _Peer(MISSED_BEATS, writer), None
        try:
            line = await asyncio.wait_for(reader.readline(), JOIN_SECONDS)
            token, _, payload = line.decode(errors="replace").partition(" ")
            request = JoinRequest(*json.loads(payload)) if token == self._token else None
            if request is None or not self._admit(peer, request):
                return
            rank = request.rank
            async for line in reader:
                word, _, reason = line.decode(errors="replace").strip().partition(" ")
                peer.silent, peer.is_done = 0, peer.is_done or word in ("done", "failed")
                if word == "failed":
                    self._failed.setdefault(rank, reason[:1000])
                    self._settle()
                elif word == "done" and rank == 0 and not (self._gone or self._failed):
                    self._end("done")
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # it ended, a stranger writes what is no line, or the loop ends: of that Python 3.11 would tell
        finally:
            writer.close()
            if rank is not None and not peer.is_done and not self._over.is_set():
                self._gone[rank] = "ended without a word"
                self._settle()

    def _admit(self, peer: _Peer, request: JoinRequest) -> bool:
        if not 0 <= request.rank < self.size:
            return False
        if request.rank in self._requests:
            first = self._requests[request.rank].host
            self._twice.append(f"two processes came as rank {request.rank}, from {first} and from {request.host}")
            return False
        self._requests[request.rank], self._peers[request.rank] = request, peer
        peer.write(self._token)
        if not self.missing:
            self._respond()
        return True

    def _respond(self) -> None:
        """Respond to the ranks that have come: whoever connects now is a stranger."""
        self._server.close()
        reached = [plain(peer.writer.get_extra_info("sockname")[0]) for rank, peer in self._peers.items() if rank]
        outside = [address for address in reached if not is_loopback(address)]
        problem = "\n".join([*self._twice, *_problems(self._requests)])[:LONGEST_PROBLEM]
        attempt = max(request.attempt for request in self._requests.values())
        response = [problem or None, attempt, outside[0] if outside else "127.0.0.1"]
        self._write(f"all {json.dumps(response)}")

    def _write(self, text: str) -> None:
        for rank in sorted(self._peers, reverse=True):  # rank 0 last: what it hears may end this process
            self._peers[rank].write(text)

    def _beat(self) -> None:
        self._write("beat")
        for peer in self._peers.values():
            peer.silent += 1
        self._note_silence(0)

    def _note_silence(self, early: int) -> None:
        for rank, peer in self._peers.items():
            if peer.is_silent(early) and not peer.is_done and rank not in self._gone:
                self._gone[rank] = _silence(self.lost_after)
                self._settle()

    def _settle(self) -> None:
        """Something went wrong: wait for what else did, then tell."""
        self._loop.call_later(SETTLE_SECONDS, self._tell)

    def _tell(self) -> None:
        if _silence(self.lost_after) in self._gone.values():  # others of the same host are about to be silent as long
            self._note_silence(1)
        hosts = {rank: request.host for rank, request in self._requests.items()}
        lost = _lost_ranks(self._gone, self._failed, hosts)
        self._end(f"lost {json.dumps(astuple(lost))}")

    def _end(self, word: str) -> None:
        self._write(word)
        self._over.set()


def _problems(requests: Mapping[int, JoinRequest]) -> list[str]:
    """Return each problem once, with the ranks that have it where others have not."""
    hosts = {rank: request.host for rank, request in requests.items()}
    having = _grouped({rank: request.problem for rank, request in sorted(requests.items()) if request.problem})
    return [
        problem if len(ranks) == len(requests) else f"{_named(ranks, hosts)}: {problem}"
        for problem, ranks in having.items()
    ]


def _lost_ranks(gone: Mapping[int, str], failed: Mapping[int, str], hosts: Mapping[int, str]) -> LostRanks:
    if not gone:
        rank, reason = next(iter(failed.items()))
        return LostRanks([rank], f"{_named([rank], hosts)} failed: {reason}")
    sentences = [
        f"{_named(ranks, hosts)} {'is' if len(ranks) == 1 else 'are'} lost: {why}"
        for why, ranks in sorted(_grouped(gone).items())
    ]
    return LostRanks(sorted(gone), "; ".join(sentences))


def _silence(lost_after: float) -> str:
    return f"no sign of life for {lost_after:g} s (launch.lost_after)"


def _named(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """`rank 3 on b`, `ranks 2, 3 on b and rank 5 on c`."""
    by_host = _grouped({rank: hosts[rank] for rank in sorted(ranks)})
    named = [f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))} on {host}" for host, of in by_host.items()]
    return " and ".join(named)


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Group ranks by their text."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return groups
