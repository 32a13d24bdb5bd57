"""A vocabulary sharded over ranks: the ids of each rank, sizes of tiles, matrix products, and merging of statistics.

A group of None, or of one rank, means that the vocabulary is not sharded. There are no collectives then.

A softmax over parts needs two numbers per row of each part: the maximum m of its logits z, and l = log Σ exp(z - m).
m and l are separate numbers, because m + l would lose digits of l where m is large. With the parts of two ranks, for
example,

    rank 0: z = [1, 3]   m = 3, l = log(exp(-2) + 1) = 0.127
    rank 1: z = [2]      m = 2, l = 0

the full vocabulary has m = 3 and l = log(exp(0.127) + exp(2 - 3 + 0)) = 0.408. Rank 0's fraction of the probability is
exp(0.127 - 0.408) = 0.755, rank 1's is exp(-1 - 0.408) = 0.245.

Reference: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.parallel.collectives import all_gather
from dtrain.parallel.mesh import get_group_devices

Group = Any  # a torch ProcessGroup, or None

# Tokens and ids of the largest tile of logits. On a CPU a tile stays near the size of a core's cache. On a GPU a few
# large matrix products are faster than many small ones.
_BLOCK = {"cpu": (512, 1024), "cuda": (4096, 32768)}


def block(device_type: str) -> tuple[int, int]:
    """Return the number of tokens and of ids in the largest tile, if tiles have only some of the tokens and ids."""
    return _BLOCK.get(device_type, _BLOCK["cuda"])


def tile_rows(columns: int, device_type: str, *, blocks: int = 2, min_rows: int = 8) -> int:
    """Return the number of rows of a tile that has all columns.

    For example, a CPU's block has 512 · 1024 elements, so for 65,536 ids a tile of 2 blocks has 16 rows.

    Args:
        columns: Ids on this rank.
        device_type: "cpu", "cuda", ...
        blocks: Size of the tile on a CPU, as a multiple of `block`. The defaults of `blocks` and `min_rows` are for
            existing logits. Tiles that are computed from the head's weight are larger (`sources.head_tile_rows`): every
            tile reads the full weight, and a product with few rows is limited by that.
        min_rows: Smallest number of rows.
    """
    tokens, ids = block(device_type)
    elements = tokens * ids * (blocks if device_type == "cpu" else 1)
    return max(min_rows, elements // max(columns, 1))


def tiles(shape: torch.Size, rows: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that divide the leading dimensions of a tensor into parts of at most `rows` rows.

    Indexing with integers and slices returns views for all strides. For example, shape [2, 5] and rows=3 yield
    (0, 0:3), (0, 3:6), (1, 0:3), (1, 3:6), and shape [4, 2] and rows=4 yields (0:2,), (2:4,).

    Args:
        shape: The leading dimensions, without that of the columns.
        rows: The largest number of rows of a part.
    """
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


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [m, k] @ b [k, n] in max(float32, the dtypes), never rounded to less."""
    dtype = torch.promote_types(compute_dtype(a.dtype), b.dtype)
    if a.is_cuda and a.dtype == b.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total [m, n] += a [m, k] @ b [k, n]. On a GPU this allocates no second [m, n].

    Args:
        total: [m, n], in the compute dtype.
        a: [m, k], any floating dtype.
        b: [k, n], any floating dtype.
    """
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and a.dtype == b.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(product(a, b))


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary.

    Parts may be uneven or empty. Rank r + 1 begins with the id after the last one of rank r.

    Attributes:
        start: The first id of the part.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        largest: The size of the largest part. None: unknown, so the ranks exchange their sizes if it is needed.
    """

    start: int | Tensor
    group: Group
    largest: int | None = None


UNSHARDED = VocabShard(0, None)


class HeadInput(NamedTuple):
    """Input of a model's head.

    Attributes:
        hidden: Hidden states, [N, D].
        weight: The head's weight, this rank's part of the vocabulary, [V/tp, D].
        softcap: Logits become softcap · tanh(logits / softcap). None: unchanged.
    """

    hidden: Tensor
    weight: Tensor
    softcap: float | None = None


def group_size(group: Group) -> int:
    """Return the number of ranks in a group, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Return this rank's index in a group, 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def shard_sizes(columns: int, group: Group, device: torch.device) -> list[int]:
    """Return every rank's number of columns, as numbers on the host.

    Args:
        columns: The number of columns of this rank.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        device: Device of the message, if the group has no CPU backend.

    Collectives:
        One all-gather of one number: on the CPU if the group has a CPU backend, else on `device`.
    """
    if group_size(group) == 1:
        return [columns]
    has_cpu_backend = torch.device("cpu") in get_group_devices(group)
    message = torch.full((1,), columns, device="cpu" if has_cpu_backend else device)
    return all_gather(message, 0, group).tolist()


def on_shard(ids: Tensor, start: int | Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Convert ids of the full vocabulary to columns of a shard.

    For example, for ids [1, 4, 7] and a shard of 4 columns that starts at 4: columns [0, 0, 3], [False, True, True].

    Args:
        ids: [...].
        start: The first id of the shard.
        columns: The number of ids of the shard.

    Returns:
        Columns [...], 0 for ids of other shards, and whether each id is in this shard, bool [...].
    """
    local = ids - start
    is_local = (local >= 0) & (local < columns)
    return torch.where(is_local, local, 0), is_local


def pick(logits: Tensor, columns: Tensor, is_local: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits at given columns.

    Args:
        logits: [..., v]. v may be 0.
        columns: [..., k].
        is_local: [..., k] bool, False for ids of other shards.
        dtype: Dtype of the result.

    Returns:
        [..., k], 0 where `is_local` is False.

    Example:
        >>> pick(torch.tensor([5.0, 7.0]), torch.tensor([1, 0]), torch.tensor([True, False]), torch.float32)
        tensor([7., 0.])
    """
    if not logits.shape[-1]:
        return torch.zeros(columns.shape, dtype=dtype, device=logits.device)
    return torch.where(is_local, logits.gather(-1, columns).to(dtype), 0)


def add_at_(tile: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values [t, k] to tile [t, v] at columns [t, k], in place. v may be 0."""
    if tile.shape[1]:
        tile.scatter_add_(1, columns, values)


@dataclass
class Stats:
    """Statistics of the softmax over a part of the vocabulary, for every row [...].

    Attributes:
        m: The largest logit; -inf if the part is empty or all of its logits are -inf.
        l: log Σ exp(z - m) over the part; 0 where m is -inf.
        neg_entropy: Σ p·log p, where p is the softmax over this part only. None if it was not requested.
        squares: Σ p², where p is the softmax over this part only. None if it was not requested. Requires `neg_entropy`.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    neg_entropy: Tensor | None = None
    squares: Tensor | None = None

    def pack(self) -> Tensor:
        """Stack the fields that are not None, [2 to 4, ...]. `Stats(*packed)` unpacks them."""
        fields = (self.m, self.l, self.neg_entropy, self.squares)
        return torch.stack([values for values in fields if values is not None])


def merge(parts: Stats) -> tuple[Stats, Tensor]:
    """Merge the statistics of parts of a vocabulary.

    Args:
        parts: Statistics of n parts, [n, ...] each.

    Returns:
        The statistics of the full vocabulary [...], and the logarithm of each part's fraction of the probability,
        [n, ...].

    Example:
        The module's docstring has the numbers.

        >>> merged, log_fraction = merge(Stats(m=torch.tensor([3.0, 2.0]), l=torch.tensor([0.1269, 0.0])))
        >>> merged.m, merged.l, log_fraction.exp()
        (tensor(3.), tensor(0.4076), tensor([0.7553, 0.2447]))
    """
    m = parts.m.amax(0)
    delta = torch.where(parts.m == -float("inf"), -float("inf"), parts.m - m) + parts.l
    # If all logits of a row are -inf, l is 0, as in each part. Its fractions are then exp(-inf) = 0 and not NaN.
    l = torch.where(m == -float("inf"), 0, delta.logsumexp(0))  # noqa: E741
    log_fraction = delta - l
    fraction = log_fraction.exp()
    merged = Stats(m, l)
    if parts.neg_entropy is not None:
        # log p of the full vocabulary is log p of the part plus the log of the part's fraction.
        merged.neg_entropy = torch.where(fraction == 0, 0, fraction * (parts.neg_entropy + log_fraction)).sum(0)
    if parts.squares is not None:
        merged.squares = (fraction.square() * parts.squares).sum(0)
    return merged, log_fraction


class Merged(NamedTuple):
    """Statistics of the full vocabulary, with the same bits on every rank.

    Attributes:
        stats: The statistics, [...].
        extra: The sum over ranks of the argument `extra`, [k, ...].
        vocab_size: The size of the vocabulary, a number or a scalar on the device.
        at_largest: The argument `at_largest` of the rank with the largest logit, [j, ...].
    """

    stats: Stats
    extra: Tensor
    vocab_size: int | Tensor
    at_largest: Tensor


def merge_over(
    stats: Stats, columns: int, group: Group, extra: Tensor | None = None, at_largest: Tensor | None = None
) -> Merged:
    """Merge the statistics of the ranks' parts of a vocabulary.

    Args:
        stats: Statistics of this rank's part, [...] each.
        columns: The size of this rank's part.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        extra: More numbers to sum over the ranks, [k, ...]. For example, the logit at the target, which is 0 on all
            ranks but one. None: no numbers.
        at_largest: More numbers, [j, ...], of which only those of the rank with the row's largest logit are returned.
            For example, whether the target is the argmax of this rank's ids. If ranks have equal maxima, the lowest
            rank counts, whose ids are lower. None: no numbers.

    Returns:
        The statistics of the full vocabulary, with the same bits on every rank.

    Collectives:
        One all-gather of (2 to 4) + k + j numbers per row. Summing gathered numbers in the order of the ranks gives the
        same bits on every rank.
    """
    no_numbers = stats.m.new_empty(0, *stats.m.shape)
    extra = no_numbers if extra is None else extra
    at_largest = no_numbers if at_largest is None else at_largest
    size = group_size(group)
    if size == 1:
        return Merged(stats, extra, columns, at_largest)
    packed = stats.pack()
    message = torch.cat([packed.flatten(), extra.flatten(), at_largest.flatten(), packed.new_full((1,), columns)])
    gathered = all_gather(message, 0, group).view(size, -1)
    counts = [len(packed), len(extra), len(at_largest)]
    numbers, columns_of_ranks = gathered[:, :-1], gathered[:, -1]
    parts, extras, candidates = numbers.view(size, sum(counts), *stats.m.shape).split(counts, 1)
    merged, _ = merge(Stats(*parts.unbind(1)))
    if len(at_largest):
        rank_of_largest = parts[:, 0].argmax(0).expand(1, *at_largest.shape)  # argmax returns the first of equal ones
        at_largest = candidates.gather(0, rank_of_largest).squeeze(0)
    return Merged(merged, extras.sum(0), columns_of_ranks.sum(), at_largest)
