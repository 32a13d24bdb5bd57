"""Starting values that depend on the seed, the parameter's name and the logical position, never on the layout.

Every element draws from a counter-based generator: SplitMix64 (Steele, Lea, Flood 2014) of its flat index in the whole
parameter, keyed by a hash of seed and name. Any slice, on any rank, has the bits that one process would have.
"""

import hashlib
import math
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from dtrain.models.layers import CausalLM
from dtrain.parallel.placement import local_slices, local_tensor

# SplitMix64's constants as int64, whose arithmetic wraps.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@torch.no_grad()
def init_weights(model: CausalLM, seed: int) -> None:
    """Fill every parameter by `model.initial`, with transformers' distributions: normal(0, initializer_range) for
    matrices (zero in the padding token's embedding), ones or zeros for norms, zeros for biases.

    Parameters may be plain or DTensors; a rank draws what it holds. Normals are drawn in float64, then rounded to the
    parameter's dtype. No collective.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        local = local_tensor(parameter)
        kind = next(kind for pattern, kind in model.initial.items() if fnmatchcase(name, pattern))
        if kind == "normal":
            _fill_normal(local, parameter.shape, local_slices(parameter), _key(seed, name), config.initializer_range)
        else:
            local.fill_(1.0 if kind == "ones" else 0.0)
        if name == "model.embed_tokens.weight" and config.pad_token_id is not None:
            held = local_slices(parameter)[0]
            row = config.pad_token_id % config.vocab_size
            if held.start <= row < held.stop:
                local[row - held.start] = 0.0


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little", signed=True)


def _fill_normal(local: Tensor, shape: torch.Size, held: tuple[slice, ...], key: int, std: float) -> None:
    """`local` is the slice `held` of a parameter of `shape`. In chunks: on a CPU the arithmetic stays in its cache."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = torch.zeros((), dtype=torch.int64, device=local.device)
    for bounds, stride in zip(held[1:], strides[1:], strict=True):
        inner = inner[..., None] + torch.arange(bounds.start, bounds.stop, device=local.device) * stride
    rows = max(1, (2**15 if local.device.type == "cpu" else 2**22) // max(inner.numel(), 1))
    for start in range(held[0].start, held[0].stop, rows):
        end = min(start + rows, held[0].stop)
        outer = torch.arange(start, end, device=local.device) * strides[0]
        flat = outer.view(-1, *[1] * inner.dim()) + inner
        local[start - held[0].start : end - held[0].start] = _normal(flat, key).mul_(std)


def _normal(index: Tensor, key: int) -> Tensor:
    """Standard normals [..] float64 of flat indices [..] int64: the inverse distribution function of a uniform."""
    return torch.erfinv(uniform(index, key).mul_(2).sub_(1)).mul_(math.sqrt(2))


def uniform(index: Tensor, key: int | Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, never 0 or 1: of each index [..] int64 in the sequence that `key` names."""
    bits = index * _GAMMA + key
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    bits = bits ^ _shift(bits, 31)
    return (_shift(bits, 11).to(torch.float64) + 0.5) * 2.0**-53  # 53 bits and a half


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right: int64's own keeps the sign."""
    return (bits >> count) & (2 ** (64 - count) - 1)
