"""How ranks of torchrun and SLURM meet: in threads of this process, through real stores."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dtrain.base.errors import Stopped, UserError
from dtrain.launch import rendezvous
from dtrain.launch.exits import on_stop_signals
from dtrain.launch.rank_info import RankInfo
from dtrain.launch.rendezvous import join_rendezvous
from dtrain.parallel.mesh import StopFlag


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def meet_all(size, port, agent_store=False, problems=(), attempts=()):
    """Return of each rank its meeting, or the text of its UserError."""

    def come(rank):
        time.sleep(0.1 * rank)
        attempt = attempts[rank] if attempts else 0
        place = RankInfo(rank, rank, size, size, "torchrun", attempt, ("127.0.0.1", port), agent_store)
        try:
            return join_rendezvous(place, StopFlag(), problems[rank] if problems else None)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(come, range(size)))


def test_each_start_has_keys_of_its_own_whatever_an_earlier_one_left():
    """As under torchrun, whose agent keeps one store over all restarts."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("arrived/1", "of a start that rank 0 never saw")
    for size in (3, 3, 2):
        met = meet_all(size, agent.port, agent_store=True, attempts=range(size))
        assert [one.attempt for one in met] == [size - 1] * size  # the largest count of restarts
        assert sorted(one.store.add("count", 1) for one in met) == list(range(1, size + 1))


def test_a_problem_of_one_rank_is_an_error_on_all():
    host = socket.gethostname()
    told = meet_all(3, free_port(), problems=[None, "there is no recipe", "there is no recipe"])
    assert told == [f"ranks 1, 2 on {host}: there is no recipe"] * 3
    assert meet_all(2, free_port(), problems=["no recipe", "no recipe"]) == ["no recipe"] * 2


def test_a_rank_that_does_not_find_the_others_says_where_it_looked(monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 1.0)
    port = free_port()
    for rank in (0, 1):
        place = RankInfo(rank, 0, 2, 1, "slurm", 0, ("127.0.0.1", port))
        with pytest.raises(UserError, match=f"rank {rank} on .* did not meet the other 1 ranks at 127.0.0.1:{port}"):
            join_rendezvous(place, StopFlag())
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {taken} of .* Set MASTER_PORT to a free port"):
            join_rendezvous(RankInfo(0, 0, 2, 1, "slurm", 0, ("127.0.0.1", taken)), StopFlag())


def test_a_rank_that_waits_for_the_others_can_be_stopped():
    stop = StopFlag()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with on_stop_signals(stop.request), pytest.raises(Stopped) as stopped:
        join_rendezvous(RankInfo(0, 0, 2, 1, "slurm", 0, ("127.0.0.1", free_port())), stop)
    assert stopped.value.signum == signal.SIGTERM
