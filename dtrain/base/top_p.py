"""Top-p (nucleus) masks over a vocabulary, by a search over the values instead of a sort of them.

A float's bits, read as an integer, are in the order of the floats; below zero in the reverse order. The last value kept
is built bit by bit from the highest one on: each pass sums the probabilities of what is at least as large as some trial
values. Every sum is in float64. Nothing is read back to the host.
"""

import torch
from torch import Tensor

from dtrain.base.fused import Fused

_INTEGER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
_INTEGER[torch.float16] = torch.int16
_INFINITY = {torch.float64: 0x7FF0_0000_0000_0000, torch.float32: 0x7F80_0000}  # its bits
_INFINITY |= {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_FEW = 2**22  # elements up to which passes cost more than sums
_BITS, _BITS_OF_FEW = 2, 4  # found in one pass; each trial value is another sum


def smallest_kept_value(values: Tensor, probabilities: Tensor, share: Tensor) -> Tensor:
    """Return [n, 1] of values [n, V], any float dtype: the largest v for which the probabilities [n, V] of all tokens
    with values ≥ v sum to at least `share` [n, 1] float64, at most the sum of all. NaN where a row has NaN."""
    are_few = values.numel() <= _FEW
    step = _BITS_OF_FEW if are_few else _BITS
    share = share.clamp(min=torch.finfo(torch.float64).tiny)
    order = torch.zeros(len(values), 1, dtype=torch.int64, device=values.device)  # from 0 up
    for shift in range(torch.iinfo(_INTEGER[values.dtype]).bits - step, -1, -step):
        order = _with_digit(order, torch.tensor(shift), values, probabilities, share, are_few)
    return _value_of(order, values.dtype)


@Fused
def _with_digit(
    order: Tensor, shift: Tensor, values: Tensor, probabilities: Tensor, share: Tensor, are_few: bool
) -> Tensor:
    """Return `order` [n, 1] with the next bits of the place, from bit `shift` on, a scalar of the host. No argument is
    a number, which a compiler would make a variable."""
    digits = torch.arange(1, 2 ** (_BITS_OF_FEW if are_few else _BITS), device=values.device)  # [trials]
    # Below the place of −inf are NaNs, which nothing is larger than: as trial values they count as −inf.
    least = -1 - _INFINITY[values.dtype]
    trial = _value_of(order | (digits << shift), values.dtype, least)  # [n, trials], ascending
    masses = [
        torch.where(values >= threshold, probabilities, 0).sum(-1, keepdim=True, dtype=torch.float64)
        for threshold in trial.split(1, 1)
    ]
    return order | ((torch.cat(masses, 1) >= share).sum(-1, keepdim=True) << shift)


def _value_of(order: Tensor, dtype: torch.dtype, least: int | None = None) -> Tensor:
    """Return the floats at places `order`, int64 from 0 on, of all floats in order; none below that of bits `least`."""
    integer = _INTEGER[dtype]
    lowest = torch.iinfo(integer).min
    signed = order ^ lowest if integer is torch.int64 else order + lowest  # 64 bits of places leave no room to add
    signed = signed if least is None else signed.clamp(min=least)
    return torch.where(signed >= 0, signed, ~(signed - lowest)).to(integer).view(dtype)


def top_p_mask(logits: Tensor, top_p: float) -> Tensor:
    """Return the mask [n, V] of logits [n, V], some of which may be −inf: the likeliest tokens up to the one whose
    probability makes the sum reach top_p, at least one, equal ones by lower id. A row with NaN or with nothing but −inf
    has no distribution, and no token is kept."""
    p = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    whole = p.sum(-1, keepdim=True, dtype=torch.float64)
    share = whole.clamp(max=top_p)
    return _down_to(smallest_kept_value(logits, p, share), logits, p, share) | (whole < top_p)  # by rounding


@Fused
def _down_to(last: Tensor, logits: Tensor, p: Tensor, share: Tensor) -> Tensor:
    """Return the mask [n, V] of what is above `last` [n, 1], and of what equals it as long as the sum is short of
    `share` [n, 1]."""
    above, equal = logits > last, logits == last
    before = torch.where(above, p, 0).sum(-1, keepdim=True, dtype=torch.float64)
    each = torch.where(equal, p, 0).amax(-1, keepdim=True).to(torch.float64)
    places = equal.cumsum(-1) - 1  # [n, V], among the equal ones
    return above | (equal & ((before + places * each < share) | (places == 0)))
