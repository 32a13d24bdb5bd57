"""GPUs by their names, as gpus.toml has them, for `mfu` and `dtrain plan`; the free memory of a device."""

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


OF_FREE = 0.8  # of a GPU's free memory
C_COMPILERS = ("cc", "gcc", "clang")  # one of which Triton needs on a GPU's machine
_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BOARDS: dict[str, dict[str, Any]] = _FILE["boards"]
"""GPUs that `dtrain plan` can plan for, as `commands.plan.hardware` reads them."""


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Return the dense FLOP/s of one device in `dtype`, bfloat16 or float16, by the name CUDA gives it; None where that
    is unknown."""
    device = _device_of(device_name)
    rate = BOARDS[device]["arithmetic"][1 if dtype == "float16" else 0] if isinstance(device, str) else device
    return rate or None


def board_of(device_name: str) -> str | None:
    """Return the key in BOARDS of a device by the name CUDA gives it; None where `dtrain plan` does not know it."""
    device = _device_of(device_name)
    return device if isinstance(device, str) else None


def _device_of(device_name: str) -> str | float | None:
    """Return what gpus.toml has for a device: a board, or its FLOP/s."""
    words = device_name.replace("-", " ").split()
    for name, device in _FILE["devices"].items():
        parts = name.split()
        if any(words[start : start + len(parts)] == parts for start in range(len(words))):
            return device
    return None


def free_memory(device: "torch.device", ranks: int = 1) -> int:
    """Return the bytes that large buffers, keys and values say, may take on `device`; a CPU is shared by `ranks`."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reserved) * OF_FREE)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // ranks
