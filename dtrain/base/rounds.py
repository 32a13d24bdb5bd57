"""Loops that do the same in each of their rounds, marked for who follows what they do."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def rounds(items: Sequence[Any], tensor: Tensor) -> Iterable[Any]:
    """Return `items`, for each of which a loop does the same with tensors of the same sizes, smaller ones for the last
    perhaps; all that it keeps is there after the first. A mode of torch's functions that sees `tensor`, any of the
    loop's, may answer with some of the items: `dtrain plan` follows three of them."""
    return handle_torch_function(rounds, (tensor,), items, tensor) if has_torch_function_unary(tensor) else items
