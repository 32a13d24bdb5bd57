"""The watch of ranks over one another, over real sockets in threads of this process: who comes, who is told to be lost,
and when.

And how the ranks of a start agree on a name that no earlier start had.
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtrain.base import addresses
from dtrain.base.errors import Stopped, UserError
from dtrain.launch.hosts import coordinator, rendezvous
from dtrain.launch.hosts.coordinator import (
    SETTLE_SECONDS,
    Coordinator,
    CoordinatorAddress,
    JoinRequest,
    Member,
    connect,
)
from dtrain.launch.hosts.rendezvous import Callbacks
from dtrain.launch.place import RankPlace
from dtrain.launch.watch import within
from dtrain.parallel.runtime import StopFlag

HOSTS = ("a", "a", "b", "b")


class World:
    """A coordinator and four members, two hosts; `told[rank]` is what that rank's `lost` was called with.

    problems: what ranks bring; come: the members that have come beside rank 0.
    """

    def __init__(self, lost_after=30.0, problems=None, come=(1, 2, 3)):
        listener, token = addresses.listen("127.0.0.1", 0), "0f" * 16
        self.address = CoordinatorAddress("a", ("127.0.0.1",), listener.getsockname()[1], token, lost_after)
        self.told, self.lost_after, self.problems, self.members = {}, lost_after, problems or {}, {}
        self.coordinator = Coordinator(4, lost_after, listener, token)
        self.coordinator.start()
        for rank in (0, *come):
            self.come(rank)
        self.members[0].coordinator = self.coordinator
        self.start(0)

    def request(self, rank):
        return JoinRequest(rank, HOSTS[rank], rank, self.problems.get(rank))

    def come(self, rank):
        connection = connect(self.address, self.request(rank))
        self.members[rank] = Member(self.request(rank), "a", self.lost_after, self.lost(rank), connection)

    def close(self):
        return [self.members[rank].close() for rank in sorted(self.members, reverse=True)]

    def lost(self, rank):
        return lambda text: self.told.setdefault(rank, text)

    def start(self, *ranks):
        for rank in ranks:
            self.members[rank].start()

    def wait(self, *ranks, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not self.told.keys() >= set(ranks):
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)

    def kill(self, rank):
        """As the system does with a process: the connection ends without a word."""
        self.members[rank]._connection.shutdown(socket.SHUT_RDWR)


def test_ranks_that_end_in_order_are_not_lost():
    world = World(lost_after=1.2)
    world.start(1, 2, 3)
    time.sleep(1.5)  # longer than a silence may be
    assert world.close() == [None] * 4
    assert world.told == {}


def test_the_others_are_told_of_ranks_that_died_at_once():
    world = World()
    world.start(1)
    began = time.monotonic()
    world.kill(2)
    world.kill(3)
    world.wait(0, 1)
    assert time.monotonic() - began < SETTLE_SECONDS + 5  # not `lost_after`, which is 30 s
    assert set(world.told.values()) == {"ranks 2, 3 on b are lost: ended without a word"}


def test_silent_ranks_are_lost_after_their_time_and_not_before():
    world = World(lost_after=3.0)
    began = time.monotonic()
    world.start(1)  # 2 and 3 hold their connections and say nothing, as hosts behind a cut wire do
    world.wait(0, 1)
    assert 2.0 < time.monotonic() - began < 3.0 + SETTLE_SECONDS + 5
    assert set(world.told.values()) == {"ranks 2, 3 on b are lost: no sign of life for 3 s (launch.lost_after)"}


def test_a_coordinator_that_is_gone_is_rank_0():
    world = World(lost_after=3.0)
    world.start(2)
    world.members[0].close()  # in order: nobody is lost
    assert world.members[2].close() is None
    listener = socket.create_server(("127.0.0.1", 0))  # a coordinator that says nothing
    link = socket.create_connection(listener.getsockname())
    member = Member(world.request(3), "a", 1.2, world.lost(3), link)
    member.start()
    world.wait(3)
    assert world.told == {3: "rank 0 on a is lost: no sign of life for 1.2 s (launch.lost_after)"}


def test_a_death_is_the_cause_of_failures_that_follow_it_and_the_first_failure_of_those_after_it():
    world = World()
    world.start(1, 3)
    answers = {}

    def fail(rank, why):
        answers[rank] = world.members[rank].close(failed=why)

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


def test_a_rank_that_failed_and_waits_to_hear_why_has_not_died():
    world = World(lost_after=1.2)  # beats come while it waits
    world.start(1, 2, 3)
    assert world.members[3].close(failed="RuntimeError: x") is None
    world.wait(0, 1, 2)
    assert set(world.told.values()) == {"rank 3 on b failed: RuntimeError: x"}


def test_a_stranger_is_not_a_rank():
    world = World(lost_after=1.2, come=(1, 2))
    stranger = socket.create_connection(("127.0.0.1", world.address.port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger.recv(100) == b""
    assert connect(replace(world.address, token="0" * 32), world.request(2)) is None
    world.come(3)
    world.start(1, 2, 3)
    time.sleep(1.5)
    assert world.told == {} and world.close() == [None] * 4


def test_strangers_are_not_waited_for_and_find_nobody_once_all_have_come(monkeypatch):
    monkeypatch.setattr(coordinator, "JOIN_SECONDS", 0.5)
    world = World(come=(1, 2))
    where = ("127.0.0.1", world.address.port)
    silent, endless, old = (socket.create_connection(where, 5) for _ in range(3))
    endless.sendall(b"x" * 100_000)  # a line without end
    old.sendall(f'{"1e" * 16} [3, "b", 0, null]\n'.encode())  # of another start
    for sock in (old, endless, silent):
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert world.coordinator.missing == [3]
    world.come(3)
    world.start(1, 2, 3)
    assert world.members[3].wait(10)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, 5)
    assert world.close() == [None] * 4 and world.told == {}


def test_the_coordinator_is_found_by_the_address_that_leads_to_it():
    world = World(come=())
    elsewhere = socket.create_server(("127.0.0.2", 0))
    where = replace(world.address, addresses=("nowhere.invalid", "127.0.0.1"))
    assert connect(where, world.request(1)) is not None
    assert rendezvous.addresses_towards(("127.0.0.1", elsewhere.getsockname()[1]))[0] == "127.0.0.1"


def test_all_know_the_highest_attempt_once_the_last_has_come():
    world = World(come=(1, 3))
    world.start(1, 3)
    assert world.members[1].wait(0.3) is None and world.coordinator.missing == [2]
    world.come(2)
    world.start(2)
    for rank in range(4):
        together = world.members[rank].wait(10)
        assert (together.attempt, together.problem, together.address) == (3, None, "127.0.0.1")
    assert world.close() == [None] * 4 and world.told == {}


def test_a_rank_that_dies_before_the_last_has_come_is_told_of():
    world = World(come=(1, 3))
    world.start(1)
    world.kill(3)
    world.wait(0, 1)
    assert set(world.told.values()) == {"rank 3 on b is lost: ended without a word"}


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ({2: "no model\nthere", 3: "no model\nthere"}, "ranks 2, 3 on b: no model\nthere"),
        (dict.fromkeys(range(4), "an unknown key"), "an unknown key"),
        ({0: "x", 3: "y"}, "rank 0 on a: x\nrank 3 on b: y"),
    ],
)
def test_what_any_rank_found_wrong_is_told_to_all(problems, expected):
    world = World(problems=problems)
    world.start(1, 2, 3)
    assert {world.members[rank].wait(10).problem for rank in range(4)} == {expected}
    assert world.close() == [None] * 4 and world.told == {}


def test_a_problem_is_told_though_ranks_stay_away_and_two_of_one_number_are_one():
    world = World(come=(1,))
    world.start(1)
    assert not world.coordinator.has_problem
    assert connect(world.address, JoinRequest(1, "b")) is None
    assert world.coordinator.has_problem
    world.coordinator.wait_no_longer()
    assert world.members[1].wait(10).problem == "two processes came as rank 1, from a and from b"


def test_the_interface_of_an_address():
    assert addresses.interface_of("127.0.0.1") == "lo" and addresses.interface_of("192.0.2.77") is None
    assert addresses.plain("::ffff:10.0.0.1") == "10.0.0.1" and addresses.plain("fe80::1%eth0") == "fe80::1"
    assert addresses.is_loopback("::ffff:127.0.1.1") and not addresses.is_loopback("10.0.0.1")


def callbacks():
    return Callbacks(str, print, print, StopFlag())


@pytest.fixture
def silent_port():
    """Something that is no store listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_ranks_that_cannot_meet_are_told_where_they_looked(monkeypatch, silent_port):
    monkeypatch.setattr(rendezvous, "SERVED_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "NAME_SECONDS", 0.3)
    place = RankPlace(rank=1, world_size=2, started_by="slurm", master=("127.0.0.1", silent_port))
    with pytest.raises(UserError, match=f"127.0.0.1:{silent_port}, where the ranks meet, .*no answer for 0.3 s"):
        rendezvous.open_store(place, callbacks())
    with pytest.raises(UserError, match=f"port {silent_port} of .* is taken by another process: set MASTER_PORT"):
        rendezvous.open_store(replace(place, rank=0), callbacks())
    with pytest.raises(UserError, match="rank 1 on .* cannot reach rank 0's host at nowhere.invalid:1 "):
        rendezvous.open_store(replace(place, master=("nowhere.invalid", 1)), callbacks())


def test_a_rank_that_does_not_find_the_others_says_so_on_its_host(monkeypatch, silent_port):
    monkeypatch.setattr(rendezvous, "SERVED_SECONDS", 0.1)
    noted = []
    place = RankPlace(rank=1, world_size=2, started_by="slurm", master=("127.0.0.1", silent_port))
    with pytest.raises(UserError) as raised, rendezvous.rendezvous(place, 9.0, replace(callbacks(), note=noted.append)):
        pass
    assert noted == [str(raised.value)]


def test_a_rank_that_waits_for_the_others_can_be_stopped():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free_port = probe.getsockname()[1]
    asked = callbacks()
    asked.stop.request(15)
    with (
        pytest.raises(Stopped),
        rendezvous.rendezvous(RankPlace(0, 0, 2, 1, "slurm", 0, ("localhost", free_port)), 9.0, asked),
    ):
        pass


def test_what_takes_too_long_is_not_waited_for():
    assert within(20, lambda: 3) == 3
    assert within(0.1, lambda: time.sleep(5) or 3) is None
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: 1 / 0)


def test_who_watches():
    assert not RankPlace().watches
    assert RankPlace(world_size=2, local_world_size=2, started_by="torchrun").watches
    assert not RankPlace(world_size=2, local_world_size=2).watches  # its launcher does
    assert RankPlace(world_size=4, local_world_size=2, started_by="torchrun").watches
    assert RankPlace(world_size=2, local_world_size=2, started_by="slurm").watches


def test_each_start_has_a_store_of_its_own_whatever_an_earlier_one_left():
    """As under torchrun, whose agent keeps one store over all restarts."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("here/1", "of a start that rank 0 never saw")
    for size in (3, 3, 2):
        found = {}

        def come(rank, size, found):
            place = RankPlace(rank, rank, size, size, "torchrun", 0, ("127.0.0.1", agent.port), True)
            with rendezvous.rendezvous(place, 20.0, callbacks()) as met:
                met.store.set(str(rank), "")
                met.store.wait([str(other) for other in range(size)], timedelta(seconds=20))
                found[rank] = met.store.add("count", 1)

        threads = [threading.Thread(target=come, args=(rank, size, found)) for rank in range(size)]
        for thread in threads:
            thread.start()
            time.sleep(0.15)
        for thread in threads:
            thread.join()
        assert sorted(found.values()) == list(range(1, size + 1))
