"""Queries about tensors and autograd that torch has no public function for."""

from contextlib import AbstractContextManager

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
    """Check whether a tensor has values that can be read, and not only a shape.

    Meta tensors and fake tensors have none. Code that reads values to choose its work, for example which keys a run of
    queries sees, takes the general way for them.
    """
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage among all that exist."""
    return tensor.untyped_storage()._cdata
