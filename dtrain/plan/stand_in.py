"""Tensors without memory that stand in for those of the planned device.

A plan's tensors are torch's meta tensors: shapes, dtypes and autograd, no bytes and no arithmetic. Two modes make a
training step run on them as it would run on the device.

`OnDevice` answers for them. dtrain's own code asks a tensor where it is and chooses its kernels and tiles by that, as
torch's optimizers do, so it is told the planned device. Other code is told that they are on a CPU: FSDP would open CUDA
streams otherwise, which a machine without CUDA cannot. Whatever is made inside is a meta tensor too.

`Stubbed` does what meta tensors cannot: a collective leaves its output as it is, and what the host reads of a tensor is
one, or True: a step takes the path of a finite gradient norm. Where it asks for NaN there is none. A collective of host
tensors is the fake group's, where every rank holds what this one does.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dtrain.plan.kernels import attention, rms_norm

_TOLD = ("dtrain.", "torch.optim.")  # torch's optimizers step all parameters at once on a GPU, one by one on a CPU
_META = torch.device("meta")
_CPU = torch.device("cpu")
_HOST = torch.device("cpu", 0)  # what real tensors answer, to tell it from a planned CPU


class OnDevice(TorchFunctionMode):
    """Inside, meta tensors say that they are on a device of type `device_type` (cpu or cuda)."""

    def __init__(self, device_type: str):
        super().__init__()
        self.device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
        self._false = WeakIdKeyDictionary()  # stand-ins that hold no True: they ask for numbers that are none
        self._getters = {Tensor.device.__get__: self._device_of, Tensor.is_cuda.__get__: self._is_cuda}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        getter = self._getters.get(func)
        if getter is not None:
            return getter(args[0], sys._getframe(1).f_globals.get("__name__", ""))
        if func is functional.scaled_dot_product_attention:
            return attention(self.device.type, *args, **kwargs)
        if func is functional.rms_norm:
            return rms_norm(*args, **kwargs)
        if func is Tensor.backward:
            with self:  # torch takes a mode off while it answers, and this one has to answer all through the backward
                return _engine_run_backward(
                    (args[0],),
                    (torch.empty_like(args[0]),),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        if func is Tensor.isnan and args[0].is_meta:
            found = func(*args, **kwargs)
            self._false[found] = True
            return found
        if func is Tensor.any and args[0] in self._false:
            return torch.zeros((), dtype=torch.bool)
        if func is Tensor.cpu and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        if _is_device(kwargs.get("device")):
            kwargs["device"] = _META
        args = tuple(_META if _is_device(arg) else arg for arg in args)
        return func(*args, **kwargs)

    def _device_of(self, tensor: Tensor, asking: str) -> torch.device:
        if not tensor.is_meta:
            return _HOST
        if asking == "torch.utils.checkpoint":  # it compares with what it was told inside an operation, without a mode
            return _META
        return self.device if asking.startswith(_TOLD) else _CPU

    def _is_cuda(self, tensor: Tensor, asking: str) -> bool:
        return self._device_of(tensor, asking).type == "cuda"


def _is_device(value: Any) -> bool:
    """Whether an argument names the planned device: one that a stand-in or the policy answered with. The host is where
    a real tensor is, or "cpu", or nothing."""
    return isinstance(value, torch.device) and value != _HOST


class Stubbed(TorchDispatchMode):
    """What a meta tensor has no kernel for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func.namespace == "c10d" and any(one.is_meta for one in tree_leaves(args) if isinstance(one, Tensor)):
            return _without_sending(func, args)
        with torch._C.DisableTorchFunction():  # torch's own kernels for meta tensors ask where these are, too
            return func(*args, **(kwargs or {}))


def _without_sending(func: Any, args: tuple) -> Any:
    """What an in-place collective of torch.distributed returns: its outputs, where its schema has some, and a Work."""
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def is_wrapped(types: tuple) -> bool:
    """Whether an operation reached a dispatch mode on DTensors, which come again as plain tensors."""
    return any(issubclass(one, DTensor) for one in types)
