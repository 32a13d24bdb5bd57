"""The shard of a parameter that a rank stores, described as rows and columns of a matrix.

dtrain's own optimizers step the local shard as a plain matrix [local_rows, local_columns], whatever cut it. The columns
are the parameter's last dimension and the rows are all others. A vector is a matrix with one column.

Example: a weight [10, 37] under FSDP over 3 ranks and tensor parallel over 2 ranks, which cuts the columns (o_proj and
down_proj). FSDP makes chunks of ceil(10 / 3) = 4 rows, tensor parallel chunks of ceil(37 / 2) = 19 columns. The rank
that is second in both groups stores rows 4 to 7 and columns 19 to 36:

    LocalShard(num_rows=10, num_columns=37, first_row=4, first_column=19, local_rows=4, local_columns=18,
               column_groups=(the tensor-parallel group,), max_local_columns=19)

Element [1, 2] of that shard is element [5, 21] of the weight, which has the flat index 5 * 37 + 21 = 206. Random bits
are a function of this index (`stochastic_rounding`), so every mesh rounds an element in the same way.

The weights of a layer's experts are a stack [experts, rows, columns]. Tensor parallel may cut the rows of every expert,
and then the local rows are not consecutive in the stack. For example, 2 experts of 5 rows are a matrix of 10 rows, and
a rank that stores rows 1 and 2 of each expert has first_row=1, local_rows=4, matrix_rows=5, local_matrix_rows=2. Its
rows are 1, 2, 6 and 7 of the full matrix.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from dtrain.parallel.placement import cut_by, local_bounds, local_tensor

MAX_SLICE_ELEMENTS = 2**22
"""Elements of a parameter that are stepped at once, 16 MiB in float32: a step's temporary memory stays within a few
such slices, however large the parameter is."""


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard of a parameter, as a matrix (the module has examples).

    Attributes:
        num_rows: Rows of the full parameter.
        num_columns: Columns of the full parameter.
        first_row: Row of the full parameter at which the shard begins.
        first_column: Column of the full parameter at which the shard begins.
        local_rows: Rows of the shard.
        local_columns: Columns of the shard.
        matrix_rows: Rows of each matrix in a stack of matrices; 1 for a single matrix.
        local_matrix_rows: Rows of each matrix that the shard has; 1 for a single matrix.
        column_groups: Groups of ranks that share the columns, one per mesh dimension that cuts them.
        max_local_columns: Columns of the largest shard among these ranks.
    """

    num_rows: int
    num_columns: int
    first_row: int
    first_column: int
    local_rows: int
    local_columns: int
    matrix_rows: int = 1
    local_matrix_rows: int = 1
    column_groups: tuple[dist.ProcessGroup, ...] = ()
    max_local_columns: int = 0

    @classmethod
    def of(cls, parameter: Tensor) -> "LocalShard":
        """Return this rank's shard of `parameter`, a plain tensor or a DTensor, [n], [rows, columns] or a stack."""
        shape = tuple(parameter.shape)
        bounds = local_bounds(parameter)
        if len(shape) < 2:
            shape, bounds = (*shape, 1), (*bounds, (0, 1))
        matrix_rows = math.prod(shape[1:-1])
        first, last = bounds[0]
        top, bottom = bounds[1] if len(shape) == 3 else (0, matrix_rows)
        left, right = bounds[-1]
        column_cuts = cut_by(parameter, parameter.dim() - 1) if parameter.dim() > 1 else []
        column_parts = math.prod(mesh.size(dim) for mesh, dim in column_cuts)
        return cls(
            num_rows=shape[0] * matrix_rows,
            num_columns=shape[-1],
            first_row=first * matrix_rows + top,
            first_column=left,
            local_rows=(last - first) * (bottom - top),
            local_columns=right - left,
            matrix_rows=matrix_rows,
            local_matrix_rows=bottom - top,
            column_groups=tuple(mesh.get_group(dim) for mesh, dim in column_cuts),
            max_local_columns=-(-shape[-1] // column_parts),
        )

    @property
    def global_row_shape(self) -> tuple[int, ...]:
        """The full parameter's row dimensions: (rows,), or (matrices, rows) for a stack."""
        if self.matrix_rows == 1:
            return (self.num_rows,)
        return self.num_rows // self.matrix_rows, self.matrix_rows

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Indices in `global_row_shape` at which the shard begins."""
        return (self.first_row,) if self.matrix_rows == 1 else divmod(self.first_row, self.matrix_rows)

    @property
    def local_row_shape(self) -> tuple[int, ...]:
        """The shard's row dimensions, like `global_row_shape`."""
        if self.matrix_rows == 1:
            return (self.local_rows,)
        return self.local_rows // max(self.local_matrix_rows, 1), self.local_matrix_rows

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns of the full matrix that the shard is. Not for a stack whose matrices are cut."""
        rows = slice(self.first_row, self.first_row + self.local_rows)
        columns = slice(self.first_column, self.first_column + self.local_columns)
        return rows, columns

    def as_matrix(self, tensor: Tensor) -> Tensor:
        """Return the local tensor of `tensor` as a matrix.

        Args:
            tensor: The parameter, its gradient, or a state tensor with the shape of the local shard.

        Returns:
            [local_rows, local_columns], a view if the local tensor is contiguous.
        """
        return local_tensor(tensor).detach().reshape(self.local_rows, self.local_columns)

    def row_slices(self, num_elements: int = MAX_SLICE_ELEMENTS, min_row_elements: int = 1) -> Iterator[slice]:
        """Yield slices of the local rows, to be stepped one after the other.

        The number of rows per slice depends on the full parameter's columns. Ranks that share the columns of the same
        rows therefore make the same slices, and can communicate in each of them.

        Args:
            num_elements: Largest number of elements in a slice, counted over all columns of the full parameter. A
                slice has at least one row.
            min_row_elements: Elements that a row counts at least, if the state of a row is filled up to that number.
        """
        rows_per_slice = max(1, num_elements // max(self.num_columns, min_row_elements))
        for start in range(0, self.local_rows, rows_per_slice):
            yield slice(start, min(start + rows_per_slice, self.local_rows))
