"""The dtypes of a run: what weights are kept in, what layers compute in, what gradients are reduced in."""

from dataclasses import dataclass

import torch

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """master: weights and optimizer state; compute: layers; reduce: gradients on the wire. `reason` explains `auto`."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    reason: str

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.master


def choose_precision(name: str, device_type: str) -> Precision:
    """`train.dtype` on a device: bfloat16 on CUDA and float32 on the CPU for auto; masters are float32 or better."""
    reason = "train.dtype"
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" else "float32"
        reason = f"train.dtype is auto and the device is {device_type}"
    compute = _DTYPES[name]
    master = torch.promote_types(compute, torch.float32)
    return Precision(master=master, compute=compute, reduce=master, reason=reason)
