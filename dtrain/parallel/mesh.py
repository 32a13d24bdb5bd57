"""The device mesh of a run, its process groups, and `Runtime`, which has a rank's own number and device.

The mesh has the dimensions dp_replicate, dp_shard, cp and tp. Example: 16 ranks with dp_replicate = 2, dp_shard = 2,
cp = 2 and tp = 2. The rank number counts tp fastest, so rank 13 = 1·8 + 1·4 + 0·2 + 1 has the coordinates (1, 1, 0, 1).
Other dimensions are made by flattening these four:

    fsdp      dp_shard × cp = 4 ranks          parameters are sharded over it (with dp_replicate in front: HSDP)
    dp        dp_replicate × dp_shard = 4      samples are distributed over it
    dp_cp     dp_replicate × dp_shard × cp = 8 tokens are distributed over it
    ep        divides fsdp, for example 2 × 2  experts are distributed over it, and each is sharded over the rest

Each process group has a backend per device type, and a timeout after which a rank stops waiting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class StopFlag:
    """Request to stop: set by a signal handler, and read by the trainer between steps.

    Attributes:
        signum: Number of the signal. 0 until there was one.
    """

    def __init__(self) -> None:
        self.signum = 0

    def request(self, signum: int) -> None:
        """Record the signal."""
        self.signum = signum


class PeakMemory(Protocol):
    """The planned peak memory of a rank.

    Attributes:
        words: The peak as text, or the reason why there is none.
        size: Its bytes. 0 if there is none.
    """

    @property
    def words(self) -> str: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Runtime:
    """A rank of a run. `launch` creates the object, and the other packages read it instead of the environment.

    Attributes:
        rank: Number of the rank in the run.
        local_rank: Number of the rank on its host.
        world_size: The number of ranks.
        device: Device of the rank.
        stop: Request to stop.
        wait_for_plan: Waits at most the given seconds for a plan that is computed next to the run, and returns its
            peak memory, or None if the plan is not ready by then. None if there is no such plan.
        collective_timeout: Seconds, `launch.collective_timeout`. None: see `set_timeouts`.
        size_notes: Lines on the sizes that the recipe left to `auto`.
        machine: Facts of the machine for which these sizes were chosen, on rank 0.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    stop: StopFlag = field(default_factory=StopFlag)
    wait_for_plan: Callable[[float], PeakMemory | None] | None = None
    collective_timeout: float | None = None
    size_notes: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")

# Ranks wait for each other's slow work (preparing data, a rollout, writing a file) over gloo, which may take hours.
DEFAULT_GLOO_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Mesh:
    """The device mesh, with the submeshes that other packages use.

    Attributes:
        device_mesh: All four dimensions.
        fsdp: Dimensions over which parameters are sharded: dp_shard and cp, flattened. Under HSDP it has two
            dimensions, of which dp_replicate is the first.
        dp: Ranks over which samples are distributed: dp_replicate and dp_shard, flattened. The cp and tp ranks of one
            dp rank have the same samples.
        dp_cp: Ranks over which tokens are distributed: dp_replicate, dp_shard and cp, flattened.
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks.
        size: The number of ranks.
        dp_rank: Index of this rank in `dp`.
        dp_size: The number of ranks in `dp`.
        ep: Ranks over which experts are distributed, neighbours in `fsdp`. None if every rank has all experts.
        expert_fsdp: Ranks over which each expert is sharded: `fsdp` divided by `ep`. Under HSDP with dp_replicate in
            front. None if `ep` is.
    """

    device_mesh: DeviceMesh
    fsdp: DeviceMesh
    dp: DeviceMesh
    dp_cp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    size: int
    dp_rank: int
    dp_size: int
    ep: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None


def build_mesh(
    runtime: Runtime, *, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1, ep: int = 1
) -> Mesh:
    """Build the mesh over the initialised process group. Collective, because it creates process groups.

    Args:
        runtime: This rank.
        dp_replicate: Replicas of the sharded model.
        dp_shard: Data-parallel ranks over which parameters are sharded.
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks. The product of these four must be the world size.
        ep: Expert-parallel ranks. It must divide dp_shard · cp.
    """
    sizes = (dp_replicate, dp_shard, cp, tp)
    mesh = init_device_mesh(runtime.device.type, sizes, mesh_dim_names=DIMENSIONS)
    sharded = mesh["dp_shard", "cp"]._flatten("fsdp")
    dp = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    dp_cp = mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    derived = [sharded, dp, dp_cp]
    ep_mesh: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None
    if ep > 1:
        split = sharded._unflatten(dim=0, mesh_sizes=(sharded.size() // ep, ep), mesh_dim_names=("expert_fsdp", "ep"))
        ep_mesh, expert_fsdp = split["ep"], split["expert_fsdp"]
        derived += [ep_mesh, expert_fsdp]
        if dp_replicate > 1:
            expert_fsdp = concatenate_meshes(mesh["dp_replicate"], expert_fsdp)
    for group in (*mesh.get_all_groups(), *(submesh.get_group() for submesh in derived)):
        set_timeouts(group, runtime.collective_timeout)
    return Mesh(
        device_mesh=mesh,
        fsdp=mesh["dp_replicate", "fsdp"] if dp_replicate > 1 else sharded,
        dp=dp,
        dp_cp=dp_cp,
        cp=mesh["cp"],
        tp=mesh["tp"],
        size=mesh.size(),
        dp_rank=dp.get_local_rank(),
        dp_size=dp.size(),
        ep=ep_mesh,
        expert_fsdp=expert_fsdp,
    )


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the dimensions of all `meshes`, in order. They must be parts of one mesh. No collective."""
    return DeviceMesh._concatenate(device_mesh_list=list(meshes))


def get_group_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the types of devices whose tensors `group` can send, as devices without an index."""
    return group._device_types


def init_process_group(
    device_type: str, store: dist.Store, rank: int, world_size: int, collective_timeout: float | None = None
) -> None:
    """Initialise the process group of the run: gloo for tensors in host memory, and nccl for those on CUDA devices.

    The group is not bound to a device. DeviceMesh would then split its groups from this one, and torch would pass
    nccl's options to their gloo backends, with a warning. nccl's communicators are created when they are first used.

    Args:
        device_type: "cpu" or "cuda".
        store: Store through which the ranks find each other.
        rank: Number of this rank.
        world_size: The number of ranks.
        collective_timeout: Seconds. None: see `set_timeouts`.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    set_timeouts(dist.group.WORLD, collective_timeout)


def init_one_process_group(device_type: str) -> None:
    """Initialise a process group of this process only, unless there is one, so that one rank runs the same code."""
    if not dist.is_initialized():
        init_process_group(device_type, dist.HashStore(), 0, 1)


def set_timeouts(group: dist.ProcessGroup | None, seconds: float | None) -> None:
    """Set how long ranks wait for each other in the collectives of a group.

    Args:
        group: The group.
        seconds: `launch.collective_timeout`. None: a day on gloo, and torch's half an hour on nccl. Only gloo's
            collectives wait for the slow work of another rank, such as data, a rollout or a file.
    """
    assert group is not None, "no process group is initialised"
    for device in get_group_devices(group):
        backend = group._get_backend(device)
        if seconds is not None:
            backend.set_timeout(timedelta(seconds=seconds))
        elif isinstance(backend, dist.ProcessGroupGloo):
            backend.set_timeout(DEFAULT_GLOO_TIMEOUT)


def new_host_group(collective_timeout: float | None = None) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, for a thread that communicates next to the main one. Collective."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # torch returns a number to ranks that are not in a new group
    set_timeouts(group, collective_timeout)
    return group
