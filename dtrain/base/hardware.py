"""Device type, GPU table, free memory and processors of this machine.

`choose_device_type` resolves settings such as `launch.device` without starting CUDA. gpus.toml is the table of GPUs
with their peak FLOP/s, for `mfu` and `dtrain plan`. Torch is imported only by functions that query a device.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError

if TYPE_CHECKING:
    import torch


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_TYPES = ("cpu", "cuda")

FREE_MEMORY_FRACTION = 0.8  # of a GPU's free memory
C_COMPILERS = ("cc", "gcc", "clang")  # one of which Triton needs on a GPU's machine
_GPU_TABLE = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
BOARDS: dict[str, dict[str, Any]] = _GPU_TABLE["boards"]
"""GPUs that `dtrain plan` can plan for, as `commands.plan.hardware` reads them."""

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
# Of version 2 of control groups, and of version 1: limit, use, and the key of pages that a limit gives back.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def choose_device_type(setting: str, wanted: str, environ: Mapping[str, str] | None = None) -> str:
    """Return "cpu" or "cuda".

    Args:
        setting: The setting's name, for messages, such as "launch.device".
        wanted: Its value. "auto" is "cuda" if torch sees a CUDA device.
        environ: The environment of the process that uses the device, to explain why it has none. None: not known.

    Raises:
        UserError: If `wanted` is unknown, or "cuda" without a CUDA device.

    Example:
        >>> choose_device_type("--device", "cpu")
        'cpu'
    """
    import torch  # measured: `import dtrain` is fast because only what computes loads torch

    if wanted not in ("auto", *DEVICE_TYPES):
        raise UserError(f"{setting}={wanted} is unknown. Use auto, cpu or cuda.")
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.device_count() > 0:
        return "cuda"
    if wanted == "auto":
        return "cpu"
    reason = hidden_gpu_reason(environ or {})
    if reason is None:
        reason = "torch sees no CUDA device here (`nvidia-smi` shows what the driver sees)"
    raise UserError(f"{setting}=cuda: {reason}; or set {setting}=cpu")


def hidden_gpu_reason(environ: Mapping[str, str]) -> str | None:
    """Return the reason for a missing GPU that the build of torch or the environment shows. None if neither does."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it (https://pytorch.org)"
    if VISIBLE_DEVICES in environ:
        value = f"{VISIBLE_DEVICES}={environ[VISIBLE_DEVICES]}"
        return f"{value} hides all GPUs: unset it, or name some that `nvidia-smi -L` lists"
    return None


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Return the dense FLOP/s of one device in `dtype`, bfloat16 or float16, by the name CUDA gives it; None where that
    is unknown."""
    device = _table_entry(device_name)
    rate = BOARDS[device]["arithmetic"][1 if dtype == "float16" else 0] if isinstance(device, str) else device
    return rate or None


def find_board(device_name: str) -> str | None:
    """Return the key in BOARDS of a device by the name CUDA gives it; None where `dtrain plan` does not know it."""
    device = _table_entry(device_name)
    return device if isinstance(device, str) else None


def _table_entry(device_name: str) -> str | float | None:
    """Return what gpus.toml has for a device: a board, or its FLOP/s."""
    words = device_name.replace("-", " ").split()
    for name, device in _GPU_TABLE["devices"].items():
        parts = name.split()
        if any(words[start : start + len(parts)] == parts for start in range(len(words))):
            return device
    return None


def free_device_memory(device: "torch.device", ranks: int = 1) -> int:
    """Return the bytes that large buffers, keys and values say, may take on `device`; a CPU is shared by `ranks`."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reserved) * FREE_MEMORY_FRACTION)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // ranks


def num_cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Return the bytes of this host's memory, or of the control group where that has fewer."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _memory_cgroups())])


def free_host_memory(processes: int = 1) -> int:
    """Return the bytes that are free for each of so many processes of this host."""
    free = total_memory()
    with suppress(OSError):
        if available := re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text()):
            free = min(free, int(available[1]) * 1024)
    free = min([free, *(limit - used for limit, used in _memory_cgroups())])
    return max(0, free) // processes


def _memory_cgroups() -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of the control groups with a limit that this process is in. Pages of files that
    were not used lately are not in use."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = _CGROUP / controllers
            group = top / path.lstrip("/")
            for directory in (group, *group.parents):
                if directory.is_relative_to(top):
                    yield from _cgroup_limit(directory)


def _cgroup_limit(group: Path) -> Iterator[tuple[int, int]]:
    for limit, used, reclaimable in _CGROUP_FILES:
        with suppress(OSError, ValueError):
            pages = re.search(rf"^{reclaimable} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            most, now = (int((group / name).read_text()) for name in (limit, used))
            yield most, max(0, now - (int(pages[1]) if pages else 0))
