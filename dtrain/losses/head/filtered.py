"""Log-probabilities of targets from hidden states under the filter that they were drawn with: top-k, then top-p, over
full rows of logits as sampling engines do it.

Top-p (nucleus sampling): Holtzman et al., arXiv:1904.09751, section 3.1. Top-k: Fan et al., arXiv:1805.04833. Tokens
are taken in chunks, each computed again in the backward. A filter needs whole rows: an all-to-all turns [rows, V/tp] on
every rank into [rows/tp, V], each rank filters its rows, the log-probabilities of all come back in one all-reduce. Rows
need not divide by tp, nor shards be even.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtrain.base.fused import Fused
from dtrain.base.top_p import kept_by_top_p
from dtrain.losses.head.logprobs import TrainingSamplingParams, need_top_k_or_top_p_filtering
from dtrain.losses.head.vocabulary import (
    WHOLE,
    Group,
    VocabShard,
    add_at_,
    add_product_,
    compute_dtype,
    fill_rows_,
    group_rank,
    group_size,
    product,
    shard_sizes,
)
from dtrain.parallel.placement import chunk_bounds

# Tokens whose logits exist at once.
_CHUNK = {"cpu": 256, "cuda": 2048}

# Rows sorted at once: a sort holds values and indices of all of them.
ROWS_PER_SORT = 256
_ROWS_OF_GPU = 512  # filtered at once, unsorted: a block works on each, and there are more than run at a time


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
    """log p(target) of the distribution that is left after temperature, top-k and top-p, shaped as targets [...]; 0
    where there is no target, −inf (and no gradient) where the filter leaves it out.

    hidden [..., D], weight [V, D] or with `shard` this rank's rows of it, targets [...] int64 global ids, index [T]
    int64 the flat positions of targets. Computed in max(float32, the dtypes), on a GPU from operands as they are; the
    weight's gradient is then summed in float32 over the chunks. With `shard` the values come back on
    every rank, and hidden's gradient has still to be summed over the group; per chunk one all-to-all and one all-reduce
    forward, two and one in the backward.
    """
    group = (shard or WHOLE).group
    step = _CHUNK.get(hidden.device.type, _CHUNK["cuda"])
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)  # [T, D]
    chosen = targets.flatten().index_select(0, index)
    dtype = torch.promote_types(compute_dtype(hidden.dtype), weight.dtype)
    held, total, anchor = weight.detach(), None, None
    if hidden.is_cuda and hidden.dtype == weight.dtype != dtype:  # no copy of the weight in float32
        total = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if weight.requires_grad else None
        anchor = _SummedBeside.apply(weight, total)

    def of_chunk(rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        if anchor is None:
            logits = rows.to(dtype) @ weight.to(dtype).t()  # [t, V/tp]
        else:
            logits = _WideProduct.apply(rows, held, total, anchor)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits / sampling.temperature
        return SampledLogprob.apply(logits[None], chosen[None], group, sampling.top_k, sampling.top_p)[0]

    parts = [
        checkpoint(of_chunk, rows[start : start + step], weight, chosen[start : start + step], use_reentrant=False)
        for start in range(0, len(index), step)
    ]
    # Without a target the sum over nothing keeps hidden and weight in the graph, whose collectives go on.
    values = torch.cat(parts) if parts else rows.to(dtype).sum(1) + weight[:0].to(dtype).sum()
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
    """The mask of the tokens of logits [n, V] that pass the filter, [n, V]."""
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


class _SummedBeside(torch.autograd.Function):
    """A scalar 0 in place of a weight: the products that take it add to `total`, the gradient that the weight gets."""

    @staticmethod
    def forward(ctx, weight, total):
        ctx.total, ctx.dtype = total, weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device)

    @staticmethod
    def backward(ctx, _):
        if ctx.total is None:
            raise RuntimeError("this loss sums its weight's gradient once; compute it again for a second backward")
        total, ctx.total = ctx.total, None
        return total.to(ctx.dtype), None


class _WideProduct(torch.autograd.Function):
    """rows [t, D] · weightᵀ [V, D] in float32 from operands of half of that; adds the weight's gradient to `total`."""

    @staticmethod
    def forward(ctx, rows, weight, total, anchor):
        ctx.save_for_backward(rows, weight)
        ctx.total = total
        return product(rows, weight.t())

    @staticmethod
    def backward(ctx, upstream):
        rows, weight = ctx.saved_tensors
        upstream = upstream.to(rows.dtype)
        if ctx.total is not None:
            add_product_(ctx.total, upstream.t(), rows)
        of_rows = product(upstream, weight).to(rows.dtype) if ctx.needs_input_grad[0] else None
        return of_rows, None, None, upstream.new_zeros((), dtype=torch.float32)


class Exchange:
    """Rows of a cut vocabulary to whole rows and back, for one group and one set of shard sizes."""

    def __init__(self, columns: int, group: Group, device: torch.device):
        self.group, self.size, self.rank = group, group_size(group), group_rank(group)
        self.columns = shard_sizes(columns, group, device)

    def chunks(self, rows: int, step: int) -> Iterator[tuple[slice, slice]]:
        """Runs of `step` of so many rows, and which of each this rank has whole."""
        for start in range(0, rows, max(step, 1)):
            end = min(start + step, rows)
            mine = chunk_bounds(end - start, self.size, self.rank)
            yield slice(start, end), slice(start + mine[0], start + mine[1])

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
        dist.all_to_all_single(received, tensor.flatten(), list(receive), list(send), group=self.group)
        return received


class SampledLogprob(torch.autograd.Function):
    """log p(target) [B, S] under top-k / top-p filtering from logits [B, S, V/tp], target [B, S]; arguments as
    `forward` has them. Without chunk_size one local softmax is saved for the backward; with it (positions of the
    sequence at once) the logits are, and filtered again."""

    @staticmethod
    def forward(ctx, logits, target, group, top_k, top_p, chunk_size=None):
        exchange = Exchange(logits.shape[-1], group, logits.device)
        rule = _Rule(top_k, top_p, sum(exchange.columns))
        target = target.flatten()
        rows = logits.detach().reshape(len(target), logits.shape[-1])
        step = len(rows) if chunk_size is None else chunk_size * max(logits.shape[:-2].numel(), 1)
        logprobs = torch.zeros(target.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
        saves = ctx.needs_input_grad[0]
        softmax = None
        for chunk, mine in exchange.chunks(len(rows), step):
            whole = exchange.whole_rows(rows[chunk])
            softmax = torch.empty_like(whole, dtype=logprobs.dtype) if saves and chunk_size is None else None
            logprobs[mine] = rule.logprobs(whole, target[mine], softmax)
        if exchange.size > 1:
            dist.all_reduce(logprobs, group=group)
        if saves:
            # One local softmax, or with chunks the logits, which are filtered again.
            live = rule.valid(target) & (logprobs > -float("inf"))
            ctx.save_for_backward(logits if softmax is None else softmax, target, live)
            ctx.from_softmax, ctx.shape, ctx.dtype = softmax is not None, logits.shape, logits.dtype
            ctx.exchange, ctx.rule, ctx.step = exchange, rule, step
        return logprobs.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx, upstream):
        saved, target, live = ctx.saved_tensors
        exchange, rule = ctx.exchange, ctx.rule
        upstream = torch.where(live, upstream.flatten(), 0).to(compute_dtype(ctx.dtype))
        count = len(target)
        rows = saved.reshape(-1 if ctx.from_softmax else count, saved.shape[-1])
        grad = torch.empty(count, ctx.shape[-1], dtype=ctx.dtype, device=saved.device)
        for chunk, mine in exchange.chunks(count, ctx.step):
            p = rows
            if not ctx.from_softmax:
                whole = exchange.whole_rows(rows[chunk])
                p = torch.empty_like(whole, dtype=upstream.dtype)
                rule.logprobs(whole, target[mine], p)
            full = _gradient(p, upstream[mine, None], target[mine, None], ctx.dtype)
            grad[chunk] = exchange.shards(full, chunk.stop - chunk.start)
        return grad.view(ctx.shape), *[None] * 5


class _Rule:
    """A filter over a vocabulary of known size."""

    def __init__(self, top_k: int | None, top_p: float, vocabulary: int):
        self.top_k, self.top_p, self.vocabulary = top_k, top_p, vocabulary
        self.filters = need_top_k_or_top_p_filtering(TrainingSamplingParams(top_k, top_p))

    def valid(self, target: Tensor) -> Tensor:
        return (target >= 0) & (target < self.vocabulary)

    def logprobs(self, logits: Tensor, target: Tensor, softmax: Tensor | None) -> Tensor:
        """Return log p(target) [n] over the tokens of logits [n, V] that stay, −inf for the others, 0 where the target
        is no token. softmax [n, V]: p is written there."""
        valid = self.valid(target)
        columns = torch.where(valid, target, 0).unsqueeze(-1)
        chosen = torch.empty(target.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
        step = _ROWS_OF_GPU if logits.is_cuda else ROWS_PER_SORT
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            mask = kept(logits[rows], self.top_k, self.top_p) if self.filters else None
            chosen[rows] = _at_target(logits[rows], mask, columns[rows], None if softmax is None else softmax[rows])
        return torch.where(valid, chosen, 0)


@Fused
def _at_target(logits: Tensor, mask: Tensor | None, columns: Tensor, softmax: Tensor | None) -> Tensor:
    """Return log p at columns [n, 1] over the tokens of logits [n, V] in the mask (None: all), [n]. p is written to
    softmax."""
    remaining = logits if mask is None else logits.masked_fill(~mask, -float("inf"))
    logp = torch.log_softmax(remaining, -1, dtype=compute_dtype(logits.dtype), out=softmax)
    chosen = logp.gather(-1, columns).squeeze(-1)
    if softmax is not None:
        logp.exp_()
    return chosen


@Fused
def _gradient(p: Tensor, upstream: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return upstream · (onehot − p) [n, V] in `dtype`, 0 in rows of upstream 0. upstream, target [n, 1]."""
    full = p * -upstream
    is_off = upstream == 0
    fill_rows_(full, is_off.squeeze(1))
    add_at_(full, torch.where(is_off, 0, target), upstream)
    return full.to(dtype)
