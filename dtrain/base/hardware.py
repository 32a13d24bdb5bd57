"""Use of the hardware: model FLOPs utilisation, peak and free memory."""

import os
import resource
import sys
from typing import TYPE_CHECKING

from dtrain.base.gpus import peak_flops

if TYPE_CHECKING:
    import torch

OF_FREE = 0.8  # of a GPU's free memory


def model_flops_utilisation(
    flops_per_token: float, tokens_per_sec: float, world_size: int, device: "torch.device", compute_dtype: "torch.dtype"
) -> float | None:
    """Return the share of the devices' peak that the model's own arithmetic takes (PaLM, arXiv:2204.02311, appendix B).

    flops_per_token: training FLOPs, recomputation not counted; tokens_per_sec: over all ranks. None where no peak is
    known: off CUDA, for a device that is not in the table (base/gpus.py), for dtypes other than bfloat16 and float16.
    """
    import torch

    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        return None
    peak = peak_flops(torch.cuda.get_device_name(device), str(compute_dtype).removeprefix("torch."))
    return None if peak is None else flops_per_token * tokens_per_sec / (peak * world_size)


def memory_gib(device: "torch.device") -> float:
    """Return this rank's peak memory so far, in GiB: allocated on the device for CUDA, else the resident set."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def free_memory(device: "torch.device", ranks: int = 1) -> int:
    """Return the bytes that large buffers, keys and values say, may take on `device`; a CPU is shared by `ranks`."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reserved) * OF_FREE)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // ranks
