"""A CUDA graph's rules, on any device: calls are recorded without effect, and replayed on the memory that they named.

While recording, nothing may be read on the host and nothing may be copied from it. Memory that is allocated meanwhile
belongs to the recording: nobody finds anything there afterwards. Memory from outside must still be held when it is
replayed. What the host knew is as it was.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_READ = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2", "item"}


class NotCapturable(RuntimeError):
    pass


class Recording(TorchDispatchMode):
    """Records the calls on tensors of `device` made inside; `replay` makes them again."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device.type
        self._calls: list[tuple] = []  # (function, args, kwargs, outputs)
        self._made: dict[int, Tensor] = {}  # by storage
        self._host: dict[int, Tensor] = {}  # made of Python's numbers, where the device is the host
        self._outside: dict[int, dict[tuple, Tensor]] = {}  # by storage: an alias of each view
        self._before: list[tuple[Tensor, Tensor]] = []  # what lay outside before it was written

    def __len__(self) -> int:
        return len(self._calls)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if name == "lift_fresh":  # made of Python's numbers
            self._host[_storage(args[0])] = args[0]
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        of_device = [one for one in inputs if not self._is_host(one)]
        by_mask = name.startswith("index") and any(
            one is not None and one.dtype == torch.bool for one in _indices(args)
        )
        if (name in _READ and of_device) or by_mask:
            raise NotCapturable(f"{name} is read on the host")
        if of_device and any(self._is_host(one) and one.ndim for one in inputs):
            raise NotCapturable(f"{name} copies from the host")
        args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        written = self._written(function, args, kwargs)
        for tensor in written:
            if _storage(tensor) in self._outside:
                self._before.append((tensor, tensor.clone()))
        outputs = function(*args, **kwargs)
        fresh = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        held = {_storage(one) for one in inputs}
        is_host = name == "lift_fresh" or (bool(inputs) and not of_device)
        if self._device != "cpu":
            is_host = bool(fresh) and all(self._is_host(one) for one in fresh)
            if is_host and of_device and not written:
                raise NotCapturable(f"{name} brings a tensor to the host")
        for one in fresh:
            if _storage(one) not in held or name == "lift_fresh":
                (self._host if is_host else self._made)[_storage(one)] = one
        if written or any(_storage(one) not in held for one in fresh):
            if not is_host:
                self._calls.append((function, args, kwargs, outputs))
        return outputs

    def end(self) -> None:
        """Nothing has happened: what lies outside is as it was."""
        for tensor, value in reversed(self._before):
            tensor.copy_(value)
        self._before.clear()
        self._spoil()

    def replay(self) -> None:
        for storage, aliases in self._outside.items():
            # Its Python object counts as one holder.
            held = torch._C._storage_Use_Count(next(iter(aliases.values())).untyped_storage()._cdata)
            if held <= len(aliases) + 1:
                raise NotCapturable(f"memory at {storage:#x} was given back before a replay")
        for function, args, kwargs, outputs in self._calls:
            found = function(*args, **kwargs)
            for old, new in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self._spoil()

    def _is_host(self, tensor: Tensor) -> bool:
        if self._device != "cpu":
            return tensor.device.type == "cpu"
        return _storage(tensor) in self._host

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor in a recording: an alias of one from outside; its owner may drop it."""
        storage = _storage(tensor)
        if self._is_host(tensor) or storage in self._made:
            return tensor
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        return self._outside.setdefault(storage, {}).setdefault(view, tensor.detach())

    def _written(self, function: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
        declared = function._schema.arguments
        given = dict(zip([one.name for one in declared], args, strict=False)) | kwargs
        names = [one.name for one in declared if one.alias_info is not None and one.alias_info.is_write]
        return [one for name in names for one in tree_leaves(given.get(name)) if isinstance(one, Tensor)]

    def _spoil(self) -> None:
        for tensor in self._made.values():
            whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            whole.fill_(float("nan") if tensor.is_floating_point() else 77)


def _indices(args: tuple) -> list:
    return args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Replays:
    """A maker of graphs for `inference.engine.Engine` that records and replays, and counts."""

    def __init__(self, device: torch.device):
        self.device = device
        self.captured, self.replayed, self.nbytes = 0, 0, 0

    def run_eagerly(self, step: Callable[[], None]) -> None:
        step()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        recording = Recording(self.device)
        try:
            with recording:
                step()
        finally:
            recording.end()

        def replay() -> None:
            self.replayed += 1
            recording.replay()

        return replay
