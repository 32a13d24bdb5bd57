"""Softmax and log-softmax of logits whose vocabulary is cut over ranks: each rank's own columns, over the whole
vocabulary."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.logprob import fill_rows_, rows_within
from dtrain.losses.shard import Group, group_all_reduce_sum
from dtrain.losses.softmax_stats import Stats, compute_dtype, merge_over, part_stats, tiles


def _log_softmax(logits: Tensor, group: Group, temperature: float = 1.0) -> Tensor:
    """A new tensor [.., v] in the compute dtype. One all-gather."""
    dtype = compute_dtype(logits.dtype)
    logp = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    leading = logits.shape[:-1]
    stats = Stats(*logp.new_empty(2, *leading).unbind())
    for index in tiles(leading, rows_within(logits, None)):
        tile = logits[index] if temperature == 1.0 else logits[index].to(dtype) / temperature
        part = part_stats(tile, logp[index])
        stats.m[index], stats.l[index] = part.m, part.l
    whole, log_share, _, _ = merge_over(stats, None, logits.shape[-1], group)
    if whole is not stats:
        logp.add_(log_share.unsqueeze(-1))
        fill_rows_(logp, (stats.m == -float("inf")) & (whole.m != -float("inf")), -float("inf"))
    return logp


@torch.no_grad()
def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """logits [.., V/tp] -> log p of this rank's ids, same shape, float32 (float64 from float64). No gradient."""
    return _log_softmax(vocab_parallel_logits, group)


@torch.no_grad()
def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """logits [.., V/tp] -> p of this rank's ids, same shape, float32 (float64 from float64). No gradient."""
    return _log_softmax(vocab_parallel_logits, group).exp_()


class _VocabParallelLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature, group):
        logp = _log_softmax(logits, group, temperature)
        ctx.save_for_backward(logp)
        ctx.temperature, ctx.group, ctx.dtype = temperature, group, logits.dtype
        return logp

    @staticmethod
    def backward(ctx, upstream):
        (logp,) = ctx.saved_tensors
        total = group_all_reduce_sum(upstream.sum(-1, keepdim=True), ctx.group)
        grad = torch.addcmul(upstream, logp.exp(), total, value=-1)
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None


def vocab_parallel_log_softmax(logits: Tensor, temperature: float, *, tp_group: Group = None) -> Tensor:
    """log softmax(logits / temperature) of this rank's ids: [.., V/tp] as the logits (a DTensor's local shard),
    float32 (float64 from float64), differentiable.

    Without a group the plain one. Forward one all-gather of 3 numbers per row, backward one all-reduce of one.
    """
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    return _VocabParallelLogSoftmax.apply(logits, temperature, tp_group)
