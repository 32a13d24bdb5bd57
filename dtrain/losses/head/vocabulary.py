"""A softmax over a vocabulary that may be cut over ranks and into tiles: which ids a rank holds, the products that are
its logits, and what must be known of each row of a part so that parts can be merged, tiles on one rank or shards on
several.

A group of None, or of one rank, means that the whole vocabulary is here: no collective then.

Of a part with logits z, of each row: the maximum m = max z and l = log Σ exp(z − m), kept apart because their sum would
lose the digits of l where m is large; on request E = Σ p·log p and Q = Σ p² of the softmax p over the part alone.
Online log-sum-exp (Milakov and Gimelshein, arXiv:1805.02867) is the merge of two parts; here any number is merged at
once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.parallel.collectives import all_gather
from dtrain.parallel.mesh import devices_of

Group = Any  # a torch ProcessGroup, or None

# Largest block of logits [tokens, ids]: on a CPU core both near the cache, on a GPU few large products.
_BLOCK = {"cpu": (512, 1024), "cuda": (4096, 32768)}


def block(device_type: str) -> tuple[int, int]:
    """Tokens and ids of the largest tile of logits, where both are cut."""
    return _BLOCK.get(device_type, _BLOCK["cuda"])


def tile_rows(columns: int, device_type: str, *, blocks: int = 2, least: int = 8) -> int:
    """Rows of a tile of logits [rows, columns], where only rows are cut: of `blocks` blocks on a CPU, at least `least`.

    The defaults are for logits that are read where they lie. Tiles that are products with the head's weight take four
    blocks and 64 rows: each reads the whole weight, and a product of few rows is bound by that.
    """
    tokens, ids = block(device_type)
    elements = tokens * ids * (blocks if device_type == "cpu" else 1)
    return max(least, elements // max(columns, 1))


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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that losses are computed in: max(float32, dtype)."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [k, n] in max(float32, the dtypes), never rounded to less; into `out` [m, n] where given."""
    dtype = torch.promote_types(compute_dtype(a.dtype), b.dtype)
    if a.is_cuda and a.dtype == b.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, n] += a [m, k] @ b [k, n], total in the compute dtype; on a GPU without another [m, n] beside it."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and a.dtype == b.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(product(a, b))


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows [start, start + rows of its weight) of a vocabulary cut over `group`; shards may be uneven or
    empty, but cover the vocabulary. largest: the rows of the largest shard; None: the ranks ask one another."""

    start: int
    group: Group
    largest: int | None = None


WHOLE = VocabShard(0, None)


class HeadInput(NamedTuple):
    """Hidden states and the head's weight of a model, this rank's part of the vocabulary."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V/tp, D]
    softcap: float | None = None


def group_size(group: Group) -> int:
    """Ranks in `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank's place in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def shard_sizes(columns: int, group: Group, device: torch.device) -> list[int]:
    """Every rank's number of columns, on the host. One all-gather of a number, on the CPU where the group can do
    that.
    """
    if group_size(group) == 1:
        return [columns]
    on_host = torch.device("cpu") in devices_of(group)
    return all_gather(torch.full((1,), columns, device="cpu" if on_host else device), 0, group).tolist()


def on_shard(ids: Tensor, start: int | Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Global ids [...] as columns [...] of a shard that begins at `start`, and whether they are there (bool [...]);
    column 0 where not."""
    local = ids - start
    is_mine = (local >= 0) & (local < columns)
    return torch.where(is_mine, local, 0), is_mine


def pick(logits: Tensor, columns: Tensor, is_mine: Tensor, dtype: torch.dtype) -> Tensor:
    """logits [..., v] at columns [..., k] in `dtype`, 0 where they are not mine; v may be 0."""
    if not logits.shape[-1]:
        return torch.zeros(columns.shape, dtype=dtype, device=logits.device)
    return torch.where(is_mine, logits.gather(-1, columns).to(dtype), 0)


def add_at_(tile: Tensor, columns: Tensor, values: Tensor) -> None:
    """tile [t, v] += values [t, k] at columns [t, k]; v may be 0."""
    if torch.compiler.is_compiling() and columns.shape[1] == 1:  # a scatter would be a kernel of its own
        tile.add_(torch.where(torch.arange(tile.shape[1], device=tile.device) == columns, values, 0))
    elif tile.shape[1]:
        tile.scatter_add_(1, columns, values)


@dataclass
class Stats:
    """Statistics of every row [...]: maximum m and l = log Σ exp(z − m) over a part of the vocabulary; E = Σ p·log p
    and Q = Σ p² over the part's own softmax, or None, Q without E too. An empty part has m = −inf and l = 0."""

    m: Tensor
    l: Tensor  # noqa: E741
    neg_entropy: Tensor | None = None
    squares: Tensor | None = None

    def pack(self) -> Tensor:
        """[2..4, ...]: `Stats(*packed)` has them by name again."""
        return torch.stack([part for part in (self.m, self.l, self.neg_entropy, self.squares) if part is not None])


def fill_rows_(tile: Tensor, dead: Tensor, value: float = 0.0) -> None:
    """Sets the rows of tile [..., v] to `value` where dead [...], whatever they hold."""
    if torch.compiler.is_compiling() or tile.is_cuda:
        tile.masked_fill_(dead.unsqueeze(-1), value)
    elif dead.any():  # on the CPU a look is free, and a pass over the tile is not
        tile[dead] = value


def weighted_sum_(values: Tensor, p: Tensor) -> Tensor:
    """Σ p·values [..., v] -> [...], a value of −inf at p = 0 counting as 0. Overwrites `values`."""
    products = values.mul_(p)
    total = products.sum(-1)
    # Where a look costs no synchronisation, the common case skips a pass.
    if torch.compiler.is_compiling() or total.is_cuda or total.isnan().any():
        total = torch.where(p == 0, 0, products).sum(-1)
    return total


def part_stats(logits: Tensor, scratch: Tensor, second: Tensor | None = None, *, squares: bool = False) -> Stats:
    """Return the statistics of logits [..., v] of any float dtype. `scratch` [..., v] in the compute dtype is
    overwritten.

    second: another [..., v], which may be the logits' own memory: then Σ p·log p is computed too, with `squares` Σ p².
    """
    dtype = scratch.dtype
    rows = logits.shape[:-1]
    if not logits.shape[-1]:
        zero = torch.zeros(rows, dtype=dtype, device=logits.device)
        return Stats(zero - float("inf"), zero, None if second is None else zero, zero if squares else None)
    largest = logits.amax(-1, keepdim=True).to(dtype)
    m = largest.squeeze(-1)
    dead = m == -float("inf")
    if torch.compiler.is_compiling():  # these operations it knows as one pass
        logp = logits.to(dtype) - largest
        stats = Stats(m, logp.exp().sum(-1, keepdim=True).squeeze(-1).log().masked_fill(dead, 0))
        logp = logp - stats.l[..., None]
    else:
        logp = torch.log_softmax(logits, -1, dtype=dtype, out=scratch)  # one fused kernel: max, exp, sum, subtract
        stats = Stats(m, -logp.amax(-1).masked_fill_(dead, 0))
    if second is not None:
        p = torch.exp(logp, out=second)
        stats.neg_entropy = weighted_sum_(logp, p).masked_fill_(dead, 0)
        stats.squares = p.square_().sum(-1).masked_fill_(dead, 0) if squares else None
    return stats


def merge(parts: Stats) -> tuple[Stats, Tensor]:
    """The parts' statistics, [n, ...] each, as those of the whole vocabulary [...], and log of each part's share of the
    probability [n, ...]."""
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
    stats: Stats, columns: int, group: Group, extra: Tensor | None = None, at_likeliest: Tensor | None = None
) -> tuple[Stats, Tensor, Tensor, int | Tensor, Tensor]:
    """Merge statistics over ranks by one all-gather of each rank's [...], of `extra` [k, ...] and `at_likeliest`
    [j, ...] (None: k, j = 0), and of its number of columns.

    Returns the whole vocabulary's statistics; this rank's log share of the probability [...]; `extra` summed over
    ranks; the size of the vocabulary, a scalar on the device; and `at_likeliest` of the rank that holds the likeliest
    id of the whole vocabulary, of equal ones the lowest: ranks hold ids in their order. Bit for bit the same on every
    rank. Without a group what it got.
    """
    none = stats.m.new_empty(0, *stats.m.shape)
    extra, at_likeliest = none if extra is None else extra, none if at_likeliest is None else at_likeliest
    size = group_size(group)
    if size == 1:
        return stats, torch.zeros_like(stats.m), extra, columns, at_likeliest
    own, ends = stats.pack(), len(extra)
    message = torch.cat([own.flatten(), extra.flatten(), at_likeliest.flatten(), own.new_full((1,), columns)])
    gathered = all_gather(message, 0, group).view(size, -1)
    parts = gathered[:, :-1].view(size, len(own) + ends + len(at_likeliest), *stats.m.shape)
    stats_of, extras, chosen = parts.split([len(own), ends, len(at_likeliest)], 1)
    whole, log_share = merge(Stats(*stats_of.unbind(1)))
    if len(at_likeliest):
        holder = stats_of[:, 0].argmax(0).expand(1, *at_likeliest.shape)  # argmax: the first of equals
        at_likeliest = chosen.gather(0, holder).squeeze(0)
    return whole, log_share[group_rank(group)], extras.sum(0), gathered[:, -1].sum(), at_likeliest
