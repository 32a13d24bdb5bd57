"""Compiled parts of layers: what lies before attention and after it, each one graph for rows of all lengths.

A region is handed tensors alone, so nothing of a micro-batch (its mask, its packing) is compiled in, and attention and
FSDP's hooks stay outside: it compiles alike under every kernel and mesh. So does full checkpointing, which computes a
whole layer again; selective checkpointing is compiled in, and what attention gives is kept by attention.
"""

import logging
import shutil
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils._triton import has_triton

from dtrain.models.common.decoder import CausalLM, Layer
from dtrain.parallel.selective import AS_WRITTEN, selective

# Of one region, over all layers: with and without gradients, of a policy, its reference and its teacher, for one row
# and for several. torch's own limit is 8.
GRAPHS = 32


class Region:
    """`function` of tensors [B, S, ..], compiled when it is first called. Where torch has compiled it `GRAPHS` times,
    it warns and computes as `function` is written from then on."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.compiled: Callable[..., Any] | None = torch.compile(function, fullgraph=True)

    def __call__(self, *tensors: Tensor) -> Any:
        """`function(*tensors)`; rows and tokens are sizes that vary."""
        if self.compiled is None:
            return self.function(*tensors)
        # A setting of each thread, and autograd's compute again; torch 2.11 takes no limit for one torch.compile alone.
        torch._dynamo.config.recompile_limit = GRAPHS
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, [0, 1])
        try:
            return self.compiled(*tensors)
        except FailOnRecompileLimitHit:
            self.compiled = None
            warnings.warn(
                f"train.compile: a part of the layers was compiled {GRAPHS} times over and runs uncompiled from here "
                "on, slower: train.compile=false says so from the start",
                stacklevel=2,
            )
            return self.function(*tensors)


def compile_layers(model: CausalLM, is_selective: bool = False) -> None:
    """Give every layer of `model` its regions, with selective checkpointing inside them or without; a mixture of
    experts, whose sizes follow from values, is not compiled. No collective; nothing is compiled before the first
    forward."""
    # torch warns of operations in place; layers have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for layer in cast(list[Layer], model.model.layers):
        before = Region(selective(layer.before) if is_selective else layer.before)
        if layer.is_sparse:
            after = selective(layer.after, AS_WRITTEN) if is_selective else layer.after
        else:
            after = Region(selective(layer.after) if is_selective else layer.after)
        layer.regions = before, after


def missing(device: torch.device) -> str | None:
    """Return what compiling for `device` misses on this machine, in words; None where nothing is missing."""
    if device.type == "cuda" and not has_triton():
        return "Triton, which comes with torch's CUDA builds, is not installed or does not know this GPU"
    compilers = ("g++",) if device.type == "cpu" else ("cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return f"there is no compiler ({' or '.join(compilers)}) on this machine"
    return None
