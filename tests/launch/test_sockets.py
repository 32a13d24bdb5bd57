"""Sockets of a run: on one host nothing beyond the loopback and no store, on several the interface that is used.

Sockets are found as the system lists them, by the processes that hold them.
"""

import ipaddress
import os
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from dtrain import recipe as config
from dtrain.base.addresses import ALL_INTERFACES, choose_listen_address, listen
from tests.forked_python import ForkedPython, in_namespace
from tests.launch.processes import Launched
from tests.launch.test_clusters import ROOT, children, srun, start, wait_for  # noqa: F401  start is a fixture
from tests.launch.test_two_hosts import MASTER, OTHER, hosts  # noqa: F401  a fixture
from tests.tiny import tiny_recipe


def listening(process: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that `process` and what came of it listen on."""
    found = set()
    for pid in [process, *children(process)]:
        held = set()
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                held.add(os.readlink(link))
            except FileNotFoundError:
                continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in held:
                    address, port = local.split(":")
                    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                    packed = struct.pack(f"={len(words)}I", *words)
                    found.add((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def addresses(found) -> set[str]:
    return {address for address, _ in found}


def is_store(address: str, port: int) -> bool:
    """Return whether a client of torch's store, as a stranger has it, gets an answer there."""
    code = "import sys, torch.distributed as dist; dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)"
    client = ForkedPython([sys.executable, "-c", code, address, str(port)], stderr=subprocess.DEVNULL)
    try:
        return client.wait(3) == 0
    except subprocess.TimeoutExpired:  # what listens there does not answer
        client.kill()
        client.wait()
        return False


def test_sockets_are_found_as_they_listen():
    with socket.create_server(("127.0.0.2", 0)) as one, listen(ALL_INTERFACES, 0) as other:
        found = listening(os.getpid())
        assert {one.getsockname(), (other.getsockname()[0], other.getsockname()[1])} <= found


@pytest.mark.parametrize(
    ("training", "overrides"), [("waits", ()), ("fails_once_and_waits", ("launch.max_restarts=1",))]
)
def test_a_run_on_one_host_has_no_store_that_a_stranger_could_write_to(tmp_path, training, overrides):
    launched = Launched(tmp_path, training, "launch.nproc=2", *overrides)
    launched.pids(2)
    found = listening(launched.process.pid)
    assert found and addresses(found) == {"127.0.0.1"}  # gloo's, one a rank
    assert not any(is_store(*one) for one in found)
    launched.ctrl_c()
    assert launched.end()[0] == 130


def test_a_store_of_torch_would_be_found():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert is_store("127.0.0.1", store.port)


@pytest.mark.parametrize(
    ("nproc", "prefix"),
    [(1, ()), (3, ()), (1, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))],
)
def test_nothing_of_one_host_listens_where_another_could_reach_it(tmp_path, hosts, start, nproc, prefix):  # noqa: F811
    """The host's name is that of its address outside, where gloo would listen."""
    recipe = tiny_recipe(tmp_path, "train.steps=100000", "train.global_batch=12", f"launch.nproc={nproc}")
    path = tmp_path / "recipe.yaml"
    path.write_text(config.to_yaml(recipe))
    command = [sys.executable, *prefix, "-m", "dtrain", "run", str(path)]
    host = start(command, enter=partial(in_namespace, hosts[0], MASTER))
    wait_for(Path(recipe.run.dir) / "run" / "metrics.jsonl")
    pid = host.processes[0].pid
    ranks = children(pid) if prefix else [pid]  # torchrun's own store is not ours to close
    found = set().union(*map(listening, ranks))
    assert found and addresses(found) == {"127.0.0.1"}, host.text()


def test_several_hosts_listen_at_the_interface_that_leads_to_the_others(tmp_path, hosts, start):  # noqa: F811
    recipe = tiny_recipe(tmp_path, "train.steps=100000")
    path = tmp_path / "recipe.yaml"
    path.write_text(config.to_yaml(recipe))
    both = []
    for node, name in enumerate(hosts):
        commands, given = srun(node, 29519, "dtrain", "run", str(path))
        given = [one | {"MASTER_ADDR": MASTER} for one in given]
        both.append(start(*commands, environments=given, enter=partial(in_namespace, name)))
    wait_for(Path(recipe.run.dir) / "run" / "metrics.jsonl")
    for host, own in zip(both, (MASTER, OTHER), strict=True):
        found = set().union(*(listening(process.pid) for process in host.processes))
        assert found and addresses(found) == {own}, host.text()


def test_a_name_says_where_to_listen(monkeypatch):
    resolve = socket.getaddrinfo

    def as_on_debian(host, *rest, **kind):
        return resolve("127.0.1.1" if host == "gpu07" else host, *rest, **kind)

    monkeypatch.setattr(socket, "getaddrinfo", as_on_debian)
    assert choose_listen_address("localhost", 1) == choose_listen_address("127.0.0.1", 1) == "127.0.0.1"
    assert choose_listen_address("gpu07", 1) == ALL_INTERFACES  # others know it by another address
    assert choose_listen_address("nowhere.invalid", 1) == ALL_INTERFACES


def test_a_group_for_weights_listens_where_its_receivers_look(hosts):  # noqa: F811
    """At the address that both ends were told, on a host of several."""
    code = "import sys, torch; from dtrain.policy.weights import join_weight_group; _, rank, ip = sys.argv\n"
    code += "group = join_weight_group(ip, 29520, int(rank), 2, torch.device('cpu')); group.barrier().wait()\n"
    code += "print('there', flush=True); sys.stdin.read()"
    ends = [
        ForkedPython(
            [sys.executable, "-c", code, str(rank), MASTER], enter=partial(in_namespace, hosts[0]),
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [end.stdout.readline() for end in ends] == ["there\n"] * 2
        found = [listening(end.pid) for end in ends]
        assert (MASTER, 29520) in found[0] and addresses(found[0] | found[1]) == {MASTER}
    finally:
        for end in ends:
            end.communicate(timeout=300)
