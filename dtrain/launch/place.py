"""The place of a process among those of its run, by what torchrun and SLURM say in its environment."""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.base.errors import UserError

# Variables of the environment, read by torch and by NCCL: the network interface to use.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankPlace:
    """This process among those of the run.

    started_by  torchrun, or slurm; None: this process is alone, or a launcher or one of its ranks
    attempt     restarts of all processes before this one
    master      host and port of the store where ranks meet; rank 0 serves it, or the elastic agent (`agent_store`)
    file        where the ranks of one launcher meet instead
    environ     the environment of this process, where gloo's interface is named unless its user has
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
    def watches(self) -> bool:
        """True if the ranks watch over one another; those of a launcher are watched by it."""
        return self.world_size > 1 and self.started_by is not None

    @property
    def is_inside(self) -> bool:
        """True if all ranks are known to be on this host: SLURM does not always say."""
        return self.world_size == 1 or (self.world_size == self.local_world_size and self.started_by != "slurm")


def find_place(environ: MutableMapping[str, str], nproc: int) -> RankPlace | None:
    """Return the place that torchrun or SLURM gave this process, or None where nobody started it as one of several
    ranks.

    Of SLURM's processes srun's tasks are ranks; a batch script and a shell of salloc are none, and neither is a step of
    one task that asks for processes of its own (`nproc` > 1). Raises UserError for an environment that contradicts
    itself.
    """
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        world = number(environ, "WORLD_SIZE")
        place = RankPlace(
            rank=number(environ, "RANK"),
            local_rank=number(environ, "LOCAL_RANK"),
            world_size=world,
            local_world_size=number(environ, "LOCAL_WORLD_SIZE", 1 if world == 1 else None),
            started_by="torchrun",
            attempt=number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            master=(environ.get("MASTER_ADDR", "localhost"), number(environ, "MASTER_PORT", 29500)),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environ=environ,
        )
    elif "SLURM_PROCID" in environ and _is_step(environ):
        tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), "SLURM_NTASKS")
        world = number(environ, tasks)
        if world == 1 < nproc:
            return None
        place = RankPlace(
            rank=number(environ, "SLURM_PROCID"),
            local_rank=number(environ, "SLURM_LOCALID"),
            world_size=world,
            local_world_size=_tasks_here(environ, world),
            started_by="slurm",
            attempt=number(environ, "SLURM_RESTART_COUNT", 0),
            master=_slurm_master(environ),
            environ=environ,
        )
    else:
        return None
    if not 0 <= place.rank < place.world_size:
        raise UserError(
            f"{place.started_by} started this process as rank {place.rank} of {place.world_size}, says the environment"
        )
    return place


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
