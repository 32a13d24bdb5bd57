"""Head-tail layout of packed sequences over context-parallel ranks, each sequence cut by itself."""

import torch
from torch import Tensor


def sequence_of(positions: Tensor, ends: Tensor) -> Tensor:
    """The sequence [n] that each of `positions` [n] lies in; ends [N + 1]: the first is 0."""
    return torch.searchsorted(ends[1:].contiguous(), positions, right=True)


def held_positions(ends: Tensor, tokens: int, rank: int, size: int) -> Tensor:
    """The packed positions [tokens / size] that a cp rank holds of sequences ending at `ends` [N + 1], in its order:
    rising, the head and the tail chunk of each."""
    places = torch.arange(tokens // size, device=ends.device)
    sequence = sequence_of(places, torch.div(ends, size, rounding_mode="floor"))
    start, end = ends[sequence], ends[sequence + 1]
    chunk = torch.div(end - start, 2 * size, rounding_mode="floor")
    offset = places - torch.div(start, size, rounding_mode="floor")
    in_tail = offset >= chunk
    return start + torch.where(in_tail, (2 * size - 1 - rank) * chunk + offset - chunk, rank * chunk + offset)
