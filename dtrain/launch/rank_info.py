"""Rank, world size and rendezvous address of this process, read from the environment of torchrun or SLURM.

For example, the second of two tasks that `srun --ntasks-per-node=2` started on node gpu07 sees

    SLURM_PROCID=1  SLURM_LOCALID=1  SLURM_STEP_NUM_TASKS=2  SLURM_STEP_NODELIST=gpu07  ...

and becomes `RankInfo(rank=1, local_rank=1, world_size=2, local_world_size=2, started_by="slurm", ...)`.
"""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.base.errors import UserError

# The environment variables with which gloo and NCCL (through torch) choose their network interface.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

# Set by the launcher for its workers, so that a worker knows its job.
WORKER_VARIABLE = "DTRAIN_JOB"


@dataclass(frozen=True)
class RankInfo:
    """This process among the ranks of its run.

    Attributes:
        rank: Index among all ranks.
        local_rank: Index among the ranks of this host.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this host.
        started_by: "torchrun", "slurm" or "pods". None for a single process, and for a rank of our own launcher.
        attempt: Number of times that all ranks were restarted before this start.
        master: Host and port of the rendezvous store. Rank 0 serves it, or the elastic agent (`agent_store`).
        agent_store: Whether torchrun's elastic agent serves the store.
        file: File that the ranks of our own launcher use as a store instead of `master`.
        environ: Environment of this process. The network interface of gloo is set in it while a run lasts.
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
        """Whether this is one of several ranks that torchrun, SLURM or pods started, perhaps on several hosts."""
        return self.world_size > 1 and self.started_by is not None

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are known to run on this host."""
        if self.started_by == "slurm" and self.world_size > 1:
            return self.environ.get("SLURM_STEP_NUM_NODES") == "1"
        return self.world_size == self.local_world_size


def read_rank_info(environ: MutableMapping[str, str], nproc: int) -> RankInfo | None:
    """Read this process's rank from the environment of torchrun, SLURM or a job of pods.

    Under SLURM, only tasks of srun are ranks. A batch script and an interactive shell of salloc are not, and neither is
    a step of one task whose recipe asks for several processes (`nproc` > 1). Kubeflow's PyTorchJob sets RANK and
    WORLD_SIZE but not LOCAL_RANK: each pod is then one rank.

    Args:
        environ: Environment of this process.
        nproc: `launch.nproc` as a number.

    Returns:
        The rank, or None if this process was not started as a rank.

    Raises:
        UserError: If the environment contradicts itself, or describes pods while the recipe asks for several processes.
    """
    has_rank = "RANK" in environ and "WORLD_SIZE" in environ
    if has_rank and "LOCAL_RANK" in environ:
        rank_info = _torchrun_rank(environ)
    elif "SLURM_PROCID" in environ and _is_srun_step(environ):
        rank_info = _slurm_rank(environ)
        if rank_info.world_size == 1 < nproc:
            return None
    elif has_rank and read_number(environ, "WORLD_SIZE") > 1:
        rank_info = _pod_rank(environ, nproc)
    else:
        return None
    if not 0 <= rank_info.rank < rank_info.world_size:
        raise UserError(
            f"the environment says that this process is rank {rank_info.rank} of {rank_info.world_size} "
            f"({rank_info.started_by})"
        )
    return rank_info


def _torchrun_rank(environ: MutableMapping[str, str]) -> RankInfo:
    world_size = read_number(environ, "WORLD_SIZE")
    return RankInfo(
        rank=read_number(environ, "RANK"),
        local_rank=read_number(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=read_number(environ, "LOCAL_WORLD_SIZE", default=1 if world_size == 1 else None),
        started_by="torchrun",
        attempt=read_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        master=(environ.get("MASTER_ADDR", "localhost"), read_number(environ, "MASTER_PORT", default=29500)),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environ=environ,
    )


def _slurm_rank(environ: MutableMapping[str, str]) -> RankInfo:
    # `srun --preserve-env` keeps SLURM_NTASKS of the job, so the step's own number comes first.
    has_step_size = "SLURM_STEP_NUM_TASKS" in environ
    world_size = read_number(environ, "SLURM_STEP_NUM_TASKS" if has_step_size else "SLURM_NTASKS")
    return RankInfo(
        rank=read_number(environ, "SLURM_PROCID"),
        local_rank=read_number(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_tasks_on_this_node(environ, world_size),
        started_by="slurm",
        attempt=read_number(environ, "SLURM_RESTART_COUNT", default=0),
        master=_slurm_master(environ),
        environ=environ,
    )


def _pod_rank(environ: MutableMapping[str, str], nproc: int) -> RankInfo:
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
            "other ranks. Unset RANK and WORLD_SIZE to run a single process, or start the ranks with torchrun."
        )
    return RankInfo(
        rank=read_number(environ, "RANK"),
        world_size=read_number(environ, "WORLD_SIZE"),
        started_by="pods",
        master=(environ["MASTER_ADDR"], read_number(environ, "MASTER_PORT", default=29500)),
        environ=environ,
    )


def read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read an environment variable as a non-negative integer.

    Args:
        environ: Environment of a rank.
        name: Name of the variable.
        default: Value if the variable is not set. None: it must be set.

    Raises:
        UserError: If the variable is missing or not a number.

    Example:
        >>> read_number({"RANK": "3"}, "RANK")
        3
        >>> read_number({}, "MASTER_PORT", default=29500)
        29500
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        problem = "is not set" if text is None else f"is {text!r}, which is not a number"
        raise UserError(f"this process was started as one of several ranks, but {name} {problem} in its environment")
    return int(text)


def _is_srun_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process, as opposed to a batch script or a shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    # SLURM gives the steps of batch scripts and of salloc's shell special ids at the end of the 32-bit range.
    first_special_id = 0xFFFFFFF0
    return step.isdecimal() and int(step) < first_special_id


def _tasks_on_this_node(environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of tasks of this step on this node."""
    task_list = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    tasks_by_node = expand_task_list(task_list)
    node = read_number(environ, "SLURM_NODEID", default=0)
    if node < len(tasks_by_node):
        return tasks_by_node[node]
    return max(tasks_by_node, default=world_size)


def expand_task_list(task_list: str) -> list[int]:
    """Return the number of tasks on each node from SLURM's compressed list.

    Example:
        >>> expand_task_list("2(x3),1")
        [2, 2, 2, 1]
    """
    tasks_by_node: list[int] = []
    for num_tasks, num_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", task_list):
        tasks_by_node += [int(num_tasks)] * int(num_nodes or 1)
    return tasks_by_node


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host of rank 0 and a port that all ranks compute alike. MASTER_ADDR and MASTER_PORT take precedence.

    Rank 0 runs on the first host of the step's node list. SLURM_LAUNCH_NODE_IPADDR is only a fallback, because it is
    srun's own host, which may be a login node. A step on a single host uses the loopback address.
    """
    node_list = ""
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if name in environ:
            node_list = environ[name]
            break
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        host = "localhost"
    elif node_list:
        host = first_host(node_list)
    else:
        host = environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
    # Two steps on one machine rarely get the same port. Ports stay below 32768, from where on Linux assigns ports to
    # outgoing connections.
    job_id = read_number(environ, "SLURM_JOB_ID", default=0)
    step_id = read_number(environ, "SLURM_STEP_ID", default=0)
    port = 20000 + (job_id + 1009 * step_id) % 12000
    return environ.get("MASTER_ADDR") or host, read_number(environ, "MASTER_PORT", default=port)


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list.

    Example:
        >>> first_host("gpu[07-09,12],login1")
        'gpu07'
    """
    if not node_list:
        return "localhost"
    first = re.split(r",(?![^\[]*\])", node_list)[0]  # commas inside brackets do not separate entries
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
