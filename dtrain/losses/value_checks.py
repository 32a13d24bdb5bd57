"""The check of what a user's loss function returns."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dtrain.base.errors import UserError


def check_loss_values(name: str, values: Any, shape: Sequence[int], unit: str) -> None:
    """Check that a loss function returned one value per token or pair.

    dtrain adds the values up and divides by a count of the global batch. A function that returns a sum or a mean would
    train with wrong numbers, because its value would be broadcast to every token.

    Args:
        name: Name of the loss, for the error.
        values: The returned object.
        shape: The shape that it must have, such as [tokens] or [pairs].
        unit: "token" or "pair".

    Raises:
        UserError: If `values` is not a tensor of this shape.

    Example:
        >>> import torch
        >>> check_loss_values("focal", torch.ones(3), [3], "token")
    """
    expected = list(shape)
    returned = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if returned != expected:
        raise UserError(
            f"the loss {name} must return one value per {unit}, {expected} for this call, and returned {returned}. "
            f"dtrain adds the values up and divides by the number of {unit}s"
        )
