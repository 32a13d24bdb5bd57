"""Device type, GPU table, free memory and processors of this machine.

`choose_device_type` resolves settings such as `launch.device` without starting CUDA. gpus.toml is the table of GPUs
with their peak FLOP/s, for `mfu` and `dtrain plan`. Torch is imported only by functions that query a device.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError

if TYPE_CHECKING:
    import torch


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_TYPES = ("cpu", "cuda")

FREE_MEMORY_FRACTION = 0.8  # of a GPU's free memory that `free_device_memory` returns
BFLOAT16_CAPABILITY = (8, 0)  # first compute capability with bfloat16 arithmetic and flash attention
C_COMPILERS = ("cc", "gcc", "clang")  # Triton needs one of them
_GPU_TABLE = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
BOARDS: dict[str, dict[str, Any]] = _GPU_TABLE["boards"]
"""GPUs that `dtrain plan` supports, by key. `commands.plan.hardware` describes the entries."""

_MEMINFO = Path("/proc/meminfo")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
# For version 2 of control groups, and for version 1: the file with the limit, the file with the used memory, and the
# key in memory.stat for cached file pages, which the kernel frees if memory becomes scarce.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class DeviceFacts:
    """A rank's GPU.

    Attributes:
        rank: The rank.
        host: Name of its host.
        name: Name of the GPU.
        memory: Bytes.
        capability: CUDA's compute capability, (major, minor).
        uuid: Identifier of the GPU, unique on its host.
        free: Free bytes if other processes use more than a tenth of the memory, otherwise None.
    """

    rank: int
    host: str
    name: str
    memory: int
    capability: tuple[int, int]
    uuid: str
    free: int | None = None

    @property
    def has_bfloat16(self) -> bool:
        """True if the GPU supports bfloat16. The same GPUs support flash attention."""
        return self.capability >= BFLOAT16_CAPABILITY

    @property
    def description(self) -> str:
        """Name, memory and compute capability as text."""
        major, minor = self.capability
        return f"{self.name} ({self.memory / 2**30:.0f} GiB, compute capability {major}.{minor})"


def choose_device_type(setting: str, requested: str, environ: Mapping[str, str] | None = None) -> str:
    """Return "cpu" or "cuda".

    Args:
        setting: The setting's name, for messages, such as "launch.device".
        requested: Its value. "auto" is "cuda" if torch sees a CUDA device.
        environ: The environment of the process that uses the device, to explain a missing device. None: unknown.

    Raises:
        UserError: If `requested` is unknown, or "cuda" without a CUDA device.

    Example:
        >>> choose_device_type("--device", "cpu")
        'cpu'
    """
    import torch  # inside the function, because importing torch would dominate the time of `import dtrain`

    if requested not in ("auto", *DEVICE_TYPES):
        raise UserError(f"{setting}={requested} is unknown. Use auto, cpu or cuda.")
    if requested == "cpu":
        return "cpu"
    if torch.cuda.device_count() > 0:
        return "cuda"
    if requested == "auto":
        return "cpu"
    reason = hidden_gpu_reason(environ or {})
    if reason is None:
        reason = "torch sees no CUDA device here (`nvidia-smi` shows what the driver sees)"
    raise UserError(f"{setting}=cuda: {reason}; or set {setting}=cpu")


def hidden_gpu_reason(environ: Mapping[str, str]) -> str | None:
    """Return the reason for a missing GPU, from the build of torch and the environment. None if it is unknown."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it (https://pytorch.org)"
    if VISIBLE_DEVICES in environ:
        value = f"{VISIBLE_DEVICES}={environ[VISIBLE_DEVICES]}"
        return f"{value} hides all GPUs: unset it, or name some that `nvidia-smi -L` lists"
    return None


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Return the peak FLOP/s of a device for dense matrices.

    Args:
        device_name: Name of the device, from CUDA.
        dtype: "bfloat16" or "float16".

    Returns:
        FLOP/s. None if the device is unknown.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
    """
    entry = _table_entry(device_name)
    if not isinstance(entry, str):
        return entry or None
    bfloat16_flops, float16_flops, *_ = BOARDS[entry]["arithmetic"]
    return (float16_flops if dtype == "float16" else bfloat16_flops) or None


def find_board(device_name: str) -> str | None:
    """Return the key in BOARDS of a device, by its name from CUDA. None if `dtrain plan` does not support it."""
    entry = _table_entry(device_name)
    return entry if isinstance(entry, str) else None


def _table_entry(device_name: str) -> str | float | None:
    """Return the entry of a device in gpus.toml: the key of a board, or FLOP/s. None if there is no entry."""
    words = device_name.replace("-", " ").split()
    for name, entry in _GPU_TABLE["devices"].items():
        parts = name.split()
        for start in range(len(words)):
            if words[start : start + len(parts)] == parts:
                return entry
    return None


def free_device_memory(device: "torch.device", ranks: int = 1) -> int:
    """Return the memory that large buffers, such as a KV cache, may use on a device.

    Args:
        device: The device.
        ranks: Number of ranks that share the memory of a CPU.

    Returns:
        Bytes: FREE_MEMORY_FRACTION of a GPU's free memory, or a quarter of the host's memory divided by `ranks`.
    """
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch's caching allocator has reserved and that no tensor uses is not free for CUDA, but new
        # tensors of this process can use it.
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reusable) * FREE_MEMORY_FRACTION)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // ranks


def num_cores() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def total_memory() -> int:
    """Return the bytes of this host's memory, or the limit of this process's control group if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _memory_cgroups())])


def free_host_memory(processes: int = 1) -> int:
    """Return the bytes of free host memory for each of several processes on this host."""
    free = total_memory()
    with suppress(OSError):
        available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        if available:
            free = min(free, int(available[1]) * 1024)
    free = min([free, *(limit - used for limit, used in _memory_cgroups())])
    return max(0, free) // processes


def _memory_cgroups() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes for each control group with a memory limit that contains this process.

    Cached file pages that were not used lately do not count as used.
    """
    with suppress(OSError):
        for line in _PROCESS_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = _CGROUP / controllers
            group = top / path.lstrip("/")
            for directory in (group, *group.parents):
                if directory.is_relative_to(top):
                    yield from _cgroup_limit(directory)


def _cgroup_limit(group: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes for one control group, if it has a limit."""
    for limit_file, used_file, reclaimable_key in _CGROUP_FILES:
        # ValueError: the limit is "max".
        with suppress(OSError, ValueError):
            match = re.search(rf"^{reclaimable_key} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            reclaimable = int(match[1]) if match else 0
            limit = int((group / limit_file).read_text())
            used = int((group / used_file).read_text())
            yield limit, max(0, used - reclaimable)
