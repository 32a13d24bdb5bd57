"""Random numbers that depend only on a key and an index, and not on the mesh or the order of calls.

A key is a hash of words, such as ("dropout", seed, step, layer). The number at an index of the key's sequence is
computed directly from both by SplitMix64. So every rank computes the numbers of its own shard, and these are the bits
that one process would have there. For example, ranks 0 and 1 of two ranks initialise the halves of a tensor by
`random_uniform(torch.arange(0, 50), key)` and `random_uniform(torch.arange(50, 100), key)`.

Torch is not imported.

Reference:
    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64).
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# SplitMix64's constants as int64. Its arithmetic wraps around, as that of unsigned integers does.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def digest(*parts: object) -> bytes:
    """Return 8 bytes of BLAKE2b of the parts' texts, joined by colons."""
    return hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()


def random_key(*parts: object) -> int:
    """Return a signed 64-bit number that is a hash of the parts' texts.

    Example:
        >>> random_key("dropout", 0, 1) == random_key("dropout", 0, 2)
        False
    """
    return int.from_bytes(digest(*parts), "little", signed=True)


def mix(values: "Tensor") -> "Tensor":
    """Apply SplitMix64's finaliser to each element of an int64 tensor."""
    values = (values ^ _shift(values, 30)) * _MIX_1
    values = (values ^ _shift(values, 27)) * _MIX_2
    return values ^ _shift(values, 31)


def random_int64(index: "Tensor", key: "int | Tensor") -> "Tensor":
    """Return 64 random bits for each index of a key's sequence.

    Args:
        index: Indices, any shape, int64.
        key: A number from `random_key`, or a tensor of these that broadcasts.

    Returns:
        int64, in the shape of `index`.
    """
    return mix(index * _GAMMA + key)


def random_uniform(index: "Tensor", key: "int | Tensor") -> "Tensor":
    """Return a uniform number in (0, 1) for each index of a key's sequence.

    Args:
        index: Indices, any shape, int64.
        key: A number from `random_key`, or a tensor of these that broadcasts.

    Returns:
        float64, in the shape of `index`. Never 0 or 1.
    """
    # 53 bits, and a half so that 0 does not occur.
    return (_shift(random_int64(index, key), 11).double() + 0.5) * 2.0**-53


def _shift(bits: "Tensor", count: int) -> "Tensor":
    """Shift to the right and fill with zeros. int64's own shift fills with the sign."""
    return (bits >> count) & (2 ** (64 - count) - 1)
