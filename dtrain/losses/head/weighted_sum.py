"""Log-probabilities straight from hidden states and the head's weight, in tiles: the logits never exist whole.

For a weighted sum of log-probabilities whose weights are known in the tile (SFT's loss), the gradient is formed in the
forward, tile by tile: three matrix products of the head instead of the four that recomputing in the backward costs,
and no more memory than one tile of logits beside the two gradients.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.base.fused import Fused, own, rounds
from dtrain.losses.head.vocabulary import (
    WHOLE,
    Stats,
    VocabShard,
    add_at_,
    add_product_,
    compute_dtype,
    merge_over,
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
    rows = tile_rows(columns, device_type, blocks=4, least=64)
    return rows if device_type == "cpu" or rows < 128 else round(rows / 128) * 128  # whole blocks of a GPU's products


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
        self._memory: list[Tensor] = []
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

    def memory(self, count: int, rows: int) -> list[Tensor] | list[None]:
        """Return uninitialised memory for `count` tiles of logits [rows, V/tp], the same at every call: a CPU would
        fault in every page of new ones. None for each on a GPU, where torch keeps what was allocated."""
        if self.hidden.is_cuda:
            return [None] * count
        if not self._memory:  # the first tile is the largest
            shape = rows, len(self.weight)
            self._memory = [torch.empty(shape, dtype=self.dtype, device=self.hidden.device) for _ in range(count)]
        return [tile[:rows] for tile in self._memory]

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
        local_target, is_mine = on_shard(targets[tile, None], shard.start, logits.shape[1])  # [t, 1]
        wants = bool(smoothing), counts, tokens.wants_gradient
        largest, part, summed, is_likeliest, *of_cap = _softmax(logits, local_target, is_mine, softcap, *wants)
        whole, log_share, summed, vocabulary, is_likeliest = merge_over(
            Stats(largest, part.log()), logits.shape[1], shard.group, summed, is_likeliest
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
        of_rows = (
            largest[:, None],
            (-(scale + evenly) * log_share.exp() / part)[:, None],
            local_target,
            scale[:, None] * is_mine,
            (evenly / vocabulary)[:, None] if smoothing else None,
        )
        tokens.add_gradient(_gradient(logits, of_rows, softcap, *of_cap, tokens.operand.dtype), tile, rows)
    return total, correct


@Fused
def _softmax(
    products: Tensor, target: Tensor, is_mine: Tensor, softcap: float | None, sums: bool, counts: bool, has_slope: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """Return max z [t] of z = softcap(products) [t, v], Σ exp(z − max z) [t], z at targets and with `sums` Σ z
    [1 or 2, t], with `counts` 1 where the likeliest is the target's [1, t], with has_slope the softcap's slope [t, v],
    and whether the products are left as they were: so they are, and without a slope, where this is compiled. Else
    exp(z − max z) is in their memory."""
    is_left = torch.compiler.is_compiling()
    logits, slope = _capped(own(products), softcap, has_slope and not is_left)
    summed = pick(logits, target, is_mine, logits.dtype).t()
    if sums:
        summed = torch.cat([summed, logits.sum(-1)[None]])
    largest, is_likeliest = _largest(logits, target, is_mine, counts)
    exponentials = logits.sub_(largest[:, None]).exp_()
    return largest, exponentials.sum(-1), summed, is_likeliest, slope, is_left


@Fused
def _gradient(
    left: Tensor, of_rows: tuple, softcap: float | None, slope: Tensor | None, is_left: bool, dtype: torch.dtype
) -> Tensor:
    """Return (factor · exp(z − largest) + of_each, and at_target at the target) · the softcap's slope, [t, v], in
    `dtype`. left [t, v], slope, is_left: as `_softmax` left and gave them. of_rows: the others, [t, 1]; of_each may be
    None. Overwrites `left`."""
    largest, factor, target, at_target, of_each = of_rows
    grad = left if left.dtype == dtype else own(left)
    if is_left:  # computed again is faster than written and read
        grad, slope = _capped(grad, softcap, True)
        grad.sub_(largest).exp_()
    grad.mul_(factor)
    if of_each is not None:
        grad.add_(of_each)
    add_at_(grad, target, at_target)
    return (grad if slope is None else grad.mul_(slope)).to(dtype)


def _capped(products: Tensor, softcap: float | None, wants_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return the logits [t, v], in the products' memory, and d logits / d product if it is wanted and not 1."""
    if softcap is None:
        return products, None
    ratio = products.div_(softcap).tanh_()
    slope = 1 - ratio.square() if wants_slope else None
    return ratio.mul_(softcap), slope


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
