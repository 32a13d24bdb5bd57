"""Functions of tensors that torch.compile makes a few kernels of, and that run as written where it cannot.

Nothing is compiled, and no compiler loaded, before the first call.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._triton import has_triton

# Of one function: for dtypes, for one row and for several, with and without gradients. torch's own limit is 8.
GRAPHS = 32


def obstacle(device_type: str) -> str | None:
    """Return why nothing can be compiled for a type of device on this machine, in words; None where it can."""
    if device_type == "cuda" and not has_triton():
        return "Triton, which comes with torch's CUDA builds, is not installed or does not know this GPU"
    compilers = ("g++",) if device_type == "cpu" else ("cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return f"there is no compiler ({' or '.join(compilers)}) on this machine"
    return None


class Compiled:
    """`function` of tensors [B, S, ..], of which B and S vary, compiled when it is first called. Where that fails, or
    torch has compiled it `GRAPHS` times, it warns and computes as `function` is written from then on.

    name: of what it computes, as a user reads it, with what to do about it.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.function, self.name = function, name
        self.compiled: Callable[..., Any] | None = None
        self.is_written = False  # from here on

    def varying(self, tensor: Tensor) -> list[int]:
        """Return the dimensions of `tensor` [..] whose sizes vary."""
        return [*range(min(2, tensor.dim()))]

    def __call__(self, *arguments: Any) -> Any:
        """Return `function(*arguments)`: tensors, dictionaries and tuples of them, and constants."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self.is_written:
            return self.function(*arguments)
        self.compiled = self.compiled or torch.compile(self.function, fullgraph=True)
        # A setting of each thread, and autograd's compute again; torch 2.11 takes no limit for one torch.compile alone.
        torch._dynamo.config.recompile_limit = GRAPHS
        for tensor in tensors_in(arguments):
            torch._dynamo.maybe_mark_dynamic(tensor, self.varying(tensor))
        try:
            return self.compiled(*arguments)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            self.is_written = True
            limit = isinstance(error, FailOnRecompileLimitHit)
            why = f"compiled {GRAPHS} times over" if limit else f"not compiled ({str(error).splitlines()[0]})"
            warnings.warn(f"{self.name} {why}: it runs uncompiled from here on, slower", stacklevel=2)
            return self.function(*arguments)


class Fused(Compiled):
    """`function` of tensors whose sizes but the last vary, compiled on a GPU that Triton knows; elsewhere, and within
    what is compiled, as it is written.

    A function mode can take its calls (`torch.overrides`): a plan counts one as one kernel.
    """

    def varying(self, tensor: Tensor) -> list[int]:
        return [*range(max(tensor.dim() - 1, min(tensor.dim(), 1)))]  # a vector's only one, too

    def compiles(self, tensor: Tensor) -> bool:
        """Return whether a call with `tensor` [..] is compiled."""
        if has_torch_function((tensor,)):
            return False
        if self.compiled is None and not self.is_written and tensor.is_cuda:
            self.is_written = obstacle("cuda") is not None
        return tensor.is_cuda and not self.is_written

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*arguments)
        tensors = [*tensors_in(arguments)]
        if has_torch_function(tensors):
            return handle_torch_function(self, tensors, *arguments)
        if not any(map(self.compiles, tensors)):
            return self.function(*arguments)
        return super().__call__(*arguments)


def fused(name: str) -> Callable[[Callable[..., Any]], Fused]:
    """Return a decorator that makes a function a `Fused` of this name."""
    return lambda function: Fused(function, name)


def own(tensor: Tensor) -> Tensor:
    """Return `tensor` [..] to compute in, where its contents count no longer. Within what is compiled it is a copy that
    a kernel has in registers: what is computed there is not written back to memory."""
    return tensor.clone() if torch.compiler.is_compiling() else tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or outputs; torch's own walk takes a tenth of a trace."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
