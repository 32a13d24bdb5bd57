"""Tensors without memory that stand in for those of the planned device.

They are torch's meta tensors: shapes, dtypes and autograd, no bytes and no arithmetic. Two modes make a training step
run on them as it would run on the device.

`PlannedDevice` answers where a tensor is: a meta tensor says the planned device, so that dtrain and torch's optimizers
choose the kernels and tiles that they would choose there. Whatever is made inside on that device is a meta tensor too,
and none holds NaN. FSDP is to be set up before: a machine that plans has no such device to open streams on.

`MetaKernels` does what meta tensors cannot: a collective leaves its output as it is, and what the host reads of a
tensor is one, or True: a step takes the path of a finite gradient norm. A collective of host tensors is the fake
group's, where every rank holds what this one does.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtrain.commands.plan.kernels import attention, rms_norm

_META = torch.device("meta")
_HOST = torch.device("cpu", 0)  # what real tensors answer, to tell the host from a planned CPU
_DEVICE = Tensor.device.__get__
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # a property; torch's stub says bool


class PlannedDevice(TorchFunctionMode):
    """Function mode in which meta tensors say that they are on `device`, of type cpu or cuda."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self._nowhere: weakref.ref[Tensor] | None = None  # the last answer to where a meta tensor holds NaN

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)  # this machine may have no device to pin for
        if func == _DEVICE:
            return self._where(args[0])
        if func == _IS_CUDA:
            return self._where(args[0]).type == "cuda"
        if func is functional.scaled_dot_product_attention:
            return attention(self.device.type, *args, **kwargs)
        if func is functional.rms_norm:
            return rms_norm(*args, **kwargs)
        if func is Tensor.backward:
            # torch takes a mode off while it answers, and this one has to answer all through the backward. Every way
            # in but the engine's own would ask the mode again.
            with self:
                gradients = (torch.empty_like(args[0]),)
                return _engine_run_backward(args[:1], gradients, False, False, (), True, accumulate_grad=True)
        if func is Tensor.isnan and args[0].is_meta:
            is_nan = func(*args)
            self._nowhere = weakref.ref(is_nan)
            return is_nan
        if func is Tensor.any and self._nowhere is not None and args[0] is self._nowhere():
            return torch.zeros((), dtype=torch.bool)
        if func is Tensor.cpu and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*map(_as_meta, args), **{name: _as_meta(value) for name, value in kwargs.items()})

    def _where(self, tensor: Tensor) -> torch.device:
        return self.device if tensor.is_meta else _HOST


def _as_meta(value: Any) -> Any:
    """Return meta for an argument that names the planned device, as tensors or the policy say it; for FSDP's "cpu" too.
    The host is the device of a real tensor, or "cpu", or nothing."""
    return _META if isinstance(value, torch.device) and value != _HOST else value


class MetaKernels(TorchDispatchMode):
    """Dispatch mode that answers operations that have no kernel for meta tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and torch need not guard each operation against it."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func.namespace == "c10d" and any(leaf.is_meta for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
            work = FakeWork().boxed()  # what an in-place collective returns: its outputs where it has some, and a Work
            return work if len(func._schema.returns) == 1 else (args[0], work)
        with torch._C.DisableTorchFunction():  # torch's own kernels for meta tensors ask where these are, too
            return func(*args, **(kwargs or {}))
