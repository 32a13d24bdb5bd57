"""Dtypes of a run: of weights, of the computation in layers, of the reduction of gradients."""

from dataclasses import dataclass

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run. master: of trained weights; compute: of layers; reduce: of gradients on the wire, and summed
    over micro-batches. `reason` explains `auto`."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    reason: str

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.master or self.compute != self.reduce


def choose_precision(name: str, device_type: str, masters: str = "float32") -> Precision:
    """Return the dtypes of `train.dtype` and `train.masters` on a device: bfloat16 on CUDA and float32 on the CPU for
    auto; masters are float32 or better, or bfloat16, which the layers then compute in; gradients are reduced in float32
    or better."""
    reason = "train.dtype"
    if name == "auto":
        name = "bfloat16" if device_type == "cuda" or masters == "bfloat16" else "float32"
        why = "train.masters is bfloat16" if masters == "bfloat16" else f"the device is {device_type}"
        reason = f"train.dtype is auto and {why}"
    compute = DTYPES[name]
    reduce = torch.promote_types(compute, torch.float32)
    return Precision(compute if masters == "bfloat16" else reduce, compute, reduce, reason)
