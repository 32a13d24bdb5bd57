"""Log-probabilities after top-k / top-p filtering from logits whose vocabulary is cut over ranks, and the exchange from
shards to whole rows that filters need. `losses.head.filtered` does the work.
"""

from torch import Tensor

from dtrain.losses.head.filtered import Exchange, SampledLogprob
from dtrain.losses.head.vocabulary import Group
from dtrain.losses.logits.logprob import check_chunk


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """[rows, V/tp] on every rank -> [rows/tp, V]: rank r gets the r-th part of the rows, cut as torch.chunk cuts.

    One all-to-all, and one exchange of shard sizes on the host. No gradient. Raises ValueError for other than 2-D.
    """
    if vocab_parallel_logits.dim() != 2:
        raise ValueError(f"[rows, V/tp] is needed, this is a 2D function; it got {tuple(vocab_parallel_logits.shape)}")
    exchange = Exchange(vocab_parallel_logits.shape[1], tp_group, vocab_parallel_logits.device)
    return exchange.whole_rows(vocab_parallel_logits)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """[rows/tp, V] on every rank -> [rows, V/tp], the inverse of `all_to_all_vp2sq`; the vocabulary is cut as
    torch.chunk cuts. One all-to-all, and one exchange of row counts on the host. No gradient.
    """
    if seq_parallel_logits.dim() != 2:
        raise ValueError(f"[rows/tp, V] is needed, this is a 2D function; it got {tuple(seq_parallel_logits.shape)}")
    # The exchange that undoes it has rows and columns in each other's place.
    transposed = seq_parallel_logits.t()
    exchange = Exchange(transposed.shape[1], tp_group, seq_parallel_logits.device)
    return exchange.whole_rows(transposed).t().contiguous()


def sampled_logprobs(
    logits: Tensor,
    target: Tensor,
    group: Group,
    top_k: int | None,
    top_p: float,
    chunk_size: int | None,
    inference_only: bool,
) -> Tensor:
    """logits [B, S, V/tp], target [B, S] -> [B, S]: `DistributedLogprobWithSampling.apply`, in chunks where asked."""
    check_chunk(chunk_size)
    return SampledLogprob.apply(logits.detach() if inference_only else logits, target, group, top_k, top_p, chunk_size)


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
        return sampled_logprobs(vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only)


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
        """Return what `DistributedLogprobWithSampling.apply` does, [B, S]; extra memory O(chunk_size · V), chunk_size
        in sequence positions. Per chunk one all-to-all, in the backward two.
        """
        return sampled_logprobs(vocab_parallel_logits, target, tp_group, top_k, top_p, chunk_size, inference_only)
