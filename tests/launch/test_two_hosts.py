"""Two hosts, as two network namespaces joined by one wire: torchrun on each, the numbers of one process."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import pytest

from dtrain import recipe as config
from tests.forked_python import ForkedPython, in_namespace
from tests.running import run, trajectory
from tests.tiny import tiny_recipe

ROOT = Path(__file__).parents[2]
MASTER, OTHER = "10.213.7.1", "10.213.7.2"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def hosts():
    """The names of two namespaces that reach each other and nothing else, with interface `wire`."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (package iproute2): two hosts were not tried")
    tag = uuid.uuid4().hex[:8]
    names = [f"dtrain-{tag}-a", f"dtrain-{tag}-b"]
    steps = [
        ("netns", "add", names[0]),
        ("netns", "add", names[1]),
        ("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1]),
    ]
    for name, address in zip(names, (MASTER, OTHER), strict=True):
        steps += [
            ("-n", name, "addr", "add", f"{address}/24", "dev", "wire"),
            ("-n", name, "link", "set", "wire", "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ]
    try:
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"this machine allows no network namespaces: `ip {' '.join(step)}`: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def torchrun(host, rank, recipe, log):
    """One host's torchrun with two processes, in a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(rank)]
    command += ["--master-addr", MASTER, "--master-port", "29517", "-m", "dtrain", "run", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return ForkedPython(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        enter=partial(in_namespace, host),
    )  # fmt: skip


def test_torchrun_on_two_hosts_gives_the_numbers_of_one_process(tmp_path, hosts):
    one = run(tiny_recipe(tmp_path, "train.micro_batch=8", name="one"))
    two = tiny_recipe(tmp_path, "parallel.tp=2", name="two")
    path = tmp_path / "two.yaml"
    path.write_text(config.to_yaml(two))
    logs = [(tmp_path / f"host-{rank}.txt").open("w+") for rank in range(2)]
    processes = [torchrun(host, rank, path, log) for rank, (host, log) in enumerate(zip(hosts, logs, strict=True))]
    try:
        statuses = [process.wait(timeout=300) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
    assert statuses == [0, 0], "\n".join(log.read()[-3000:] for log in logs)
    found, expected = trajectory(two), trajectory(one)
    assert len(found) == len(expected) == 10
    for mine, right in zip(found, expected, strict=True):
        assert mine[2:] == right[2:]
        assert abs(mine[0] - right[0]) <= 1e-9 * right[0] and abs(mine[1] - right[1]) <= 1e-9 * right[1]
