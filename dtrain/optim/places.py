"""Part of a whole parameter that this rank holds, as rows and columns of a matrix, and random bits for its elements.

The columns are the last dimension, the rows all others. A vector is a matrix of one column.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.randomness import bits, key
from dtrain.parallel.placement import cut_by, local_bounds, local_tensor


@dataclass(frozen=True)
class Place:
    """Parameter [rows, columns] and the part of it that this rank holds: [held_rows, held_columns] at first_row and
    first_column. groups: of the ranks that share the columns; widest: columns of the rank that has most."""

    rows: int
    columns: int
    first_row: int
    first_column: int
    held_rows: int
    held_columns: int
    groups: tuple[dist.ProcessGroup, ...] = ()
    widest: int = 0

    @classmethod
    def of(cls, parameter: Tensor) -> "Place":
        """Return the place of `parameter` [..], plain or a DTensor cut in its first dimension, its last, or both. No
        collective."""
        shape, bounds = tuple(parameter.shape), local_bounds(parameter)
        if len(shape) < 2:
            shape, bounds = (*shape, 1), (*bounds, (0, 1))
        middle = math.prod(shape[1:-1])
        if any(end - start != size for (start, end), size in zip(bounds[1:-1], shape[1:-1], strict=True)):
            raise ValueError(f"a parameter of {shape} is cut in a dimension that is neither its first nor its last")
        (first, last), (left, right) = bounds[0], bounds[-1]
        cuts = cut_by(parameter, parameter.dim() - 1) if parameter.dim() > 1 else []
        parts = math.prod(mesh.size(dim) for mesh, dim in cuts)
        return cls(
            rows=shape[0] * middle,
            columns=shape[-1],
            first_row=first * middle,
            first_column=left,
            held_rows=(last - first) * middle,
            held_columns=right - left,
            groups=tuple(mesh.get_group(dim) for mesh, dim in cuts),
            widest=-(-shape[-1] // parts),
        )

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns of the whole parameter that are held."""
        columns = slice(self.first_column, self.first_column + self.held_columns)
        return slice(self.first_row, self.first_row + self.held_rows), columns

    def of_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of `tensor` [..], a parameter or its like, as [held_rows, held_columns]: a view,
        where it is contiguous."""
        return local_tensor(tensor).detach().reshape(self.held_rows, self.held_columns)

    def runs(self, elements: int, least: int = 1) -> Iterator[slice]:
        """Yield the held rows in runs of about `elements` elements of the whole tensor, of which a row counts as
        `least` at least."""
        size = max(1, elements // max(self.columns, least))
        for start in range(0, self.held_rows, size):
            yield slice(start, min(start + size, self.held_rows))

    def bits(self, rows: slice, name: int, device: torch.device) -> Tensor:
        """Return 64 random bits for each element of some of the held rows: int64 [rows, held_columns]. name: of the
        sequence (`stream`); an element's number in it is its index in the whole parameter."""
        row = torch.arange(self.first_row + rows.start, self.first_row + rows.stop, device=device)
        column = torch.arange(self.first_column, self.first_column + self.held_columns, device=device)
        return bits(row[:, None] * self.columns + column, name)

    def few_bits(self, rows: slice, name: int, device: torch.device) -> Tensor:
        """Return 16 random bits for each element, as `bits`, at a quarter of its cost: int32 [rows, held_columns]."""
        first, end = self.first_column // 4, -(-(self.first_column + self.held_columns) // 4)
        row = torch.arange(self.first_row + rows.start, self.first_row + rows.stop, device=device)
        fours = row[:, None] * -(-self.columns // 4) + torch.arange(first, end, device=device)
        before = self.first_column - 4 * first
        return bits(fours, name).view(torch.int16)[:, before : before + self.held_columns].int()


def stream(seed: int, step: int, name: str) -> int:
    """Return the name of the sequence of bits that a parameter's step takes."""
    return key("optimizer", seed, step, name)
