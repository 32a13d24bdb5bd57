"""Functions that are compiled with torch.compile, and run uncompiled where that is not possible.

`CompiledFunction` is used directly for functions that are always compiled. `dtrain.base.fused.Fused` uses it for small
functions that are compiled only on CUDA.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._triton import has_triton

from dtrain.base.hardware import C_COMPILERS

# Maximum number of graphs of one function. torch compiles one graph for each combination of dtypes, number of rows (one
# or several) and gradient mode (with or without). torch's own limit of 8 graphs is too low for that.
MAX_GRAPHS = 32


def missing_compiler_reason(device_type: str) -> str | None:
    """Return the reason why torch.compile cannot be used for a type of device on this machine. None if it can.

    Args:
        device_type: "cuda" or "cpu".
    """
    if device_type == "cuda" and not has_triton():
        return "Triton, which comes with torch's CUDA builds, is not installed or does not know this GPU"
    compilers = ("g++",) if device_type == "cpu" else C_COMPILERS
    if not any(shutil.which(name) for name in compilers):
        return f"there is no compiler ({' or '.join(compilers)}) on this machine"
    return None


class CompiledFunction:
    """A function of tensors that is compiled at its first call.

    If the compilation fails, or if torch has compiled the function MAX_GRAPHS times, one warning is printed, and all
    later calls run the function uncompiled.

    Attributes:
        function: The function as it is written.
        name: What the function computes, for the warning.
        num_dynamic_dims: How many dimensions of the tensors, from the first one on, vary between calls. -1: all but the
            last one.
        compiled: The compiled function.
        runs_uncompiled: Whether calls use `function` from now on.
    """

    def __init__(self, function: Callable[..., Any], name: str, num_dynamic_dims: int):
        self.function, self.name, self.num_dynamic_dims = function, name, num_dynamic_dims
        self.compiled: Callable[..., Any] = torch.compile(function, fullgraph=True)
        self.runs_uncompiled = False

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with tensors and constants."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        return self.call_with_tensors(tensors, *arguments)

    def call_with_tensors(self, tensors: Iterable[Tensor], *arguments: Any) -> Any:
        """Call the function with arguments that contain tensors in dicts and tuples.

        Args:
            tensors: All tensors in the arguments.
            *arguments: Tensors, constants, and dicts and tuples of these.
        """
        if self.runs_uncompiled:
            return self.function(*arguments)
        # This setting belongs to a thread, and the backward runs in another one, so it is set at each call. torch 2.11
        # does not accept a limit for a single torch.compile.
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        for tensor in tensors:
            dims = list(range(tensor.dim()))
            # For a vector, num_dynamic_dims=-1 selects no dimension; its only dimension varies then.
            dynamic_dims = dims[: self.num_dynamic_dims] or dims
            torch._dynamo.maybe_mark_dynamic(tensor, dynamic_dims)
        try:
            return self.compiled(*arguments)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            self.runs_uncompiled = True
            if isinstance(error, FailOnRecompileLimitHit):
                reason = f"was compiled {MAX_GRAPHS} times over"
            else:
                first_lines = " ".join(str(error).splitlines()[:2])
                reason = f"is not compiled ({first_lines})"
            warnings.warn(f"{self.name} {reason}: it runs uncompiled from here on, slower", stacklevel=2)
            return self.function(*arguments)
