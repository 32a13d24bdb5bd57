"""Table of GPUs by their makers' data sheets: one row for `mfu` and `dtrain plan`. The free memory of a device.

TFLOP/s are dense, without sparsity; float32 is what torch computes by default, without TF32. GiB are what torch reports
as the device's total, less than the memory that is sold. TB/s are the memory's; GB/s, of one direction, are a device's
links to the others of its node (NVLink) and its network card's. reach: the share of the peak that large products get,
less on devices whose clock gives way to their power limit.

SXM boards: NVIDIA's data sheets. Their reach is held to torchtitan's runs, b200's is h100's.
GeForce: NVIDIA's white papers of GA102, AD102 and GB202, with float32 accumulation. They reach one another through the
host's memory alone: half of PCIe 4.0 x16, of the 5090 PCIe 5.0 x16. Boards for laptops and for China compute less.
L40S, A10, L4, T4: NVIDIA's data sheets, PCIe 4.0 x16, of the T4 3.0. A T4 has no bfloat16.
MI300X: AMD's data sheet, matrix cores, seven Infinity Fabric links of 64 GB/s. It is said to reach 45% in practice.
For a PCIe card 10 Gb/s of Ethernet are assumed between nodes. No run is known that confirms the reach of these.
"""

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Board(NamedTuple):
    """A GPU that `dtrain plan` can plan for. tflops: (bfloat16, float16, float32, float64), None where it does not
    compute in the dtype."""

    title: str
    gib: float
    tflops: tuple[float | None, float, float, float]
    terabytes: float
    inside: float
    between: float
    reach: float


BOARDS = {
    "a100": Board("A100 80 GB", 79.1, (312, 312, 19.5, 19.5), 2.04, 300, 25, 0.7),
    "h100": Board("H100 80 GB", 79.1, (989, 989, 67, 67), 3.35, 450, 50, 0.6),
    "h200": Board("H200 141 GB", 139.8, (989, 989, 67, 67), 4.8, 450, 50, 0.6),
    "b200": Board("B200 180 GB", 178.4, (2250, 2250, 75, 37), 7.7, 900, 50, 0.6),
    "3090": Board("RTX 3090 24 GB", 23.6, (71, 71, 35.6, 0.56), 0.936, 16, 1.25, 0.7),
    "4090": Board("RTX 4090 24 GB", 23.6, (165, 165, 82.6, 1.3), 1.008, 16, 1.25, 0.7),
    "5090": Board("RTX 5090 32 GB", 31.3, (209, 209, 104.8, 1.6), 1.792, 32, 1.25, 0.7),
    "l40s": Board("L40S 48 GB", 44.4, (362, 362, 91.6, 1.4), 0.864, 32, 1.25, 0.6),
    "a10": Board("A10 24 GB", 22.0, (125, 125, 31.2, 0.49), 0.6, 32, 1.25, 0.5),
    "l4": Board("L4 24 GB", 22.0, (121, 121, 30.3, 0.47), 0.3, 32, 1.25, 0.5),
    "t4": Board("T4 16 GB", 14.5, (None, 65, 8.1, 0.25), 0.3, 16, 1.25, 0.5),
    "mi300x": Board("MI300X 192 GB", 191.9, (1307, 1307, 163, 163), 5.3, 448, 50, 0.45),
}
# By words of the name that CUDA gives, the first that fits: a board of the table, or the TFLOP/s of one that plan does
# not know, in bfloat16 and float16; None where they are not known.
_DEVICES: tuple[tuple[str, str | float | None], ...] = (
    ("GB300", 2500),
    ("GB200", 2500),
    ("B300", 2250),
    ("B200", "b200"),
    ("H200 NVL", 835),
    ("H200", "h200"),
    ("GH200", 989),
    ("H100 NVL", 835),
    ("H100 PCIe", 756),
    ("H100", "h100"),
    ("H800", 989),
    ("A100", "a100"),
    ("A800", 312),
    ("L40S", "l40s"),
    ("L4", "l4"),
    ("A40", 150),
    ("A30", 165),
    ("A10G", 70),
    ("A10", "a10"),
    ("T4", "t4"),
    ("Laptop", None),
    ("RTX 3090 Ti", None),
    ("RTX 3090", "3090"),
    ("RTX 4090 D", None),
    ("RTX 4090", "4090"),
    ("RTX 5090 D", None),
    ("RTX 5090", "5090"),
    ("MI300X", "mi300x"),
    ("MI325X", 1307),
    ("MI355X", 2500),
)


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Return the dense FLOP/s of one device in `dtype`, bfloat16 or float16, by the name CUDA gives it; None where that
    is unknown."""
    words = device_name.replace("-", " ").split()
    for name, device in _DEVICES:
        parts = name.split()
        if any(words[start : start + len(parts)] == parts for start in range(len(words))):
            if isinstance(device, str):
                bfloat16, float16, *_ = BOARDS[device].tflops
                device = float16 if dtype == "float16" else bfloat16
            return None if device is None else device * 1e12
    return None


OF_FREE = 0.8  # of a GPU's free memory


def free_memory(device: "torch.device", ranks: int = 1) -> int:
    """Return the bytes that large buffers, keys and values say, may take on `device`; a CPU is shared by `ranks`."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reserved) * OF_FREE)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // ranks
