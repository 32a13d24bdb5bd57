"""Log-probabilities after top-k / top-p filtering from logits whose vocabulary is cut over ranks.

A filter needs whole rows: an all-to-all turns [rows, V/tp] on every rank into [rows/tp, V], each rank filters its rows,
the log-probabilities of all come back in one all-reduce. Rows need not divide by tp, nor shards be even.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.losses.filtering import ROWS_PER_SORT, TrainingSamplingParams, kept, need_top_k_or_top_p_filtering
from dtrain.losses.logprob import fill_rows_
from dtrain.losses.shard import Group, group_rank, group_size, shard_sizes
from dtrain.losses.softmax_stats import compute_dtype
from dtrain.parallel.placement import chunk_bounds


class _Exchange:
    """Rows of a cut vocabulary to whole rows and back, for one group and one set of shard sizes."""

    def __init__(self, columns: int, group: Group, device: torch.device):
        self.group, self.size, self.rank = group, group_size(group), group_rank(group)
        self.columns = shard_sizes(columns, group, device)

    def my_rows(self, rows: int) -> slice:
        return slice(*chunk_bounds(rows, self.size, self.rank))

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


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """[rows, V/tp] on every rank -> [rows/tp, V]: rank r gets the r-th part of the rows, cut as torch.chunk cuts.

    One all-to-all, and one exchange of shard sizes on the host. No gradient. Raises ValueError for other than 2-D.
    """
    if vocab_parallel_logits.dim() != 2:
        raise ValueError(f"[rows, V/tp] is needed, this is a 2D function; it got {tuple(vocab_parallel_logits.shape)}")
    exchange = _Exchange(vocab_parallel_logits.shape[1], tp_group, vocab_parallel_logits.device)
    return exchange.whole_rows(vocab_parallel_logits)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """[rows/tp, V] on every rank -> [rows, V/tp], the inverse of `all_to_all_vp2sq`; the vocabulary is cut as
    torch.chunk cuts. One all-to-all, and one exchange of row counts on the host. No gradient.
    """
    if seq_parallel_logits.dim() != 2:
        raise ValueError(f"[rows/tp, V] is needed, this is a 2D function; it got {tuple(seq_parallel_logits.shape)}")
    # The exchange that undoes it has rows and columns in each other's place.
    transposed = seq_parallel_logits.t()
    exchange = _Exchange(transposed.shape[1], tp_group, seq_parallel_logits.device)
    return exchange.whole_rows(transposed).t().contiguous()


class _SampledLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group, top_k, top_p, chunk_size, inference_only):
        exchange = _Exchange(logits.shape[-1], group, logits.device)
        rule = _Rule(top_k, top_p, sum(exchange.columns))
        target = target.flatten()
        rows = logits.reshape(len(target), logits.shape[-1])
        step = len(rows) if chunk_size is None else chunk_size * max(logits.shape[:-2].numel(), 1)
        logprobs = torch.zeros(target.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
        saves = not inference_only and ctx.needs_input_grad[0]
        softmax = None
        for start in range(0, len(rows), max(step, 1)):
            shard = rows[start : start + step]
            mine = exchange.my_rows(len(shard))
            mine = slice(start + mine.start, start + mine.stop)
            logp = rule.log_softmax(exchange.whole_rows(shard))
            logprobs[mine] = rule.at_target(logp, target[mine])
            if saves and chunk_size is None:
                softmax = logp.exp_()
        if exchange.size > 1:
            dist.all_reduce(logprobs, group=group)
        value = logprobs.view(logits.shape[:-1])
        if inference_only:
            ctx.mark_non_differentiable(value)
        elif saves:
            # One local softmax, or with chunks the logits, which are filtered again.
            live = rule.valid(target) & (logprobs > -float("inf"))
            ctx.save_for_backward(logits if softmax is None else softmax, target, live)
            ctx.from_softmax, ctx.shape, ctx.dtype = softmax is not None, logits.shape, logits.dtype
            ctx.exchange, ctx.rule, ctx.step = exchange, rule, step
        return value

    @staticmethod
    def backward(ctx, upstream):
        saved, target, live = ctx.saved_tensors
        exchange, rule = ctx.exchange, ctx.rule
        upstream = torch.where(live, upstream.flatten(), 0).to(compute_dtype(ctx.dtype))
        count = len(target)
        rows = saved.reshape(-1 if ctx.from_softmax else count, saved.shape[-1])
        grad = torch.empty(count, ctx.shape[-1], dtype=ctx.dtype, device=saved.device)
        for start in range(0, count, max(ctx.step, 1)):
            end = min(start + ctx.step, count)
            mine = exchange.my_rows(end - start)
            mine = slice(start + mine.start, start + mine.stop)
            if ctx.from_softmax:
                p = rows
            else:
                p = rule.log_softmax(exchange.whole_rows(rows[start:end])).exp_()
            g = upstream[mine, None]
            full = p * -g
            fill_rows_(full, g.squeeze(1) == 0)
            full.scatter_add_(-1, torch.where(g == 0, 0, target[mine, None]), g)
            grad[start:end] = exchange.shards(full.to(ctx.dtype), end - start)
        return grad.view(ctx.shape), *[None] * 6


class _Rule:
    """A filter over a vocabulary of known size."""

    def __init__(self, top_k: int | None, top_p: float, vocabulary: int):
        self.top_k, self.top_p, self.vocabulary = top_k, top_p, vocabulary
        self.filters = need_top_k_or_top_p_filtering(TrainingSamplingParams(top_k, top_p))

    def valid(self, target: Tensor) -> Tensor:
        return (target >= 0) & (target < self.vocabulary)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """[n, V] -> log p over the tokens that stay, −inf for the others."""
        logp = torch.empty(logits.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
        for start in range(0, len(logits), ROWS_PER_SORT):
            block = logits[start : start + ROWS_PER_SORT]
            if self.filters:
                mask = kept(block, self.top_k, self.top_p)
                block = block.masked_fill(~mask, -float("inf"))
            torch.log_softmax(block, -1, dtype=logp.dtype, out=logp[start : start + ROWS_PER_SORT])
        return logp

    def at_target(self, logp: Tensor, target: Tensor) -> Tensor:
        """log p(target) [n]; 0 where the target is no token."""
        valid = self.valid(target)
        chosen = logp.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1)
        return torch.where(valid, chosen, 0)


class DistributedLogprobWithSampling:
    """log p(target) under top-k / top-p filtering, from logits with a cut vocabulary."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        """logits [B, S, V/tp], target [B, S] global ids -> [B, S] on every rank, float32 (float64 from float64).

        The rule is `apply_top_k_top_p`'s. A filtered target: −inf and a zero gradient row; a target outside [0, V): 0.0
        and a zero gradient. One softmax [B·S/tp, V] is saved for the backward. Forward: one all-to-all, one all-reduce
        of B·S numbers, one exchange of shard sizes on the host; backward: one all-to-all.
        """
        return _SampledLogprob.apply(vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only)


class ChunkedDistributedLogprobWithSampling:
    """`DistributedLogprobWithSampling` in chunks: less memory, and the backward filters again."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        chunk_size: int,
        inference_only: bool = False,
    ) -> Tensor:
        """As `DistributedLogprobWithSampling.apply`; extra memory O(chunk_size · V), chunk_size in sequence positions.

        Per chunk one all-to-all, in the backward two.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size}: a chunk holds at least one position")
        return _SampledLogprob.apply(vocab_parallel_logits, target, tp_group, top_k, top_p, chunk_size, inference_only)
