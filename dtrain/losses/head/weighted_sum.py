"""Losses of SFT from hidden states and the head's weight: sums over tokens and their gradients in one pass over tiles.

If a token's weight in the sum is known when its tile is computed, as for SFT, the gradient is computed in the forward.
That takes three matrix products with the head (logits, gradient of the hidden states, gradient of the weight) instead
of the four of `logprobs`. Memory is one tile of logits and the two gradients.

One tile of t tokens on a rank with v of V ids:

    tile             logits [t, v]
    tile_statistics  m', l' [t] of this rank's ids, logits at the targets [t]; exp(z - m') replaces the logits
    merge_over       m, l [t] of the full vocabulary, by one all-gather
    loss, autograd   losses [t], and the derivative of each by its log p(target)
    gradient_of_exps gradient [t, v]; it replaces exp(z - m')
    add_gradient     two matrix products: += gradient of the hidden states [t, D] and of the weight [v, D]
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.losses.head.softmax import (
    FusedGradientSum,
    GradientCoefficients,
    RequestedStatistics,
    finite,
    gradient_of_exps,
    tile_statistics,
)
from dtrain.losses.head.sources import HeadLogits, Scaling, tile_rows_of
from dtrain.losses.head.vocabulary import UNSHARDED, Merged, Stats, VocabShard, compute_dtype, merge_over, on_shard
from dtrain.losses.value_checks import check_loss_values

TokenLossFn = Callable[[Tensor], Tensor]
"""A loss of single tokens: maps log-probabilities of targets [t] to losses [t].

The loss of a token depends on its own log-probability only. Any differentiable function is possible, because autograd
computes the derivative. The function is called once per tile. Training divides the sum over the trained tokens of the
global batch by their number. `losses.token_options` lists the losses by name.
"""


def nll(logprobs: Tensor) -> Tensor:
    """Return -log p [t], given log p [t]."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """Return -p · log p [t], given log p [t]. No gradient flows through the factor p.

    Reference:
        DFT: Wu et al., arXiv:2508.05629, equation 9.
    """
    return -logprobs.exp().detach() * logprobs


# The losses by name. `token_options.LOSSES` refers to them by name, because it must not import torch.
FORMULAS: dict[str, Callable[..., Tensor]] = {"nll": nll, "dft": dft}


class TokenSums(NamedTuple):
    """Sums over tokens, scalars in max(float32, the dtype).

    Attributes:
        loss: The sum of the loss. Differentiable.
        correct: The number of targets that are the argmax of their token's logits, the lowest id if several are equal.
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
    """Sum the loss of tokens, and count the targets that are the argmax.

    The sum is Σ_i loss(log p_i[targets[i]]) with p_i = softmax(softcap(hidden[index[i]] · weightᵀ)).
    `weighted_logprob_sum` describes dtypes and gradients.

    Args:
        hidden: Hidden states, [N, D].
        weight: The head's weight [V, D], or with `shard` this rank's rows of it.
        targets: Ids of the full vocabulary, [T] int64.
        index: The rows of `hidden` that have a target, [T] int64, each at most once.
        loss: See `TokenLossFn`.
        label_smoothing: ε in [0, 1). The result is (1 - ε) times the loss, plus ε times the mean of -log p over the
            vocabulary, the target included.
        softcap: See `sources.Scaling`. None: no softcap.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens per tile of logits. None: `sources.tile_rows_of`.

    Returns:
        The sums over all tokens, on every rank.

    Collectives:
        Per tile, one all-gather of four numbers per row, or five with `label_smoothing`. Also that of `tile_rows_of` if
        `rows_per_tile` is None.

    Reference:
        Label smoothing: Szegedy et al., arXiv:1512.00567, section 7.
    """
    shard = shard or UNSHARDED
    token_sum = _fused_gradient_sum(hidden, weight, index, softcap, rows_per_tile, shard)
    ones = torch.ones(index.shape, dtype=token_sum.source.dtype, device=index.device)
    total, correct = _token_sums(token_sum, targets, ones, loss, label_smoothing, shard, counts=True)
    return TokenSums(token_sum.with_gradient(total), correct)


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

    The sum is computed and returned in max(float32, the dtype), and the weight's gradient is summed over the tiles in
    that dtype. Gradients are returned in the dtypes of the inputs. A second backward raises RuntimeError.

    Args:
        hidden: Hidden states [N, D], any floating dtype. Rows without a target are not computed and have a gradient of
            0, even if they are NaN.
        weight: The head's weight [V, D], or with `shard` this rank's rows of it, in the dtype of `hidden`.
        targets: Ids of the full vocabulary [T], int64 in [0, V), the same on every rank.
        token_weights: Weights of the tokens, [T], without gradient.
        index: The rows of `hidden` that have a target, [T] int64, each at most once.
        softcap: See `sources.Scaling`. None: no softcap.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        rows_per_tile: Tokens per tile of logits. None: `sources.tile_rows_of`.

    Returns:
        The sum over all tokens, a scalar, on every rank. The gradient of `weight` is complete. The gradient of `hidden`
        is this rank's part and must be summed over the group.

    Collectives:
        Per tile, one all-gather of three numbers per row. Also that of `tile_rows_of` if `rows_per_tile` is None.
    """
    shard = shard or UNSHARDED
    token_sum = _fused_gradient_sum(hidden, weight, index, softcap, rows_per_tile, shard)
    token_weights = token_weights.to(token_sum.source.dtype)
    total, _ = _token_sums(token_sum, targets, token_weights, None, 0.0, shard, counts=False)
    return token_sum.with_gradient(total)


def _fused_gradient_sum(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    softcap: float | None,
    rows_per_tile: int | None,
    shard: VocabShard,
) -> FusedGradientSum:
    max_rows = rows_per_tile or tile_rows_of(weight, shard)
    source = HeadLogits(
        hidden,
        weight,
        index=index,
        max_rows=max_rows,
        scaling=Scaling(softcap=softcap),
        dtype=compute_dtype(hidden.dtype),
    )
    return FusedGradientSum(source)


@torch.no_grad()
def _token_sums(
    token_sum: FusedGradientSum,
    targets: Tensor,
    token_weights: Tensor,
    loss: TokenLossFn | None,
    smoothing: float,
    shard: VocabShard,
    *,
    counts: bool,
) -> tuple[Tensor, Tensor]:
    """Sum token_weights · loss(log p) with label smoothing, and with `counts` count the targets that are the argmax.

    If `loss` is None, sum token_weights · log p. The gradients are added to `token_sum`.
    """
    source = token_sum.source
    total = torch.zeros((), dtype=source.dtype, device=targets.device)
    correct = torch.zeros_like(total)
    requested = RequestedStatistics(logit_sum=smoothing > 0, is_argmax=counts)

    # A function, so that every tensor of a tile is freed before the next tile is computed.
    def add_tile(index: slice) -> None:
        tile = source.tile(index, source.blocks[0])
        columns, is_local = on_shard(targets[index, None], shard.start, source.columns)  # [t, 1]
        # Computed before `tile_statistics`, which overwrites the logits with exp(z - m').
        slope = source.scaling.slope(tile.logits) if token_sum.needs_gradient else None
        overwrite = True
        found = tile_statistics(tile.logits, columns, is_local, requested, overwrite)
        stats = Stats(*found.stats)  # m' and l' of this rank's ids
        sums = [found.at_ids[:, 0]]
        if found.logit_sum is not None:
            sums.append(found.logit_sum)
        # The target is the argmax of the full vocabulary if it is the argmax of the rank with the largest logit.
        is_argmax = None if found.is_argmax is None else found.is_argmax[None]
        merged = merge_over(stats, source.columns, shard.group, torch.stack(sums), is_argmax)
        weights = token_weights[index]
        values, coefficients = _values_of_rows(merged, weights, loss, smoothing, is_local)
        total.add_((weights * values).sum())
        if counts:
            correct.add_(merged.at_largest.sum())
        if token_sum.needs_gradient:
            # log p = z - m - l = (z - m') + log_scale
            log_scale = (finite(stats.m) - finite(merged.stats.m) - merged.stats.l)[:, None]
            grad = gradient_of_exps(tile.logits, log_scale, coefficients, columns, slope, source.gradient_dtype)
            tile = tile.without_logits()  # frees the logits, unless `grad` is in their memory
            source.add_gradient(tile, grad)

    for index in source.indices():
        add_tile(index)
    return total, correct


def _values_of_rows(
    merged: Merged, weights: Tensor, loss: TokenLossFn | None, smoothing: float, is_local: Tensor
) -> tuple[Tensor, GradientCoefficients]:
    """Return the loss of each row [t], and the coefficients of the gradient of weight · loss.

    Args:
        merged: Statistics of the full vocabulary. `extra` has the logit at the target and, if `smoothing` > 0, Σ z.
        weights: The weights of the rows, [t].
        loss: See `TokenLossFn`. None: log p.
        smoothing: ε of label smoothing.
        is_local: Whether this rank has the target, [t, 1].
    """
    m, l = finite(merged.stats.m), merged.stats.l  # noqa: E741
    logprobs = merged.extra[0] - m - l
    if loss is None:
        values, by_target = logprobs, weights
    else:
        values, slope = _with_slope(loss, logprobs)
        by_target = weights * slope
    by_mean, at_all_ids = torch.zeros_like(by_target), None
    if smoothing:
        mean_logprob = merged.extra[1] / merged.vocab_size - m - l
        values = (1 - smoothing) * values - smoothing * mean_logprob
        by_target = (1 - smoothing) * by_target
        by_mean = -smoothing * weights
        at_all_ids = (by_mean / merged.vocab_size)[:, None]
    times_p = -(by_target + by_mean)
    coefficients = GradientCoefficients(times_p[:, None], at_ids=by_target[:, None] * is_local, at_all_ids=at_all_ids)
    return values, coefficients


@torch.enable_grad()
def _with_slope(loss: TokenLossFn, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses [t] of log-probabilities [t], and the derivative of each loss by its log-probability, [t].

    Raises:
        UserError: If the loss does not return one value per token. A sum or mean would be added to every token of the
            tile, and the result would depend on the size of the tiles.
    """
    logprobs = logprobs.detach().requires_grad_()
    values = loss(logprobs)
    function = loss.func if isinstance(loss, partial) else loss
    check_loss_values(getattr(function, "__name__", str(function)), values, logprobs.shape, "token")
    (slope,) = torch.autograd.grad(values.sum(), logprobs)
    return values.detach(), slope
