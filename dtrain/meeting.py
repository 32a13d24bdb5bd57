"""Where a rank is among those of its run, how they meet, and how those on several hosts watch over one another."""

import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dtrain import pulse
from dtrain.errors import Stopped, Unavailable, UserError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PATIENCE = timedelta(minutes=30)  # for the others to come: torch's own
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Place:
    """This process among those of the run.

    started_by  torchrun, or slurm; None: this process is alone, or a launcher
    attempt     restarts of all processes before this one
    master      host and port of the store where ranks meet; rank 0 serves it, or the elastic agent (`agent_store`)
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    started_by: str | None = None
    attempt: int = 0
    master: tuple[str, int] = ("localhost", 0)
    agent_store: bool = False

    @property
    def watches(self) -> bool:
        """Whether the ranks watch over one another: an agent of torchrun sees the processes of its own host only, and
        srun's need not end together."""
        alone = self.world_size == 1 or self.started_by is None
        return not alone and (self.started_by == "slurm" or self.world_size > self.local_world_size)


def join(place: Place, device: "torch.device") -> None:
    """The process group of the whole run. Collective. Raises UserError where other ranks do not come."""
    import torch.distributed as dist

    host, port = place.master
    if place.agent_store:  # the same one over all restarts: what an earlier start left there must not be read
        store = dist.TCPStore(host, port, is_master=False)
        where = {"store": dist.PrefixStore(agree(store, place.rank, place.world_size), store)}
    else:
        where = {"init_method": f"tcp://{host}:{port}"}
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, device_id=device_id, **where)


def agree(store: "dist.Store", rank: int, size: int, patience: timedelta = PATIENCE) -> str:
    """A name that the `size` ranks of this start share and no other start on `store` had. Collective.

    The count of restarts is none: an agent that came back, in place of a lost one, counts from 0, and torchrun does not
    count the restarts of changed membership at all. So every rank signs in with a word of its own, and rank 0 answers
    each word with the name until all have said that they have it. Raises UserError after `patience`.
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"here/{rank}", mine)
        try:
            store.wait([f"answer/{mine}"], patience)
        except RuntimeError as error:
            raise UserError(f"rank 0 did not come within {patience.total_seconds():g} s") from error
        name = store.get(f"answer/{mine}").decode()
        store.set(f"{name}/has/{rank}", "")
        return name
    answered: dict[int, str] = {}
    missing = set(range(1, size))
    until = time.monotonic() + patience.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{mine}/has/{other}"]):
                missing.discard(other)
            elif store.check([f"here/{other}"]):
                word = store.get(f"here/{other}").decode()
                if word != answered.get(other):  # that of an earlier start comes first, perhaps
                    answered[other] = word
                    store.set(f"answer/{word}", mine)
        if missing and time.monotonic() > until:
            which = ", ".join(map(str, sorted(missing)[:8])) + ", ..." * (len(missing) > 8)
            raise UserError(f"of {size} ranks, {len(missing)} did not come: {which}")
        time.sleep(POLL_SECONDS if missing else 0)
    return mine


@contextmanager
def watched(place: Place, patience: float, tell: Callable[[str], str], end: Callable[[str], None]) -> Iterator[int]:
    """While the block runs, a rank of another host that is lost is told of: at the latest `patience` + 1 seconds after
    its last sign of life, `end(tell(who and why))` is called in a thread, or, where this rank failed because of it,
    Unavailable is raised with what `tell` returned. Collective: one all-gather of objects.

    Yields the attempt that this start is, by the rank that has counted the most.
    """
    import torch.distributed as dist

    listener, meeting = None, None
    if place.rank == 0:
        listener, token = pulse.listen()
        meeting = pulse.Meeting((place.master[0], *pulse.addresses(place.master)), listener.getsockname()[1], token)
    told = [None] * place.world_size
    dist.all_gather_object(told, (socket.gethostname(), place.attempt, meeting))
    hosts, attempts, meetings = zip(*told, strict=True)

    def lost(who: str) -> None:
        end(tell(who))

    if listener is not None:
        heart = pulse.Hub(hosts, patience, lost, listener, token)
    else:
        link = pulse.connect(meetings[0], place.rank)
        if link is None:
            print(f"note: rank 0 on {hosts[0]} cannot be reached at port {meetings[0].port}: this rank is not watched")
            yield max(attempts)
            return
        heart = pulse.Spoke(place.rank, hosts, patience, lost, link)
    heart.start()
    try:
        yield max(attempts)
    except Stopped:
        heart.close()
        raise
    except UserError as error:
        heart.close(failed=str(error))
        raise
    except BaseException as error:  # a lost rank shows as whatever the collective library makes of it
        lines = str(error).strip().splitlines()
        who = heart.close(failed=f"{type(error).__name__}: {lines[0] if lines else ''}")
        if who is None:
            raise
        raise Unavailable(tell(who)) from error
    heart.close()
