"""Sources of logits: existing logits, and logits that are computed tile by tile from hidden states and a head.

A source divides its rows into tiles, computes the logits of one tile per call, and accumulates the gradients of its
inputs. `softmax` has the functions that read a tile. A forward and a backward over a source are

    for index in source.indices():                      # rows
        for block in source.blocks:                     # ids; most sources have one block with all of them
            tile = source.tile(index, block)            # logits [t, v]
            ...                                         # statistics of the tile

    source.begin_gradients(needed)
    for index in source.indices():
        for block in source.blocks:
            tile = source.tile(index, block)            # the same logits once more
            source.add_gradient(tile, grad)             # grad [t, v]
    hidden_grad, weight_grad = source.gradients()

Example: `HeadLogits` of 5 tokens, D = 2 and a weight [6, 2] with max_rows=2 and max_columns=4 has the rows 0:2, 2:4 and
4:5, each with the ids 0:4 and 4:6. A tile is hidden [2, 2] · weight[0:4]ᵀ, so the largest one is [2, 4] instead of [5,
6].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dtrain.base.fused import uniform_iterations
from dtrain.losses.head.vocabulary import (
    VocabShard,
    add_product_,
    compute_dtype,
    product,
    shard_sizes,
    tile_rows,
    tiles,
)

Index = Any  # selects the rows of a tile: a slice, or a tuple of integers and a slice


@dataclass(frozen=True)
class Scaling:
    """Softcap and temperature of logits.

    With product = hidden · weightᵀ, logits = softcap · tanh(product / softcap) / temperature, or product / temperature
    if `softcap` is None.

    Raises:
        ValueError: If the temperature or the softcap is not positive.

    Reference:
        Softcap: Gemma 2, arXiv:2408.00118, section 2.
    """

    temperature: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(f"temperature={self.temperature} and softcap={self.softcap} must be positive")

    def logits_(self, product: Tensor) -> Tensor:
        """Convert products [t, V] to logits, in place."""
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        return product if self.temperature == 1.0 else product.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return d logits / d product at logits [t, V], as a new tensor [t, V] or a number. None means 1."""
        if self.softcap is None and self.temperature == 1.0:
            return None
        if self.softcap is None:
            return 1.0 / self.temperature
        # The derivative of softcap · tanh(product / softcap) / temperature is (1 - tanh²) / temperature. Top-k and
        # top-p set logits to -inf. The clamp makes tanh -1 there, and the slope 0.
        tanh = (logits * (self.temperature / self.softcap)).clamp_(-1, 1)
        return tanh.square_().sub_(1).mul_(-1.0 / self.temperature)


class Tile(NamedTuple):
    """Logits of some rows and ids.

    Attributes:
        index: Which rows of the source.
        block: Which of this rank's ids.
        logits: [t, v] in the compute dtype. The caller may overwrite them if the source `has_own_tiles`.
        rows: The hidden states that the logits were computed from, [t, D]. [t, 0] for `GivenLogits`.
        part: The tile of another source that `FilteredRows` made this one from, without its logits. Else None.
    """

    index: Index
    block: slice
    logits: Tensor
    rows: Tensor
    part: "Tile | None" = None

    def without_logits(self) -> "Tile":
        """Drop the logits before `add_gradient`, which does not read them, to free memory for its matrix products."""
        return self._replace(logits=torch.empty(0, dtype=self.logits.dtype, device=self.logits.device))


class LogitSource(Protocol):
    """Logits [*leading, v] of this rank's part of a vocabulary, and the gradients of the source's inputs.

    Attributes:
        leading: The shape of the rows.
        columns: The number of ids, v.
        blocks: The ids of the tiles that make up a row. Most sources have one block with all ids.
        dtype: The dtype of the tiles.
        device: The device of the tiles.
        scaling: Softcap and temperature.
        has_own_tiles: Whether tiles are new memory, and not a view of the caller's logits.
        exact_dtype: The narrowest dtype that represents the values of the tiles exactly. They are sent in it.
        gradient_dtype: The dtype of gradients that `add_gradient` accepts.
    """

    leading: torch.Size
    columns: int
    blocks: Sequence[slice]
    dtype: torch.dtype
    device: torch.device
    scaling: Scaling
    has_own_tiles: bool
    exact_dtype: torch.dtype
    gradient_dtype: torch.dtype

    def indices(self) -> Iterable[Index]:
        """Return an index for each tile."""
        ...

    def tile(self, index: Index, block: slice, is_live: Tensor | None = None) -> Tile:
        """Compute a tile.

        Args:
            index: The rows, from `indices`. `Tile.index` selects fewer of them if other ranks compute the others.
            block: The ids, from `blocks`.
            is_live: [t] bool, False for rows without a target. Their inputs may be NaN, and their gradient will be 0.
        """
        ...

    def begin_gradients(self, needed: Sequence[bool]) -> None:
        """Allocate the gradients of those of the source's input tensors that need one."""
        ...

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        """Add the gradient with respect to a tile's hidden · weightᵀ, [t, v] in `gradient_dtype`.

        Called once for every row and block. All blocks of some rows are added before those of the next rows.
        """
        ...

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the source's input tensors, None for those that need none."""
        ...


class GivenLogits:
    """`LogitSource` of existing logits, [..., v].

    Args:
        logits: This rank's part of the logits, any floating dtype and strides.
        max_rows: Rows per tile. None: as many as fit a CPU's cache.
        scaling: Applied to the logits.
        flatten: Whether to flatten the leading dimensions of `logits` to one.
    """

    def __init__(
        self,
        logits: Tensor,
        *,
        max_rows: int | None = None,
        scaling: Scaling | None = None,
        flatten: bool = False,
    ):
        self._shape = logits.shape
        self.logits = logits.detach()
        if flatten:
            self.logits = self.logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])
        self.leading, self.columns = self.logits.shape[:-1], logits.shape[-1]
        self.dtype, self.device = compute_dtype(logits.dtype), logits.device
        self.scaling = scaling or Scaling()
        self.has_own_tiles = False
        self.exact_dtype = logits.dtype if self.scaling == Scaling() else self.dtype
        self.gradient_dtype = logits.dtype
        self.blocks: Sequence[slice] = [slice(0, self.columns)]
        self._max_rows = max_rows or tile_rows(self.columns, self.device.type)
        self._grad: Tensor | None = None

    def indices(self) -> Iterable[Index]:
        return uniform_iterations(list(tiles(self.leading, self._max_rows)), self.logits)

    def tile(self, index: Index, block: slice, is_live: Tensor | None = None) -> Tile:
        is_scaled = self.scaling != Scaling()
        part = self.logits[index]
        logits = part.reshape(part.shape[:-1].numel(), self.columns).to(self.dtype, copy=is_scaled)
        if is_scaled:
            self.scaling.logits_(logits)
        return Tile(index, block, logits, logits[:, :0])

    def begin_gradients(self, needed: Sequence[bool]) -> None:
        self._grad = torch.empty_like(self.logits, memory_format=torch.contiguous_format) if needed[0] else None

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        if self._grad is not None:
            target = self._grad[tile.index]
            target.copy_(grad.view(target.shape))

    def gradients(self) -> tuple[Tensor | None, ...]:
        return (None if self._grad is None else self._grad.view(self._shape),)


class HeadLogits:
    """`LogitSource` of hidden · weightᵀ at some positions, computed one tile at a time.

    On a GPU a product of bfloat16 operands is summed and returned in float32. A CPU would round the result to bfloat16,
    so there the operands are cast to the compute dtype first.

    Args:
        hidden: Hidden states, [N, D].
        weight: This rank's part of the head's weight, [V/tp, D].
        index: The positions to compute logits for, [T] int64, each at most once.
        scaling: Softcap and temperature.
        max_rows: Rows per tile.
        max_columns: Ids per tile. None: all of them.
        dtype: The dtype of the logits. None: max(float32, the operands' dtypes).

    Attributes:
        inputs: `hidden` and `weight` with their autograd graph.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        index: Tensor,
        max_rows: int,
        max_columns: int | None = None,
        scaling: Scaling | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.inputs = hidden, weight
        self.hidden, self.weight, self.index = hidden.detach(), weight.detach(), index
        self.leading, self.columns, self.device = index.shape, len(weight), hidden.device
        self.dtype = dtype or torch.promote_types(compute_dtype(hidden.dtype), weight.dtype)
        self.scaling = scaling or Scaling()
        self.has_own_tiles = True
        self.exact_dtype = self.dtype
        self._max_rows = max_rows
        keeps_dtype = weight.is_cuda and compute_dtype(weight.dtype) == self.dtype
        self.gradient_dtype = weight.dtype if keeps_dtype else self.dtype  # of the operands of products
        step = max(1, max_columns or self.columns)
        starts = range(0, max(1, self.columns), step)
        self.blocks: Sequence[slice] = [slice(start, min(start + step, self.columns)) for start in starts]
        # If there is one block, every tile reads it, so it is cast once. If there are several, each is cast when a tile
        # needs it, because a copy of the full weight would be larger than a tile.
        self._cast_weight = self.weight.to(self.gradient_dtype) if len(self.blocks) == 1 else None
        self._rows_grad: Tensor | None = None  # of the rows whose blocks are being added
        self._hidden_grad: Tensor | None = None
        self._weight_grad: Tensor | None = None

    def indices(self) -> Iterable[Index]:
        num_rows = len(self.index)
        slices = []
        for start in range(0, num_rows, self._max_rows):
            slices.append(slice(start, min(start + self._max_rows, num_rows)))
        return uniform_iterations(slices, self.hidden)

    def tile(self, index: Index, block: slice, is_live: Tensor | None = None) -> Tile:
        rows = self.hidden.index_select(0, self.index[index]).to(self.gradient_dtype)
        if is_live is not None:
            # The weight's gradient is a product with these rows, and 0 · NaN is NaN.
            rows = rows.masked_fill(~is_live.unsqueeze(-1), 0)
        logits = self.scaling.logits_(product(rows, self._operand(block).t()))
        return Tile(index, block, logits, rows)

    def _operand(self, block: slice) -> Tensor:
        """Return rows of the weight in the dtype of the products' operands."""
        if self._cast_weight is not None:
            return self._cast_weight
        return self.weight[block].to(self.gradient_dtype)

    def begin_gradients(self, needed: Sequence[bool]) -> None:
        needs_hidden, needs_weight = needed
        # Zeros and not None, even if this rank has no token: FSDP reduces the gradient over all ranks.
        self._hidden_grad = torch.zeros_like(self.hidden) if needs_hidden else None
        self._weight_grad = None
        if needs_weight:
            self._weight_grad = torch.zeros(self.weight.shape, dtype=self.dtype, device=self.device)

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        if self._hidden_grad is not None:
            if self._rows_grad is None:
                self._rows_grad = product(grad, self._operand(tile.block))
            else:
                add_product_(self._rows_grad, grad, self._operand(tile.block))
            if tile.block.stop == self.columns:
                self._hidden_grad.index_copy_(0, self.index[tile.index], self._rows_grad.to(self._hidden_grad.dtype))
                self._rows_grad = None  # before the weight's product, which is the peak
        if self._weight_grad is not None:
            add_product_(self._weight_grad[tile.block], grad.t(), tile.rows)

    def gradients(self) -> tuple[Tensor | None, ...]:
        weight_grad = None if self._weight_grad is None else self._weight_grad.to(self.weight.dtype)
        return self._hidden_grad, weight_grad

    def take_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients, the weight's still in the compute dtype, and drop the references to them."""
        gradients = self._hidden_grad, self._weight_grad
        self._hidden_grad = self._weight_grad = None
        return gradients


def head_tile_rows(columns: int, device_type: str) -> int:
    """Return the number of rows of a tile that is computed from a head's weight with `columns` ids."""
    rows = tile_rows(columns, device_type, blocks=4, min_rows=64)
    if device_type == "cpu" or rows < 128:
        return rows
    return round(rows / 128) * 128  # matrix products of a GPU work on blocks of 128 rows


def tile_rows_of(weight: Tensor, shard: VocabShard) -> int:
    """Return the number of rows of a tile, the same on every rank.

    Ranks have a collective for each tile, so all of them use the size that fits the largest shard.

    Args:
        weight: This rank's part of the head's weight, [V/tp, D].
        shard: This rank's part of the vocabulary.

    Collectives:
        One exchange of shard sizes on the host if `shard.largest` is None.
    """
    largest = shard.largest
    if largest is None:
        largest = max(shard_sizes(len(weight), shard.group, weight.device))
    return head_tile_rows(largest, weight.device.type)


def as_tuple(index: Index) -> tuple[Any, ...]:
    """Return the index of a tile as a tuple, to combine it with the indices of other dimensions."""
    return index if isinstance(index, tuple) else (index,)


def rows_of(values: Tensor, index: Index) -> Tensor:
    """Return the rows [t, k] of values [*leading, k] that a tile's index selects."""
    rows = values[index]
    return rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])
