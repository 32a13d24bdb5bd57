"""The device mesh of a run: dimensions dp_replicate, dp_shard, cp, tp, and what is flattened from them."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtrain.parallel.runtime import Runtime

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The mesh and the slices of it that other packages ask for.

    `fsdp` is what parameters are sharded over: dp_shard and cp flattened, with dp_replicate in front under HSDP.
    `dp` is what samples are shared out over: dp_replicate and dp_shard flattened; the cp and tp ranks of one dp rank
    hold the same samples. `dp_cp`: what tokens are shared out over.
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


def build_mesh(runtime: Runtime, *, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1) -> Mesh:
    """The mesh over the process group, which must be up; the four sizes must multiply to the world size."""
    sizes = (dp_replicate, dp_shard, cp, tp)
    mesh = init_device_mesh(runtime.device.type, sizes, mesh_dim_names=DIMENSIONS)
    sharded = mesh["dp_shard", "cp"]._flatten("fsdp")
    dp = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    return Mesh(
        device_mesh=mesh,
        fsdp=mesh["dp_replicate", "fsdp"] if dp_replicate > 1 else sharded,
        dp=dp,
        dp_cp=mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp"),
        cp=mesh["cp"],
        tp=mesh["tp"],
        size=mesh.size(),
        dp_rank=dp.get_local_rank(),
        dp_size=dp.size(),
    )


def init_one_process_group(device_type: str) -> None:
    """A process group of this process alone, where none is up, so that one rank runs the code of many."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
