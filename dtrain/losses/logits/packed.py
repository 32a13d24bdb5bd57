"""Log-probabilities of the next tokens of packed sequences, each cut head-tail over context-parallel ranks on its own.

Where a token lies is arithmetic on the cumulative lengths, for all sequences at once: no loop over them, nothing read
back from the device.
"""

import torch
from torch import Tensor

from dtrain.losses.head.logprobs import TrainingSamplingParams
from dtrain.losses.head.vocabulary import Group, group_rank, group_size
from dtrain.losses.logits.next_token import NO_TARGET, logprobs_of_targets
from dtrain.parallel.collectives import gather_along
from dtrain.parallel.context.batch import held_positions, sequence_of


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """logits [1, T/cp, V/tp], target [1, T] unshifted, cu_seqlens_padded [B + 1] -> [B, unpacked_seqlen − 1]: log p of
    the token after each position of each sequence, 0 beyond its end; an empty sequence gives a row of zeros.

    Sequence b is the span between cu_seqlens_padded[b] and [b + 1]; every cp rank holds its head and tail chunk of
    each, one sequence after the other. target_is_pre_rolled: target [1, T/cp] is shifted and cut already.
    Under cp the incoming gradient is summed over cp. Collectives: those of the log-probabilities over `group`, one
    all-gather over cp. Raises ValueError where shapes do not fit; RuntimeError (on CUDA a device assertion) where 2·cp
    does not divide a sequence's length, the spans go beyond T, or unpacked_seqlen is shorter than a sequence.
    """
    size = group_size(cp_group)
    tokens = vocab_parallel_logits.shape[1] * size
    if target.shape[-1] != (tokens // size if target_is_pre_rolled else tokens):
        raise ValueError(
            f"target has {target.shape[-1]} tokens, the logits {vocab_parallel_logits.shape[1]} on each of {size} cp "
            f"ranks, target_is_pre_rolled={target_is_pre_rolled}"
        )
    ends = cu_seqlens_padded.to(vocab_parallel_logits.device, torch.int64)
    # Tokens after the last sequence are one more, which is not returned.
    ends = torch.cat([ends, ends.new_full((1,), tokens)])
    _check(ends, size, unpacked_seqlen)
    starts, lengths = ends[:-2], ends.diff()[:-1]
    if target_is_pre_rolled:
        following = target.flatten()
    else:
        following = _next_in_sequence(target.flatten(), ends)
        if size > 1:
            following = following[held_positions(ends, tokens, group_rank(cp_group), size)]
    logprobs = logprobs_of_targets(
        vocab_parallel_logits,
        following[None],
        vocab_start_index,
        vocab_end_index,
        group,
        inference_only,
        chunk_size,
        sampling_params,
    ).squeeze(0)  # [T/cp]
    if size > 1:
        logprobs = gather_along(logprobs, 0, cp_group)  # [T], rank after rank
        held = torch.cat([held_positions(ends, tokens, rank, size) for rank in range(size)])
        places = torch.empty_like(held).scatter_(0, held, torch.arange(tokens, device=held.device))
        logprobs = logprobs.index_select(0, places)
    offsets = torch.arange(unpacked_seqlen - 1, device=ends.device)
    inside = offsets < lengths[:, None] - 1  # [B, unpacked_seqlen − 1]
    if not tokens:
        return logprobs.new_zeros(inside.shape)
    places = torch.where(inside, starts[:, None] + offsets, 0)
    return torch.where(inside, logprobs.index_select(0, places.flatten()).view(places.shape), 0)


def _check(ends: Tensor, cp_size: int, unpacked_seqlen: int) -> None:
    lengths = ends.diff()
    rise = (lengths >= 0).all() & (ends[0] == 0)
    torch._assert_async(rise, "cu_seqlens_padded must rise from 0 to at most the number of packed tokens")
    fits = (lengths[:-1] <= unpacked_seqlen).all()
    torch._assert_async(fits, "unpacked_seqlen is shorter than a packed sequence; nothing is cut off")
    if cp_size > 1:
        even = (lengths % (2 * cp_size) == 0).all()
        torch._assert_async(even, f"a packed length is no multiple of {2 * cp_size}, 2·cp; nothing is dropped")


def _next_in_sequence(target: Tensor, ends: Tensor) -> Tensor:
    """[T] -> the token after each in its own sequence, NO_TARGET at its end."""
    positions = torch.arange(len(target), device=target.device)
    last = positions + 1 == ends[1:][sequence_of(positions, ends)]
    return torch.where(last, NO_TARGET, target.roll(-1))
