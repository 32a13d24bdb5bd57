"""What an optimizer keeps for each parameter, found out on parameters of a few numbers."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from dtrain.config.schema import Optimizer
from dtrain.optim import build_optimizer

_TINY = {1: (5,), 2: (3, 7)}  # sizes that tell a state's dimensions apart


def state_bytes(section: Optimizer, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes of the optimizer's state over parameters of `shapes` (one rank's shards) and `dtype`, after a step.

    The recipe's own optimizer steps one tiny parameter of each number of dimensions; what it keeps then is taken to
    have the parameter's size, or 1, in each dimension. Raises UserError as `build_optimizer` does.
    """
    kept: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    total = 0
    for shape in shapes:
        dims = max(1, min(len(shape), 2))
        if dims not in kept:
            kept[dims] = _kept(section, _TINY[dims], dtype)
        sizes = dict(zip(_TINY[dims], shape, strict=True))
        total += sum(prod(sizes.get(size, size) for size in state) * itemsize for state, itemsize in kept[dims])
    return total


def _kept(section: Optimizer, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of an element of each tensor that the optimizer keeps for a parameter of `shape`."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = build_optimizer(replace(section), [("parameter", parameter)])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = optimizer.state[parameter].values()
    return [(tuple(state.shape), state.element_size()) for state in states if isinstance(state, Tensor)]
