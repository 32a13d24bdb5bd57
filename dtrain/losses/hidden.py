"""Log-probabilities straight from hidden states and the head's weight, in tiles: the logits never exist whole.

For a weighted sum of log-probabilities whose weights are known in the tile (SFT's loss), the gradient is formed in the
forward, tile by tile: three matrix products of the head instead of the four that recomputing in the backward costs,
and no more memory than one tile of logits beside the two gradients.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dtrain.losses.vocabulary import (
    WHOLE,
    Stats,
    VocabShard,
    add_product_,
    compute_dtype,
    merge_over,
    on_shard,
    pick,
    product,
    shard_sizes,
    tile_rows,
)


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
        """Of each tile which of the tokens [t] it has, and their hidden states [t, D] in the operand's dtype."""
        for start in range(0, len(self.index), self.rows):
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
    by_probability: bool = False,
) -> Tensor:
    """Σᵢ token_weights[i] · log softmax(softcap(hidden[index[i]] · weightᵀ))[targets[i]], a scalar.

    hidden: [N, D] any float dtype; weight: [V, D], or with a shard [V/tp, D], of the
    same dtype; index [T] int64: the rows of `hidden` that have a
    target, each at most once; targets [T] int64 in [0, V); token_weights [T], constants (they get no gradient).
    softcap: logits become softcap · tanh(logits / softcap) (Gemma 2, arXiv:2408.00118, section 2). by_probability: each
    weight is times the token's own probability, a constant too (DFT: Wu et al., arXiv:2508.05629, equation 9).

    Computed in max(float32, the dtype), and returned so. Gradients come in the inputs' dtypes; the weight's is summed
    in max(float32, the dtype) over the tiles. Rows of `hidden` without a target cost nothing and get a zero gradient,
    whatever they hold. The graph can be walked once: a second backward raises RuntimeError.

    shard: weight is this rank's part of the vocabulary, targets are global ids, the same on every rank of the group.
    The value is the whole sum on every rank, the gradients are the shard's own: hidden's has still to be summed over
    the group. One all-gather of three numbers per row and tile; `tile_rows_of`'s where rows_per_tile is None. Without a
    shard no collective.
    """
    shard = shard or WHOLE
    tokens = TiledSum(hidden, weight, index, rows_per_tile or tile_rows_of(weight, shard), compute_dtype(hidden.dtype))
    token_weights = token_weights.to(tokens.dtype)
    return tokens.with_gradient(_weighted_logprob_sum(tokens, targets, token_weights, softcap, shard, by_probability))


@torch.no_grad()
def _weighted_logprob_sum(
    tokens: TiledSum,
    targets: Tensor,
    token_weights: Tensor,
    softcap: float | None,
    shard: VocabShard,
    by_probability: bool,
) -> Tensor:
    total = torch.zeros((), dtype=tokens.dtype, device=targets.device)
    for tile, rows in tokens.tiles():
        scale = token_weights[tile, None]  # [t, 1]
        logits = product(rows, tokens.operand.t())  # [t, V/tp]
        cap_slope = None
        if softcap is not None:
            logits = logits.div_(softcap).tanh_()
            cap_slope = 1 - logits.square() if tokens.wants_gradient else None
            logits = logits.mul_(softcap)
        local_target, is_mine = on_shard(targets[tile, None], shard.start, logits.shape[1])  # [t, 1]
        target_logit = pick(logits, local_target, is_mine, tokens.dtype)
        largest = logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -float("inf"))
        exponentials = logits.sub_(largest[:, None]).exp_()  # the logits' memory from here on
        part = exponentials.sum(-1)
        stats = Stats(largest, part.log())
        whole, log_share, at_target, _ = merge_over(stats, logits.shape[1], shard.group, target_logit.t())
        logprobs = at_target.squeeze(0) - whole.m - whole.l
        if by_probability:
            scale = scale * logprobs.exp()[:, None]
        total += (scale.squeeze(1) * logprobs).sum()
        if not tokens.wants_gradient:
            continue
        # d(Σ w·logp)/dlogits = w·(onehot − softmax)
        grad = exponentials.mul_(-scale * (log_share.exp() / part)[:, None])
        if grad.shape[1]:
            grad.scatter_add_(-1, local_target, scale * is_mine)
        if cap_slope is not None:
            grad.mul_(cap_slope)
        tokens.add_gradient(grad, tile, rows)
    return total
