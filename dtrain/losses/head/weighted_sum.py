"""Log-probabilities straight from hidden states and the head's weight, in tiles: the logits never exist whole.

For a weighted sum of log-probabilities whose weights are known in the tile (SFT's loss), the gradient is formed in the
forward, tile by tile: three matrix products of the head instead of the four that recomputing in the backward costs,
and no more memory than one tile of logits beside the two gradients.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.base.rounds import rounds
from dtrain.losses.head.vocabulary import (
    WHOLE,
    Stats,
    VocabShard,
    add_product_,
    compute_dtype,
    merge_with_likeliest,
    on_shard,
    pick,
    product,
    shard_sizes,
    tile_rows,
)

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


def head_tile_rows(columns: int, device_type: str) -> int:
    """Tokens of a tile of logits [tokens, columns] that is a product with the head's weight."""
    return tile_rows(columns, device_type, blocks=4, least=64)


def tile_rows_of(weight: Tensor, shard: VocabShard) -> int:
    """Tokens per tile for this rank's weight [V/tp, D]: by the largest shard, so that all ranks send the same tiles.

    Where `shard` does not say how large that is, one exchange of shard sizes on the host.
    """
    sizes = shard_sizes(len(weight), shard.group, weight.device) if shard.largest is None else [shard.largest]
    return head_tile_rows(max(sizes), weight.device.type)


def as_operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A head's weight [V, D] as it goes into products that give `dtype`: a CPU would round those of bfloat16, a GPU
    not."""
    return weight if weight.is_cuda and compute_dtype(weight.dtype) == dtype else weight.to(dtype)


class TiledSum:
    """Helps a loss that is a sum over tokens index [T] of hidden [N, D], by the head's weight [V/tp, D]: as tiles are
    added to the sum, it adds to the gradients. Make it outside torch.no_grad: it asks whether the caller wants them."""

    def __init__(self, hidden: Tensor, weight: Tensor, index: Tensor, rows: int, dtype: torch.dtype):
        self.hidden, self.weight, self.index, self.rows = hidden.detach(), weight.detach(), index, rows
        self.dtype, self.operand = dtype, as_operand(self.weight, dtype)
        self._inputs = hidden, weight
        self.wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        # Zeros where no token is: a rank without any takes part in the gradients' reduction all the same.
        self._hidden_grad = self._weight_grad = None  # of what is frozen
        if self.wants_gradient and hidden.requires_grad:
            self._hidden_grad = torch.zeros_like(self.hidden)
        if self.wants_gradient and weight.requires_grad:
            self._weight_grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the tokens [t] of each tile, and their hidden states [t, D] in the operand's dtype."""
        for start in rounds(range(0, len(self.index), self.rows), self.hidden):
            tile = slice(start, start + self.rows)
            yield tile, self.hidden.index_select(0, self.index[tile]).to(self.operand.dtype)

    def memory(self, count: int) -> list[Tensor]:
        """For `count` tiles of logits, [at most rows, V/tp] each, uninitialised."""
        shape = min(self.rows, len(self.index)), len(self.weight)
        return [torch.empty(shape, dtype=self.dtype, device=self.hidden.device) for _ in range(count)]

    def add_gradient(self, grad: Tensor, tile: slice, hidden: Tensor) -> None:
        """Add a tile's gradients: grad [t, V/tp] is that of the sum by the logits; hidden [t, D] as of `tiles`."""
        grad = grad.to(self.operand.dtype)
        if self._hidden_grad is not None:
            # Nameless: it is gone before the weight's product, which is the peak.
            self._hidden_grad.index_copy_(0, self.index[tile], product(grad, self.operand).to(self._hidden_grad.dtype))
        if self._weight_grad is not None:
            add_product_(self._weight_grad, grad.t(), hidden)

    def with_gradient(self, total: Tensor) -> Tensor:
        """`total`, a scalar, as a tensor whose backward gives the gradients that were added."""
        if not self.wants_gradient:
            return total
        return _WithGradient.apply(*self._inputs, total, self._hidden_grad, self._weight_grad)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, total, hidden_grad, weight_grad):
        ctx.gradient, ctx.weight_dtype = (hidden_grad, weight_grad), weight.dtype
        return total.clone()

    @staticmethod
    def backward(ctx, upstream):
        """In place and once: a copy of [V, D] would be the step's peak."""
        if ctx.gradient is None:
            raise RuntimeError("this loss forms its gradient once; compute it again for a second backward")
        (hidden, weight), ctx.gradient = ctx.gradient, None
        of_hidden = None if hidden is None else hidden.mul_(upstream.to(hidden.dtype))
        of_weight = None if weight is None else weight.mul_(upstream).to(ctx.weight_dtype)
        return of_hidden, of_weight, None, None, None


class TokenSums(NamedTuple):
    """Sums over tokens, scalars in max(float32, the dtype). loss: with a gradient. correct: how many of the targets are
    the likeliest token, of equally likely ones the one of the lowest id."""

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
    """Σᵢ loss(log p[targets[i]]) over the tokens i, p = softmax(softcap(hidden[index[i]] · weightᵀ)), and how many of
    the targets are the likeliest token.

    loss: see `TokenLossFn`.
    label_smoothing: ε, from 0 to below 1: (1 − ε) of it, and ε of the mean of −log p over the vocabulary, the target
    included (Szegedy et al., arXiv:1512.00567, section 7).

    hidden, weight, targets, index, softcap, shard and rows_per_tile, and all that is said of gradients: as
    `weighted_logprob_sum`. One all-gather of four numbers per row and tile, five with label_smoothing.
    """
    shard = shard or WHOLE
    tokens = _tiled(hidden, weight, index, rows_per_tile, shard)
    ones = torch.ones(index.shape, dtype=tokens.dtype, device=index.device)
    total, correct = _token_sums(tokens, targets, ones, loss, label_smoothing, softcap, shard, counts=True)
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
    """Σᵢ token_weights[i] · log softmax(softcap(hidden[index[i]] · weightᵀ))[targets[i]], a scalar.

    hidden: [N, D] any float dtype; weight: [V, D], or with a shard [V/tp, D], of the
    same dtype; index [T] int64: the rows of `hidden` that have a
    target, each at most once; targets [T] int64 in [0, V); token_weights [T], constants (they get no gradient).
    softcap: logits become softcap · tanh(logits / softcap) (Gemma 2, arXiv:2408.00118, section 2).

    Computed in max(float32, the dtype), and returned so. Gradients come in the inputs' dtypes; the weight's is summed
    in max(float32, the dtype) over the tiles. Rows of `hidden` without a target cost nothing and get a zero gradient,
    whatever they hold. The graph can be walked once: a second backward raises RuntimeError.

    shard: weight is this rank's part of the vocabulary, targets are global ids, the same on every rank of the group.
    The value is the whole sum on every rank, the gradients are the shard's own: hidden's has still to be summed over
    the group. One all-gather of three numbers per row and tile; `tile_rows_of`'s where rows_per_tile is None. Without a
    shard no collective.
    """
    shard = shard or WHOLE
    tokens = _tiled(hidden, weight, index, rows_per_tile, shard)
    token_weights = token_weights.to(tokens.dtype)
    total, _ = _token_sums(tokens, targets, token_weights, None, 0.0, softcap, shard, counts=False)
    return tokens.with_gradient(total)


def _tiled(hidden: Tensor, weight: Tensor, index: Tensor, rows_per_tile: int | None, shard: VocabShard) -> TiledSum:
    rows = rows_per_tile or tile_rows_of(weight, shard)
    return TiledSum(hidden, weight, index, rows, compute_dtype(hidden.dtype))


@torch.no_grad()
def _token_sums(
    tokens: TiledSum,
    targets: Tensor,
    token_weights: Tensor,
    loss: TokenLossFn | None,
    smoothing: float,
    softcap: float | None,
    shard: VocabShard,
    *,
    counts: bool,
) -> tuple[Tensor, Tensor]:
    """Σ token_weights · loss(log p) (None: log p itself), smoothed, and with `counts` the number of right targets."""
    total = torch.zeros((), dtype=tokens.dtype, device=targets.device)
    correct = torch.zeros_like(total)
    for tile, rows in tokens.tiles():
        logits = product(rows, tokens.operand.t())  # [t, V/tp]
        cap_slope = None
        if softcap is not None:
            logits = logits.div_(softcap).tanh_()
            cap_slope = 1 - logits.square() if tokens.wants_gradient else None
            logits = logits.mul_(softcap)
        local_target, is_mine = on_shard(targets[tile, None], shard.start, logits.shape[1])  # [t, 1]
        summed = pick(logits, local_target, is_mine, tokens.dtype).t()  # [1, t]
        if smoothing:
            summed = torch.cat([summed, logits.sum(-1)[None]])
        largest, is_likeliest = _largest(logits, local_target, is_mine, counts)
        exponentials = logits.sub_(largest[:, None]).exp_()  # the logits' memory from here on
        part = exponentials.sum(-1)
        stats = Stats(largest, part.log())
        whole, log_share, summed, vocabulary, is_likeliest = merge_with_likeliest(
            stats, logits.shape[1], shard.group, summed, is_likeliest
        )
        logprobs = summed[0] - whole.m - whole.l
        values, slope = (logprobs, None) if loss is None else _with_slope(loss, logprobs)
        scale = token_weights[tile] if slope is None else token_weights[tile] * slope  # of the onehot
        evenly = torch.zeros_like(scale)  # of what each id has alike
        if smoothing:
            values = (1 - smoothing) * values - smoothing * (summed[1] / vocabulary - whole.m - whole.l)
            scale, evenly = (1 - smoothing) * scale, -smoothing * token_weights[tile]
        total += (token_weights[tile] * values).sum()
        if counts:
            correct += is_likeliest.sum()
        if not tokens.wants_gradient:
            continue
        # d(scale·logp + evenly·mean logp)/dlogits = scale·onehot + evenly/V − (scale + evenly)·softmax
        grad = exponentials.mul_((-(scale + evenly) * log_share.exp() / part)[:, None])
        if smoothing:
            grad.add_((evenly / vocabulary)[:, None])
        if grad.shape[1]:
            grad.scatter_add_(-1, local_target, scale[:, None] * is_mine)
        if cap_slope is not None:
            grad.mul_(cap_slope)
        tokens.add_gradient(grad, tile, rows)
    return total, correct


def _largest(logits: Tensor, target: Tensor, is_mine: Tensor, counts: bool) -> tuple[Tensor, Tensor | None]:
    """The largest of logits [t, v] and, with `counts`, 1 where that is the target's [1, t], of equal ones the first."""
    if not logits.shape[1]:
        none = logits.new_zeros(1, len(logits)) if counts else None
        return logits.new_full(logits.shape[:1], -float("inf")), none
    if not counts:
        return logits.amax(-1), None
    largest, likeliest = logits.max(-1)
    return largest, ((likeliest == target.squeeze(1)) & is_mine.squeeze(1))[None].to(largest.dtype)


@torch.enable_grad()
def _with_slope(loss: TokenLossFn, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of log-probabilities [t], and their derivatives by these."""
    logprobs = logprobs.detach().requires_grad_()
    values = loss(logprobs)
    (slope,) = torch.autograd.grad(values.sum(), logprobs)
    return values.detach(), slope
