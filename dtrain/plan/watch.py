"""The one who sees every operation of a step that is traced, and hands it to those who count."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dtrain.plan.costs import Cost, cost
from dtrain.plan.memory import Storages
from dtrain.plan.stand_in import Stubbed, is_wrapped
from dtrain.plan.traffic import Groups, Sent, collective


class Watch(Stubbed):
    """Hands every operation to those who count. on_host: the planned device is a CPU, whose gloo works on a copy of
    what it reduces and scatters."""

    def __init__(self, groups: Groups, on_host: bool):
        super().__init__()
        self.on_host = on_host
        self.storages = Storages("temporaries")
        self.host = Storages("rows")
        self.sent: list[tuple[int | None, Sent]] = []
        self.costs: dict[int | None, Cost] = defaultdict(Cost)
        self.current: int | None = None  # the pass through the model
        self.is_forward = False
        self.is_costed = True
        self._groups = groups

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.storages.poll()
        if self.on_host and func is torch.ops.c10d._reduce_scatter_base_.default and args[0].shape != args[1].shape:
            self.storages.within_operation(args[1])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        everything = list(_tensors((args, tuple(kwargs.values()), out)))
        tensors = [one for one in everything if one.is_meta]
        self.storages.saw(func, tensors)
        for one in everything:
            if not one.is_meta:
                self.host.see(one)
        sent = collective(func, args, out, self._groups, self.current is not None)
        if sent is not None:
            self.sent.append((self.current, sent))
        elif tensors and self.is_costed:
            self.costs[self.current] += cost(func, args, kwargs, out, tensors)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
