"""Functions of torch that have no public name."""

from contextlib import AbstractContextManager

import torch


def without_torch_functions() -> AbstractContextManager[None]:
    """Context in which no `__torch_function__` is called, neither of a mode nor of a subclass of Tensor."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return, unused-ignore]


def in_backward() -> bool:
    """Check for a running backward of autograd in this thread."""
    return torch._C._current_graph_task_id() != -1
