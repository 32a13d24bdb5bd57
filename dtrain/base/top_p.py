"""Top-p (nucleus) masks over a vocabulary, by a binary search over the values instead of a sort.

Top-p sampling keeps the tokens with the highest probabilities whose sum reaches p. The usual way sorts the vocabulary.
This module instead searches for the lowest value that is kept, the threshold v:

    mass(v) = sum of the probabilities of all tokens with a value of at least v        falls as v rises
    threshold = the largest v with mass(v) >= p

The search goes over the bits of the floats. Read as an integer, the bits of positive floats are in the order of the
floats, and those of negative floats are in the reverse order. So every float has a rank from 0 (lowest) on, and the
threshold's rank is found bit by bit from the highest bit on: a bit is 1 if the mass is still at least p with it. A pass
over the logits finds several bits at once, by one sum for each combination of them.

For example, with probabilities 0.5, 0.3, 0.2 and p = 0.6, the threshold is the value of the second token: from it on
the mass is 0.8, and from the next larger value on it is 0.5.

All sums are in float64. Nothing is copied to the host.
"""

import torch
from torch import Tensor

from dtrain.base.fused import Fused

_INTEGER_TYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_INFINITY_BITS = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
}
# Each pass over the values costs the time of reading them, and 2 ** bits - 1 sums. With few values the passes are what
# costs time, so they find more bits.
_SMALL_NUMEL = 2**22
_BITS_PER_PASS, _BITS_PER_PASS_SMALL = 2, 4


def find_top_p_threshold(values: Tensor, probabilities: Tensor, target_mass: Tensor) -> Tensor:
    """Find the smallest value that top-p sampling keeps.

    Args:
        values: [n, V], any floating dtype. For example logits.
        probabilities: Probabilities of the tokens, [n, V].
        target_mass: The sum that the probabilities of the kept tokens reach, [n, 1] float64. At most the sum of all.

    Returns:
        The largest v for which the probabilities of all tokens with values >= v sum to at least `target_mass`, [n, 1].
        NaN for a row that contains NaN.
    """
    is_small = values.numel() <= _SMALL_NUMEL
    step = _BITS_PER_PASS_SMALL if is_small else _BITS_PER_PASS
    # With a target mass of 0, every trial would have enough mass, and the search would end at the highest rank, a NaN.
    target_mass = target_mass.clamp(min=torch.finfo(torch.float64).tiny)
    num_bits = torch.iinfo(_INTEGER_TYPES[values.dtype]).bits
    rank = torch.zeros(len(values), 1, dtype=torch.int64, device=values.device)
    for shift in range(num_bits - step, -1, -step):
        rank = _find_next_bits(rank, torch.tensor(shift), values, probabilities, target_mass, is_small)
    return _float_at_rank(rank, values.dtype)


@Fused
def _find_next_bits(
    rank: Tensor, shift: Tensor, values: Tensor, probabilities: Tensor, target_mass: Tensor, is_small: bool
) -> Tensor:
    """Find the next bits of the threshold's rank.

    For example, with 2 bits per pass and rank = 0b10_00, the trials are the floats with the ranks 0b10_01, 0b10_10 and
    0b10_11. If the first two of them have enough mass, the next bits are 0b10, since the masses fall from trial to
    trial.

    Args:
        rank: The bits that are known, with zeros below them, [n, 1] int64.
        shift: Position of the lowest of the next bits. A scalar tensor on the host, because torch.compile would compile
            the function again for each Python number.
        values: As in `find_top_p_threshold`, [n, V].
        probabilities: As in `find_top_p_threshold`, [n, V].
        target_mass: As in `find_top_p_threshold`, [n, 1].
        is_small: Whether a pass finds 4 bits instead of 2.

    Returns:
        `rank` with the next bits set, [n, 1].
    """
    num_bits = _BITS_PER_PASS_SMALL if is_small else _BITS_PER_PASS
    digits = torch.arange(1, 2**num_bits, device=values.device)  # [trials]
    # The ranks below that of -inf belong to NaNs, and comparisons with NaN are always false. Use -inf instead of them.
    lowest = -1 - _INFINITY_BITS[values.dtype]
    trials = _float_at_rank(rank | (digits << shift), values.dtype, lowest)  # [n, trials], ascending
    masses = [
        torch.where(values >= threshold, probabilities, 0).sum(-1, keepdim=True, dtype=torch.float64)
        for threshold in trials.split(1, 1)
    ]
    # The masses fall, so the number of trials with enough mass is the largest such digit.
    digit = (torch.cat(masses, 1) >= target_mass).sum(-1, keepdim=True)
    return rank | (digit << shift)


def _float_at_rank(rank: Tensor, dtype: torch.dtype, lowest: int | None = None) -> Tensor:
    """Return the floats with the given ranks among all floats of a dtype in ascending order.

    Args:
        rank: int64, from 0 on.
        dtype: The floating dtype.
        lowest: Lower limit of the signed order (the rank minus half of the number of floats, so that +0.0 is 0).
            For example, -1 - _INFINITY_BITS[dtype] is -inf. None: no limit.

    Returns:
        Floats in the shape of `rank`.
    """
    integer_type = _INTEGER_TYPES[dtype]
    offset = torch.iinfo(integer_type).min
    # Flipping the sign bit adds the offset. For 64 bits an addition would overflow.
    signed = rank ^ offset if integer_type is torch.int64 else rank + offset
    if lowest is not None:
        signed = signed.clamp(min=lowest)
    bits = torch.where(signed >= 0, signed, ~(signed - offset))  # negative floats are in the reverse order
    return bits.to(integer_type).view(dtype)


def top_p_mask(logits: Tensor, top_p: float) -> Tensor:
    """Return the mask of the tokens that top-p sampling keeps.

    These are the tokens with the highest probabilities, up to the one with which their sum reaches `top_p`. At least
    one token is kept. Of tokens with equal logits, those with lower ids come first.

    Args:
        logits: [n, V]. Some may be -inf.
        top_p: The probability to reach.

    Returns:
        [n, V] bool. A row with NaN, or with nothing but -inf, has no distribution, and none of its tokens is kept.

    Example:
        >>> top_p_mask(torch.tensor([[0.5, 0.3, 0.2]]).log(), 0.6)
        tensor([[ True,  True, False]])
    """
    p = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    total = p.sum(-1, keepdim=True, dtype=torch.float64)
    target_mass = total.clamp(max=top_p)
    threshold = find_top_p_threshold(logits, p, target_mass)
    # By rounding, all probabilities together may sum to less than top_p. All tokens are kept then.
    return _mask_down_to(threshold, logits, p, target_mass) | (total < top_p)


@Fused
def _mask_down_to(threshold: Tensor, logits: Tensor, p: Tensor, target_mass: Tensor) -> Tensor:
    """Return the mask of the tokens with logits above the threshold, and of the needed tokens at the threshold.

    Tokens with logits equal to the threshold are added in the order of their ids until `target_mass` is reached, at
    least one. For example, with probabilities 0.4, 0.2, 0.2, 0.2 and target mass 0.5, the first two tokens are kept.

    Args:
        threshold: [n, 1].
        logits: [n, V].
        p: Probabilities, [n, V].
        target_mass: The sum to reach, [n, 1].
    """
    above, equal = logits > threshold, logits == threshold
    mass_above = torch.where(above, p, 0).sum(-1, keepdim=True, dtype=torch.float64)
    p_of_equal = torch.where(equal, p, 0).amax(-1, keepdim=True).to(torch.float64)
    index_among_equal = equal.cumsum(-1) - 1  # [n, V]
    is_needed = mass_above + index_among_equal * p_of_equal < target_mass
    return above | (equal & (is_needed | (index_among_equal == 0)))
