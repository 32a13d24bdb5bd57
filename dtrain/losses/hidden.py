"""Log-probabilities straight from hidden states and the head's weight, in tiles: the logits never exist whole.

For a weighted sum of log-probabilities whose weights are known before (SFT's loss), the gradient is formed in the
forward, tile by tile: three matrix products of the head instead of the four that recomputing in the backward costs,
and no more memory than one tile of logits beside the two gradients.
"""

import torch
from torch import Tensor

from dtrain.losses.vocabulary import (
    Stats,
    VocabShard,
    compute_dtype,
    merge_over,
    on_shard,
    pick,
    shard_sizes,
    tile_rows,
)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [k, n] in max(float32, the dtypes), never rounded to less; into `out` where given."""
    dtype = torch.promote_types(compute_dtype(a.dtype), b.dtype)
    if a.is_cuda and a.dtype == b.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    a, b = a.to(dtype), b.to(dtype)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total in the compute dtype."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(product(a, b))


def head_tile_rows(columns: int, device_type: str) -> int:
    """Tokens of a tile of logits [tokens, columns] that is a product with the head's weight."""
    return tile_rows(columns, device_type, blocks=4, least=64)


def tile_rows_of(weight: Tensor, shard: VocabShard | None) -> int:
    """Tokens per tile for this rank's weight [V/tp, D]: by the largest shard, so that all ranks send the same tiles.

    Where `shard` does not say how large that is, one exchange of shard sizes on the host.
    """
    largest = len(weight) if shard is None else shard.largest
    if largest is None:
        largest = max(shard_sizes(len(weight), shard.group, weight.device))
    return head_tile_rows(largest, weight.device.type)


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

    hidden: [N, D] any float dtype; weight: [V, D] of the same dtype; index [T] int64: the rows of `hidden` that have a
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
    rows_per_tile = rows_per_tile or tile_rows_of(weight, shard)
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    arguments = (hidden, weight, targets, token_weights, index, softcap, shard, rows_per_tile, with_grad)
    return _WeightedLogprobSum.apply(*arguments)


def as_operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A head's weight as it goes into products that give `dtype`: a CPU would round those of bfloat16, a GPU not."""
    return weight if weight.is_cuda and compute_dtype(weight.dtype) == dtype else weight.to(dtype)


class GradientInForward:
    """The gradients of a sum by hidden states and weight, formed tile by tile in the sum's own forward."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype):
        # Zeros where no token is: a rank without any takes part in the gradients' reduction all the same.
        self.hidden: Tensor | None = torch.zeros_like(hidden)  # [N, D]
        self.weight: Tensor | None = torch.zeros(weight.shape, dtype=dtype, device=weight.device)  # [V, D]
        self._weight_dtype = weight.dtype

    def add_tile(self, grad: Tensor, some: Tensor, rows: Tensor, operand: Tensor) -> None:
        """grad [t, V] by the product of rows [t, D], which stand at positions `some` [t], and operand [V, D]."""
        grad = grad.to(operand.dtype)
        self.hidden.index_copy_(0, some, product(grad, operand).to(self.hidden.dtype))
        add_product_(self.weight, grad.t(), rows)

    def scaled(self, grad_total: Tensor) -> tuple[Tensor, Tensor]:
        """Both, times the incoming gradient. In place and once: a copy of [V, D] would be the step's peak."""
        if self.hidden is None or self.weight is None:
            raise RuntimeError("this loss forms its gradient once; compute it again for a second backward")
        hidden, weight = self.hidden, self.weight
        self.hidden = self.weight = None
        return hidden.mul_(grad_total.to(hidden.dtype)), weight.mul_(grad_total).to(self._weight_dtype)


class _WeightedLogprobSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_weights, index, softcap, shard, rows_per_tile, with_grad):
        dtype = compute_dtype(hidden.dtype)
        start_id, group = (0, None) if shard is None else (shard.start, shard.group)
        token_weights = token_weights.to(dtype)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        operand = as_operand(weight, dtype)
        ctx.gradient = GradientInForward(hidden, weight, dtype) if with_grad else None
        for start in range(0, index.numel(), rows_per_tile):
            tile = slice(start, start + rows_per_tile)
            rows = hidden.index_select(0, index[tile]).to(operand.dtype)  # [t, D]
            scale = token_weights[tile, None]  # [t, 1]
            logits = product(rows, operand.t())  # [t, V]
            if softcap is not None:
                logits = logits.div_(softcap).tanh_()
                cap_slope = 1 - logits.square() if with_grad else None
                logits = logits.mul_(softcap)
            local_target, is_mine = on_shard(targets[tile, None], start_id, weight.shape[0])  # [t, 1]
            target_logit = pick(logits, local_target, is_mine, dtype).squeeze(1)
            largest = _row_max(logits)
            exponentials = logits.sub_(largest[:, None]).exp_()  # the logits' memory from here on
            part = exponentials.sum(-1)
            stats = Stats(largest, part.log())
            whole, log_share, target_logit, _ = merge_over(stats, target_logit[None], weight.shape[0], group)
            total += (scale.squeeze(1) * (target_logit.squeeze(0) - whole.m - whole.l)).sum()
            if not with_grad:
                continue
            # d(Σ w·logp)/dlogits = w·(onehot − softmax)
            grad = exponentials.mul_(-scale * (log_share.exp() / part)[:, None])  # [t, V]
            if grad.shape[1]:
                grad.scatter_add_(-1, local_target, scale * is_mine)
            if softcap is not None:
                grad.mul_(cap_slope)
            ctx.gradient.add_tile(grad, index[tile], rows, operand)
        return total

    @staticmethod
    def backward(ctx, grad_total):
        return *ctx.gradient.scaled(grad_total), *[None] * 7


def _row_max(logits: Tensor) -> Tensor:
    """[t]: the largest logit of each row, −inf of none."""
    return logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -float("inf"))
