"""The softmax over a sharded vocabulary in tiles of rows, forward and backward.

Training and the functions of `dtrain.losses` both use it. There are three sources of logits. `sources.GivenLogits`
reads given logits. `sources.HeadLogits` computes them tile by tile from hidden states and the head's weight, so that
the full logits never exist. `filtered.FilteredRows` exchanges and filters those of another source.

Example: one token with hidden state h = [1, 2], a vocabulary of three ids on two ranks, and the loss log p(id 2).

                                  rank 0, ids 0 and 1          rank 1, id 2
    weight                        [1, 0]    [1, 1]             [0, 1]
    logits z = h · weightᵀ         1         3                  2
    m, l, z at the target         3, 0.127, 0 (not here)       2, 0, 2

    all-gather                    m = 3, l = 0.408, z at the target = 2, so log p(id 2) = 2 - 3 - 0.408 = -1.408

    p = exp(z - m - l)            0.090     0.665              0.245
    dL/dz = [id is 2] - p        -0.090    -0.665              0.755
    dL/dweight = dzᵀ · h          [-0.090, -0.180]             [0.755, 1.511]
                                  [-0.665, -1.330]
    dL/dh, this rank's part       [-0.755, -0.665]             [0, 0.755]

Both ranks have the same loss. Each row of the weight's gradient is complete, because its rank has that id for all
tokens. The hidden state's gradient is the sum of the two parts, [-0.755, 0.090].

**Forward.** `tile_statistics` computes for each row of a tile the maximum m, l = log Σ exp(z - m), the logits at given
ids, and on request Σ p·log p, Σ p² and more. If the vocabulary is sharded, `merge_over` merges these few numbers with
one all-gather. After that every rank knows log Σ exp z = m + l of the full vocabulary for every row.

**Backward.** A loss L reads a row's distribution p = softmax(z) only through log p at some ids, E = Σ p·log p and
M = the mean of log p over all V ids. Their derivatives are

    d log p(id) / dz_v = [v = id] - p_v        dE / dz_v = p_v · (log p_v - E)        dM / dz_v = 1/V - p_v

With g_k = dL/d log p(id_k), e = dL/dE and s = dL/dM, the chain rule gives one formula for all losses. Its coefficients
for a row are the fields of `GradientCoefficients`:

    dL/dz_v = p_v · (a + b · log p_v) + Σ_k c_k · [v = id_k] + d

    times_p         a   = -Σ_k g_k - e · E - s
    times_p_log_p   b   = e
    at_ids          c_k = g_k
    at_all_ids      d   = s / V

In the example g = 1 and e = s = 0, so a = -1, c = 1 and b = d = 0.

`gradient_of_logits` and `gradient_of_exps` evaluate the formula. Each rank does it for its own ids only, from the
merged m and l, so dz needs no communication. From dz, `HeadLogits` computes the gradient of the weight,
dzᵀ · hidden [V/tp, D], and this rank's part of the gradient of the hidden states, dz · weight [N, D]. The model's
tensor parallel sums these parts over the ranks (`parallel.tensor.Stack.forward`).

There are two ways to compute dL/d log p. `softmax_rows` is for losses that autograd differentiates: its backward
receives dL/d log p, and computes the tiles a second time. `FusedGradientSum` is for sums over tokens whose weights are
known before the forward, as in SFT: the gradient is added up during the forward, which saves one product with the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.fused import Fused
from dtrain.losses.head.sources import HeadLogits, Index, LogitSource, Scaling, as_tuple, rows_of
from dtrain.losses.head.vocabulary import (
    UNSHARDED,
    Merged,
    Stats,
    VocabShard,
    add_at_,
    group_size,
    merge,
    merge_over,
    on_shard,
    pick,
)

# exp of this number is 0 in float64, too. A log p of -inf is replaced by it before a product with p, because 0 · -inf
# is NaN.
_LOG_OF_ZERO = -1e4

# ---- forward and backward of a tile


@dataclass(frozen=True)
class RequestedStatistics:
    """The optional results that `tile_statistics` computes.

    Attributes:
        neg_entropy: Σ p·log p.
        squares: Σ p². Requires `neg_entropy`.
        logit_sum: Σ z.
        is_argmax: Whether the first id is the argmax. Among equal logits, the lowest id is the argmax.
    """

    neg_entropy: bool = False
    squares: bool = False
    logit_sum: bool = False
    is_argmax: bool = False


class TileStatistics(NamedTuple):
    """Statistics of a tile of t rows over this rank's part of the vocabulary.

    Attributes:
        stats: m, l and on request Σ p·log p and Σ p², packed as [2 to 4, t]. `Stats(*stats)` unpacks them.
        at_ids: The logits at the ids, [t, k]. 0 for ids of other ranks.
        logit_sum: Σ z, [t]. None if it was not requested.
        is_argmax: 1 or 0, [t]. None if it was not requested.
    """

    stats: Tensor
    at_ids: Tensor
    logit_sum: Tensor | None
    is_argmax: Tensor | None


@Fused
def tile_statistics(
    logits: Tensor, columns: Tensor, is_local: Tensor, requested: RequestedStatistics, overwrite: bool = False
) -> TileStatistics:
    """Compute the statistics of a tile of t rows and v ids.

    Args:
        logits: [t, v].
        columns: Columns of the ids, [t, k].
        is_local: Whether the ids are in this tile, [t, k].
        requested: Which optional statistics to compute.
        overwrite: Store exp(z - m) in the memory of `logits`, for `gradient_of_exps`. Not together with
            `requested.neg_entropy`, whose sum needs z - m and exp(z - m) at the same time.

    Returns:
        The statistics over this rank's ids.
    """
    at_ids = pick(logits, columns, is_local, logits.dtype)
    logit_sum = logits.sum(-1) if requested.logit_sum else None
    m, is_argmax = _largest(logits, columns, is_local, requested.is_argmax)
    shifted = _shifted(logits, m[:, None], overwrite)
    exps = shifted.exp() if requested.neg_entropy else shifted.exp_()
    total = exps.sum(-1)
    is_empty = total == 0  # no logit, or all of them -inf
    l = torch.where(is_empty, 0, total.log())  # noqa: E741
    stats = Stats(m, l)
    if requested.neg_entropy:
        # Σ p·log p with log p = (z - m) - l and p = exp(z - m) / total
        weighted = shifted.clamp_(min=_LOG_OF_ZERO).mul_(exps).sum(-1)
        stats.neg_entropy = torch.where(is_empty, 0, weighted / total - l)
    if requested.squares:
        stats.squares = torch.where(is_empty, 0, exps.square_().sum(-1) / total.square())
    return TileStatistics(stats.pack(), at_ids, logit_sum, is_argmax)


class GradientCoefficients(NamedTuple):
    """Coefficients of dL/dz for each row of a tile. The module's docstring has the formula.

    Attributes:
        times_p: a, [t, 1].
        at_ids: c, [t, k]. 0 for ids of other ranks.
        times_p_log_p: b, [t, 1]. None means 0.
        at_all_ids: d, [t, 1]. None means 0.
    """

    times_p: Tensor
    at_ids: Tensor
    times_p_log_p: Tensor | None = None
    at_all_ids: Tensor | None = None


@Fused
def gradient_of_logits(
    logits: Tensor,
    lse: Tensor,
    coefficients: GradientCoefficients,
    columns: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    overwrite: bool = False,
) -> Tensor:
    """Compute the gradient with respect to hidden · weightᵀ, before softcap and temperature, from a tile's logits.

    Args:
        logits: [t, v].
        lse: m and l of the full vocabulary, [t, 2]. (One tensor with the rows first, because the compiled function
            accepts any size in every dimension but the last.)
        coefficients: The coefficients of the formula, for each row.
        columns: Columns of the ids, [t, k].
        scaling: Softcap and temperature that made the logits.
        dtype: The dtype of the result.
        overwrite: Whether the memory of the logits may be overwritten.

    Returns:
        [t, v].
    """
    m, l = lse.split(1, 1)  # noqa: E741
    slope = scaling.slope(logits)
    exps = _shifted(logits, m, overwrite).exp_()
    return _gradient(exps, -l, coefficients, columns, slope, dtype)


@Fused
def gradient_of_exps(
    exps: Tensor,
    log_scale: Tensor,
    coefficients: GradientCoefficients,
    columns: Tensor,
    slope: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the same as `gradient_of_logits` from the exps that `tile_statistics(..., overwrite=True)` stored.

    Args:
        exps: exp(z - m'), [t, v], where m' is the largest logit of the row on this rank. Overwritten.
        log_scale: m' - m - l, [t, 1], with m and l of the full vocabulary, so that log p = (z - m') + log_scale.
        coefficients: The coefficients of the formula, for each row.
        columns: Columns of the ids, [t, k].
        slope: d logits / d product, as `Scaling.slope` returns it.
        dtype: The dtype of the result.

    Returns:
        [t, v].
    """
    return _gradient(exps, log_scale, coefficients, columns, slope, dtype)


def _gradient(
    exps: Tensor,
    log_scale: Tensor,
    coefficients: GradientCoefficients,
    columns: Tensor,
    slope: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Evaluate the formula of the module's docstring in the memory of exps [t, v].

    p = exps · exp(log_scale) and log p = log exps + log_scale.
    """
    scale = log_scale.exp()
    if coefficients.times_p_log_p is None:
        grad = exps.mul_(coefficients.times_p * scale)  # p · a
    else:
        # p · (a + b · log p). log p is -inf where exps is 0, and 0 · -inf would be NaN.
        log_p = exps.log().add_(log_scale).clamp_(min=_LOG_OF_ZERO)
        grad = log_p.mul_(coefficients.times_p_log_p).add_(coefficients.times_p).mul_(exps).mul_(scale)
    if coefficients.at_all_ids is not None:
        grad.add_(coefficients.at_all_ids)
    add_at_(grad, columns, coefficients.at_ids)
    return (grad if slope is None else grad.mul_(slope)).to(dtype)


def _shifted(logits: Tensor, m: Tensor, overwrite: bool) -> Tensor:
    """Return logits [t, v] - m [t, 1], in the memory of the logits or in a new tensor."""
    return logits.sub_(finite(m)) if overwrite else logits - finite(m)


def log_softmax(logits: Tensor, lse: Tensor) -> Tensor:
    """Return log p [t, v] of logits [t, v] in a new tensor, given m and l of the full vocabulary, lse [t, 2]."""
    m, l = lse.split(1, 1)  # noqa: E741
    return (logits - finite(m)).sub_(l)


def log_softmax_(logits: Tensor, lse: Tensor) -> Tensor:
    """Compute `log_softmax` in the memory of the logits."""
    m, l = lse.split(1, 1)  # noqa: E741
    return logits.sub_(finite(m)).sub_(l)


def finite(m: Tensor) -> Tensor:
    """Replace a maximum of -inf by the lowest finite number, because -inf - -inf is NaN."""
    return m.clamp(min=torch.finfo(m.dtype).min)


def _largest(logits: Tensor, columns: Tensor, is_local: Tensor, argmax: bool) -> tuple[Tensor, Tensor | None]:
    """Return the maximum of each row of logits [t, v] and, if `argmax`, 1 or 0 for "it is at columns[:, 0]"."""
    if not logits.shape[1]:
        no_row = logits.new_zeros(len(logits)) if argmax else None
        return logits.new_full(logits.shape[:1], -float("inf")), no_row
    if not argmax:
        return logits.amax(-1), None
    largest, argmax_columns = logits.max(-1)
    is_argmax = (argmax_columns == columns[:, 0]) & is_local[:, 0]
    return largest, is_argmax.to(largest.dtype)


# ---- differentiable values of rows; the backward computes the tiles again


class RowValues(NamedTuple):
    """Values of the rows of a source, identical on every rank. (With `FilteredRows`: 0 in the rows of other ranks.)

    Attributes:
        logprobs: log p at the ids, [*leading, k]. 0 for an id outside the vocabulary. Differentiable.
        neg_entropy: Σ p·log p, [*leading]. Differentiable. None if it was not requested.
        log_p2: log Σ p², [*leading], without gradient. None if it was not requested.
    """

    logprobs: Tensor
    neg_entropy: Tensor | None
    log_p2: Tensor | None


def softmax_rows(
    make_source: Callable[..., LogitSource],
    *tensors: Tensor,
    ids: Tensor,
    shard: VocabShard | None = None,
    requested: RequestedStatistics | None = None,
    masks_rows: bool = True,
) -> RowValues:
    """Compute log p at ids, and on request Σ p·log p and log Σ p², from any source of logits.

    The backward computes the tiles again, so no tensor as large as the logits is saved.

    Args:
        make_source: Builds the source from `tensors`. Called in the forward and again in the backward.
        tensors: Inputs of the source that receive gradients.
        ids: Ids of the full vocabulary [*leading, k], the same on every rank. An id outside it, -100 included, has
            the log-probability 0 and no gradient.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        requested: Optional values to compute. None: only log p.
        masks_rows: Whether a row without a valid id has the value 0 and no gradient, even if its logits are NaN.

    Returns:
        The values. The gradient of a weight's shard is complete. The gradient of hidden states is this rank's part and
        must be summed over the group.

    Collectives:
        Forward: one all-gather of 2 to 5 numbers per row, and with k > 1 one all-reduce of k numbers per row. Backward:
        none. `FilteredRows` has collectives of its own in both.
    """
    shard = shard or UNSHARDED
    requested = requested or RequestedStatistics()
    logprobs, neg_entropy, log_p2 = _SoftmaxRows.apply(make_source, ids, shard, requested, masks_rows, *tensors)
    return RowValues(logprobs, neg_entropy, log_p2)


class _SoftmaxRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, make_source, ids, shard, requested, masks_rows, *tensors):
        source = make_source(*tensors)
        columns, is_local = on_shard(ids, shard.start, source.columns)
        num_stats = 2 + int(requested.neg_entropy) + int(requested.squares)  # the fields that `Stats.pack` stacks
        # Initialised with zeros, because `FilteredRows` computes only some of the rows on this rank. The other rows
        # keep m = l = 0 and a logit of 0, so their log-probability is 0. `filtered_logprobs` then sums over the ranks.
        packed = torch.zeros(num_stats, *source.leading, dtype=source.dtype, device=source.device)
        at_ids = torch.zeros(ids.shape, dtype=source.dtype, device=source.device)
        can_overwrite = source.has_own_tiles and not requested.neg_entropy
        for index in source.indices():
            parts = []  # the rows' statistics over each block of ids
            for block in source.blocks:
                tile = source.tile(index, block)
                rows = tile.index
                block_columns, in_block = _in_block(columns, is_local, rows, block)
                found = tile_statistics(tile.logits, block_columns, in_block, requested, can_overwrite)
                parts.append(found.stats)
                at_ids[rows] += found.at_ids.view(at_ids[rows].shape)  # 0 in every block but that of the id
                del tile  # before the next one is computed
            stats = parts[0]
            if len(parts) > 1:
                all_blocks, _ = merge(Stats(*torch.stack(parts, 1)))
                stats = all_blocks.pack()
            packed[:, *as_tuple(rows)] = stats.view(num_stats, *packed[0][rows].shape)
        merged, at_ids = _merge_with_ids(Stats(*packed.unbind()), source.columns, shard, at_ids)
        stats = merged.stats
        valid = (ids >= 0) & (ids < merged.vocab_size)
        is_live = valid.any(-1) if masks_rows else torch.ones(source.leading, dtype=torch.bool, device=source.device)
        # log p = z - m - l, in this order, because m + l would lose digits of l
        m, l = finite(stats.m).unsqueeze(-1), stats.l.unsqueeze(-1)  # noqa: E741
        logprobs = torch.where(valid, (at_ids - m) - l, 0)
        neg_entropy = None if stats.neg_entropy is None else torch.where(is_live, stats.neg_entropy, 0)
        log_p2 = None if stats.squares is None else torch.where(is_live, stats.squares.log(), 0)
        if log_p2 is not None:
            ctx.mark_non_differentiable(log_p2)
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):
            lse = torch.stack([stats.m, stats.l], -1)
            ctx.save_for_backward(columns, is_local, valid, is_live, lse, stats.neg_entropy, *tensors)
            ctx.make_source, ctx.masks_rows = make_source, masks_rows
        return logprobs, neg_entropy, log_p2

    @staticmethod
    def backward(ctx, by_logprobs, by_neg_entropy, _by_log_p2):
        columns, is_local, valid, is_live, lse, neg_entropy, *tensors = ctx.saved_tensors
        not_tensors = (None,) * 5  # make_source, ids, shard, requested and masks_rows have no gradient
        if by_logprobs is None and by_neg_entropy is None:
            return *not_tensors, *(None for _ in tensors)
        source = ctx.make_source(*tensors)
        source.begin_gradients(ctx.needs_input_grad[len(not_tensors) :])
        if by_logprobs is None:
            by_logprobs = torch.zeros_like(valid, dtype=source.dtype)
        by_logprobs = torch.where(valid, by_logprobs, 0).to(source.dtype)  # [*leading, k]
        # Coefficients of the module's docstring: c = by_logprobs, b = by_neg_entropy and a = -Σ c - b · E.
        times_p = -by_logprobs.sum(-1)
        times_p_log_p = None
        if by_neg_entropy is not None:
            times_p_log_p = torch.where(is_live, by_neg_entropy, 0).to(source.dtype)
            times_p = times_p - times_p_log_p * torch.where(is_live, neg_entropy, 0)
        for index in source.indices():
            live_rows = is_live[index].flatten() if ctx.masks_rows else None
            for block in source.blocks:
                tile = source.tile(index, block, live_rows)
                rows = tile.index
                block_columns, in_block = _in_block(columns, is_local, rows, block)
                coefficients = GradientCoefficients(
                    times_p=times_p[rows].reshape(-1, 1),
                    at_ids=torch.where(in_block, rows_of(by_logprobs, rows), 0),
                    times_p_log_p=None if times_p_log_p is None else times_p_log_p[rows].reshape(-1, 1),
                )
                grad = gradient_of_logits(
                    tile.logits,
                    rows_of(lse, rows),
                    coefficients,
                    block_columns,
                    source.scaling,
                    source.gradient_dtype,
                    source.has_own_tiles,
                )
                if ctx.masks_rows:
                    grad.masked_fill_(~is_live[rows].reshape(-1, 1), 0)
                tile = tile.without_logits()
                source.add_gradient(tile, grad)
                del tile, grad  # before the next ones are computed
        return *not_tensors, *source.gradients()


def _merge_with_ids(stats: Stats, columns: int, shard: VocabShard, at_ids: Tensor) -> tuple[Merged, Tensor]:
    """Merge statistics over ranks, and sum the logits at ids [*leading, k] over them: all ranks but one have 0."""
    if at_ids.shape[-1] == 1:
        merged = merge_over(stats, columns, shard.group, at_ids.squeeze(-1)[None])
        return merged, merged.extra.squeeze(0).unsqueeze(-1)
    merged = merge_over(stats, columns, shard.group)
    if at_ids.shape[-1] > 1 and group_size(shard.group) > 1:
        # An all-reduce receives k numbers per row. Within the all-gather each rank would receive ranks · k.
        dist.all_reduce(at_ids, group=shard.group)
    return merged, at_ids


def _in_block(columns: Tensor, is_local: Tensor, index: Index, block: slice) -> tuple[Tensor, Tensor]:
    """Return the ids' columns within a block [t, k], and whether the ids are in it. Column 0 if not."""
    block_columns, in_block = on_shard(rows_of(columns, index), block.start, block.stop - block.start)
    return block_columns, in_block & rows_of(is_local, index)


# ---- sums over tokens whose gradient is computed in the forward


class FusedGradientSum:
    """A sum over tokens whose gradient is computed in the forward, tile by tile, while each tile's logits exist.

    Usage: create it (outside of `torch.no_grad`, because it checks whether gradients are enabled), then for each tile
    add to the sum, and if `needs_gradient` call `source.add_gradient`. Finally return `with_gradient(total)`.

    Attributes:
        source: The logits, tile by tile.
        needs_gradient: Whether hidden states or weight need a gradient.
    """

    def __init__(self, source: HeadLogits):
        self.source = source
        needed = [torch.is_grad_enabled() and tensor.requires_grad for tensor in source.inputs]
        self.needs_gradient = any(needed)
        source.begin_gradients(needed)

    def with_gradient(self, total: Tensor) -> Tensor:
        """Return `total`, a scalar, with a backward that returns the added gradients times its upstream gradient."""
        if not self.needs_gradient:
            return total
        return _WithGradient.apply(*self.source.inputs, total, *self.source.take_gradients())


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, total, hidden_grad, weight_grad):
        ctx.gradient = hidden_grad, weight_grad
        ctx.weight_dtype = weight.dtype
        return total.clone()

    @staticmethod
    def backward(ctx, upstream):
        # The gradients are scaled in place, so this works only once. A copy of [V, D] would be the step's peak memory.
        if ctx.gradient is None:
            raise RuntimeError("this loss can be differentiated once. Compute it again for a second backward")
        (hidden_grad, weight_grad), ctx.gradient = ctx.gradient, None
        if hidden_grad is not None:
            hidden_grad.mul_(upstream.to(hidden_grad.dtype))
        if weight_grad is not None:
            weight_grad = weight_grad.mul_(upstream).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None
