"""Storage of an Adam moment between two steps: in float32, in bfloat16, or in int8 by blocks.

`read` returns some rows in float32 and `write` stores them again. Both see the same rows of each state tensor, as
[rows, local_columns], or if the shard consists of full blocks as [rows, blocks, BLOCK_SIZE]. Values are rounded up or
down at random (`optim.stochastic_rounding`). Rounded to the nearest, a moment that changes by less than half a step of
its grid would never change. The caller passes the random bits.

int8 (after Dettmers et al., arXiv:2110.02861): a row of the full tensor is divided into blocks of `BLOCK_SIZE`
elements, each with its largest magnitude ("scale") in float32. A first moment is stored as a signed code c from -127 to
127 and means sign(c) · (c / 127)² · scale. A second moment is stored as a code from 0 to 255 and means
(c / 255)⁴ · scale. Small values of a block keep about two digits. The grids of the two moments are alike, because the
update is the quotient m / √v. A second moment above 0 is never rounded to 0.

Example: in a block with scale 0.08, the first moment 0.01 has (c / 127)² = 0.125, so c = 44.9. It is stored as 44
(0.0096) or as 45 (0.01004), with the probabilities 0.1 and 0.9, whose mean is 0.01.

If tensor parallel divides a row within a block, its ranks agree on the block's scale, and each stores all scales of the
row.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtrain.optim.local_shard import LocalShard
from dtrain.optim.shard_optimizer import StateLocation
from dtrain.optim.stochastic_rounding import round_bfloat16

BLOCK_SIZE = 256
MIN_ELEMENTS = 4096  # moments of smaller tensors stay float32

# Largest code and exponent of the grid of a first moment (signed codes) and of a second moment.
_GRIDS = {torch.int8: (127, 2), torch.uint8: (255, 4)}

State = dict[str, Tensor]


def kind_of(name: str, size: torch.Size, state: str) -> str:
    """Choose the storage of a parameter's moments, a key of `MOMENT_STORAGE`.

    Vectors, small tensors and embeddings (and heads that are tied to one) stay float32. They are a small share of the
    model, and the gradients of an embedding's rows differ too much for one scale.

    Args:
        name: Name of the parameter.
        size: Size of the full parameter.
        state: The recipe's `optimizer.state`.
    """
    is_small = len(size) < 2 or size.numel() < MIN_ELEMENTS
    return "float32" if is_small or "embed" in name else state


class PlainMoment:
    """A moment that is stored in one tensor.

    Attributes:
        shard: Local shard of the parameter.
        key: Key of the moment in the optimizer's state.
        keys: Keys of all tensors that store it.
        dtype: Dtype of the tensor. None: the dtype of the arithmetic.
    """

    def __init__(self, shard: LocalShard, key: str, dtype: torch.dtype | None = None):
        self.shard, self.key, self.dtype = shard, key, dtype
        self.keys: tuple[str, ...] = (key,)

    def allocate(self, like: Tensor, dtype: torch.dtype) -> State:
        """Return the tensors of a moment that is zero.

        Args:
            like: Local shard of the parameter, [..].
            dtype: Dtype of the arithmetic.
        """
        return {self.key: torch.zeros_like(like, dtype=self.dtype or dtype)}


class Int8Moment(PlainMoment):
    """A moment that is stored as 8-bit codes and a float32 scale per block.

    Attributes:
        scales: Key of the scales.
        shares_blocks: Whether other ranks store a part of the same blocks.
        first_block: Block of the full row at which the stored scales begin.
        num_blocks: Scales per row.
        before: Elements of the first block that other ranks store.
        after: Elements of the last block that other ranks store, or that do not exist.
    """

    def __init__(self, shard: LocalShard, key: str):
        super().__init__(shard, key, torch.int8 if key == "exp_avg" else torch.uint8)
        self.scales = f"{key}_scale"
        self.keys = key, self.scales
        self.shares_blocks = bool(shard.column_groups) and shard.max_local_columns % BLOCK_SIZE != 0
        self.first_block = 0 if self.shares_blocks else shard.first_column // BLOCK_SIZE
        end = shard.num_columns if self.shares_blocks else shard.first_column + shard.local_columns
        has_blocks = shard.local_columns > 0 or self.shares_blocks
        self.num_blocks = -(-end // BLOCK_SIZE) - self.first_block if has_blocks else 0
        self.before = shard.first_column - self.first_block * BLOCK_SIZE
        self.after = self.num_blocks * BLOCK_SIZE - self.before - shard.local_columns

    @property
    def edges(self) -> tuple[int, int]:
        """`before` and `after`: by how much the shard's rows are filled up to full blocks on both sides."""
        return self.before, self.after

    @property
    def scales_location(self) -> StateLocation:
        """Location of this rank's scales in those of all ranks."""
        num_blocks = -(-self.shard.num_columns // BLOCK_SIZE)
        return StateLocation(
            global_size=(*self.shard.global_row_shape, num_blocks),
            offsets=(*self.shard.row_offsets, self.first_block),
        )

    def allocate(self, like: Tensor, dtype: torch.dtype) -> State:
        """Override `PlainMoment.allocate`: codes like `like`, scales [local rows, blocks], for a stack of matrices
        [matrices, rows, blocks]."""
        scales = torch.zeros(*self.shard.local_row_shape, self.num_blocks, device=like.device)
        return super().allocate(like, dtype) | {self.scales: scales}

    def all_reduce_scales(self, scales: Tensor) -> None:
        """Replace `scales` [rows, blocks] by the largest of all ranks that share blocks. One all-reduce per group."""
        for group in self.shard.column_groups:
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)


def read(rows: State, key: str, edges: tuple[int, int] = (0, 0)) -> Tensor:
    """Return rows of a moment in the dtype of the arithmetic: the state itself if it has that dtype, else a copy.

    Args:
        rows: Rows of each state tensor, by key.
        key: The moment.
        edges: `Int8Moment.edges`.
    """
    stored = rows[key]
    if stored.dtype == torch.bfloat16:
        return stored.float()
    if stored.dtype not in _GRIDS:
        return stored
    largest_code, exponent = _GRIDS[stored.dtype]
    # Multiply by the reciprocal, because a GPU divides by a number in this way and a CPU does not.
    values = stored.float().mul_(1 / largest_code)
    values = values * values.abs() if exponent == 2 else _power(values, exponent)
    return values.mul_(_of_elements(rows[f"{key}_scale"], values, edges))


def write(
    rows: State,
    key: str,
    values: Tensor,
    bits: Tensor,
    edges: tuple[int, int] = (0, 0),
    all_reduce_scales: Callable[[Tensor], None] | None = None,
) -> None:
    """Store rows of a moment, if it is stored in fewer bits than `values` have.

    Args:
        rows: Rows of each state tensor, by key.
        key: The moment.
        values: Its new values, float32 [rows, local_columns] or [rows, blocks, BLOCK_SIZE].
        bits: Random integers of that shape, of which the lowest 24 bits are used.
        edges: `Int8Moment.edges`.
        all_reduce_scales: `Int8Moment.all_reduce_scales` if other ranks store a part of the same blocks.
    """
    stored = rows[key]
    if stored.dtype == torch.bfloat16:
        stored.copy_(round_bfloat16(values, bits))
    if stored.dtype not in _GRIDS:
        return
    magnitudes = values.abs()
    has_full_blocks = magnitudes.dim() == 3
    blocks = magnitudes if has_full_blocks else F.pad(magnitudes, edges).unflatten(1, (-1, BLOCK_SIZE))
    scales = blocks.amax(2, keepdim=has_full_blocks)
    if all_reduce_scales is not None:
        all_reduce_scales(scales)
    # With an infinite scale, all elements of the block would be read as NaN.
    scales.clamp_(max=torch.finfo(scales.dtype).max)
    rows[f"{key}_scale"].copy_(scales)
    magnitudes.div_(_of_elements(torch.where(scales > 0, scales, 1.0), values, edges))
    uniform = (bits & 0xFFFFFF).float().mul_(2.0**-24)  # in [0, 1)
    codes = _codes(magnitudes, uniform, *_GRIDS[stored.dtype])
    if stored.dtype == torch.int8:
        codes.copysign_(values)
    else:
        codes = torch.where(values > 0, codes.clamp_(min=1), codes)
    stored.copy_(codes)


def _of_elements(scales: Tensor, values: Tensor, edges: tuple[int, int]) -> Tensor:
    """Return the scale of each element of `values`, or of each block if `values` is [rows, blocks, BLOCK_SIZE]."""
    if values.dim() == 3:
        return scales  # [rows, blocks, 1]
    return scales.repeat_interleave(BLOCK_SIZE, 1)[:, edges[0] : edges[0] + values.shape[1]]


def _codes(magnitudes: Tensor, uniform: Tensor, largest_code: int, exponent: int) -> Tensor:
    """Round to a code of the grid (code / largest_code)^exponent, up or down such that the mean is right.

    Args:
        magnitudes: Values in [0, 1], any shape; overwritten.
        uniform: Random numbers in [0, 1) of that shape.
        largest_code: Largest code.
        exponent: 2 or 4.

    Returns:
        Codes in float32.
    """
    root = magnitudes
    for _ in range(exponent // 2):
        root = root.sqrt()
    below = (root * largest_code).floor_().clamp_(max=largest_code - 1)
    low = _power(below, exponent)
    distance = _power(below + 1, exponent).sub_(low)
    probability_of_above = magnitudes.mul_(largest_code**exponent).sub_(low).div_(distance)
    return below.add_(uniform < probability_of_above)


def _power(values: Tensor, exponent: int) -> Tensor:
    """Return values [..] to the power of 2 or 4."""
    square = values * values
    return square if exponent == 2 else square.mul_(square)


MOMENT_STORAGE: dict[str, Callable[[LocalShard, str], PlainMoment]] = {
    "float32": PlainMoment,
    "bfloat16": partial(PlainMoment, dtype=torch.bfloat16),
    "int8": Int8Moment,
}
"""Class of a moment by the name of its storage (`kind_of`)."""
