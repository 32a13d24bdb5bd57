"""Stochastic rounding to bfloat16, by random bits that are the same on every mesh.

An optimizer step often changes a weight by less than half the distance between two bfloat16 numbers. Rounded to the
nearest, such a weight would never move (for example, 1.0 by steps of 1e-6, where the next lower bfloat16 number is
1 - 2^-8). Rounded up or down at random, with probabilities that make the mean right, it moves as far as a float32
weight would on average.

The random bits of an element are SplitMix64 of its flat index in the full parameter (`base.randomness`), in a sequence
that seed, step and parameter name choose. A rank computes them for its own elements, and communicates nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.base.randomness import bits, key
from dtrain.optim.local_shard import LocalShard


class BitPositions(NamedTuple):
    """Positions, in a random sequence, of the bits for a slice of a shard's rows.

    All entries are int64 scalars on the host. A compiled kernel takes such tensors by value, and is not compiled anew
    for another number.

    Attributes:
        first_row: Row of the full parameter at which the shard begins.
        first_slice_row: Row of the shard at which the slice begins.
        num_columns: Columns of the full parameter.
        first_column: Column of the full parameter at which the shard begins.
        sequence: Name of the random sequence (`random_sequence`).
        local_matrix_rows: As in `LocalShard`, if the shard has a part of each matrix of a stack; else None.
        matrix_rows: As `local_matrix_rows`.
    """

    first_row: Tensor
    first_slice_row: Tensor
    num_columns: Tensor
    first_column: Tensor
    sequence: Tensor
    local_matrix_rows: Tensor | None = None
    matrix_rows: Tensor | None = None


def random_sequence(seed: int, step: int, name: str) -> int:
    """Return the name of the random sequence for one optimizer step of the parameter `name`."""
    return key("optimizer", seed, step, name)


def bit_positions(shard: LocalShard, rows: slice, sequence: int) -> BitPositions:
    """Return the positions of the bits for the slice `rows` of the rows of `shard`."""
    values = [shard.first_row, rows.start, shard.num_columns, shard.first_column, sequence]
    if shard.local_matrix_rows != shard.matrix_rows:
        values += [shard.local_matrix_rows, shard.matrix_rows]
    return BitPositions(*(torch.tensor(value) for value in values))


def global_rows(num_rows: int, positions: BitPositions, device: torch.device) -> Tensor:
    """Return the row in the full parameter of each of the slice's `num_rows` rows, int64 [num_rows]."""
    rows = torch.arange(num_rows, device=device) + positions.first_slice_row
    # None in the usual case, because integer division is slow on a GPU.
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
    return bits(row_starts.view(-1, *[1] * len(column_shape)) + columns, positions.sequence)


def random_16_bits(shape: tuple[int, int], positions: BitPositions, device: torch.device) -> Tensor:
    """Return 16 random bits for each element of a slice of rows, cheaper than `random_bits` on a CPU.

    Four neighbours in a row share one 64-bit number: columns 4k to 4k + 3 of the full parameter take its lowest to its
    highest 16 bits. A CPU computes each number once. A compiled kernel computes it for each element, which is faster
    there than exchanging it.

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
        return bits(row_starts + (columns >> 2), positions.sequence) >> ((columns & 3) * 16)
    first_number, skipped = divmod(int(positions.first_column), 4)
    end_number = first_number + (skipped + num_columns + 3) // 4
    numbers = bits(row_starts + torch.arange(first_number, end_number, device=device), positions.sequence)
    return numbers.view(torch.int16)[:, skipped : skipped + num_columns].int()


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round to bfloat16, up or down at random.

    A bfloat16 number is the upper half of a float32 number's 32 bits. Adding 16 random bits to the lower half carries
    into the upper half with the probability lower half / 2^16, which is the distance to the next bfloat16 number in
    units of that step. Numbers that bfloat16 has exactly, infinities and NaN stay as they are.

    Args:
        values: float32, any shape.
        bits: Integers of the same shape; the lowest 16 bits are used.

    Returns:
        bfloat16 of the same shape.
    """
    words = values.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (words & -0x10000).view(torch.float32)
    # The sum may turn a NaN into an infinity or a zero, so values that are not finite are passed on.
    return torch.where(values.isfinite(), rounded, values).bfloat16()
