"""Local shards of parameters as matrices, and stochastic rounding that is the same on every mesh.

`ShardOptimizer` is the base of dtrain's own optimizers. They step the local shard as a plain matrix [local_rows,
local_columns], whether FSDP, tensor parallel or both have sharded the parameter. The columns are the parameter's last
dimension and the rows are all others. A vector is a matrix with one column.

Example: a weight [10, 37] under FSDP over 3 ranks and tensor parallel over 2 ranks, which cuts the columns (o_proj and
down_proj). FSDP makes chunks of ceil(10 / 3) = 4 rows, tensor parallel chunks of ceil(37 / 2) = 19 columns. The rank
that is second in both groups stores rows 4 to 7 and columns 19 to 36:

    LocalShard(num_rows=10, num_columns=37, first_row=4, first_column=19, local_rows=4, local_columns=18,
               column_groups=(the tensor-parallel group,), max_local_columns=19)

Element [1, 2] of that shard is element [5, 21] of the weight, which has the flat index 5 * 37 + 21 = 206. Random bits
are a function of this index (see below), so every mesh rounds an element in the same way.

The weights of a layer's experts are a stack [experts, rows, columns]. Tensor parallel may cut the rows of every expert,
and then the local rows are not consecutive in the stack. For example, 2 experts of 5 rows are a matrix of 10 rows, and
a rank that stores rows 1 and 2 of each expert has first_row=1, local_rows=4, matrix_rows=5, local_matrix_rows=2. Its
rows are 1, 2, 6 and 7 of the full matrix.

Stochastic rounding: an optimizer step often changes a weight by less than half the distance between two bfloat16
numbers. Rounded to the nearest, such a weight would never move. For example, steps of 1e-6 would leave the weight 1.0
unchanged, because the next lower bfloat16 number is 1 - 2^-8 = 0.996. Instead, the weight is rounded up or down at
random, with probabilities for which the expected value is the exact one. On average, the weight then moves as far as a
float32 weight.

The random bits of an element are SplitMix64 of its flat index in the full parameter (`base.randomness`), in a sequence
that is selected by seed, step and parameter name. Each rank computes the bits of its own elements, without
communication.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dtrain.base.randomness import random_int64, random_key
from dtrain.parallel.placement import get_sharding_dims, local_bounds, local_tensor

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
        column_cuts = get_sharding_dims(parameter, parameter.dim() - 1) if parameter.dim() > 1 else []
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
        """Row slice and column slice of the shard in the full matrix. Not valid for a stack whose matrices are cut."""
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
        """Yield consecutive slices of the local rows, each small enough to be stepped at once.

        The number of rows per slice depends on the full parameter's columns. Ranks that share the columns of the same
        rows therefore make the same slices, and can communicate in each of them.

        Args:
            num_elements: Largest number of elements in a slice, counted over all columns of the full parameter. A
                slice has at least one row.
            min_row_elements: Elements that a shorter row counts as. Used if the optimizer pads the state of each row to
                this number.
        """
        rows_per_slice = max(1, num_elements // max(self.num_columns, min_row_elements))
        for start in range(0, self.local_rows, rows_per_slice):
            yield slice(start, min(start + rows_per_slice, self.local_rows))


class StateLocation(NamedTuple):
    """Location of a rank's part of a state tensor in the tensor of all ranks.

    Attributes:
        global_size: Size of the tensor of all ranks.
        offsets: Indices in it at which this rank's part begins.
    """

    global_size: tuple[int, ...]
    offsets: tuple[int, ...]


class ShardOptimizer(Optimizer):
    """Base of dtrain's own optimizers, which step local shards as plain tensors.

    `checkpoint.dcp` calls `state_location` to save each state tensor as a part of the tensor of all ranks.

    Attributes:
        state_is_on_host: Whether the state is in host memory, and copied to the device during a step.
    """

    state_is_on_host = False

    def allocate_state(self) -> None:
        """Allocate the state of every parameter, as a step would. Weights keep their values."""
        _step_without_change(self)

    def step_buffer_bytes(self) -> int:
        """Return the bytes on the device of the buffers through which a step copies state that is on the host."""
        return 0

    def is_fused_on(self, device_type: str) -> bool:
        """Check whether a step on devices of this type reads and writes each of its tensors once."""
        return False

    def state_location(self, parameter: Tensor, key: str) -> StateLocation | None:
        """Return the location of a state tensor in the state tensor of all ranks.

        Args:
            parameter: The parameter.
            key: Key of the state tensor, such as "exp_avg".

        Returns:
            The location. None if it is the same as that of the local shard in `parameter`.
        """
        return None


def allocate_state(optimizer: Optimizer) -> None:
    """Allocate the state of a new optimizer, with the tensors that it has after a step.

    No weight is changed. The contents of the state are meaningless until a checkpoint is loaded into them. An optimizer
    that has state already is left as it is.

    Raises:
        ValueError: If parameters have gradients.

    Collectives:
        Those of the optimizer's step.
    """
    if optimizer.state:
        return
    if isinstance(optimizer, ShardOptimizer):
        optimizer.allocate_state()
    else:
        _step_without_change(optimizer)


@torch.no_grad()
def _step_without_change(optimizer: Optimizer) -> None:
    """Make an optimizer allocate its state, by a step with gradients of 0 at a learning rate of 0."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError("allocate_state is for an optimizer between steps: there are gradients")
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None


class BitPositions(NamedTuple):
    """Positions, in a random sequence, of the bits for a slice of a shard's rows.

    All entries are int64 scalars on the host. A compiled kernel takes such tensors by value, and is not compiled anew
    for another number.

    Attributes:
        first_row: Row of the full parameter at which the shard begins.
        first_slice_row: Row of the shard at which the slice begins.
        num_columns: Columns of the full parameter.
        first_column: Column of the full parameter at which the shard begins.
        sequence: Key of the random sequence (`random_sequence`).
        local_matrix_rows: As in `LocalShard`, if the shard has a part of each matrix of a stack; else None.
        matrix_rows: As in `LocalShard`, in the same case; else None.
    """

    first_row: Tensor
    first_slice_row: Tensor
    num_columns: Tensor
    first_column: Tensor
    sequence: Tensor
    local_matrix_rows: Tensor | None = None
    matrix_rows: Tensor | None = None


def random_sequence(seed: int, step: int, name: str) -> int:
    """Return the 64-bit key of the random sequence for one optimizer step of the parameter `name`."""
    return random_key("optimizer", seed, step, name)


def bit_positions(shard: LocalShard, rows: slice, sequence: int) -> BitPositions:
    """Return the positions of the bits for a slice of a shard's rows.

    Args:
        shard: The shard.
        rows: Slice of the shard's rows, from `LocalShard.row_slices`.
        sequence: Key of the random sequence.
    """
    values = [shard.first_row, rows.start, shard.num_columns, shard.first_column, sequence]
    if shard.local_matrix_rows != shard.matrix_rows:
        values += [shard.local_matrix_rows, shard.matrix_rows]
    return BitPositions(*(torch.tensor(value) for value in values))


def global_rows(num_rows: int, positions: BitPositions, device: torch.device) -> Tensor:
    """Return the row in the full parameter of each of the slice's `num_rows` rows, int64 [num_rows]."""
    rows = torch.arange(num_rows, device=device) + positions.first_slice_row
    # Only for a part of each matrix of a stack, because integer division is slow on a GPU.
    if positions.local_matrix_rows is not None and positions.matrix_rows is not None:
        matrix = rows // positions.local_matrix_rows
        row_in_matrix = rows % positions.local_matrix_rows
        rows = matrix * positions.matrix_rows + row_in_matrix
    return rows + positions.first_row


def random_bits(shape: Sequence[int], positions: BitPositions, device: torch.device) -> Tensor:
    """Return 64 random bits for each element of a slice of rows.

    Args:
        shape: [rows, local_columns], or the columns as several dimensions, [rows, blocks, block size].
        positions: Where the slice is.
        device: Where the bits are computed.

    Returns:
        int64 of `shape`.
    """
    column_shape = shape[1:]
    columns = torch.arange(math.prod(column_shape), device=device).view(column_shape) + positions.first_column
    row_starts = global_rows(shape[0], positions, device) * positions.num_columns
    return random_int64(row_starts.view(-1, *[1] * len(column_shape)) + columns, positions.sequence)


def random_16_bits(shape: tuple[int, int], positions: BitPositions, device: torch.device) -> Tensor:
    """Return 16 random bits for each element of a slice of rows, cheaper than `random_bits` on a CPU.

    Four neighbours in a row share one 64-bit number: columns 4k to 4k + 3 of the full parameter take its lowest to its
    highest 16 bits. A CPU computes each number once. A compiled kernel computes it again for each of the four elements,
    which is faster than sharing it between threads.

    Args:
        shape: [rows, local_columns].
        positions: Where the slice is.
        device: Where the bits are computed.

    Returns:
        Integers of `shape`, of which the lowest 16 bits are random.
    """
    num_rows, num_columns = shape
    numbers_per_row = (positions.num_columns + 3) // 4
    row_starts = global_rows(num_rows, positions, device)[:, None] * numbers_per_row
    if torch.compiler.is_compiling():
        columns = torch.arange(num_columns, device=device) + positions.first_column
        return random_int64(row_starts + (columns >> 2), positions.sequence) >> ((columns & 3) * 16)
    first_number, skipped = divmod(int(positions.first_column), 4)
    end_number = first_number + (skipped + num_columns + 3) // 4
    numbers = random_int64(row_starts + torch.arange(first_number, end_number, device=device), positions.sequence)
    return numbers.view(torch.int16)[:, skipped : skipped + num_columns].int()


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round to bfloat16, up or down at random.

    A bfloat16 number is the upper half of a float32 number's 32 bits. Adding 16 random bits to the lower half carries
    into the upper half with the probability lower half / 2^16. This is the right probability for rounding away from
    zero: lower half / 2^16 is how far the value is on the way from one bfloat16 number to the next. Values that
    bfloat16 represents exactly, infinities and NaN are not changed.

    Args:
        values: float32, any shape.
        bits: Integers of the same shape; the lowest 16 bits are used.

    Returns:
        bfloat16 of the same shape.

    Example:
        A quarter of the way from 1 to 1 + 2^-7, the next bfloat16 number. So a quarter of the 2^16 possible bits, those
        from 49152 on, round up.

        >>> values = torch.full((2,), 1 + 2**-9)
        >>> round_bfloat16(values, torch.tensor([49151, 49152]))
        tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    words = values.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (words & -0x10000).view(torch.float32)
    # The sum may turn a NaN into an infinity or a zero, so values that are not finite are passed on.
    return torch.where(values.isfinite(), rounded, values).bfloat16()
