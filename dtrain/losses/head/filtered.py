"""Log-probabilities of targets under the filter with which they were sampled: top-k, then top-p.

Filters work on rows of the full vocabulary, as sampling engines apply them. If the vocabulary is sharded, an
all-to-all turns a tile of [rows, V/tp] on every rank into [rows/tp, V]: each rank filters its own rows, and the
log-probabilities of all rows come back in one all-reduce. Rows need not divide by tp, nor shards be even. For example,
5 rows on 2 ranks: rank 0 filters rows 0 to 2, rank 1 rows 3 and 4. `FilteredRows` is that, as a source of logits for
`softmax_rows`.

Reference: top-p (nucleus) sampling: Holtzman et al., arXiv:1904.09751, section 3.1. Top-k: Fan et al.,
arXiv:1805.04833.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.top_p import kept_by_top_p
from dtrain.losses.head.logprobs import TrainingSamplingParams, need_top_k_or_top_p_filtering
from dtrain.losses.head.softmax import softmax_rows
from dtrain.losses.head.sources import HeadLogits, Index, LogitSource, Scaling, Tile, as_tuple
from dtrain.losses.head.vocabulary import (
    UNSHARDED,
    Group,
    VocabShard,
    compute_dtype,
    group_rank,
    group_size,
    shard_sizes,
)
from dtrain.parallel.collectives import leave_region
from dtrain.parallel.placement import chunk_bounds

# Tokens whose logits exist at once.
_CHUNK = {"cpu": 256, "cuda": 2048}

# Rows sorted at once: a sort holds values and indices of all of them.
ROWS_PER_SORT = 256
_ROWS_OF_GPU = 512  # filtered at once without a sort: a block works on each, and there are more than run at a time


def filtered_logprobs_from_hidden_states(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    sampling: TrainingSamplingParams,
    *,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    index: Tensor,
) -> Tensor:
    """Compute log p(target) of the distribution that is left after temperature, top-k and top-p.

    Computed in max(float32, the dtypes); the weight's gradient is summed in that dtype over the tiles.

    Args:
        hidden: Hidden states [..., D].
        weight: The head's weight [V, D], or with `shard` this rank's rows of it.
        targets: Ids of the full vocabulary [...], int64.
        sampling: The filter and the temperature.
        softcap: The softcap of the logits. None for none.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        index: Flat positions that have a target, [T] int64, each once.

    Returns:
        Values shaped as the targets, on every rank: 0 where there is no target, -inf without a gradient where the
        filter leaves the target out. hidden's gradient must still be summed over the group.

    Collectives:
        Per tile one all-to-all in the forward, two in the backward. One all-reduce of the values. One exchange of shard
        sizes in the forward, another one in the backward.
    """
    step = _CHUNK.get(hidden.device.type, _CHUNK["cuda"])
    make_inner = partial(HeadLogits, index=index, max_rows=step, scaling=Scaling(sampling.temperature, softcap))
    ids = targets.flatten().index_select(0, index)
    flat = hidden.reshape(-1, hidden.shape[-1])
    group = (shard or UNSHARDED).group
    values = filtered_logprobs(make_inner, flat, weight, ids=ids, group=group, sampling=sampling, keeps_masks=False)
    return values.new_zeros(targets.numel()).index_copy(0, index, values).view(targets.shape)


def apply_top_k_top_p(
    logits: Tensor, top_k: int | None, top_p: float, chunk_size: int | None = ROWS_PER_SORT
) -> tuple[Tensor, Tensor | None]:
    """logits [..., V] -> (logits with −inf where filtered, the mask of what is kept [..., V]); differentiable.

    Top-k first (tokens that tie with the k-th stay; top_k > V means V), then top-p over what is left, renormalised: the
    most likely tokens up to and with the one that makes the sum reach top_p, at least one, equal ones by lower id.
    With neither on: the logits themselves, and None. chunk_size: rows sorted at once, None for all.
    """
    if not need_top_k_or_top_p_filtering(TrainingSamplingParams(top_k, top_p)):
        return logits, None
    with torch.no_grad():
        rows = logits.reshape(-1, logits.shape[-1])
        mask = torch.empty(rows.shape, dtype=torch.bool, device=logits.device)
        step = chunk_size or max(len(rows), 1)
        for start in range(0, len(rows), step):
            mask[start : start + step] = kept(rows[start : start + step], top_k, top_p)
        mask = mask.view(logits.shape)
    return logits.masked_fill(~mask, -float("inf")), mask


def kept(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Return the mask of the tokens of logits [n, V] that pass the filter, [n, V]."""
    mask = None
    if top_k is not None and top_k > 0:
        mask = logits >= logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        if top_p is None or top_p == 1.0:
            return mask
        logits = logits.masked_fill(~mask, -float("inf"))
    if logits.is_cuda:  # where a sort of whole rows costs more than all else here
        nucleus = kept_by_top_p(logits, top_p)
        return nucleus if mask is None else nucleus & mask
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(ordered, -1, dtype=compute_dtype(logits.dtype))
    before = p.cumsum(-1).sub_(p)  # the probability of all that are likelier
    stays = before < top_p
    stays[:, 0] = True
    nucleus = torch.empty_like(stays).scatter_(-1, ids, stays)
    return nucleus if mask is None else nucleus & mask


class Exchange:
    """Turns rows of a sharded vocabulary into rows of the full one and back, for one group."""

    def __init__(self, columns: int, group: Group, device: torch.device):
        self.group, self.size, self.rank = group, group_size(group), group_rank(group)
        self.columns = shard_sizes(columns, group, device)

    def _rows_of(self, rows: int) -> list[int]:
        bounds = [chunk_bounds(rows, self.size, rank) for rank in range(self.size)]
        return [end - start for start, end in bounds]

    def whole_rows(self, shard: Tensor) -> Tensor:
        """[rows, V/tp] -> [my rows, V]. One all-to-all."""
        if self.size == 1:
            return shard
        rows = self._rows_of(len(shard))
        mine = rows[self.rank]
        send = [count * shard.shape[1] for count in rows]
        receive = [mine * columns for columns in self.columns]
        received = self._all_to_all(shard, send, receive)
        parts = zip(received.split(receive), self.columns, strict=True)
        return torch.cat([part.view(mine, columns) for part, columns in parts], 1)

    def shards(self, whole: Tensor, rows: int) -> Tensor:
        """[my rows, V] -> [rows, V/tp]. One all-to-all."""
        if self.size == 1:
            return whole
        columns = self.columns[self.rank]
        send = [len(whole) * other for other in self.columns]
        receive = [count * columns for count in self._rows_of(rows)]
        parts = torch.cat([part.flatten() for part in whole.split(self.columns, 1)])
        return self._all_to_all(parts, send, receive).view(rows, columns)

    def _all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        received = tensor.new_empty(sum(receive))
        dist.all_to_all_single(received, tensor.flatten().contiguous(), list(receive), list(send), group=self.group)
        return received


class FilteredRows:
    """Source of filtered logits of this rank's rows, over the full vocabulary.

    `leading` counts all T rows, but a tile has only this rank's rows of a chunk, which `Tile.index` selects. For
    example, of the chunk of rows 0 to 4 rank 0 of 2 gets a tile of rows 0 to 2, [3, V], and rank 1 one of rows 3 and 4.
    `softmax_rows` leaves the values of the other rows at 0.

    Args:
        part: Source of the logits of all rows [T, V/tp], for this rank's part of the vocabulary. It must have one block
            of ids. Its tiles are the chunks, the same on every rank.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        sampling: The filter.
        masks: Masks of the tokens that stay, by the first row of their chunk: filled in the forward and read in the
            backward. None: tokens are filtered again in the backward, which takes less memory.

    Collectives:
        One exchange of shard sizes. `tile` and `add_gradient` have an all-to-all each, so every rank calls them for
        every chunk.
    """

    def __init__(
        self, part: LogitSource, *, group: Group, sampling: TrainingSamplingParams, masks: dict[int, Tensor] | None
    ):
        self._part, self._sampling, self._masks = part, sampling, masks
        self._exchange = Exchange(part.columns, group, part.device)
        self.leading, self.columns = part.leading, sum(self._exchange.columns)
        self.blocks: Sequence[slice] = [slice(0, self.columns)]
        self.dtype, self.device, self.scaling = part.dtype, part.device, part.scaling
        self.has_own_tiles = True  # the filter makes a copy
        self.exact_dtype, self.gradient_dtype = part.exact_dtype, part.gradient_dtype

    def indices(self) -> Iterable[Index]:
        return self._part.indices()

    def tile(self, index: Index, block: slice, is_live: Tensor | None = None) -> Tile:
        part = self._part.tile(index, self._part.blocks[0], is_live)  # all rows of the chunk, [t, V/tp]
        sent = part.logits.to(self._part.exact_dtype)
        logits = self._exchange.whole_rows(sent).to(self.dtype)  # this rank's rows of the chunk, [t/tp, V]
        first_row = as_tuple(index)[0].start
        # The backward reads a mask once, and frees it.
        mask = None if self._masks is None else self._masks.pop(first_row, None)
        if mask is None:
            mask = _mask_of(logits, self._sampling)
            if self._masks is not None:
                self._masks[first_row] = mask
        logits = logits.masked_fill(~mask, -float("inf"))
        start, end = chunk_bounds(len(part.rows), self._exchange.size, self._exchange.rank)
        my_rows = slice(first_row + start, first_row + end)
        return Tile(my_rows, block, logits, logits[:, :0], part.without_logits())

    def begin_gradients(self, needed: Sequence[bool]) -> None:
        self._part.begin_gradients(needed)

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        assert tile.part is not None
        self._part.add_gradient(tile.part, self._exchange.shards(grad, len(tile.part.rows)))

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self._part.gradients()


def filtered_logprobs(
    make_part: Callable[..., LogitSource],
    *tensors: Tensor,
    ids: Tensor,
    group: Group,
    sampling: TrainingSamplingParams,
    keeps_masks: bool,
) -> Tensor:
    """Compute log p(id) of the distribution that is left after a filter.

    Args:
        make_part: Builds the source of this rank's part of the logits, of T rows, from `tensors`.
        tensors: The tensors that gradients go to.
        ids: Ids of the full vocabulary [T], the same on every rank.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        sampling: The filter. The logits are divided by the temperature already.
        keeps_masks: Whether a mask of each row, a byte per token, is kept for the backward, which does not filter again
            then.

    Returns:
        [T] on every rank: 0 for an id outside the vocabulary, -inf without a gradient for one that is left out.

    Collectives:
        Per tile one all-to-all in the forward and two in the backward. One all-reduce of the values. One exchange of
        shard sizes in the forward, another one in the backward.
    """
    masks: dict[int, Tensor] | None = {} if keeps_masks and torch.is_grad_enabled() else None

    def make_source(*parts: Tensor) -> FilteredRows:
        return FilteredRows(make_part(*parts), group=group, sampling=sampling, masks=masks)

    # No `shard`: a tile has the full vocabulary.
    values = softmax_rows(make_source, *tensors, ids=ids.unsqueeze(-1)).logprobs.squeeze(-1)
    if group_size(group) > 1:
        # Every rank has the values of its own rows, and 0 for the others, so their sum has the values of all rows. In
        # the backward every rank gets the gradient of all values, and reads it at its own rows.
        values = leave_region(values, group)
    # A row whose target is left out has no gradient.
    return torch.where(values == -float("inf"), values.detach(), values)


def _mask_of(logits: Tensor, sampling: TrainingSamplingParams) -> Tensor:
    """Return the mask of the tokens of logits [n, V] that pass the filter, [n, V], computed some rows at a time."""
    if not need_top_k_or_top_p_filtering(sampling):
        return torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    step = _ROWS_OF_GPU if logits.is_cuda else ROWS_PER_SORT
    mask = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    for start in range(0, len(logits), step):
        mask[start : start + step] = kept(logits[start : start + step], sampling.top_k, sampling.top_p)
    return mask
