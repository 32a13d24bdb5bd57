"""Random numbers by logical position: a key is a hash of words, a number SplitMix64's of its index in a key's sequence.

Any part of a sequence, on any rank, has the bits that one process would have. Loads no torch by itself.

SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# SplitMix64's constants as int64, whose arithmetic wraps.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def digest(*parts: object) -> bytes:
    """Return BLAKE2b's 8 bytes of "part:part:...", each part as it prints."""
    return hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()


def random_key(*parts: object) -> int:
    """Return a signed 64-bit number made of anything that prints."""
    return int.from_bytes(digest(*parts), "little", signed=True)


def mix(values: "Tensor") -> "Tensor":
    """Apply SplitMix64's finaliser to int64 [..], element by element."""
    values = (values ^ _shift(values, 30)) * _MIX_1
    values = (values ^ _shift(values, 27)) * _MIX_2
    return values ^ _shift(values, 31)


def random_int64(index: "Tensor", key: "int | Tensor") -> "Tensor":
    """Return 64 random bits, int64, of each index [..] int64 in the sequence that `key` names."""
    return mix(index * _GAMMA + key)


def random_uniform(index: "Tensor", key: "int | Tensor") -> "Tensor":
    """Return uniform numbers in (0, 1), float64, never 0 or 1, of each index [..] int64 in the sequence of `key`."""
    return (_shift(random_int64(index, key), 11).double() + 0.5) * 2.0**-53  # 53 bits and a half


def _shift(bits: "Tensor", count: int) -> "Tensor":
    """Shift logically to the right: int64's own shift keeps the sign."""
    return (bits >> count) & (2 ** (64 - count) - 1)
