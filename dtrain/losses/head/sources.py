"""Sources of logits: given ones, and those of hidden states and a head, tile by tile.

A source divides its rows into tiles, computes the logits of a tile when it is asked for them, and adds up the gradients
of what they come from. `softmax` has the functions of a tile.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dtrain.base.fused import rounds
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
    """From products of hidden states and the head's weight to logits.

    logits = softcap · tanh(product / softcap) / temperature, without the tanh if `softcap` is None (Gemma 2,
    arXiv:2408.00118, section 2).

    Raises:
        ValueError: If the temperature or the softcap is not positive.
    """

    temperature: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(f"temperature={self.temperature} and softcap={self.softcap} must be positive")

    def logits_(self, product: Tensor) -> Tensor:
        """Turn products [t, V] into logits, in place."""
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        return product if self.temperature == 1.0 else product.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return d logits / d product at logits [t, V]: a new tensor [t, V] or a number. None stands for 1."""
        if self.softcap is None:
            return None if self.temperature == 1.0 else 1.0 / self.temperature
        # logits = softcap · tanh / temperature has the slope (1 - tanh²) / temperature. At logits of -inf, which a
        # filter sets, the clamp makes tanh -1 and the slope 0.
        tanh = (logits * (self.temperature / self.softcap)).clamp_(-1, 1)
        return tanh.square_().sub_(1).mul_(-1.0 / self.temperature)


class Tile(NamedTuple):
    """Logits of some rows and ids.

    Attributes:
        index: Which rows of the source.
        block: Which of this rank's ids.
        logits: [t, v] in the compute dtype. The receiver may overwrite them if the source `has_own_tiles`.
        rows: The hidden states [t, D] that they were computed from; [t, 0] for given logits.
        part: The tile that this one was made from, without its logits. None for most sources.
    """

    index: Index
    block: slice
    logits: Tensor
    rows: Tensor
    part: "Tile | None" = None

    def without_logits(self) -> "Tile":
        """Return the tile for `add_gradient`, which does not read the logits: their memory is free for its products."""
        return self._replace(logits=torch.empty(0, dtype=self.logits.dtype, device=self.logits.device))


class LogitSource(Protocol):
    """Logits [*leading, v] of this rank's part of a vocabulary, and the gradients of what they come from.

    Attributes:
        leading: The shape of the rows.
        columns: The number of ids, v.
        blocks: The ids of the tiles that make up a row. Most sources have one block with all ids.
        dtype: The dtype of the tiles.
        device: Their device.
        scaling: From products to logits.
        has_own_tiles: Whether tiles are new memory, and not a view of given logits.
        exact_dtype: The narrowest dtype that has the values of the tiles, in which they may be sent.
        gradient_dtype: The dtype in which `add_gradient` takes a gradient.
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
        """Compute a tile. Rows that are not live [t] may hold anything, and get a gradient of 0.

        The tile's own index may select fewer rows than `index`, if other ranks compute the others.
        """
        ...

    def begin_gradients(self, needed: Sequence[bool]) -> None:
        """Allocate gradients of the source's tensors, each if it is needed."""
        ...

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        """Add the gradient by the products behind a tile of logits, [t, v] in `gradient_dtype`.

        The blocks of a row come one after the other, and each row comes once.
        """
        ...

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the source's tensors."""
        ...


class GivenLogits:
    """Logits that exist, [..., v] of any floating dtype and strides.

    Args:
        logits: This rank's part of the logits.
        max_rows: Rows per tile. None for a size that stays in a CPU's cache.
        scaling: Applied to the logits.
        flatten: Whether the rows have one leading dimension, in place of those of `logits`.
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
        return rounds(list(tiles(self.leading, self._max_rows)), self.logits)

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
    """Logits hidden · weightᵀ of some positions, which exist one tile at a time.

    On a GPU products take their operands as they are, and sum in float32. A CPU would round to the operands' dtype, so
    they are cast to the compute dtype there.

    Args:
        hidden: Hidden states [N, D].
        weight: This rank's part of the head's weight, [V/tp, D].
        index: The positions whose logits are wanted, [T] int64, each at most once.
        scaling: From products to logits.
        max_rows: Rows per tile.
        max_columns: Ids per tile. None for all of them.
        dtype: The dtype of the logits. None for max(float32, the operands' dtypes).

    Attributes:
        inputs: `hidden` and `weight` as they were given, with their graph.
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
        # One block is read for every tile, so it is cast once. Of several blocks each is cast for its tiles, because a
        # copy of the full weight would be larger than a tile.
        self._cast_weight = self.weight.to(self.gradient_dtype) if len(self.blocks) == 1 else None
        self._rows_grad: Tensor | None = None  # of the rows whose blocks are being added
        self._hidden_grad: Tensor | None = None
        self._weight_grad: Tensor | None = None

    def indices(self) -> Iterable[Index]:
        starts = range(0, len(self.index), self._max_rows)
        ends = [min(start + self._max_rows, len(self.index)) for start in starts]
        return rounds([slice(start, end) for start, end in zip(starts, ends, strict=True)], self.hidden)

    def tile(self, index: Index, block: slice, is_live: Tensor | None = None) -> Tile:
        rows = self.hidden.index_select(0, self.index[index]).to(self.gradient_dtype)
        if is_live is not None:
            # The weight's gradient is a product with these rows, and 0 · NaN is NaN.
            rows = rows.masked_fill(~is_live.unsqueeze(-1), 0)
        logits = self.scaling.logits_(product(rows, self._operand(block).t()))
        return Tile(index, block, logits, rows)

    def _operand(self, block: slice) -> Tensor:
        """Return rows of the weight in the dtype in which products take them."""
        if self._cast_weight is not None:
            return self._cast_weight
        return self.weight[block].to(self.gradient_dtype)

    def begin_gradients(self, needed: Sequence[bool]) -> None:
        needs_hidden, needs_weight = needed
        # Zeros where no token is: a rank without any takes part in the reduction of gradients all the same.
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
        weight_grad = self._weight_grad
        return self._hidden_grad, None if weight_grad is None else weight_grad.to(self.weight.dtype)

    def take_sums(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients as they were summed, the weight's in the compute dtype, and forget them."""
        sums = self._hidden_grad, self._weight_grad
        self._hidden_grad = self._weight_grad = None
        return sums


def head_tile_rows(columns: int, device_type: str) -> int:
    """Return the rows of a tile of logits [rows, columns] that is a product with the head's weight."""
    rows = tile_rows(columns, device_type, blocks=4, least=64)
    if device_type == "cpu" or rows < 128:
        return rows
    return round(rows / 128) * 128  # full blocks of a GPU's products


def tile_rows_of(weight: Tensor, shard: VocabShard) -> int:
    """Return the rows of a tile for this rank's weight [V/tp, D], by the largest shard, so that all ranks have equal
    tiles.

    Collectives:
        One exchange of shard sizes on the host if `shard` does not say how large the largest one is.
    """
    sizes = shard_sizes(len(weight), shard.group, weight.device) if shard.largest is None else [shard.largest]
    return head_tile_rows(max(sizes), weight.device.type)


def as_tuple(index: Index) -> tuple[Any, ...]:
    """Return the index of a tile as a tuple, to index further dimensions with it."""
    return index if isinstance(index, tuple) else (index,)


def rows_of(values: Tensor, index: Index) -> Tensor:
    """Return the rows [t, k] of values [*leading, k] that a tile's index selects."""
    rows = values[index]
    return rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])
