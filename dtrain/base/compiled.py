"""Functions of tensors that torch.compile makes a few kernels of, and that run as written where it cannot."""

import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._triton import has_triton

from dtrain.base.hardware import C_COMPILERS

# Of one function: for dtypes, for one row and for several, with and without gradients. torch's own limit is 8.
MAX_GRAPHS = 32


def missing_compiler_reason(device_type: str) -> str | None:
    """Return why nothing can be compiled for a type of device on this machine, in words; None where it can."""
    if device_type == "cuda" and not has_triton():
        return "Triton, which comes with torch's CUDA builds, is not installed or does not know this GPU"
    compilers = ("g++",) if device_type == "cpu" else C_COMPILERS
    if not any(shutil.which(name) for name in compilers):
        return f"there is no compiler ({' or '.join(compilers)}) on this machine"
    return None


class CompiledFunction:
    """`function` of tensors, whose first sizes vary, compiled when it is first called. Where that fails, or torch has
    compiled it `MAX_GRAPHS` times, it warns and computes as `function` is written from then on.

    name: of what it computes, as a user reads it. num_dynamic_dims: how many sizes vary; −1: all but the last, of a
    vector all.
    """

    def __init__(self, function: Callable[..., Any], name: str, num_dynamic_dims: int):
        self.function, self.name, self.num_dynamic_dims = function, name, num_dynamic_dims
        self.compiled: Callable[..., Any] = torch.compile(function, fullgraph=True)
        self.runs_uncompiled = False  # from here on

    def __call__(self, *arguments: Any) -> Any:
        """Return `function(*arguments)`, tensors and constants."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        return self.call_with_tensors(tensors, *arguments)

    def call_with_tensors(self, tensors: Iterable[Tensor], *arguments: Any) -> Any:
        """Return `function(*arguments)`: tensors, dictionaries and tuples of them, and constants. tensors: them all."""
        if self.runs_uncompiled:
            return self.function(*arguments)
        # A setting of each thread, and autograd's compute again; torch 2.11 takes no limit for one torch.compile alone.
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        for tensor in tensors:
            dims = [*range(tensor.dim())]
            torch._dynamo.maybe_mark_dynamic(tensor, dims[: self.num_dynamic_dims] or dims)
        try:
            return self.compiled(*arguments)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            self.runs_uncompiled = True
            why = f"is not compiled ({' '.join(str(error).splitlines()[:2])})"
            if isinstance(error, FailOnRecompileLimitHit):
                why = f"was compiled {MAX_GRAPHS} times over"
            warnings.warn(f"{self.name} {why}: it runs uncompiled from here on, slower", stacklevel=2)
            return self.function(*arguments)
