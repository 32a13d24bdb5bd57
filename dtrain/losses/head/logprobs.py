"""Log-probabilities of targets straight from hidden states and the head's weight: the logits exist one tile at a time.

Tiles over tokens and vocabulary; per tile one matrix product and the row statistics of `vocabulary`, merged over
tiles and then over ranks. The backward computes the tiles again: four products of the head in all, and no more memory
than a tile beside the two gradients. For a sum with known weights `weighted_sum` needs three.
"""

from dataclasses import dataclass
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
    block,
    compute_dtype,
    merge,
    merge_over,
    on_shard,
    part_stats,
    pick,
    product,
)


@dataclass(frozen=True)
class Scaling:
    """From the product of hidden states and the head's weight to logits: Gemma 2's softcap and the temperature,
    logits = softcap · tanh(product / softcap) / temperature (arXiv:2408.00118, section 2); softcap None for none.

    Raises ValueError for a temperature or softcap that is not positive.
    """

    temperature: float
    softcap: float | None

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError(f"temperature={self.temperature} and softcap={self.softcap} must be positive")

    def logits_(self, product: Tensor) -> Tensor:
        """product [t, V] to logits [t, V], in place."""
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        return product if self.temperature == 1.0 else product.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """d logits / d product at logits [t, V]: a new tensor [t, V] or a number; None for 1."""
        if self.softcap is None:
            return None if self.temperature == 1.0 else 1.0 / self.temperature
        ratio = logits * (self.temperature / self.softcap)
        return ratio.square_().sub_(1).mul_(-1.0 / self.temperature)


@dataclass
class TrainingSamplingParams:
    """Filters by which completions were sampled. top_k None or −1, top_p 1.0, temperature 1.0: off.

    The functions here read top_k and top_p; who calls them has divided the logits by the temperature.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def need_top_k_or_top_p_filtering(sampling_params: TrainingSamplingParams | None) -> bool:
    """Return whether `sampling_params` leave any token out."""
    if sampling_params is None:
        return False
    top_k, top_p = sampling_params.top_k, sampling_params.top_p
    return (top_k is not None and top_k > 0) or (top_p is not None and top_p != 1.0)


class HeadLogprobs(NamedTuple):
    """Per token, shaped as the targets, 0 where there is no target; None where it was not asked for.

    logprobs: log p(target). entropy: −Σ p·log p. log_p2: log Σ p². The first two carry gradients.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    log_p2: Tensor | None = None


@dataclass(frozen=True)
class _Head(Scaling):
    """Settings of the head: from products to logits, the values to compute, and the tiles."""

    shard: VocabShard
    entropy: bool
    squares: bool
    tile: tuple[int, int] | None

    @property
    def fields(self) -> int:
        """Number of `Stats` to compute: p² comes with p·log p."""
        return 4 if self.squares else 2 + self.entropy


def logprobs_from_hidden_states(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    entropy: bool = False,
    log_p2: bool = False,
    index: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> HeadLogprobs:
    """log softmax(softcap · tanh(hidden · weightᵀ / softcap) / temperature) at targets, and what else is asked of the
    same softmax, in one pass.

    hidden [..., D], any float dtype; weight [V, D]; targets [...] int64 global ids. A target outside [0, V), −100
    included, gives 0 everywhere, no gradient, and costs nothing, whatever its hidden state holds.
    Values in max(float32, the dtype), as are all products and sums; gradients in the inputs' dtypes, the weight's
    summed in max(float32, the dtype). log p and the entropy are differentiable, any number of times.

    shard: weight is this rank's part of the vocabulary, targets the same on every rank. The values come back on every
    rank; the gradients are the shard's own: hidden's has still to be summed over the group. One all-gather of 3 to 5
    numbers per token forward, none backward.
    index [T] int64: the flat positions that have a target, each once; who knows them on the host saves a GPU the work
    on the others. Without it a CPU finds them, a GPU (which would have to stop for that) computes all positions.
    tile: tokens and ids of the largest tile of logits.
    Raises ValueError for a temperature or softcap that is not positive.
    """
    flat, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    if index is None and not hidden.is_cuda:
        has_target = flat_targets >= 0
        if shard is None:
            has_target &= flat_targets < weight.shape[0]
        if not has_target.all():
            index = has_target.nonzero().squeeze(1)
    head = _Head(temperature, softcap, shard or WHOLE, entropy, log_p2, tile)
    chosen = flat_targets if index is None else flat_targets.index_select(0, index)
    values = _HiddenLogprobs.apply(flat, weight, chosen, index, head)

    def placed(value: Tensor) -> Tensor:
        if index is not None:
            value = value.new_zeros(flat_targets.shape).index_copy(0, index, value)
        return value.view(targets.shape)

    logprobs, *others = values
    optional = zip(others, (entropy, log_p2), strict=True)
    return HeadLogprobs(placed(logprobs), *(placed(value) if is_asked else None for value, is_asked in optional))


class _HiddenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, index, head):
        tiles = _Tiles(head, len(targets), hidden, weight)
        local, is_mine = on_shard(targets, head.shard.start, len(weight))
        packed = torch.empty(head.fields, len(targets), dtype=tiles.dtype, device=hidden.device)
        target_logit = torch.zeros(len(targets), dtype=tiles.dtype, device=hidden.device)
        for some in rounds(tiles.of_tokens(), hidden):
            rows = _rows(hidden, index, some).to(tiles.operand)
            parts = []
            for ids in tiles.of_ids():
                logits = product(rows, weight[ids].t(), out=tiles.memory(some, ids, 0))
                column, here = _in_tile(local[some], is_mine[some], ids)
                part, at_target = _stats_of_tile(logits, tiles.memory(some, ids, 1), column, here, head)
                parts.append(Stats(*part.unbind()))
                target_logit[some] += at_target
            whole = parts[0]
            if len(parts) > 1:
                whole, _ = merge(Stats(*torch.stack([part.pack() for part in parts], 1).unbind()))
            packed[:, some] = whole.pack()
        merged = merge_over(Stats(*packed.unbind()), len(weight), head.shard.group, target_logit[None])
        stats, _, (target_logit,), vocabulary, _ = merged
        valid = (targets >= 0) & (targets < vocabulary)
        logprobs = torch.where(valid, (target_logit - stats.m) - stats.l, 0)
        entropy = None if stats.neg_entropy is None or not head.entropy else torch.where(valid, -stats.neg_entropy, 0)
        log_p2 = None if stats.squares is None else torch.where(valid, stats.squares.log(), 0)
        if log_p2 is not None:
            ctx.mark_non_differentiable(log_p2)
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):
            lse = torch.where(valid, stats.m + stats.l, 0)
            kept_entropy = None if entropy is None else entropy.clone()
            ctx.save_for_backward(hidden, weight, local, is_mine & valid, valid, index, lse, kept_entropy)
            ctx.head = head
        return logprobs, entropy, log_p2

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, _log_p2):
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 5
        hidden, weight, local, is_mine, valid, index, lse, entropy = ctx.saved_tensors
        head = ctx.head
        tiles = _Tiles(head, len(lse), hidden, weight)
        by_logprob = torch.zeros_like(lse) if grad_logprobs is None else torch.where(valid, grad_logprobs, 0)
        by_logprob = by_logprob.to(tiles.dtype)[:, None]  # [T, 1]
        entropy = None if grad_entropy is None else entropy[:, None]
        by_entropy = None if grad_entropy is None else torch.where(valid, grad_entropy, 0).to(tiles.dtype)[:, None]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.zeros_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros(weight.shape, dtype=tiles.dtype, device=weight.device) if wants_weight else None
        for some in rounds(tiles.of_tokens(), hidden):
            rows = _rows(hidden, index, some).to(tiles.operand)
            if rows.is_cuda or not valid[some].all():
                rows = torch.where(valid[some, None], rows, 0)
            rows_grad = torch.zeros_like(rows, dtype=tiles.dtype)
            for ids in tiles.of_ids():
                part = weight[ids].to(tiles.operand)
                logits = product(rows, part.t(), out=tiles.memory(some, ids, 0))
                at_target = _in_tile(local[some], is_mine[some], ids)
                second = None if by_entropy is None else tiles.memory(some, ids, 1)
                by = [None if one is None else one[some] for one in (by_logprob, by_entropy, entropy)]
                grad = _gradient_of_tile(logits, second, lse[some, None], *by, *at_target, head, tiles.operand)
                if hidden_grad is not None:
                    add_product_(rows_grad, grad, part)
                if weight_grad is not None:
                    add_product_(weight_grad[ids], grad.t(), rows)
            if hidden_grad is not None:
                hidden_grad[some if index is None else index[some]] = rows_grad.to(hidden.dtype)
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None


@Fused
def _stats_of_tile(
    products: Tensor, scratch: Tensor, column: Tensor, here: Tensor, head: _Head
) -> tuple[Tensor, Tensor]:
    """Return the statistics of a tile's logits, from products [t, v], as `Stats.pack` has them, and the logits at
    `column` [t, 1] where they are `here`, [t]. Overwrites products and scratch [t, v]."""
    logits = head.logits_(own(products))
    at_target = pick(logits, column, here, scratch.dtype).squeeze(1)
    second = logits if head.fields > 2 else None
    return part_stats(logits, own(scratch), second, squares=head.squares).pack(), at_target


@Fused
def _gradient_of_tile(
    products: Tensor,
    scratch: Tensor | None,
    lse: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    entropy: Tensor | None,
    column: Tensor,
    here: Tensor,
    head: _Head,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient by products [t, v] in `dtype`. lse, by_logprob, by_entropy, entropy, column, here [t, 1].
    Overwrites products and scratch [t, v].

    d log p_t / dz_v = [v = t] − p_v;  dH / dz_v = −p_v · (log p_v + H).
    """
    logits = head.logits_(own(products))
    slope = head.slope(logits)
    logp = logits.sub_(lse)
    if by_entropy is None or scratch is None or entropy is None:
        grad = logp.exp_().mul_(-by_logprob)
    else:
        grad = torch.exp(logp, out=own(scratch))
        factor = logp.add_(entropy).mul_(-by_entropy)
        grad.mul_(factor.sub_(by_logprob))
    add_at_(grad, column, by_logprob * here)
    if slope is not None:
        grad.mul_(slope)
    return grad.to(dtype)


class _Tiles:
    """The cut of [tokens, ids] into tiles, and memory that they share."""

    def __init__(self, head: _Head, tokens: int, hidden: Tensor, weight: Tensor):
        self.dtype = torch.promote_types(compute_dtype(hidden.dtype), weight.dtype)
        # Matrix products take operands as they are on a GPU, which sums them in float32; a CPU rounds, so they are
        # cast.
        self.operand = torch.promote_types(hidden.dtype, weight.dtype) if hidden.is_cuda else self.dtype
        self.tokens, self.ids, self.device = tokens, len(weight), hidden.device
        rows, columns = head.tile or block(hidden.device.type)
        elements = rows * columns
        self.rows = max(1, min(rows, tokens))
        self.columns = max(1, min(self.ids, columns if head.tile else max(columns, elements // self.rows)))
        if not head.tile:
            self.rows = max(self.rows, min(tokens, elements // self.columns))
        self._memory: dict[int, Tensor] = {}

    def of_tokens(self) -> list[slice]:
        return [slice(start, min(start + self.rows, self.tokens)) for start in range(0, self.tokens, self.rows)]

    def of_ids(self) -> list[slice]:
        starts = range(0, max(self.ids, 1), self.columns)
        return [slice(start, min(start + self.columns, self.ids)) for start in starts]

    def memory(self, some: slice, ids: slice, which: int) -> Tensor:
        """[tokens, ids] of a tile, uninitialised; the same memory again for the same `which`."""
        if which not in self._memory:
            self._memory[which] = torch.empty(self.rows * self.columns, dtype=self.dtype, device=self.device)
        shape = (some.stop - some.start, ids.stop - ids.start)
        return self._memory[which][: shape[0] * shape[1]].view(shape)


def _rows(hidden: Tensor, index: Tensor | None, some: slice) -> Tensor:
    """The hidden states [t, D] of a tile of tokens."""
    return hidden[some] if index is None else hidden.index_select(0, index[some])


def _in_tile(local: Tensor, is_mine: Tensor, ids: slice) -> tuple[Tensor, Tensor]:
    """The shard's columns [t] of targets as columns [t, 1] of a tile, and whether they are there."""
    here = is_mine & (local >= ids.start) & (local < ids.stop)
    return torch.where(here, local - ids.start, 0)[:, None], here[:, None]
