"""Part of a whole parameter that this rank holds, as rows and columns of a matrix, and random bits for its elements.

The columns are the last dimension, the rows all others. A vector is a matrix of one column.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.randomness import bits, key
from dtrain.parallel.placement import cut_by, local_bounds, local_tensor


@dataclass(frozen=True)
class Place:
    """Parameter [rows, columns] and the part of it that this rank holds: [held_rows, held_columns] at first_row and
    first_column. Rows are those of a stack of matrices, of `of_matrix` rows each, of which this rank holds a run of
    `held_of_matrix`. groups: of the ranks that share the columns; widest: columns of the rank that has most."""

    rows: int
    columns: int
    first_row: int
    first_column: int
    held_rows: int
    held_columns: int
    of_matrix: int = 1
    held_of_matrix: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()
    widest: int = 0

    @classmethod
    def of(cls, parameter: Tensor) -> "Place":
        """Return the place of `parameter`, plain or a DTensor: a vector, a matrix or a stack. No collective."""
        shape, bounds = tuple(parameter.shape), local_bounds(parameter)
        if len(shape) < 2:
            shape, bounds = (*shape, 1), (*bounds, (0, 1))
        middle = math.prod(shape[1:-1])
        (top, bottom) = bounds[1] if len(shape) == 3 else (0, middle)
        (first, last), (left, right) = bounds[0], bounds[-1]
        cuts = cut_by(parameter, parameter.dim() - 1) if parameter.dim() > 1 else []
        parts = math.prod(mesh.size(dim) for mesh, dim in cuts)
        return cls(
            rows=shape[0] * middle,
            columns=shape[-1],
            first_row=first * middle + top,
            first_column=left,
            held_rows=(last - first) * (bottom - top),
            held_columns=right - left,
            of_matrix=middle,
            held_of_matrix=bottom - top,
            groups=tuple(mesh.get_group(dim) for mesh, dim in cuts),
            widest=-(-shape[-1] // parts),
        )

    @property
    def stack(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Rows of the whole parameter, of where the held part begins, and of that part: (rows,) each, of a stack of
        matrices (matrices, rows)."""
        if self.of_matrix == 1:
            return (self.rows,), (self.first_row,), (self.held_rows,)
        held = (self.held_rows // max(self.held_of_matrix, 1), self.held_of_matrix)
        return (self.rows // self.of_matrix, self.of_matrix), divmod(self.first_row, self.of_matrix), held

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

    def numbers(self, rows: slice, name: int) -> "Numbers":
        """Return what `element_bits` and `few_bits` need of some of the held rows. name: of the sequence (`stream`)."""
        run = (self.held_of_matrix, self.of_matrix) if self.held_of_matrix != self.of_matrix else ()
        values = self.first_row, rows.start, self.columns, self.first_column, name, *run
        return Numbers(*(torch.tensor(value) for value in values))


class Numbers(NamedTuple):
    """Numbers of some of a place's rows, int64 scalars of the host, which a kernel takes by value. first_held: of these
    rows; name: of the sequence (`stream`); the last two are None where the place holds whole matrices; the others are
    as in `Place`."""

    first_row: Tensor
    first_held: Tensor
    columns: Tensor
    first_column: Tensor
    name: Tensor
    held_of_matrix: Tensor | None = None
    of_matrix: Tensor | None = None


def row_indices(rows: int, at: Numbers, device: torch.device) -> Tensor:
    """Return the index in the whole parameter of each of so many held rows, int64 [rows]."""
    held = torch.arange(rows, device=device) + at.first_held
    if at.held_of_matrix is not None and at.of_matrix is not None:  # a GPU divides slowly
        held = held // at.held_of_matrix * at.of_matrix + held % at.held_of_matrix
    return held + at.first_row


def element_bits(shape: Sequence[int], at: Numbers, device: torch.device) -> Tensor:
    """Return 64 random bits for each element of some of the held rows: int64 [rows, ..], [rows, held_columns]
    flattened. An element's number in the sequence is its index in the whole parameter."""
    columns = torch.arange(math.prod(shape[1:]), device=device).view(shape[1:]) + at.first_column
    starts = (row_indices(shape[0], at, device) * at.columns).view(-1, *[1] * (len(shape) - 1))
    return bits(starts + columns, at.name)


def few_bits(shape: tuple[int, int], at: Numbers, device: torch.device) -> Tensor:
    """Return 16 random bits for each element, the lowest of whole numbers [rows, held_columns]: four elements of a row
    share 64 bits, which a CPU draws once and a kernel for each."""
    fours = row_indices(shape[0], at, device)[:, None] * ((at.columns + 3) // 4)
    if torch.compiler.is_compiling():
        columns = torch.arange(shape[1], device=device) + at.first_column
        return bits(fours + (columns >> 2), at.name) >> ((columns & 3) * 16)
    first, before = divmod(int(at.first_column), 4)
    end = first + (before + shape[1] + 3) // 4
    drawn = bits(fours + torch.arange(first, end, device=device), at.name)
    return drawn.view(torch.int16)[:, before : before + shape[1]].int()


def stream(seed: int, step: int, name: str) -> int:
    """Return the name of the sequence of bits that a parameter's step takes."""
    return key("optimizer", seed, step, name)
