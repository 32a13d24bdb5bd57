"""Storage of a moment of a parameter between two steps: as it is, rounded to bfloat16, or in int8 by blocks.

`read` gives some rows in float32, `write` takes them back; both see these rows of the state's tensors, wherever they
lie, as [rows, held_columns], or where a rank holds whole blocks as [rows, blocks, BLOCK]. Values are rounded up or down
at random, in such shares that the mean is the value itself: rounded to the nearest, a moment that changes by less than
half a step of its grid would never change. The caller passes the random bits.

int8 (after Dettmers et al., arXiv:2110.02861): blocks of `BLOCK` elements of a row of the whole tensor, each with its
largest magnitude in float32. A first moment is sign·(code ÷ 127)² of that, a second moment (code ÷ 255)⁴: small values
of a block keep two digits or so, and the two moments' grids are alike, since an update is their quotient m ÷ √v. A
second moment above 0 is never rounded to 0. Where ranks share a row such that a border cuts a block, they agree on its
largest magnitude, and each keeps those of the whole row.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtrain.optim.places import Place

BLOCK = 256
FEWEST = 4096  # elements of a whole tensor; smaller ones stay float32

_GRIDS = {torch.int8: (127, 2), torch.uint8: (255, 4)}  # of a first moment and of a second: most, exponent

State = dict[str, Tensor]


def kind_of(name: str, size: torch.Size, state: str) -> str:
    """Return the kind of the moments of parameter `name`, of whole size `size`, under `optimizer.state` = `state`.

    Vectors, small tensors and embeddings (heads too that are tied to one) stay float32: they are few, and the gradients
    of an embedding's rows differ too much for one scale.
    """
    is_small = len(size) < 2 or size.numel() < FEWEST
    return "float32" if is_small or "embed" in name else state


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 [..] rounded to bfloat16 up or down at random, by the lowest 16 of `bits`, whole numbers [..].
    Values that bfloat16 holds stay as they are, and so do infinities and NaN."""
    words = values.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (words & -0x10000).view(torch.float32)  # of NaN it may be infinite, or 0
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class Plain:
    """Moment in `dtype`; None: in the dtype of arithmetic. keys: of its tensors in the state."""

    def __init__(self, place: Place, key: str, dtype: torch.dtype | None = None):
        self.place, self.key, self.dtype = place, key, dtype
        self.keys: tuple[str, ...] = (key,)

    def allocate(self, like: Tensor, dtype: torch.dtype) -> State:
        """Return the state of a moment of zeros; like: this rank's part [..] of the parameter; dtype: of arithmetic."""
        return {self.key: torch.zeros_like(like, dtype=self.dtype or dtype)}


class Int8(Plain):
    """Moment in codes of 8 bits and a float32 scale for each block."""

    def __init__(self, place: Place, key: str):
        super().__init__(place, key, torch.int8 if key == "exp_avg" else torch.uint8)
        self.scales = f"{key}_scale"
        self.keys = key, self.scales
        self.shares_blocks = bool(place.groups) and place.widest % BLOCK != 0
        self.first_block = 0 if self.shares_blocks else place.first_column // BLOCK
        end = place.columns if self.shares_blocks else place.first_column + place.held_columns
        self.blocks = -(-end // BLOCK) - self.first_block if place.held_columns or self.shares_blocks else 0
        self.before = place.first_column - self.first_block * BLOCK  # elements of these blocks that others hold
        self.after = self.blocks * BLOCK - self.before - place.held_columns

    @property
    def scales_at(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size of the whole tensor of scales, and the indices where this rank's part of it begins."""
        size, begin, _ = self.place.stack
        return (*size, -(-self.place.columns // BLOCK)), (*begin, self.first_block)

    def allocate(self, like: Tensor, dtype: torch.dtype) -> State:
        """Override `Plain.allocate`: codes [..]; scales [held_rows, blocks], of a stack [matrices, rows, blocks]."""
        scales = torch.zeros(*self.place.stack[2], self.blocks, device=like.device)
        return super().allocate(like, dtype) | {self.scales: scales}

    def agree(self, scales: Tensor) -> None:
        """Take the largest of `scales` [rows, blocks] over the ranks that share blocks. One all-reduce a group."""
        for group in self.place.groups:
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)


def read(rows: State, key: str, edges: tuple[int, int] = (0, 0)) -> Tensor:
    """Return moment `key` in the dtype of arithmetic, the state itself or a copy. edges: `Int8.before` and `after`."""
    kept = rows[key]
    if kept.dtype not in _GRIDS:
        return kept.float() if kept.dtype == torch.bfloat16 else kept
    most, exponent = _GRIDS[kept.dtype]
    values = kept.float().mul_(1 / most)  # a GPU divides by a number that way, and a CPU does not
    values = values * values.abs() if exponent == 2 else _power(values, exponent)
    return values.mul_(_of_elements(rows[f"{key}_scale"], values, edges))


def write(
    rows: State,
    key: str,
    values: Tensor,
    bits: Tensor,
    edges: tuple[int, int] = (0, 0),
    agree: Callable[[Tensor], None] | None = None,
) -> None:
    """Keep `values` as moment `key`, if it is of fewer bits; bits: int64 of their shape, of which 24 from the lowest
    are taken. agree: `Int8.agree`, where ranks share blocks."""
    kept = rows[key]
    if kept.dtype == torch.bfloat16:
        kept.copy_(round_bfloat16(values, bits))
    if kept.dtype not in _GRIDS:
        return
    sizes = values.abs()
    blocks = sizes if sizes.dim() == 3 else F.pad(sizes, edges).unflatten(1, (-1, BLOCK))
    scales = blocks.amax(2, keepdim=sizes.dim() == 3)
    if agree is not None:
        agree(scales)
    scales.clamp_(max=torch.finfo(scales.dtype).max)  # by an infinite scale all its block would be read as NaN
    rows[f"{key}_scale"].copy_(scales)
    sizes.div_(_of_elements(torch.where(scales > 0, scales, 1.0), values, edges))
    share = (bits & 0xFFFFFF).float().mul_(2.0**-24)  # in [0, 1)
    codes = _codes(sizes, share, *_GRIDS[kept.dtype])
    if kept.dtype == torch.int8:
        codes.copysign_(values)
    else:
        codes = torch.where(values > 0, codes.clamp_(min=1), codes)
    kept.copy_(codes)


def _of_elements(scales: Tensor, values: Tensor, edges: tuple[int, int]) -> Tensor:
    """Return a block's value for each of `values` [rows, held_columns] or, as it is, [rows, blocks, BLOCK]."""
    if values.dim() == 3:
        return scales  # [rows, blocks, 1]
    return scales.repeat_interleave(BLOCK, 1)[:, edges[0] : edges[0] + values.shape[1]]


def _codes(sizes: Tensor, share: Tensor, most: int, exponent: int) -> Tensor:
    """Return the codes of sizes [..] in [0, 1] on the grid of (k ÷ most)^exponent: k of the point below, or of the one
    above with the probability that makes the mean right, by `share` [..] in [0, 1). Whole numbers in float32."""
    root = sizes
    for _ in range(exponent // 2):
        root = root.sqrt()
    below = (root * most).floor_().clamp_(max=most - 1)
    low = _power(below, exponent)
    part = sizes.mul_(most**exponent).sub_(low).div_(_power(below + 1, exponent).sub_(low))
    return below.add_(share < part)


def _power(values: Tensor, exponent: int) -> Tensor:
    """Return values [..] to the power of 2 or 4."""
    square = values * values
    return square if exponent == 2 else square.mul_(square)


KINDS: dict[str, Callable[[Place, str], Plain]] = {
    "float32": Plain,
    "bfloat16": partial(Plain, dtype=torch.bfloat16),
    "int8": Int8,
}
