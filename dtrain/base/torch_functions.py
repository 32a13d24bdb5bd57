"""Calls of torch that no `TorchFunctionMode` sees."""

from contextlib import AbstractContextManager

import torch


def without_torch_functions() -> AbstractContextManager[None]:
    """Context in which no `__torch_function__` is called, neither of a mode nor of a subclass of Tensor."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return, unused-ignore]
