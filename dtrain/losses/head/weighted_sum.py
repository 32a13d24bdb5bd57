"""Sums over tokens of a loss of log-probabilities, from hidden states and the head's weight: the full logits never
exist.

If a token's weight in the sum is known when its tile is computed, as for SFT, the gradient is formed in the forward:
three matrix products of the head instead of the four that computing tiles again in the backward costs, and no more
memory than one tile of logits besides the two gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.losses.head.softmax import FormedSum, RowGradient, Wanted, finite, gradient_of_exps, tile_statistics
from dtrain.losses.head.sources import HeadLogits, Scaling, tile_rows_of
from dtrain.losses.head.vocabulary import UNSHARDED, Merged, Stats, VocabShard, compute_dtype, merge_over, on_shard

TokenLossFn = Callable[[Tensor], Tensor]
"""A loss of tokens: log-probabilities [t] to losses [t], each by its own log-probability alone. It is called tile by
tile, and autograd gives its derivative: any differentiable function, of which what is detached is a constant. The sum
over the global batch's trained tokens is divided by their number. `token.options` has the names and options."""


def nll(logprobs: Tensor) -> Tensor:
    """−log p."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """−p · log p, p a constant (DFT: Wu et al., arXiv:2508.05629, equation 9)."""
    return -logprobs.exp().detach() * logprobs


class TokenSums(NamedTuple):
    """Sums over tokens, scalars in max(float32, the dtype).

    Attributes:
        loss: The loss, with a gradient.
        correct: The number of targets that are the argmax, the lowest id of equally likely ones.
    """

    loss: Tensor
    correct: Tensor


def token_loss_sums(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    index: Tensor,
    loss: TokenLossFn,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> TokenSums:
    """Sum loss(log p[targets[i]]) over the tokens i, p = softmax(softcap(hidden[index[i]] · weightᵀ)), and count the
    targets that are the argmax.

    Args:
        hidden: As in `weighted_logprob_sum`, which also describes the gradients.
        weight: As there.
        targets: As there.
        index: As there.
        loss: See `TokenLossFn`.
        label_smoothing: ε in [0, 1). The loss is (1 - ε) times the loss, plus ε times the mean of -log p over the
            vocabulary, the target included (Szegedy et al., arXiv:1512.00567, section 7).
        softcap: As there.
        shard: As there.
        rows_per_tile: As there.

    Collectives:
        Per tile, one all-gather of four numbers per row, five with `label_smoothing`. `tile_rows_of`'s if
        `rows_per_tile` is None.
    """
    shard = shard or UNSHARDED
    tokens = _formed_sum(hidden, weight, index, softcap, rows_per_tile, shard)
    ones = torch.ones(index.shape, dtype=tokens.source.dtype, device=index.device)
    total, correct = _token_sums(tokens, targets, ones, loss, label_smoothing, shard, counts=True)
    return TokenSums(tokens.with_gradient(total), correct)


def weighted_logprob_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    index: Tensor,
    *,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> Tensor:
    """Sum token_weights[i] · log softmax(softcap(hidden[index[i]] · weightᵀ))[targets[i]] over the tokens i.

    The sum is computed and returned in max(float32, the dtype). Gradients come in the inputs' dtypes; the weight's is
    summed in the compute dtype over the tiles. The graph can be walked once: a second backward raises RuntimeError.

    Args:
        hidden: Hidden states [N, D], any floating dtype. Rows without a target cost nothing and get a zero gradient,
            whatever they hold.
        weight: The head's weight [V, D], or with `shard` this rank's rows of it; of the same dtype.
        targets: Ids of the full vocabulary [T], int64 in [0, V), the same on every rank.
        token_weights: Constants [T]; they get no gradient.
        index: The rows of `hidden` that have a target, [T] int64, each at most once.
        softcap: Logits become softcap · tanh(logits / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens whose logits exist at once. None for the usual number.

    Returns:
        The full sum on every rank, a scalar. Gradients are the shard's own: hidden's must still be summed over the
        group.

    Collectives:
        One all-gather of three numbers per row and tile; `tile_rows_of`'s if `rows_per_tile` is None.
    """
    shard = shard or UNSHARDED
    tokens = _formed_sum(hidden, weight, index, softcap, rows_per_tile, shard)
    token_weights = token_weights.to(tokens.source.dtype)
    total, _ = _token_sums(tokens, targets, token_weights, None, 0.0, shard, counts=False)
    return tokens.with_gradient(total)


def _formed_sum(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    softcap: float | None,
    rows_per_tile: int | None,
    shard: VocabShard,
) -> FormedSum:
    max_rows = rows_per_tile or tile_rows_of(weight, shard)
    source = HeadLogits(
        hidden,
        weight,
        index=index,
        max_rows=max_rows,
        scaling=Scaling(softcap=softcap),
        dtype=compute_dtype(hidden.dtype),
    )
    return FormedSum(source)


@torch.no_grad()
def _token_sums(
    tokens: FormedSum,
    targets: Tensor,
    token_weights: Tensor,
    loss: TokenLossFn | None,
    smoothing: float,
    shard: VocabShard,
    *,
    counts: bool,
) -> tuple[Tensor, Tensor]:
    """Sum token_weights · loss(log p), smoothed, and with `counts` count the targets that are the argmax.

    A loss of None is log p itself. Gradients are added to `tokens`.
    """
    source = tokens.source
    total = torch.zeros((), dtype=source.dtype, device=targets.device)
    correct = torch.zeros_like(total)
    wanted = Wanted(logit_sum=smoothing > 0, is_argmax=counts)

    # A function, so that every tensor of a tile is freed before the next tile is computed.
    def add_tile(index: slice) -> None:
        tile = source.tile(index, source.blocks[0])
        columns, is_mine = on_shard(targets[index, None], shard.start, source.columns)  # [t, 1]
        # Read before `tile_statistics`, which overwrites the logits with exp(z - m').
        slope = source.scaling.slope(tile.logits) if tokens.wants_gradient else None
        overwrite = True
        found = tile_statistics(tile.logits, columns, is_mine, wanted, overwrite)
        stats = Stats(*found.stats)  # m' and l' of this rank's ids
        sums = [found.at_ids[:, 0]]
        if found.logit_sum is not None:
            sums.append(found.logit_sum)
        # The target is the argmax of the full vocabulary if it is that of the rank with the largest logit.
        is_argmax = None if found.is_argmax is None else found.is_argmax[None]
        merged = merge_over(stats, source.columns, shard.group, torch.stack(sums), is_argmax)
        weights = token_weights[index]
        values, of_rows = _values_of_rows(merged, weights, loss, smoothing, is_mine)
        total.add_((weights * values).sum())
        if counts:
            correct.add_(merged.at_largest.sum())
        if tokens.wants_gradient:
            # log p = z - m - l = (z - m') + log_scale
            log_scale = (finite(stats.m) - finite(merged.stats.m) - merged.stats.l)[:, None]
            grad = gradient_of_exps(tile.logits, log_scale, of_rows, columns, slope, source.gradient_dtype)
            tile = tile.without_logits()  # frees their memory, unless `grad` is in it
            source.add_gradient(tile, grad)

    for index in source.indices():
        add_tile(index)
    return total, correct


def _values_of_rows(
    merged: Merged, weights: Tensor, loss: TokenLossFn | None, smoothing: float, is_mine: Tensor
) -> tuple[Tensor, RowGradient]:
    """Return the loss of each row [t], and the numbers of its gradient times its weight.

    Args:
        merged: Statistics of the full vocabulary, with the logit at the target and, if `smoothing` is not 0, Σ z.
        weights: The rows' weights, [t].
        loss: See `TokenLossFn`. None for log p itself.
        smoothing: ε of label smoothing.
        is_mine: Whether this rank has the target, [t, 1].
    """
    m, l = finite(merged.stats.m), merged.stats.l  # noqa: E741
    logprobs = merged.extra[0] - m - l
    if loss is None:
        values, by_target = logprobs, weights
    else:
        values, slope = _with_slope(loss, logprobs)
        by_target = weights * slope
    by_mean, of_each = torch.zeros_like(by_target), None
    if smoothing:
        mean_logprob = merged.extra[1] / merged.vocab_size - m - l
        values = (1 - smoothing) * values - smoothing * mean_logprob
        by_target = (1 - smoothing) * by_target
        by_mean = -smoothing * weights
        of_each = (by_mean / merged.vocab_size)[:, None]
    by_p = -(by_target + by_mean)
    return values, RowGradient(by_p[:, None], at_ids=by_target[:, None] * is_mine, of_each=of_each)


@torch.enable_grad()
def _with_slope(loss: TokenLossFn, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of log-probabilities [t], and their derivatives by these."""
    logprobs = logprobs.detach().requires_grad_()
    values = loss(logprobs)
    (slope,) = torch.autograd.grad(values.sum(), logprobs)
    return values.detach(), slope
