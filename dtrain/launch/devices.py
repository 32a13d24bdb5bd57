"""The device of a rank: which it takes, and what is wrong with it or with those of all ranks together.

Ranks meet in a store before NCCL starts, which would hang or speak of its own matters where two of them cannot talk.
"""

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.hardware import VISIBLE_DEVICES, choose_device_type, hidden_gpu_reason
from dtrain.launch.rank_info import RankInfo
from dtrain.recipe.world import AUTO, MAX_AUTO_BATCH, Config, mesh_problems, replace_keys

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # a user's own settings
FREE_SHARE = 0.9  # share of a device that is free, below which others hold memory there
CPU_PROCESSES = 64  # that a machine of few cores is let start: each has torch in its memory
BFLOAT16_CAPABILITY = (8, 0)  # compute capability from which on a GPU computes in bfloat16, and has flash attention
DRIVER = Path("/proc/driver/nvidia/version")  # there where a driver is loaded


@dataclass(frozen=True)
class DeviceFacts:
    """A rank's GPU. memory: bytes; capability: CUDA's compute capability, major and minor; free: bytes, where other
    processes hold a tenth of the memory or more."""

    rank: int
    host: str
    name: str
    memory: int
    capability: tuple[int, int]
    uuid: str
    free: int | None = None

    @property
    def has_bfloat16(self) -> bool:
        """Support of bfloat16 and of flash attention, which go together."""
        return self.capability >= BFLOAT16_CAPABILITY

    @property
    def description(self) -> str:
        major, minor = self.capability
        return f"{self.name} ({self.memory / 2**30:.0f} GiB, compute capability {major}.{minor})"


def resolve_nproc(recipe: Config) -> Config:
    """Return `recipe` with a number for `launch.nproc=auto`: of this machine's CUDA devices as many as can share the
    mesh and the batch, or 1. CUDA is not started."""
    launch, count = recipe.launch, 0  # type: ignore[attr-defined]
    if launch.nproc != AUTO:
        return recipe
    if launch.device != "cpu":
        import torch

        count = torch.cuda.device_count()
    fitting = (number for number in range(count, 1, -1) if _shares(recipe, number))
    return replace_keys(recipe, {"launch.nproc": next(fitting, 1)})


def _shares(recipe: Any, count: int) -> bool:
    """Return whether the mesh and the batch of `recipe` can be shared by `count` processes."""
    problems, shape = mesh_problems(recipe, count)
    total = recipe.train.global_batch
    return (
        not problems
        and shape is not None
        and (total if isinstance(total, int) else MAX_AUTO_BATCH) % prod(shape[:2]) == 0
    )


def choose_device(wanted: str, rank_info: RankInfo) -> "torch.device":
    """Return the device of a rank of this machine. CUDA is not started.

    Args:
        wanted: `launch.device`: auto, cpu or cuda.
        place: The rank, and how many run on this machine.

    Raises:
        UserError: If there is no device of that kind, or fewer than ranks.
    """
    import torch

    device_type = choose_device_type("launch.device", wanted, rank_info.environ)
    if device_type == "cpu":
        if wanted == "auto":
            _note_unused_gpu(rank_info)
        _check_cpu_processes(rank_info)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and rank_info.started_by == "slurm":  # srun --gpus-per-task=1 shows each rank its own
        return torch.device("cuda", 0)
    if rank_info.local_world_size > count:
        shown = (
            f" ({VISIBLE_DEVICES}={rank_info.environ[VISIBLE_DEVICES]})" if VISIBLE_DEVICES in rank_info.environ else ""
        )
        raise UserError(
            f"{rank_info.local_world_size} processes on a machine with {count} CUDA device{'s' if count > 1 else ''}"
            f"{shown}: set launch.nproc={count}, or launch.device=cpu"
        )
    return torch.device("cuda", rank_info.local_rank)


def _note_unused_gpu(rank_info: RankInfo) -> None:
    """Print on rank 0 why a machine with a GPU uses its CPU, if the reason is known."""
    reason = hidden_gpu_reason(rank_info.environ)
    if reason is not None and DRIVER.exists() and rank_info.rank == 0:
        print(f"note: launch.device=auto takes the CPU, though this machine has a GPU: {reason}", file=sys.stderr)


def _check_cpu_processes(rank_info: RankInfo) -> None:
    """Refuse more processes on a CPU than its memory and cores are good for."""
    cores = os.cpu_count() or 1
    most = max(CPU_PROCESSES, 4 * cores)
    if rank_info.local_world_size > most:
        plural = "s" if cores > 1 else ""
        raise UserError(
            f"{rank_info.local_world_size} processes on a CPU with {cores} core{plural}, which has room for {most} at "
            f"most: set launch.nproc={cores}"
        )


def start_device(device: "torch.device", rank_info: RankInfo) -> DeviceFacts:
    """Start CUDA on `device`, the default from here on. Raises UserError where the driver does not let it start."""
    import torch

    if not any(name in rank_info.environ for name in ALLOCATOR):
        # Lengths differ from step to step: segments of fixed size would be left with holes.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:  # torch raises both: for the driver, and for a build without CUDA
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"CUDA does not start on {socket.gethostname()}: {first}. torch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}: update the driver (`nvidia-smi` shows its version), install a torch for an older "
            "CUDA, or set launch.device=cpu"
        ) from error
    capability = (properties.major, properties.minor)
    uuid = str(getattr(properties, "uuid", device.index))
    total, free = properties.total_memory, torch.cuda.mem_get_info(device)[0]
    rest = free if free < FREE_SHARE * total else None
    return DeviceFacts(rank_info.rank, socket.gethostname(), properties.name, total, capability, uuid, rest)


def resolve_device_type(wanted: str, dtype: str, count: int, environ: MutableMapping[str, str]) -> str:
    """Return the type of the devices that `count` processes of this machine would have, once each has been started
    here. wanted: `launch.device`. Raises UserError."""
    rank_info = RankInfo(world_size=count, local_world_size=count, environ=environ)
    device = choose_device(wanted, rank_info)
    if device.type == "cuda":
        import torch

        rank_infos = [replace(rank_info, rank=rank, local_rank=rank) for rank in range(count)]
        refusals = find_device_problems(
            [start_device(torch.device("cuda", each.rank), each) for each in rank_infos], dtype
        )
        if refusals:
            raise UserError("\n".join(refusals))
    return device.type


def find_device_problems(devices: Sequence[DeviceFacts], dtype: str, kernels: Sequence[str] | None = None) -> list[str]:
    """Return the reasons why a run in `train.dtype` cannot run on the `devices` of its ranks, one line each. kernels:
    those of this torch, `torch.cuda.get_arch_list()`."""
    if kernels is None:
        import torch

        kernels = torch.cuda.get_arch_list() if torch.version.cuda else ()
    return [*_unfit(devices, dtype, kernels), *_unlike(devices)]


def _unfit(devices: Sequence[DeviceFacts], dtype: str, kernels: Sequence[str]) -> list[str]:
    reasons = []
    for device in {each.capability: each for each in devices}.values():
        if kernels and not _has_kernels(device.capability, kernels):
            reasons.append(
                f"this torch has no kernels for {device.description}: it is built for {', '.join(kernels)}; install a "
                "build of torch that names this capability"
            )
        if dtype in ("auto", "bfloat16") and not device.has_bfloat16:
            reasons.append(
                f"{device.description} does not compute in bfloat16 (train.dtype={dtype}), which takes compute "
                "capability 8.0: an A100 or later. Set train.dtype=float16 or float32"
            )
    return reasons


def _has_kernels(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Binary kernels (sm) run on their own major version from their minor one on, PTX (compute) on all later ones."""
    for kernel in kernels:
        kind, _, digits = kernel.partition("_")
        number = int("".join(filter(str.isdigit, digits)) or 0)
        version = (number // 10, number % 10)
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return False


def _unlike(devices: Sequence[DeviceFacts]) -> list[str]:
    """Return the reasons why the devices cannot work together."""
    if len(devices) == 1:
        return []
    sliced = next((device for device in devices if " MIG " in f"{device.name} "), None)
    if sliced is not None:
        return [
            f"rank {sliced.rank} has a MIG slice, {sliced.name}, and NCCL does not connect slices: set launch.nproc=1, "
            "or have MIG switched off"
        ]
    reasons = []
    for host, count in Counter(device.host for device in devices).items():
        distinct = len({device.uuid for device in devices if device.host == host})
        if distinct < count:
            reasons.append(
                f"{count} ranks on {host} share {distinct} GPU{'s' if distinct > 1 else ''}, and NCCL takes one rank "
                f"each: give every rank its own ({VISIBLE_DEVICES}, or the batch system's --gpus-per-task)"
            )
    if len({device.capability for device in devices}) > 1:
        reasons.append(
            f"the GPUs are of different kinds, {_kinds(devices)}: ranks would take different kernels, whose numbers "
            f"differ. Choose GPUs of one kind ({VISIBLE_DEVICES}, or the batch system's constraint)"
        )
    return reasons


def device_notes(devices: Sequence[DeviceFacts]) -> list[str]:
    """Return notes for the user on devices that work together but differ."""
    if len({(device.name, device.memory) for device in devices}) == 1:
        return []
    return [f"the GPUs differ, {_kinds(devices)}: the least memory is what counts, and the slowest sets the pace"]


def _kinds(devices: Sequence[DeviceFacts]) -> str:
    ranks: dict[str, list[int]] = {}
    for device in devices:
        ranks.setdefault(device.description, []).append(device.rank)
    shown = (
        f"{words} on rank {', '.join(map(str, of[:8]))}{', ...' if len(of) > 8 else ''}" for words, of in ranks.items()
    )
    return "; ".join(shown)


def check_on_all_ranks(
    start: Callable[[], DeviceFacts],
    rank_info: RankInfo,
    store: "dist.Store | None",
    judge: Callable[[Sequence[DeviceFacts]], Sequence[str]],
) -> None:
    """Raises UserError, on every rank, with what any rank's `start` raises, or else with what `judge` finds in the
    devices of all, on rank 0. store: where the ranks of several meet."""
    if store is None:
        refusal = "\n".join(judge([start()]))
    else:
        prefix = f"devices of attempt {rank_info.attempt}"
        try:
            answer = json.dumps(asdict(start()))
        except UserError as error:
            answer = json.dumps(str(error))  # in place of a device
        store.set(f"{prefix}/{rank_info.rank}", answer)
        if rank_info.rank == 0:
            answers = [json.loads(store.get(f"{prefix}/{rank}")) for rank in range(rank_info.world_size)]
            refused = dict.fromkeys(answer for answer in answers if isinstance(answer, str))
            devices = [
                DeviceFacts(**answer | {"capability": tuple(answer["capability"])}) for answer in answers if not refused
            ]
            store.set(f"{prefix}/refusal", "\n".join(refused or judge(devices)))
        refusal = store.get(f"{prefix}/refusal").decode()
    if refusal:
        raise UserError(refusal)
