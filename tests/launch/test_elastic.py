"""torchrun with a range of nodes: a run goes on with the nodes that are left, and takes in one that comes back."""

import sys
import time
from pathlib import Path

import pytest

from dtrain import recipe as config
from dtrain.base.errors import Stopped
from tests.launch.test_clusters import free_port, rows, start, wait_for  # noqa: F401  start is a fixture
from tests.running import interrupt, trajectory
from tests.tiny import tiny_recipe


def wait_for_step(root: Path, step: int) -> None:
    metrics = root / "runs" / "run" / "metrics.jsonl"
    wait_for(metrics)
    deadline = time.monotonic() + 300
    while len(rows(root)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_text(host, text: str, count: int) -> None:
    deadline = time.monotonic() + 300
    while host.text().count(text) < count:
        assert time.monotonic() < deadline and host.processes[0].poll() is None, host.text()
        time.sleep(0.1)


def test_a_run_goes_on_with_the_node_that_is_left_and_returns_to_its_size(tmp_path, start):  # noqa: F811
    """Its numbers stay those of one process: the global batch and the order of the data do not depend on the mesh."""
    shape = ("train.steps=2000", "train.global_batch=16", "train.micro_batch=1", "checkpoint.every=1")
    recipe = tiny_recipe(tmp_path, *shape, "parallel.dp_shard=-1")
    path = tmp_path / "recipe.yaml"
    path.write_text(config.to_yaml(recipe))
    port = free_port()

    def node(rank: int):
        # Without is_host the first to come would serve the rendezvous: both are on the machine of that name.
        settings = f"is_host={rank == 0},keep_alive_interval=1,last_call_timeout=2"
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=x", "--rdzv-conf", settings]
        size = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
        command = [sys.executable, "-m", "torch.distributed.run", *size, *meeting, "-m", "dtrain", "run", str(path)]
        # An agent that shares its store says where that is in its first round only (torch 2.13): a node that comes
        # later waits in vain.
        return start(command, environments=[{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}], starts=True)

    first, second = node(0), node(1)
    wait_for_step(tmp_path, 3)
    second.kill()
    wait_for_text(first, "resumed from", 1)
    wait_for_step(tmp_path, len(rows(tmp_path)) + 3)
    node(1)
    wait_for_text(first, "resumed from", 2)
    last = len(rows(tmp_path)) + 3
    wait_for_step(tmp_path, last)
    first.kill()
    meshes = [line.split(None, 1)[1] for line in first.text().splitlines() if line.startswith("mesh ")]
    assert meshes == ["2 processes: dp_shard 2, cpu", "one process, cpu", "2 processes: dp_shard 2, cpu"], first.text()

    one = tiny_recipe(tmp_path, *shape, "checkpoint.every=null", name="one")
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(one, 1, last)
    found, expected = trajectory(recipe)[:last], trajectory(one)[:last]
    assert len(found) == len(expected) == last
    for mine, right in zip(found, expected, strict=True):
        assert mine[2:] == right[2:]
        assert abs(mine[0] - right[0]) <= 1e-9 * right[0] and abs(mine[1] - right[1]) <= 1e-9 * right[1]
