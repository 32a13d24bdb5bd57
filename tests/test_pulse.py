"""The watch of ranks over one another, over real sockets in threads of this process: who is told to be lost, and when.

And how the ranks of a start agree on a name that no earlier start had.
"""

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtrain import pulse
from dtrain.errors import UserError
from dtrain.meeting import Place, agree

HOSTS = ("a", "a", "b", "b")


class World:
    """A hub and three spokes, two hosts; `told[rank]` is what that rank's `lost` was called with."""

    def __init__(self, patience=30.0):
        listener, token = pulse.listen()
        meeting = pulse.Meeting(("127.0.0.1",), listener.getsockname()[1], token)
        self.meeting, self.told = meeting, {}
        self.hearts = [pulse.Hub(HOSTS, patience, self.lost(0), listener, token)]
        self.hearts[0].start()
        for rank in (1, 2, 3):
            self.hearts.append(pulse.Spoke(rank, HOSTS, patience, self.lost(rank), pulse.connect(meeting, rank)))

    def lost(self, rank):
        return lambda text: self.told.setdefault(rank, text)

    def start(self, *ranks):
        for rank in ranks:
            self.hearts[rank].start()

    def wait(self, *ranks, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not self.told.keys() >= set(ranks):
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)

    def kill(self, rank):
        """As the system does with a process: the connection ends without a word."""
        self.hearts[rank]._line.link.shutdown(socket.SHUT_RDWR)


def test_ranks_that_end_in_order_are_not_lost():
    world = World(patience=1.2)
    world.start(1, 2, 3)
    time.sleep(1.5)  # longer than a silence may be
    assert [heart.close() for heart in world.hearts[::-1]] == [None] * 4
    assert world.told == {}


def test_the_others_are_told_of_ranks_that_died_at_once():
    world = World()
    world.start(1)
    began = time.monotonic()
    world.kill(2)
    world.kill(3)
    world.wait(0, 1)
    assert time.monotonic() - began < pulse.SETTLE + 5  # not the patience, which is 30 s
    assert set(world.told.values()) == {"ranks 2, 3 on b are lost: ended without a word"}


def test_silent_ranks_are_lost_after_the_patience_and_not_before():
    world = World(patience=3.0)
    began = time.monotonic()
    world.start(1)  # 2 and 3 hold their connections and say nothing, as hosts behind a cut wire do
    world.wait(0, 1)
    assert 2.0 < time.monotonic() - began < 3.0 + pulse.SETTLE + 5
    assert set(world.told.values()) == {"ranks 2, 3 on b are lost: no sign of life for 3 s (launch.lost_after)"}


def test_a_hub_that_is_gone_is_rank_0():
    world = World(patience=3.0)
    world.start(2)
    world.hearts[0].close()  # in order: nobody is lost
    assert world.hearts[2].close() is None
    listener = socket.create_server(("127.0.0.1", 0))  # a hub that says nothing
    link = socket.create_connection(listener.getsockname())
    spoke = pulse.Spoke(3, HOSTS, 1.2, world.lost(3), link)
    spoke.start()
    world.wait(3)
    assert world.told == {3: "rank 0 on a is lost: no sign of life for 1.2 s (launch.lost_after)"}


def test_a_death_is_the_cause_of_failures_that_follow_it_and_the_first_failure_of_those_after_it():
    world = World()
    world.start(1, 3)
    answers = {}

    def fail(rank, why):
        answers[rank] = world.hearts[rank].close(failed=why)

    failing = threading.Thread(target=fail, args=(1, "RuntimeError: connection closed by peer"))
    failing.start()
    world.kill(2)
    failing.join()
    world.wait(0, 3)
    assert answers == {1: "rank 2 on b is lost: ended without a word"} and 1 not in world.told
    world = World()
    world.start(1, 2, 3)
    fail(3, "out of memory\non rank 3")
    world.wait(0, 1, 2)
    assert answers[3] is None  # which tells its own reason
    assert world.told[0] == "rank 3 on b failed: out of memory on rank 3"


def test_a_stranger_is_not_a_rank():
    world = World(patience=1.2)
    world.start(1, 2, 3)
    stranger = socket.create_connection(("127.0.0.1", world.meeting.port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger.recv(100) == b""
    assert pulse.connect(pulse.Meeting(("127.0.0.1",), world.meeting.port, "0" * 32), 2) is None
    time.sleep(1.5)
    assert world.told == {} and [heart.close() for heart in world.hearts[::-1]] == [None] * 4


def test_the_hub_is_found_by_the_address_that_leads_to_it():
    world = World()
    elsewhere = socket.create_server(("127.0.0.2", 0))
    meeting = pulse.Meeting(("nowhere.invalid", "127.0.0.1"), world.meeting.port, world.meeting.token)
    link = pulse.connect(meeting, 1)
    assert link is not None
    assert pulse.addresses(("127.0.0.1", elsewhere.getsockname()[1]))[0] == "127.0.0.1"


def test_who_watches():
    assert not Place().watches
    assert not Place(world_size=2, local_world_size=2, started_by="torchrun").watches  # its agent does
    assert Place(world_size=4, local_world_size=2, started_by="torchrun").watches
    assert Place(world_size=2, local_world_size=2, started_by="slurm").watches


def test_each_start_agrees_on_a_name_of_its_own_whatever_an_earlier_one_left():
    store = dist.HashStore()
    store.set("here/1", "of a start that rank 0 never saw")
    seen = []
    for size in (3, 3, 2):
        names = {}

        def come(rank, size, names):
            names[rank] = agree(store, rank, size, timedelta(seconds=20))

        threads = [threading.Thread(target=come, args=(rank, size, names)) for rank in range(size)]
        for thread in threads:
            thread.start()
            time.sleep(0.15)
        for thread in threads:
            thread.join()
        assert len(names) == size and len(set(names.values())) == 1
        seen.append(names[0])
    assert len(set(seen)) == 3
    with pytest.raises(UserError, match="of 3 ranks, 2 did not come: 1, 2"):
        agree(store, 0, 3, timedelta(seconds=0.2))
