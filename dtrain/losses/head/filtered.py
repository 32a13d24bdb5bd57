"""Log-probabilities of targets after top-k and top-p, that is, of the distribution that completions were sampled from.

Sampling engines filter rows of the full vocabulary: first top-k, then top-p over the remaining tokens. For example, p =
[0.4, 0.3, 0.2, 0.1] with top_k=3 and top_p=0.5: top-k leaves 0.4 0.3 0.2, renormalised 0.444 0.333 0.222. Top-p leaves
the first two, because 0.444 < 0.5 <= 0.444 + 0.333. Renormalised these are 0.571 and 0.429.

If the vocabulary is sharded, an all-to-all converts a tile of [rows, V/tp] on every rank to [rows/tp, V], so that each
rank filters some rows. For example, 5 rows, 4 ids and 2 ranks:

    before      rank 0 has ids 0 1 of rows 0 to 4, [5, 2]        rank 1 has ids 2 3 of rows 0 to 4, [5, 2]
    after       rank 0 has ids 0 to 3 of rows 0 1 2, [3, 4]      rank 1 has ids 0 to 3 of rows 3 4, [2, 4]

Each rank computes the log-probabilities of its own rows, with 0 for the other rows, and one all-reduce sums them. In
the backward, the gradient [rows/tp, V] returns by another all-to-all to [rows, V/tp]. The number of rows need not be
divisible by tp, and shards may be uneven. `FilteredRows` implements this as a source of logits for `softmax_rows`.

Reference:
    Top-p (nucleus) sampling: Holtzman et al., arXiv:1904.09751, section 3.1. Top-k: Fan et al., arXiv:1805.04833.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.top_p import top_p_mask
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
from dtrain.parallel.collectives import all_reduce_in_forward
from dtrain.parallel.placement import chunk_bounds

# Tokens per tile of logits.
_CHUNK = {"cpu": 256, "cuda": 2048}

# Rows per sort, to bound its memory: a sort returns values and int64 indices of all logits.
ROWS_PER_SORT = 256
# Rows per call of the GPU's kernel, which does not sort. Each row is one block of threads, and 512 blocks fill a GPU.
_ROWS_OF_GPU = 512


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
    """Compute log p(target) under the distribution after temperature, top-k and top-p.

    Everything is computed in max(float32, the dtypes), and the weight's gradient is summed over the tiles in that
    dtype.

    Args:
        hidden: Hidden states [..., D].
        weight: The head's weight [V, D], or with `shard` this rank's rows of it.
        targets: Ids of the full vocabulary [...], int64.
        sampling: The filter and the temperature.
        softcap: See `sources.Scaling`. None: no softcap.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        index: Flat positions that have a target, [T] int64, each once.

    Returns:
        Values in the shape of the targets, on every rank. 0 at positions without a target. -inf, without a gradient, if
        the filter excludes the target. The gradient of `hidden` is this rank's part and must be summed over the group.

    Collectives:
        Forward: one exchange of shard sizes, one all-to-all per tile, one all-reduce of the values. Backward: one
        exchange of shard sizes, two all-to-alls per tile.
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
    """Set the logits of tokens that top-k and top-p exclude to -inf. Differentiable.

    Top-k is applied first. It keeps all tokens that equal the k-th. Top-p is applied to the remaining tokens,
    renormalised. It keeps the most probable tokens, the lower id first if they are equal, up to and including the one
    with which the sum reaches `top_p`, and at least one. The module's docstring has an example.

    Args:
        logits: [..., V].
        top_k: None, 0 or -1: off. More than V means V.
        top_p: 1.0: off.
        chunk_size: Rows per sort. None: all.

    Returns:
        The logits [..., V], and the mask of the tokens that are kept, bool [..., V]. If both filters are off, the
        unchanged logits and None.

    Example:
        >>> logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
        >>> apply_top_k_top_p(logits, top_k=3, top_p=0.5)[1]
        tensor([[ True,  True, False, False]])
    """
    if not need_top_k_or_top_p_filtering(TrainingSamplingParams(top_k, top_p)):
        return logits, None
    with torch.no_grad():
        rows = logits.reshape(-1, logits.shape[-1])
        mask = torch.empty(rows.shape, dtype=torch.bool, device=logits.device)
        step = chunk_size or max(len(rows), 1)
        for start in range(0, len(rows), step):
            mask[start : start + step] = top_k_top_p_mask(rows[start : start + step], top_k, top_p)
        mask = mask.view(logits.shape)
    return logits.masked_fill(~mask, -float("inf")), mask


def top_k_top_p_mask(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Return the mask of the tokens that top-k and top-p keep. `apply_top_k_top_p` defines both filters.

    Args:
        logits: [n, V].
        top_k: None, 0 or -1: off. More than V means V.
        top_p: 1.0: off.

    Returns:
        [n, V] bool.
    """
    mask = None
    if top_k is not None and top_k > 0:
        mask = logits >= logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        if top_p is None or top_p == 1.0:
            return mask
        logits = logits.masked_fill(~mask, -float("inf"))
    if logits.is_cuda:  # a sort of full rows would take most of the time here
        nucleus = top_p_mask(logits, top_p)
        return nucleus if mask is None else nucleus & mask
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(ordered, -1, dtype=compute_dtype(logits.dtype))
    sum_before = p.cumsum(-1).sub_(p)  # the probability of the tokens sorted before this one
    is_kept = sum_before < top_p
    is_kept[:, 0] = True
    nucleus = torch.empty_like(is_kept).scatter_(-1, ids, is_kept)  # back to the order of ids
    return nucleus if mask is None else nucleus & mask


class Exchange:
    """Converts between all rows of a vocabulary shard and some rows of the full vocabulary, by all-to-all.

    Args:
        columns: The number of ids of this rank's shard.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        device: Device of the tensors to exchange.

    Attributes:
        columns: The number of ids of every rank's shard.

    Collectives:
        The constructor exchanges the sizes of the shards.
    """

    def __init__(self, columns: int, group: Group, device: torch.device):
        self.group = group
        self.size = group_size(group)
        self.rank = group_rank(group)
        self.columns = shard_sizes(columns, group, device)

    def _rows_per_rank(self, rows: int) -> list[int]:
        """Divide rows over the ranks. For example, 5 rows over 2 ranks: [3, 2]."""
        bounds = [chunk_bounds(rows, self.size, rank) for rank in range(self.size)]
        return [end - start for start, end in bounds]

    def to_full_rows(self, shard: Tensor) -> Tensor:
        """Convert all rows of this rank's shard [rows, V/tp] to this rank's rows of the full vocabulary [rows/tp, V].

        Collectives:
            One all-to-all.
        """
        if self.size == 1:
            return shard
        rows = self._rows_per_rank(len(shard))
        num_my_rows = rows[self.rank]
        send = [count * shard.shape[1] for count in rows]
        receive = [num_my_rows * columns for columns in self.columns]
        received = self._all_to_all(shard, send, receive)
        parts = []  # this rank's rows over the ids of each rank
        for part, columns in zip(received.split(receive), self.columns, strict=True):
            parts.append(part.view(num_my_rows, columns))
        return torch.cat(parts, 1)

    def to_shards(self, full_rows: Tensor, rows: int) -> Tensor:
        """Convert this rank's rows of the full vocabulary [rows/tp, V] to all rows of this rank's shard [rows, V/tp].

        Collectives:
            One all-to-all.
        """
        if self.size == 1:
            return full_rows
        columns = self.columns[self.rank]
        send = [len(full_rows) * other for other in self.columns]
        receive = [count * columns for count in self._rows_per_rank(rows)]
        parts = torch.cat([part.flatten() for part in full_rows.split(self.columns, 1)])
        return self._all_to_all(parts, send, receive).view(rows, columns)

    def _all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange flat numbers: `send` and `receive` are their counts for every rank."""
        received = tensor.new_empty(sum(receive))
        dist.all_to_all_single(received, tensor.flatten().contiguous(), list(receive), list(send), group=self.group)
        return received


class FilteredRows:
    """`LogitSource` of filtered logits over the full vocabulary, for some of the rows.

    `leading` counts all T rows, but a tile has only this rank's rows of a chunk, which `Tile.index` selects. For
    example, the chunk of rows 0 to 4 on 2 ranks: the tile of rank 0 has rows 0 to 2, [3, V], that of rank 1 rows 3 and
    4, [2, V]. `softmax_rows` keeps 0 as the values of the other rows.

    Args:
        part: Source of the logits of all rows for this rank's part of the vocabulary, [T, V/tp]. It must have one block
            of ids. Its tiles are the chunks, the same on every rank.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        sampling: The filter.
        masks: An empty dict for the masks of kept tokens, by the first row of their chunk. The forward fills it, and
            the backward empties it. None: the backward filters again, which takes less memory.

    Collectives:
        The constructor exchanges the sizes of the shards. `tile` and `add_gradient` have one all-to-all each, so every
        rank must call them for every chunk.
    """

    def __init__(
        self, part: LogitSource, *, group: Group, sampling: TrainingSamplingParams, masks: dict[int, Tensor] | None
    ):
        self._part = part
        self._sampling = sampling
        self._masks = masks
        self._exchange = Exchange(part.columns, group, part.device)
        self.leading = part.leading
        self.columns = sum(self._exchange.columns)
        self.blocks: Sequence[slice] = [slice(0, self.columns)]
        self.dtype = part.dtype
        self.device = part.device
        self.scaling = part.scaling
        self.has_own_tiles = True  # the filter makes a copy
        self.exact_dtype = part.exact_dtype
        self.gradient_dtype = part.gradient_dtype

    def indices(self) -> Iterable[Index]:
        return self._part.indices()

    def tile(self, index: Index, block: slice, is_live: Tensor | None = None) -> Tile:
        part = self._part.tile(index, self._part.blocks[0], is_live)  # all rows of the chunk, [t, V/tp]
        sent = part.logits.to(self._part.exact_dtype)
        logits = self._exchange.to_full_rows(sent).to(self.dtype)  # this rank's rows of the chunk, [t/tp, V]
        first_row = as_tuple(index)[0].start
        # In the backward, `pop` frees the mask.
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
        self._part.add_gradient(tile.part, self._exchange.to_shards(grad, len(tile.part.rows)))

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
    """Compute log p(id) under the distribution after top-k and top-p.

    Args:
        make_part: Builds the source of this rank's part of the logits, [T, V/tp], from `tensors`.
        tensors: Inputs of the source that receive gradients.
        ids: Ids of the full vocabulary, [T], the same on every rank.
        group: Ranks over which the vocabulary is sharded. None if it is not.
        sampling: The filter. Its temperature is not read: the source divides by it.
        keeps_masks: Whether to save the masks for the backward, one byte per logit, instead of filtering again.

    Returns:
        [T] on every rank. 0 for an id outside the vocabulary. -inf, without a gradient, for an id that is excluded.

    Collectives:
        Forward: one exchange of shard sizes, one all-to-all per tile, one all-reduce of the values. Backward: one
        exchange of shard sizes, two all-to-alls per tile.
    """
    masks: dict[int, Tensor] | None = {} if keeps_masks and torch.is_grad_enabled() else None

    def make_source(*parts: Tensor) -> FilteredRows:
        return FilteredRows(make_part(*parts), group=group, sampling=sampling, masks=masks)

    # `shard` is left out, because a tile has the full vocabulary.
    values = softmax_rows(make_source, *tensors, ids=ids.unsqueeze(-1)).logprobs.squeeze(-1)
    if group_size(group) > 1:
        # Every rank has the values of its own rows, and 0 for the other rows, so the sum has all values. In the
        # backward every rank receives the gradient of all values, and reads that of its own rows.
        values = all_reduce_in_forward(values, group)
    # A row whose target is excluded has no gradient.
    return torch.where(values == -float("inf"), values.detach(), values)


def _mask_of(logits: Tensor, sampling: TrainingSamplingParams) -> Tensor:
    """Return the mask of the tokens that the filter keeps, bool [n, V], for logits [n, V], some rows at a time."""
    if not need_top_k_or_top_p_filtering(sampling):
        return torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    step = _ROWS_OF_GPU if logits.is_cuda else ROWS_PER_SORT
    mask = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    for start in range(0, len(logits), step):
        mask[start : start + step] = top_k_top_p_mask(logits[start : start + step], sampling.top_k, sampling.top_p)
    return mask
