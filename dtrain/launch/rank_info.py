"""The place of a process among those of its run, by what torchrun and SLURM say in its environment."""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.base.errors import UserError

# Variables of the environment, read by torch and by NCCL: the network interface to use.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankInfo:
    """This process among those of the run.

    Attributes:
        started_by: "torchrun", "slurm" or "pods". None for a process of its own, and for a rank of our own launcher.
        attempt: How often all processes were started again before this one.
        master: Host and port of the store where ranks meet. Rank 0 serves it, or the elastic agent (`agent_store`).
        file: The file where the ranks of our own launcher meet instead.
        environ: The environment of this process. The network interface of gloo is set there while a run lasts.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    started_by: str | None = None
    attempt: int = 0
    master: tuple[str, int] = ("localhost", 0)
    agent_store: bool = False
    file: Path | None = None
    environ: MutableMapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def needs_rendezvous(self) -> bool:
        """True if torchrun or SLURM started several ranks: they have to find each other, perhaps across hosts."""
        return self.world_size > 1 and self.started_by is not None

    @property
    def is_single_host(self) -> bool:
        """True if all ranks are known to be on this host."""
        if self.started_by == "slurm" and self.world_size > 1:
            return self.environ.get("SLURM_STEP_NUM_NODES") == "1"
        return self.world_size == self.local_world_size


def read_rank_info(environ: MutableMapping[str, str], nproc: int) -> RankInfo | None:
    """Return the place that torchrun, SLURM or a job of pods gave this process; None if it was not started as a rank.

    Of SLURM's processes srun's tasks are ranks. A batch script and a shell of salloc are none, and neither is a step of
    one task that asks for processes of its own (`nproc` > 1). Kubeflow's PyTorchJob sets RANK and WORLD_SIZE but not
    LOCAL_RANK: each pod is then one rank.

    Args:
        nproc: `launch.nproc` as a number.

    Raises:
        UserError: If the environment contradicts itself, or counts pods while the recipe asks for several processes.
    """
    has_rank = "RANK" in environ and "WORLD_SIZE" in environ
    if has_rank and "LOCAL_RANK" in environ:
        rank_info = _torchrun_place(environ)
    elif "SLURM_PROCID" in environ and _is_step(environ):
        rank_info = _slurm_place(environ)
        if rank_info.world_size == 1 < nproc:
            return None
    elif has_rank and number(environ, "WORLD_SIZE") > 1:
        rank_info = _pod_place(environ, nproc)
    else:
        return None
    if not 0 <= rank_info.rank < rank_info.world_size:
        raise UserError(
            f"the environment says that this process is rank {rank_info.rank} of {rank_info.world_size} "
            f"({rank_info.started_by})"
        )
    return rank_info


def _torchrun_place(environ: MutableMapping[str, str]) -> RankInfo:
    world_size = number(environ, "WORLD_SIZE")
    return RankInfo(
        rank=number(environ, "RANK"),
        local_rank=number(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=number(environ, "LOCAL_WORLD_SIZE", 1 if world_size == 1 else None),
        started_by="torchrun",
        attempt=number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        master=(environ.get("MASTER_ADDR", "localhost"), number(environ, "MASTER_PORT", 29500)),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environ=environ,
    )


def _slurm_place(environ: MutableMapping[str, str]) -> RankInfo:
    tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), "SLURM_NTASKS")
    world_size = number(environ, tasks)
    return RankInfo(
        rank=number(environ, "SLURM_PROCID"),
        local_rank=number(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_tasks_here(environ, world_size),
        started_by="slurm",
        attempt=number(environ, "SLURM_RESTART_COUNT", 0),
        master=_slurm_master(environ),
        environ=environ,
    )


def _pod_place(environ: MutableMapping[str, str], nproc: int) -> RankInfo:
    if nproc > 1:
        raise UserError(
            "RANK and WORLD_SIZE are set without LOCAL_RANK, as Kubeflow's PyTorchJob sets them for a pod: one process "
            f"for each pod. This recipe asks for launch.nproc={nproc}. Set launch.nproc=1, or run torchrun in the pod: "
            f"torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node={nproc} --master-addr=$MASTER_ADDR "
            "--master-port=$MASTER_PORT -m dtrain run ..."
        )
    if "MASTER_ADDR" not in environ:
        raise UserError(
            "RANK and WORLD_SIZE are set, but neither LOCAL_RANK nor MASTER_ADDR, so that this process cannot find the "
            "other ranks. Unset RANK and WORLD_SIZE for a run of its own, or start the ranks with torchrun."
        )
    return RankInfo(
        rank=number(environ, "RANK"),
        world_size=number(environ, "WORLD_SIZE"),
        started_by="pods",
        master=(environ["MASTER_ADDR"], number(environ, "MASTER_PORT", 29500)),
        environ=environ,
    )


def number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isdecimal():
        what = "is not set" if text is None else f"is {text!r}, which is no number"
        raise UserError(f"this process was started as one of several ranks, but {name} {what} in its environment")
    return int(text)


def _is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process. salloc's shell is a step too, of a number beyond srun's."""
    step = environ.get("SLURM_STEP_ID", "")
    first_special = 0xFFFFFFF0
    return step.isdecimal() and int(step) < first_special


def _tasks_here(environ: Mapping[str, str], world: int) -> int:
    """The step's tasks on this node, from a list such as `2(x3),1`."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    nodes = [
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", listed)
        for _ in range(int(times or 1))
    ]
    node = number(environ, "SLURM_NODEID", 0)
    return nodes[node] if node < len(nodes) else max(nodes, default=world)


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host, the first of the step's node list, and a port that two steps on one machine rarely share.

    A step on one host meets at its loopback. SLURM_LAUNCH_NODE_IPADDR is srun's own host, which may be a login node: it
    counts where no list is given. The port lies below those that systems give to connections (from 32768 on Linux).
    """
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((environ[name] for name in lists if name in environ), "")
    listed = first_host(nodes) if nodes else environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
    listed = "localhost" if environ.get("SLURM_STEP_NUM_NODES") == "1" else listed
    step = number(environ, "SLURM_JOB_ID", 0) + 1009 * number(environ, "SLURM_STEP_ID", 0)
    return environ.get("MASTER_ADDR") or listed, number(environ, "MASTER_PORT", 20000 + step % 12000)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `gpu[07-09,12],login1`."""
    if not nodes:
        return "localhost"
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
