"""Loops that do the same in each of their rounds, marked for who follows what they do."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

Item = TypeVar("Item")


def rounds(items: Sequence[Item], tensor: Tensor) -> Iterable[Item]:
    """Return `items`, for each of which a loop does the same with tensors of the same sizes, smaller ones for the last
    perhaps; all that it keeps is there after the first one.

    tensor: any that the loop works on. A mode of torch's functions may answer with some of the items: `dtrain plan`
    follows three of them.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(rounds, (tensor,), items, tensor)
    return items
