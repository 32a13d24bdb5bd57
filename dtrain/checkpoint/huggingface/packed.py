"""Weights that files have in few bits and that are read as bfloat16: mxfp4 as gpt-oss has it, and fp8 in blocks.

mxfp4 (OCP Microscaling Formats, 1.0): of a stack X [E, in, out] of experts the tensors `X_blocks` uint8
[E, out, in/32, 16], two FP4 values (E2M1) a byte, the first in its low half, and `X_scales` uint8 [E, out, in/32], the
exponent of two plus 127 that 32 values share. fp8 (DeepSeek-V3, arXiv:2412.19437, section 3.3): `X` of E4M3
[.., out, in], and `X_scale_inv` [.., out/128, in/128], rounded up, the factor of each block of 128 × 128. Both are
rounded to bfloat16 once. A slice is dequantised from the blocks around it; nothing else is read.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.checkpoint.huggingface.stored import Stored, opened

_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign
_GROUP = 32  # values of mxfp4 that share an exponent
_SIDE = 128  # of a block of fp8


def unpack(stored: dict[str, Stored]) -> None:
    """Put one bfloat16 tensor in the place of each weight in few bits, and its scales, that `stored` has by name. What
    is in no such form stays, for the reader to refuse."""
    for name, entry in list(stored.items()):
        base = name.removesuffix(_BLOCKS)
        scales, inverse = stored.get(f"{base}{_SCALES}"), stored.get(f"{name}{_INVERSE}")
        if base != name and scales is not None and base not in stored and _is_mxfp4(entry, scales):
            experts, rows, groups, _ = entry.shape
            del stored[name], stored[f"{base}{_SCALES}"]
            stored[base] = MxFp4(entry.file, base, (experts, groups * _GROUP, rows), "BF16", entry, scales)
        elif inverse is not None and _is_fp8(entry, inverse):
            del stored[f"{name}{_INVERSE}"]
            stored[name] = BlockFp8(entry.file, name, entry.shape, "BF16", entry, inverse)


def _is_mxfp4(blocks: Stored, scales: Stored) -> bool:
    is_shaped = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP // 2 and blocks.shape[:3] == scales.shape
    return is_shaped and blocks.kind == scales.kind == "U8"


def _is_fp8(weight: Stored, scales: Stored) -> bool:
    if len(weight.shape) < 2:
        return False
    *lead, rows, columns = weight.shape
    wanted = (*lead, -(-rows // _SIDE), -(-columns // _SIDE))
    return weight.kind == "F8_E4M3" and scales.kind in ("F32", "BF16") and scales.shape == wanted


@dataclass(frozen=True)
class _Packed(Stored):
    """A weight [shape] in few bits. values, scales: as the file has them."""

    values: Stored
    scales: Stored

    def _slices(self, slices: tuple[slice, ...] | None) -> list[slice]:
        given = slices or ()
        given = (*given, *(slice(None),) * (len(self.shape) - len(given)))
        return [slice(*part.indices(size)[:2]) for part, size in zip(given, self.shape, strict=True)]


class MxFp4(_Packed):
    """A stack of experts [E, in, out] in mxfp4."""

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Override `Stored.read`: bfloat16. Beside the result the memory of one expert's slice."""
        experts, inner, outer = self._slices(slices)
        groups = slice(inner.start // _GROUP, -(-inner.stop // _GROUP))
        within = slice(inner.start - groups.start * _GROUP, inner.stop - groups.start * _GROUP)
        sizes = (part.stop - part.start for part in (experts, inner, outer))
        whole = torch.empty(*sizes, dtype=torch.bfloat16)
        pairs = _pairs()
        with opened(self.values.file) as of_values, opened(self.scales.file) as of_scales:
            blocks, scales = of_values.get_slice(self.values.name), of_scales.get_slice(self.scales.name)
            for matrix, number in zip(whole, range(experts.start, experts.stop), strict=True):
                codes = blocks[number, outer, groups, :]  # [out, in/32, 16]
                exponents = scales[number, outer, groups].int() - 127  # [out, in/32]
                halves = F.embedding(codes.int(), pairs).flatten(2)  # [out, in/32, 32]
                values = torch.ldexp(halves, exponents[..., None]).flatten(1)  # [out, in]
                matrix.copy_(values[:, within].t())
        return whole


class BlockFp8(_Packed):
    """Matrices [.., out, in] in fp8."""

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Override `Stored.read`: bfloat16. A few times the memory of the slice."""
        *lead, rows, columns = self._slices(slices)
        blocks = [slice(part.start // _SIDE, -(-part.stop // _SIDE)) for part in (rows, columns)]
        factors = self.scales.read((*lead, *blocks)).float()
        for dim, part in ((-2, rows), (-1, columns)):
            of_each = torch.arange(part.start, part.stop) // _SIDE - part.start // _SIDE
            factors = factors.index_select(dim, of_each)
        return (self.values.read((*lead, rows, columns)).float() * factors).bfloat16()


def _pairs() -> Tensor:
    """[256, 2] float32: the values of a byte's halves, the low one first."""
    magnitudes = torch.tensor(_VALUES)
    values = torch.cat([magnitudes, -magnitudes])
    return torch.cartesian_prod(values, values).flip(1)
