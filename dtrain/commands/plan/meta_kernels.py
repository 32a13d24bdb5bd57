"""Operations on meta tensors.

`MetaKernels` does what meta tensors cannot: a collective leaves its output as it is, and what the host reads of a
tensor is one, or True: a step takes the path of a finite gradient norm. A collective of host tensors is the fake
group's, where every rank holds what this one does.

torch's kernels for meta tensors are slow, and a step has few operations that differ in their shapes. So each is
computed by torch once, and its results are remembered: new tensors by their shapes, or arguments that it gives back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.base.torch_functions import storage_key, without_torch_functions
from dtrain.commands.plan.memory import OpOverload

META = torch.device("meta")


class Operands:
    """Arguments of an operation. tensors: in their order; key: hashable, decides with the operation on its results."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.key = self._key((args, kwargs))

    def _key(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):  # noqa: UP038 (a union takes longer, and this is asked very often)
            return tuple([self._key(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._key(item)) for name, item in value.items()])
        return type(value), value  # 1 and 1.0 are equal


class _New(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Argument(NamedTuple):
    place: int


class MetaKernels(TorchDispatchMode):
    """Dispatch mode that computes operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[tuple, Any] = {}  # by operation and operands; None: torch is to be asked

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and torch need not guard each operation against it."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes again as operations on plain tensors
        with without_torch_functions():  # torch's own kernels for meta tensors ask where these are, too
            if func.is_view:
                self.before_view(args[0])
                return func(*args, **(kwargs or {}))
            return self.computed(func, Operands(args, kwargs or {}))

    def before_view(self, tensor: Tensor) -> None:
        """Take note of `tensor` [..], of which a view is made."""

    def computed(self, func: OpOverload, operands: Operands) -> Any:
        """Return what an operation returns that makes no view."""
        args, tensors = operands.args, operands.tensors
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func.namespace == "c10d" and any(tensor.is_meta for tensor in tensors):
            work = FakeWork().boxed()  # what an in-place collective returns: its outputs where it has some, and a Work
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func.namespace not in ("aten", "torch_attn") or not all(tensor.is_meta for tensor in tensors):
            return func(*args, **operands.kwargs)
        key = func, operands.key
        if (results := self._results.get(key)) is not None:
            return _made(results, tensors)
        storages = [storage_key(tensor) for tensor in tensors]
        out = func(*args, **operands.kwargs)
        if key not in self._results:
            is_unchanged = storages == [storage_key(tensor) for tensor in tensors]
            is_unchanged &= Operands(args, operands.kwargs).key == operands.key
            self._results[key] = _results(out, tensors, storages) if is_unchanged else None
        return out


def _results(out: Any, tensors: Sequence[Tensor], storages: Sequence[int]) -> Any:
    """Return what `_made` makes such results of; None if it cannot, as for an unannounced view of an argument."""
    if isinstance(out, (list, tuple)):  # noqa: UP038
        results = [_results(item, tensors, storages) for item in out]
        return None if None in results else type(out)(results)
    if not isinstance(out, Tensor):
        return None
    for place, tensor in enumerate(tensors):
        if out is tensor:
            return _Argument(place)
    new = _New(out.shape, out.stride(), out.dtype)
    is_new = out.is_meta and out.storage_offset() == 0 and storage_key(out) not in storages
    if is_new and out.untyped_storage().nbytes() == _made(new, ()).untyped_storage().nbytes():
        return new
    return None


def _made(results: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(results, _New):
        return torch.empty_strided(results.shape, results.strides, dtype=results.dtype, device=META)
    if isinstance(results, _Argument):
        return tensors[results.place]
    return type(results)(_made(item, tensors) for item in results)
