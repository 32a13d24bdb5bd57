"""What a step's operations cost a device, whichever it is: arithmetic of matrix products by dtype, and bytes moved."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.attention.varlen  # enters its formulas in flop_registry
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

_aten = torch.ops.aten
_FORMULAS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


@dataclass
class Cost:
    """flops: of products, by the dtype of their operands. moved: bytes that the other operations read and write.
    operations: kernels started."""

    flops: Counter = field(default_factory=Counter)
    moved: int = 0
    operations: int = 0

    def __iadd__(self, other: "Cost") -> "Cost":
        self.flops.update(other.flops)
        self.moved += other.moved
        self.operations += other.operations
        return self


def cost(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: Any, tensors: Iterable[Tensor]) -> Cost:
    """Of one operation; tensors: its inputs and outputs. Attention counts all pairs of queries and keys, hidden ones
    too."""
    formula = _FORMULAS.get(func._overloadpacket)
    if formula is not None:
        dtype = next(one.dtype for one in args if isinstance(one, Tensor))
        return Cost(Counter({dtype: formula(*args, **kwargs, out_val=out)}), 0, 1)
    if func.is_view or func.namespace not in ("aten", "fsdp") or not _computes(func):
        return Cost()
    distinct = {id(one): one for one in tensors}.values()
    return Cost(Counter(), sum(one.numel() * one.element_size() for one in distinct), 1)


def _computes(func: torch._ops.OpOverload) -> bool:
    return not func._schema.name.startswith(("aten::empty", "aten::detach", "aten::_local_scalar", "aten::lift"))
