"""The device of each rank, and checks that the devices of all ranks can work together.

The checks use a torch.distributed store, before NCCL starts. NCCL itself would hang, or fail with a message about its
own internals, if two ranks share a GPU or use MIG slices.
"""

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.hardware import VISIBLE_DEVICES, DeviceFacts, choose_device_type, hidden_gpu_reason
from dtrain.base.ranges import plural
from dtrain.launch.rank_info import RankInfo
from dtrain.recipe.world import AUTO, MAX_AUTO_BATCH, Config, mesh_problems, replace_keys

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Environment variables with a user's own settings of torch's allocator.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
FREE_SHARE = 0.9  # if less of a device's memory is free, other processes are using it
CPU_PROCESSES = 64  # number of CPU processes that is always allowed; each loads torch into memory
DRIVER = Path("/proc/driver/nvidia/version")  # exists if NVIDIA's driver is loaded


def resolve_nproc(recipe: Config) -> Config:
    """Replace `launch.nproc=auto` by a number, without starting CUDA.

    The number is the largest number of this machine's CUDA devices for which the mesh and the batch can be divided, or
    1 if there is none.
    """
    launch = recipe.launch  # type: ignore[attr-defined]
    if launch.nproc != AUTO:
        return recipe
    num_devices = 0
    if launch.device != "cpu":
        import torch

        num_devices = torch.cuda.device_count()
    nproc = 1
    for count in range(num_devices, 1, -1):
        if _can_run_on(recipe, count):
            nproc = count
            break
    return replace_keys(recipe, {"launch.nproc": nproc})


def _can_run_on(recipe: Any, num_processes: int) -> bool:
    """Return whether `num_processes` can divide the mesh and the global batch of the recipe."""
    problems, shape = mesh_problems(recipe, num_processes)
    if problems or shape is None:
        return False
    dp_size = prod(shape[:2])
    global_batch = recipe.train.global_batch
    if not isinstance(global_batch, int):
        global_batch = MAX_AUTO_BATCH
    return global_batch % dp_size == 0


def choose_device(requested: str, rank_info: RankInfo) -> "torch.device":
    """Return the device of a rank of this machine, without starting CUDA.

    Args:
        requested: `launch.device`: auto, cpu or cuda.
        rank_info: The rank, and the number of ranks on this machine.

    Raises:
        UserError: If there is no such device, or fewer than ranks.
    """
    import torch

    device_type = choose_device_type("launch.device", requested, rank_info.environ)
    if device_type == "cpu":
        if requested == "auto":
            _note_unused_gpu(rank_info)
        _check_cpu_processes(rank_info)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and rank_info.started_by == "slurm":  # srun --gpus-per-task=1 makes one GPU visible to each rank
        return torch.device("cuda", 0)
    if rank_info.local_world_size > count:
        visible = rank_info.environ.get(VISIBLE_DEVICES)
        setting = "" if visible is None else f" ({VISIBLE_DEVICES}={visible})"
        raise UserError(
            f"{rank_info.local_world_size} processes on a machine with {count} CUDA {plural(count, 'device')}{setting}"
            f": set launch.nproc={count}, or launch.device=cpu"
        )
    return torch.device("cuda", rank_info.local_rank)


def _note_unused_gpu(rank_info: RankInfo) -> None:
    """Print on rank 0 why a machine with a GPU uses its CPU, if the reason is known."""
    reason = hidden_gpu_reason(rank_info.environ)
    if reason is not None and DRIVER.exists() and rank_info.rank == 0:
        print(f"note: launch.device=auto takes the CPU, though this machine has a GPU: {reason}", file=sys.stderr)


def _check_cpu_processes(rank_info: RankInfo) -> None:
    """Raise UserError if a CPU would run more processes than its memory and cores can serve."""
    cores = os.cpu_count() or 1
    max_processes = max(CPU_PROCESSES, 4 * cores)
    if rank_info.local_world_size > max_processes:
        raise UserError(
            f"{rank_info.local_world_size} processes on a CPU with {cores} {plural(cores, 'core')}, which has room for "
            f"{max_processes} at most: set launch.nproc={cores}"
        )


def start_device(device: "torch.device", rank_info: RankInfo) -> DeviceFacts:
    """Start CUDA on `device` and make it the default device of this process.

    Raises:
        UserError: If the driver does not let CUDA start.
    """
    import torch

    if not any(name in rank_info.environ for name in ALLOCATOR):
        # Sequence lengths differ from step to step, and segments of fixed size would leave gaps.
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
    free, total = torch.cuda.mem_get_info(device)[0], properties.total_memory
    return DeviceFacts(
        rank=rank_info.rank,
        host=socket.gethostname(),
        name=properties.name,
        memory=total,
        capability=(properties.major, properties.minor),
        uuid=str(getattr(properties, "uuid", device.index)),
        free=free if free < FREE_SHARE * total else None,
    )


def resolve_device_type(requested: str, dtype: str, num_processes: int, environ: MutableMapping[str, str]) -> str:
    """Choose the device type of `num_processes` processes on this machine, and start the CUDA devices that they need.

    Args:
        requested: `launch.device`: auto, cpu or cuda.
        dtype: `train.dtype`.
        num_processes: Number of processes.
        environ: Environment of this process.

    Raises:
        UserError: If the devices do not suffice.
    """
    first_rank = RankInfo(world_size=num_processes, local_world_size=num_processes, environ=environ)
    device = choose_device(requested, first_rank)
    if device.type == "cuda":
        import torch

        devices = []
        for rank in range(num_processes):
            rank_info = replace(first_rank, rank=rank, local_rank=rank)
            devices.append(start_device(torch.device("cuda", rank), rank_info))
        problems = find_device_problems(devices, dtype)
        if problems:
            raise UserError("\n".join(problems))
    return device.type


def find_device_problems(devices: Sequence[DeviceFacts], dtype: str, kernels: Sequence[str] | None = None) -> list[str]:
    """Return the reasons, one line each, why a run cannot use the GPUs of its ranks.

    Args:
        devices: GPUs of all ranks.
        dtype: `train.dtype`.
        kernels: Architectures that torch was built for, as `torch.cuda.get_arch_list()` returns them. None: those of
            the installed torch.
    """
    if kernels is None:
        import torch

        kernels = torch.cuda.get_arch_list() if torch.version.cuda else ()
    return [*_unsupported(devices, dtype, kernels), *_incompatible(devices)]


def _unsupported(devices: Sequence[DeviceFacts], dtype: str, kernels: Sequence[str]) -> list[str]:
    """Return the reasons why devices cannot compute the run, each once per compute capability."""
    reasons = []
    by_capability = {device.capability: device for device in devices}
    for device in by_capability.values():
        if kernels and not has_kernels(device.capability, kernels):
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


def has_kernels(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Return whether code that was compiled for `kernels` runs on a GPU.

    Binary kernels (sm) run on GPUs of the same major version from their minor version on. PTX (compute) is compiled on
    the machine and runs on all later versions.

    Example:
        >>> has_kernels((8, 6), ["sm_80"]), has_kernels((9, 0), ["sm_80"]), has_kernels((9, 0), ["compute_80"])
        (True, False, True)
    """
    for kernel in kernels:
        kind, _, digits = kernel.partition("_")
        number = int("".join(filter(str.isdigit, digits)) or 0)
        version = (number // 10, number % 10)
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return False


def _incompatible(devices: Sequence[DeviceFacts]) -> list[str]:
    """Return the reasons why the devices cannot work together."""
    if len(devices) == 1:
        return []
    for device in devices:
        if " MIG " in f"{device.name} ":
            return [
                f"rank {device.rank} has a MIG slice, {device.name}, and NCCL does not connect slices: set "
                "launch.nproc=1, or have MIG switched off"
            ]
    reasons = []
    num_ranks_by_host = Counter(device.host for device in devices)
    for host, num_ranks in num_ranks_by_host.items():
        num_gpus = len({device.uuid for device in devices if device.host == host})
        if num_gpus < num_ranks:
            reasons.append(
                f"{num_ranks} ranks on {host} share {num_gpus} {plural(num_gpus, 'GPU')}, and NCCL takes one rank "
                f"each: give every rank its own ({VISIBLE_DEVICES}, or the batch system's --gpus-per-task)"
            )
    capabilities = {device.capability for device in devices}
    if len(capabilities) > 1:
        reasons.append(
            f"the GPUs are of different kinds, {_list_kinds(devices)}: ranks would take different kernels, whose "
            f"numbers differ. Choose GPUs of one kind ({VISIBLE_DEVICES}, or the batch system's constraint)"
        )
    return reasons


def device_notes(devices: Sequence[DeviceFacts]) -> list[str]:
    """Return notes for the user on devices that work together but differ."""
    kinds = {(device.name, device.memory) for device in devices}
    if len(kinds) == 1:
        return []
    return [f"the GPUs differ, {_list_kinds(devices)}: the smallest memory and the slowest GPU limit the run"]


def _list_kinds(devices: Sequence[DeviceFacts]) -> str:
    """Return each kind of GPU with the ranks that have it, up to eight, as text."""
    ranks_by_kind: dict[str, list[int]] = {}
    for device in devices:
        ranks_by_kind.setdefault(device.description, []).append(device.rank)
    kinds = []
    for description, ranks in ranks_by_kind.items():
        listed = ", ".join(str(rank) for rank in ranks[:8])
        more = ", ..." if len(ranks) > 8 else ""
        kinds.append(f"{description} on rank {listed}{more}")
    return "; ".join(kinds)


def check_on_all_ranks(
    start: Callable[[], DeviceFacts],
    rank_info: RankInfo,
    store: "dist.Store | None",
    find_problems: Callable[[Sequence[DeviceFacts]], Sequence[str]],
) -> list[DeviceFacts]:
    """Start every rank's device, check all devices on rank 0, and raise the same error on every rank.

    Args:
        start: Starts this rank's device.
        rank_info: This rank.
        store: Store of all ranks. None for a single rank.
        find_problems: Called on rank 0 with the devices of all ranks.

    Returns:
        The devices of all ranks on rank 0. An empty list on the other ranks.

    Raises:
        UserError: On every rank, with the errors of all ranks' `start`, or else with the result of `find_problems`.

    Collectives:
        Through `store`: every rank sets one key and reads one, rank 0 reads the keys of all.
    """
    devices: list[DeviceFacts] = []
    if store is None:
        devices.append(start())
        refusal = "\n".join(find_problems(devices))
    else:
        prefix = f"devices of attempt {rank_info.attempt}"
        # A rank reports its device as a JSON object, or its error as a JSON string.
        try:
            report = json.dumps(asdict(start()))
        except UserError as error:
            report = json.dumps(str(error))
        store.set(f"{prefix}/{rank_info.rank}", report)
        if rank_info.rank == 0:
            reports = [json.loads(store.get(f"{prefix}/{rank}")) for rank in range(rank_info.world_size)]
            errors, devices = _split_reports(reports)
            problems = errors or find_problems(devices)
            store.set(f"{prefix}/refusal", "\n".join(problems))
        refusal = store.get(f"{prefix}/refusal").decode()
    if refusal:
        raise UserError(refusal)
    return devices


class _Reports(NamedTuple):
    """Reports of all ranks.

    Attributes:
        errors: The errors, each once.
        devices: The devices of the ranks without an error.
    """

    errors: list[str]
    devices: list[DeviceFacts]


def _split_reports(reports: Sequence[dict[str, Any] | str]) -> _Reports:
    """Return the errors and the devices among the ranks' reports: a text is an error, an object is a device."""
    errors: list[str] = []
    devices: list[DeviceFacts] = []
    for report in reports:
        if isinstance(report, str):
            if report not in errors:
                errors.append(report)
        else:
            # JSON has no tuples.
            devices.append(DeviceFacts(**{**report, "capability": tuple(report["capability"])}))
    return _Reports(errors, devices)
