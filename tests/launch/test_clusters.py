"""Several hosts: a rank or a host that is lost is named within a bounded time, and a run started again goes on.

A host is a session of processes on this machine, or a network namespace where the machine allows that; srun is played
by the environment that it gives. Then the files of recipes/ that start dtrain on a cluster.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.commands import cli
from dtrain.launch.rank_info import read_rank_info
from dtrain.training import load_recipe
from tests.forked_python import ForkedPython, in_namespace
from tests.launch.processes import wait_until_gone
from tests.launch.test_two_hosts import MASTER, hosts, ip  # noqa: F401  hosts is a fixture
from tests.tiny import tiny_recipe

ROOT = Path(__file__).parents[2]
BOUND = 300.0  # seconds for the survivors' processes to end on a busy machine


class Host:
    """Processes of one host, in a session of their own; what they say is in `text()`.

    enter: as of ForkedPython. starts: by interpreters of their own; forks hang where ranks of several hosts load.
    """

    def __init__(self, log: Path, *commands: list[str], environments=({},), enter=lambda: None, starts=False):
        self.log = log
        popen = subprocess.Popen if starts else partial(ForkedPython, enter=enter)
        self.processes = []
        for command, environment in zip(commands, environments, strict=True):
            with log.open("a") as file:
                self.processes.append(
                    popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """With -9, at once: launcher and workers."""
        pids = self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        wait_until_gone(pids)

    @contextmanager
    def stopped(self):
        """Inside, none of its processes runs."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> list[int]:
        pids = [process.pid for process in self.processes if process.poll() is None]
        pids += [child for launcher in pids for child in children(launcher)]
        for pid in pids:
            os.kill(pid, number)
        return pids

    def end(self, seconds: float = 300) -> list[int]:
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, at any depth."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


@pytest.fixture
def start(tmp_path):
    """Starts a Host, and sees to its end."""
    begun = []

    def begin(*arguments, **options):
        begun.append(Host(tmp_path / f"host-{len(begun)}.txt", *arguments, **options))
        return begun[-1]

    yield begin
    for host in begun:
        host.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def torchrun(rank, port, *words, address="127.0.0.1", options=(), nproc=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(nproc)]
    where = ["--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)]
    return [*command, *where, *options, "-m", *words]


def srun(node, job, *words, restarts=0, tasks=2):
    """Return the commands and environments that srun starts on `node` of two, with so many tasks each."""
    shared = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(2 * tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",  # a login node that nobody reaches
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
    }
    shared["SLURM_NODEID"] = str(node)
    places = [{"SLURM_PROCID": str(tasks * node + local), "SLURM_LOCALID": str(local)} for local in range(tasks)]
    return [[sys.executable, "-m", *words]] * tasks, [shared | place for place in places]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 300
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path for path in paths if not path.exists()]
        time.sleep(0.1)


def marks(root: Path) -> list[Path]:
    return [root / "runs" / f"mark-{rank}" for rank in range(4)]


def rows(root: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (root / "runs" / "run" / "metrics.jsonl").open()]


def long_recipe(root: Path, *overrides: str) -> Path:
    """A file with a run that nobody waits for the end of, with a checkpoint at every second step."""
    recipe = tiny_recipe(root, "train.steps=100000", "checkpoint.every=2", *overrides)
    path = root / "recipe.yaml"
    path.write_text(config.to_yaml(recipe))
    return path


def saved(root: Path, step: int) -> Path:
    return root / "runs" / "run" / "checkpoints" / f"step-{step}"


# ---- lost


def test_srun_s_ranks_name_those_of_a_dead_node_and_go_on_when_they_are_queued_again(tmp_path, start):
    recipe, job = long_recipe(tmp_path), free_port()
    both = [
        start(*commands, environments=given)
        for commands, given in (srun(node, job, "dtrain", "run", str(recipe)) for node in range(2))
    ]
    wait_for(saved(tmp_path, 2))
    both[1].kill()
    assert both[0].end(BOUND) == [1, 1]
    told = [line for line in both[0].text().splitlines() if line.startswith("dtrain:")]
    assert len(told) == 1 and "Traceback" not in both[0].text(), both[0].text()  # one rank of the host
    assert f"on {socket.gethostname()} lost another rank: " in told[0]
    newest = max(saved(tmp_path, 0).parent.glob("step-*"), key=lambda path: int(path.name[5:]))
    assert f"The last checkpoint is {newest}: the same command continues from it" in told[0]
    steps = int(newest.name[5:]) + 2
    again = [
        start(*commands, environments=given, starts=True)
        for commands, given in (
            srun(node, job, "dtrain", "run", str(recipe), f"train.steps={steps}", restarts=1, tasks=1)
            for node in range(2)
        )
    ]
    assert [host.end() for host in again] == [[0], [0]], again[0].text()
    assert f"resumed from {newest}" in again[0].text()
    assert rows(tmp_path) == list(range(1, steps + 1))


def test_what_one_host_finds_wrong_is_told_on_all_before_anything_starts(tmp_path, start):
    recipe, job = long_recipe(tmp_path), free_port()
    both = []
    for node, words in enumerate(([str(recipe)], [str(tmp_path / "elsewhere.yaml")])):
        commands, given = srun(node, job, "dtrain", "run", *words)
        both.append(start(*commands, environments=given))
    assert [host.end(BOUND) for host in both] == [[1, 1], [1, 1]]
    told = f"dtrain: ranks 2, 3 on {socket.gethostname()}: there is no recipe"
    for host in both:
        assert host.text().count(told) == 1 and "elsewhere.yaml" in host.text(), host.text()
    assert not saved(tmp_path, 0).parent.exists()


def test_a_cut_wire_is_noticed_on_both_hosts(tmp_path, hosts, start):  # noqa: F811
    tiny_recipe(tmp_path)
    words = ("tests.launch.launched", str(tmp_path), "reduces", "launch.collective_timeout=4")
    both = []
    for node, name in enumerate(hosts):
        command = torchrun(node, 29518, *words, address=MASTER)
        both.append(start(command, enter=partial(in_namespace, name, "ab"[node])))
    wait_for(*marks(tmp_path))
    pids = [int(path.read_text()) for path in marks(tmp_path)]
    began = time.monotonic()
    assert ip("-n", hosts[1], "link", "set", "wire", "down").returncode == 0
    wait_until_gone(pids, 4 + 30)
    assert time.monotonic() - began > 2
    for host, name in zip(both, "ab", strict=True):
        assert host.end(BOUND) != [0]
        told = rf"(?m)^(dtrain: )?rank \d on {name} lost another rank: Timed out waiting 4000ms"
        assert len(re.findall(told, host.text())) == 1, host.text()


def test_the_rank_that_failed_first_is_named_on_every_host(tmp_path, start):
    """Rank 1 crashes; the others, in a collective with it, lose their connections."""
    tiny_recipe(tmp_path)
    job, words = free_port(), ("tests.launch.launched", str(tmp_path), "crashes")
    both = []
    for node in range(2):
        commands, given = srun(node, job, *words)
        both.append(start(*commands, environments=given))
    assert [host.end(BOUND) for host in both] == [[1, 1], [1, 1]]
    name = socket.gethostname()
    for host in both:
        assert host.text().count(f"rank 1 on {name} failed: ZeroDivisionError: the reason") == 1, host.text()
        assert "Traceback" not in host.text() and "lost another rank" not in host.text(), host.text()
    assert "raise ZeroDivisionError" in (tmp_path / "runs" / "run" / "log-rank1.txt").read_text()


# ---- found


def test_where_slurm_says_that_rank_0_is():
    given = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "12041"}
    given["SLURM_STEP_ID"] = "0"
    listed = {**given, "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1"}
    assert read_rank_info(listed, 1).master == ("gpu07", 20041)
    assert read_rank_info({**given, "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1"}, 1).master == ("192.0.2.1", 20041)
    assert read_rank_info({**listed, "SLURM_STEP_ID": "1"}, 1).master == ("gpu07", 21050)
    assert read_rank_info({**listed, "SLURM_RESTART_COUNT": "2"}, 1).attempt == 2


def test_two_pods_of_kubeflow_are_one_run(tmp_path, start):
    tiny_recipe(tmp_path)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.launch.launched", str(tmp_path), "ends"]
    pods = [start(command, environments=[shared | {"RANK": str(rank)}]) for rank in range(2)]
    assert [pod.end(BOUND) for pod in pods] == [[0], [0]], pods[0].text()
    written = [path.read_text().split()[:2] for path in marks(tmp_path)[:2]]
    assert written == [["2", "1.0"], ["2", "1.0"]]  # the world's size, and the sum of the ranks


# ---- recipes/


def parsed(words: list[str]):
    """A command line after `-m dtrain`, by dtrain's own parser, and its recipe."""
    arguments, rest = cli._parser().parse_known_args(words)
    assert not rest and arguments.command is cli._run
    return arguments, load_recipe(arguments.recipe, arguments.overrides)


def test_the_files_for_clusters_ship_and_are_no_recipes(tmp_path):
    names = [name for name, _ in config.list_shipped_recipes()]
    assert "sft" in names and not {"kubernetes", "slurm"} & set(names)
    for name in ("slurm.sh", "kubernetes.yaml"):
        assert cli.main(["cp", name, str(tmp_path)]) == 0
        assert (tmp_path / name).read_text() == (ROOT / "recipes" / name).read_text()
    with pytest.raises(UserError, match="no recipe kubernetes"):
        config.find_recipe("kubernetes")
    built = (ROOT / "pyproject.toml").read_text()
    assert '"recipes" = "dtrain/_recipes"' in built


def test_the_slurm_script(tmp_path):
    script = ROOT / "recipes" / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.M))
    assert options["signal"] == "USR1@120" and "requeue" in options and options["open-mode"] == "append"
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    # srun, scontrol and python played by scripts that write down what they were called with.
    for name, status in (("srun", 138), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", script, "sft", "train.steps=3", "model.path=/m"], env=environment)
    assert done.returncode == 138
    called = (tmp_path / "called").read_text().splitlines()
    assert called[1:] == ["scontrol requeue 7"]
    words = shlex.split(called[0])
    assert words[:6] == ["srun", "--kill-on-bad-exit=0", "--wait=600", "python", "-m", "dtrain"]
    _, recipe = parsed(words[6:])
    assert recipe.train.steps == 3 and recipe.model.path == "/m"
    (tmp_path / "called").unlink()
    for status in (0, 1, 143):  # done, a mistake of its user, and scancel are not queued again
        (tmp_path / "srun").write_text(f'#!/bin/sh\n[ "$SRUN_CPUS_PER_TASK" = 5 ] && exit {status}\n')
        given = {**environment, "SLURM_CPUS_PER_TASK": "5"}
        assert subprocess.run(["bash", script], env=given).returncode == status
    assert not (tmp_path / "called").exists()


def test_the_kubernetes_job():
    from torch.distributed.run import get_args_parser

    service, job = yaml.safe_load_all((ROOT / "recipes" / "kubernetes.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    run = get_args_parser().parse_args(words)
    assert run.module and run.training_script == "dtrain"
    assert int(run.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(run.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert run.node_rank == 1 and run.master_addr == f"{name}-0.{service['metadata']['name']}"
    _, recipe = parsed(run.training_script_args)
    volumes = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == volumes.keys()
    for path in (recipe.model.path, recipe.data.train.path, recipe.run.dir):
        assert path.startswith(volumes["shared"])
    (shutdown,) = (item["value"] for item in container["env"] if item["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert int(shutdown) < pod["terminationGracePeriodSeconds"]
