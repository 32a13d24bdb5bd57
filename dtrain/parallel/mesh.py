"""The device mesh of a run, its process groups, and `Runtime`, the facts of a rank about itself.

The mesh has the dimensions dp_replicate, dp_shard, cp and tp, and flattened ones made of them. Process groups have
their backends and a time after which a rank stops waiting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class StopFlag:
    """Set by a signal handler, read by the trainer between steps. `signum` is 0 until a signal came."""

    def __init__(self) -> None:
        self.signum = 0

    def request(self, signum: int) -> None:
        self.signum = signum


@dataclass(frozen=True)
class Runtime:
    """A rank of a run. Made by `launch`; packages below read it and never the environment.

    planned: where a plan is worked out beside the run, what it says of the peak (`words`, `size` in bytes), waited for
    so many seconds.
    collective_timeout: seconds, as of `launch.collective_timeout`; mesh.py knows what None means.
    chosen: lines on the sizes that the recipe left to `auto`; machine: what these were chosen for, on rank 0.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    stop: StopFlag = field(default_factory=StopFlag)
    wait_for_plan: Callable[[float], Any] | None = None
    collective_timeout: float | None = None
    size_notes: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
DEFAULT_GLOO_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Mesh:
    """The mesh and the slices of it that other packages ask for.

    `fsdp` is what parameters are sharded over: dp_shard and cp flattened, with dp_replicate in front under HSDP.
    `dp` is what samples are shared out over: dp_replicate and dp_shard flattened; the cp and tp ranks of one dp rank
    hold the same samples. `dp_cp`: what tokens are shared out over.
    `ep`: the ranks that share experts, neighbours of one fsdp slice; None where each has all. `expert_fsdp`: what
    experts are sharded over: what ep leaves of `fsdp`, with dp_replicate in front as there.
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
    """The mesh over the process group, which must be up; the first four sizes must multiply to the world size, and ep
    divide dp_shard · cp."""
    sizes = (dp_replicate, dp_shard, cp, tp)
    mesh = init_device_mesh(runtime.device.type, sizes, mesh_dim_names=DIMENSIONS)
    sharded = mesh["dp_shard", "cp"]._flatten("fsdp")
    dp = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    dp_cp = mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    made, experts, expert_fsdp = [sharded, dp, dp_cp], None, None
    if ep > 1:
        halves, names = (sharded.size() // ep, ep), ("expert_fsdp", "ep")
        split = sharded._unflatten(dim=0, mesh_sizes=halves, mesh_dim_names=names)
        experts, expert_fsdp = split["ep"], split["expert_fsdp"]
        made += [experts, expert_fsdp]
        if dp_replicate > 1:
            expert_fsdp = concatenate_meshes(mesh["dp_replicate"], expert_fsdp)
    for group in (*mesh.get_all_groups(), *(submesh.get_group() for submesh in made)):
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
        ep=experts,
        expert_fsdp=expert_fsdp,
    )


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """The mesh of all dimensions of `meshes`, in their order; these are parts of one mesh. No collective."""
    return DeviceMesh._concatenate(device_mesh_list=list(meshes))


def get_group_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices whose tensors `group` can send, without an index."""
    return group._device_types


def init_process_group(
    device_type: str, store: dist.Store, rank: int, world_size: int, collective_timeout: float | None = None
) -> None:
    """The process group of the whole run: gloo for tensors of the host, on CUDA nccl for those of the device.

    No device is bound to it: DeviceMesh would then split its groups from this one, and torch hands nccl's options to
    gloo's half of them too, with a warning. Communicators of nccl are made where they are first used.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    set_timeouts(dist.group.WORLD, collective_timeout)


def init_one_process_group(device_type: str) -> None:
    """A process group of this process alone, where none is up, so that one rank runs the code of many."""
    if not dist.is_initialized():
        init_process_group(device_type, dist.HashStore(), 0, 1)


def set_timeouts(group: dist.ProcessGroup | None, seconds: float | None) -> None:
    """Set how long a rank waits for the others in a collective of `group`; the rule of `launch.collective_timeout`.

    Ranks wait for one another's own work (data, a rollout, a file) over gloo alone, so that nccl keeps torch's half an
    hour where `seconds` is None.
    """
    assert group is not None, "no process group is up"
    for device in get_group_devices(group):
        backend = group._get_backend(device)
        if seconds is not None or isinstance(backend, dist.ProcessGroupGloo):
            backend.set_timeout(DEFAULT_GLOO_TIMEOUT if seconds is None else timedelta(seconds=seconds))


def new_host_group(collective_timeout: float | None = None) -> dist.ProcessGroup:
    """All ranks in a gloo group of their own, for a thread beside the main one. Collective."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # a number where this rank is not in it
    set_timeouts(group, collective_timeout)
    return group
