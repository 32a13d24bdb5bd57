"""What a softmax over a cut vocabulary needs to know of each row, in a form that parts of the vocabulary can be merged
in, whether the parts are tiles on one rank or shards on several.

Of a part with logits z, of each row: the maximum m = max z and l = log Σ exp(z − m), kept apart because their sum would
lose the digits of l where m is large; on request E = Σ p·log p and Q = Σ p² of the softmax p over the part alone.
Online log-sum-exp (Milakov and Gimelshein, arXiv:1805.02867) is the merge of two parts; here any number is merged at
once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.losses.shard import Group, group_rank, group_size
from dtrain.parallel.collectives import all_gather

# Elements of one tile of logits: near a CPU core's cache, few large kernels on a GPU.
_TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses are computed in: max(float32, dtype)."""
    return torch.promote_types(dtype, torch.float32)


def tile_rows(columns: int, device_type: str) -> int:
    """Rows per tile of [rows, columns] logits that are read where they lie."""
    return max(8, _TILE_ELEMENTS.get(device_type, 2**27) // max(columns, 1))


def tiles(shape: torch.Size, rows: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut the leading dimensions `shape` of a tensor into blocks of at most `rows` rows (views, whatever
    the strides are)."""
    if len(shape) == 0:
        yield ()
        return
    inner = shape[1:].numel()
    if len(shape) == 1 or inner < rows:
        step = max(1, rows // max(inner, 1))
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)
        return
    for outer in range(shape[0]):
        for index in tiles(shape[1:], rows):
            yield (outer, *index)


@dataclass
class Stats:
    """Of every row [..]: maximum m and l = log Σ exp(z − m) over a part of the vocabulary; E = Σ p·log p and Q = Σ p²
    over the part's own softmax, or None. An empty part has m = −inf and l = 0."""

    m: Tensor
    l: Tensor  # noqa: E741
    neg_entropy: Tensor | None = None
    squares: Tensor | None = None

    def pack(self) -> Tensor:
        """[2..4, ..]"""
        return torch.stack([part for part in (self.m, self.l, self.neg_entropy, self.squares) if part is not None])

    def unpack(self, packed: Tensor) -> "Stats":
        """`packed` [2..4, ..] in the form of this one."""
        parts = iter(packed.unbind())
        fields = (self.m, self.l, self.neg_entropy, self.squares)
        return Stats(*(None if field is None else next(parts) for field in fields))


def weighted_sum_(values: Tensor, p: Tensor) -> Tensor:
    """Σ p·values over the last dimension, a value of −inf at p = 0 counting as 0. Overwrites `values`."""
    products = values.mul_(p)
    total = products.sum(-1)
    if total.is_cuda or total.isnan().any():  # where a look costs no synchronisation, the common case skips a pass
        total = torch.where(p == 0, 0, products).sum(-1)
    return total


def part_stats(logits: Tensor, scratch: Tensor, second: Tensor | None = None, *, squares: bool = False) -> Stats:
    """Of logits [.., v], any float dtype. `scratch` [.., v] in the compute dtype is overwritten.

    second: another [.., v], which may be the logits' own memory: then Σ p·log p is computed too, with `squares` Σ p².
    """
    dtype = scratch.dtype
    rows = logits.shape[:-1]
    if not logits.shape[-1]:
        zero = torch.zeros(rows, dtype=dtype, device=logits.device)
        return Stats(zero - float("inf"), zero, None if second is None else zero, zero if squares else None)
    m = logits.amax(-1).to(dtype)
    dead = m == -float("inf")
    logp = torch.log_softmax(logits, -1, dtype=dtype, out=scratch)  # one fused kernel: max, exp, sum, subtract
    stats = Stats(m, -logp.amax(-1).masked_fill_(dead, 0))
    if second is not None:
        p = torch.exp(logp, out=second)
        stats.neg_entropy = weighted_sum_(logp, p).masked_fill_(dead, 0)
        stats.squares = p.square_().sum(-1).masked_fill_(dead, 0) if squares else None
    return stats


def merge(parts: Stats) -> tuple[Stats, Tensor]:
    """The parts' statistics, [n, ..] each, as those of the whole vocabulary [..], and log of each part's share of the
    probability [n, ..]."""
    m = parts.m.amax(0)
    delta = torch.where(parts.m == -float("inf"), -float("inf"), parts.m - m) + parts.l
    l = delta.logsumexp(0)  # noqa: E741
    log_share = delta - l
    share = log_share.exp()
    whole = Stats(m, l)
    if parts.neg_entropy is not None:
        # log p of the whole is log p of the part plus the part's log share.
        whole.neg_entropy = torch.where(share == 0, 0, share * (parts.neg_entropy + log_share)).sum(0)
    if parts.squares is not None:
        whole.squares = (share.square() * parts.squares).sum(0)
    return whole, log_share


def merge_over(
    stats: Stats, extra: Tensor | None, columns: int, group: Group
) -> tuple[Stats, Tensor, Tensor | None, int | Tensor]:
    """One all-gather of every rank's statistics [..], of `extra` [k, ..] and of its number of columns.

    Returns the whole vocabulary's statistics; this rank's log share of the probability [..]; `extra` summed over ranks;
    the size of the vocabulary, a scalar on the device. Bit for bit the same on every rank. Without a group what it got.
    """
    if group_size(group) == 1:
        return stats, torch.zeros_like(stats.m), extra, columns
    packed = stats.pack()
    fields = len(packed)
    if extra is not None:
        packed = torch.cat([packed, extra])
    size = group_size(group)
    message = torch.cat([packed.flatten(), packed.new_full((1,), columns)])
    gathered = all_gather(message, 0, group).view(size, -1)
    vocabulary = gathered[:, -1].sum()
    parts = gathered[:, :-1].view(size, *packed.shape)
    whole, log_share = merge(stats.unpack(parts[:, :fields].transpose(0, 1)))
    if extra is not None:
        extra = parts[:, fields:].sum(0)
    return whole, log_share[group_rank(group)], extra, vocabulary
