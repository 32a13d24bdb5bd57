"""How the ranks of several hosts reach rank 0's: what each says of itself, by which address, over which interface.

Rank 0 listens at a port that its system picks; where that is, and a token, the others learn from the store where ranks
meet. A connection carries lines of text. Standard library only.
"""

import json
import socket
from dataclasses import dataclass

from dtrain.addresses import own_address

CONNECT_SECONDS = 5.0
LONGEST = 2**16  # bytes of a line
LONGEST_PROBLEM = 4000  # characters, of which JSON may make six bytes each


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where the coordinator is: rank 0's host, addresses of it to try, in order, and a token that only this
    start's ranks know; and the seconds of silence after which a rank is lost, which count for all."""

    host: str
    addresses: tuple[str, ...]
    port: int
    token: str
    patience: float


@dataclass(frozen=True)
class JoinRequest:
    """A rank that comes. problem: what it has found that the run cannot begin with; attempt: as it counts them."""

    rank: int
    host: str
    attempt: int = 0
    problem: str | None = None


class Connection:
    """One connection, in lines of text. It never blocks; `is_open` turns False when the other end is gone."""

    def __init__(self, link: socket.socket):
        link.setblocking(False)
        self.link, self.is_open, self._rest = link, True, b""

    def write(self, text: str) -> None:
        try:
            self.link.sendall(text.replace("\n", " ").encode()[: LONGEST - 1] + b"\n")
        except OSError:  # what it leaves to be read, its last word perhaps, is still read
            pass

    def read(self) -> list[str]:
        """The whole lines that have come."""
        try:
            while got := self.link.recv(65536):
                self._rest += got
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LONGEST:  # a stranger
            self.is_open = False
        return [line.decode(errors="replace") for line in lines]


def addresses(master: tuple[str, int]) -> tuple[str, ...]:
    """How this host may be reached by those that reach `master`: its own address on the way there, and its name."""
    own = own_address(*master)
    return (*([own] if own else []), socket.gethostname())


def connect(meeting: CoordinatorAddress, me: JoinRequest) -> socket.socket | None:
    """A connection to the coordinator that has answered with the token; None where no address leads to it."""
    problem = me.problem and me.problem[:LONGEST_PROBLEM]
    hello = f"{meeting.token} {json.dumps([me.rank, me.host, me.attempt, problem])}\n".encode()
    for address in dict.fromkeys(meeting.addresses):
        try:
            link = socket.create_connection((address, meeting.port), timeout=CONNECT_SECONDS)
        except OSError:
            continue
        try:
            link.sendall(hello)
            answer = link.recv(len(meeting.token) + 1, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        if answer.decode(errors="replace").strip() == meeting.token:
            return link
        link.close()
    return None


def read_request(text: str) -> JoinRequest | None:
    try:
        rank, host, attempt, problem = json.loads(text)
        return JoinRequest(int(rank), str(host), int(attempt), problem)
    except (ValueError, TypeError):
        return None
