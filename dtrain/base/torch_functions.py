"""Functions that torch lacks: queries about tensors and autograd, and deterministic algorithms.

`deterministic_algorithms` switches torch's own on for a block. `cumsum` replaces torch's, which has no deterministic
kernel on CUDA.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def without_torch_functions() -> AbstractContextManager[None]:
    """Context in which no `__torch_function__` is called, neither of a mode nor of a subclass of Tensor."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return, unused-ignore]


def in_backward() -> bool:
    """Check for a running backward of autograd in this thread."""
    return torch._C._current_graph_task_id() != -1


def has_values(tensor: Tensor) -> bool:
    """Check whether a tensor has values that can be read. Meta tensors and fake tensors only have a shape.

    Code that would read values to skip work, for example to find the keys that a block of queries attends to, must use
    its general path for tensors without values.
    """
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage among all that exist."""
    return tensor.untyped_storage()._cdata


@contextmanager
def deterministic_algorithms(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Context in which torch uses only deterministic algorithms, and cuBLAS workspaces of one size.

    In the context, torch raises a RuntimeError that names an operation without a deterministic algorithm.

    Args:
        environ: The environment of this process. cuBLAS reads it at the first matrix product.
    """
    was_on, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fills = switches.fill_uninitialized_memory
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # it would write all memory once more
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        switches.fill_uninitialized_memory = fills


def cumsum(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the cumulative sums over the last dimension. Differentiable.

    Same as `torch.cumsum`, except under deterministic algorithms on CUDA. torch's CUDA kernel adds in no fixed order,
    so `prefix_sums` is used instead in that case.

    Args:
        values: Floats, [..., n].
        dtype: Data type of the sums. None: that of `values`.

    Returns:
        The sums, [..., n].
    """
    if not values.is_cuda or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1, dtype=dtype)
    return prefix_sums(values if dtype is None else values.to(dtype))


def prefix_sums(values: Tensor) -> Tensor:
    """Return the cumulative sums over the last dimension in log2(n) steps, each in a fixed order.

    Step k adds to each element the one 2**k before it, so that sums of 1, 2, 4, ... neighbours result.

    Example:
        >>> prefix_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([ 1.,  3.,  6., 10.])

    Reference:
        W. D. Hillis and G. L. Steele, Data parallel algorithms, 1986.
    """
    length = 1
    while length < values.shape[-1]:
        values = torch.cat([values[..., :length], values[..., length:] + values[..., :-length]], -1)
        length *= 2
    return values
