"""Safetensors files of a directory: names, shapes and dtypes of their tensors, and slices of these.

https://huggingface.co/docs/safetensors fixes the format: eight bytes of header length, a JSON header, then the data.
Weights in mxfp4 (gpt-oss) and fp8 are read as bfloat16.

mxfp4 (OCP Microscaling Formats, 1.0): of a stack X [E, in, out] of experts the tensors `X_blocks` uint8
[E, out, in/32, 16], two FP4 values (E2M1) a byte, the first in its low half, and `X_scales` uint8 [E, out, in/32], the
exponent of two plus 127 that 32 values share. fp8 (DeepSeek-V3, arXiv:2412.19437, section 3.3): `X` of E4M3
[.., out, in], and `X_scale_inv` [.., out/128, in/128], rounded up, the factor of each block of 128 × 128. Both are
rounded to bfloat16 once. A slice is dequantised from the blocks around it; nothing else is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.model_directory import WEIGHTS, WEIGHTS_INDEX, find_weight_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What an export carries of parts that dtrain does not train, beside these.
COPIED_DTYPES = DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
COPIED_DTYPES |= {"BOOL": torch.bool}
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}  # as a recipe writes them

_LOW_BIT_SUFFIXES = ("_blocks", "_scale_inv")  # only low-bit weights have tensors with these names
_ROWS_COMPARED = 4096  # of two tensors that are compared

_MXFP4_BLOCKS, _MXFP4_SCALES, _FP8_SCALES = "_blocks", "_scales", "_scale_inv"
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign
_MXFP4_GROUP = 32  # values of mxfp4 that share an exponent
_FP8_BLOCK_SIDE = 128  # of a block of fp8


class WeightFiles:
    """The tensors of `directory`, a `single` file or what the index lists, by name in `stored`; weights in mxfp4 and in
    fp8 by blocks are bfloat16 there (`packed`). Reads the headers only.
    UserError, naming the file, for a directory without weights, a file of the index that is missing in the directory, a
    file that is cut short or damaged, and a tensor that is missing in its file."""

    def __init__(self, directory: Path, single: str = WEIGHTS):
        self.directory = directory
        self.stored: dict[str, StoredTensor] = {}
        for file, names in _weight_file_names(directory, single).items():
            self._add(directory / file, names)
        if any(name.endswith(_LOW_BIT_SUFFIXES) for name in self.stored):
            replace_low_bit_weights(self.stored)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """(A slice of) tensor `name`, [any shape], as `stored` has it. The file is mapped for this one tensor only, so
        that the process holds its pages no longer than that. No collective."""
        return self.stored[name].read(slices)

    def tensors_differ(self, name: str, other: str) -> bool:
        """Return whether two tensors have other shapes or values; they are in memory a part at a time."""
        shape = self.stored[name].shape
        if shape != self.stored[other].shape:
            return True
        parts = ((slice(start, start + _ROWS_COMPARED),) for start in range(0, shape[0], _ROWS_COMPARED))
        return any(not self.read(name, part).double().equal(self.read(other, part).double()) for part in parts)

    def _add(self, path: Path, names: Sequence[str]) -> None:
        with open_safetensors(path) as file:
            held = set(file.keys())
            missing = sorted(set(names or held) - held)
            if missing:
                raise UserError(
                    f"{path} is missing {len(missing)} tensors that {WEIGHTS_INDEX} places there, first {missing[0]}"
                )
            for name in names or sorted(held):
                entry = file.get_slice(name)
                self.stored[name] = StoredTensor(path, name, tuple(entry.get_shape()), entry.get_dtype())


def weight_files(directory: Path) -> list[Path]:
    """The files that `WeightFiles` reads, its index among them, by name. UserError where there are no weights."""
    files = _weight_file_names(directory)
    return [directory / name for name in ([WEIGHTS] if WEIGHTS in files else [WEIGHTS_INDEX, *sorted(files)])]


def _weight_file_names(directory: Path, single: str = WEIGHTS) -> Mapping[str, Sequence[str]]:
    """Return `find_weight_files`. Raises UserError where there are none."""
    if (files := find_weight_files(directory, single)) is not None:
        return files
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory")
    if any(directory.glob("pytorch_model*.bin")):
        raise UserError(
            f"{directory} has its weights as pytorch_model.bin, a pickle, which dtrain does not open. Convert it with "
            'transformers, once: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\" "
            "and copy the tokenizer's files along"
        )
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    listing = f"; it has {', '.join(others[:5])}" if others else ""
    raise UserError(f"{directory} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{listing}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `kind` is the file's word for its dtype, `dtype` ours, None for what dtrain does not read."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.kind)

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """(A slice of) it, [any shape], as it is stored, of any dtype. No collective."""
        with open_safetensors(self.file) as file:  # a tensor without dimensions has no slice
            return file.get_slice(self.name)[slices] if slices else file.get_tensor(self.name)


@contextmanager
def open_safetensors(path: Path) -> Iterator:
    """Context in which the file `path` is open. UserError, naming it, where it is missing or damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file, but {WEIGHTS_INDEX} names it; download it again") from error
    except SafetensorError as error:
        raise UserError(f"{path}: cut short or damaged ({error}); download it again") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def replace_low_bit_weights(stored: dict[str, StoredTensor]) -> None:
    """Put one bfloat16 tensor in the place of each weight in few bits, and its scales, that `stored` has by name. What
    is in no such form stays, for the reader to refuse."""
    for name, entry in list(stored.items()):
        base = name.removesuffix(_MXFP4_BLOCKS)
        scales, inverse = stored.get(f"{base}{_MXFP4_SCALES}"), stored.get(f"{name}{_FP8_SCALES}")
        if base != name and scales is not None and base not in stored and _is_mxfp4(entry, scales):
            experts, rows, groups, _ = entry.shape
            del stored[name], stored[f"{base}{_MXFP4_SCALES}"]
            stored[base] = MxFp4(entry.file, base, (experts, groups * _MXFP4_GROUP, rows), "BF16", entry, scales)
        elif inverse is not None and _is_fp8(entry, inverse):
            del stored[f"{name}{_FP8_SCALES}"]
            stored[name] = BlockFp8(entry.file, name, entry.shape, "BF16", entry, inverse)


def _is_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> bool:
    is_shaped = len(blocks.shape) == 4 and blocks.shape[3] == _MXFP4_GROUP // 2 and blocks.shape[:3] == scales.shape
    return is_shaped and blocks.kind == scales.kind == "U8"


def _is_fp8(weight: StoredTensor, scales: StoredTensor) -> bool:
    if len(weight.shape) < 2:
        return False
    *lead, rows, columns = weight.shape
    wanted = (*lead, -(-rows // _FP8_BLOCK_SIDE), -(-columns // _FP8_BLOCK_SIDE))
    return weight.kind == "F8_E4M3" and scales.kind in ("F32", "BF16") and scales.shape == wanted


@dataclass(frozen=True)
class _LowBitWeight(StoredTensor):
    """A weight [shape] in few bits. values, scales: as the file has them."""

    values: StoredTensor
    scales: StoredTensor

    def _slices(self, slices: tuple[slice, ...] | None) -> list[slice]:
        given = slices or ()
        given = (*given, *(slice(None),) * (len(self.shape) - len(given)))
        return [slice(*part.indices(size)[:2]) for part, size in zip(given, self.shape, strict=True)]


class MxFp4(_LowBitWeight):
    """A stack of experts [E, in, out] in mxfp4."""

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Override `Stored.read`: bfloat16. Beside the result the memory of one expert's slice."""
        experts, inner, outer = self._slices(slices)
        groups = slice(inner.start // _MXFP4_GROUP, -(-inner.stop // _MXFP4_GROUP))
        within = slice(inner.start - groups.start * _MXFP4_GROUP, inner.stop - groups.start * _MXFP4_GROUP)
        sizes = (part.stop - part.start for part in (experts, inner, outer))
        whole = torch.empty(*sizes, dtype=torch.bfloat16)
        pairs = _fp4_pairs()
        with open_safetensors(self.values.file) as of_values, open_safetensors(self.scales.file) as of_scales:
            blocks, scales = of_values.get_slice(self.values.name), of_scales.get_slice(self.scales.name)
            for matrix, number in zip(whole, range(experts.start, experts.stop), strict=True):
                codes = blocks[number, outer, groups, :]  # [out, in/32, 16]
                exponents = scales[number, outer, groups].int() - 127  # [out, in/32]
                halves = F.embedding(codes.int(), pairs).flatten(2)  # [out, in/32, 32]
                values = torch.ldexp(halves, exponents[..., None]).flatten(1)  # [out, in]
                matrix.copy_(values[:, within].t())
        return whole


class BlockFp8(_LowBitWeight):
    """Matrices [.., out, in] in fp8."""

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Override `Stored.read`: bfloat16. A few times the memory of the slice."""
        *lead, rows, columns = self._slices(slices)
        blocks = [slice(part.start // _FP8_BLOCK_SIDE, -(-part.stop // _FP8_BLOCK_SIDE)) for part in (rows, columns)]
        factors = self.scales.read((*lead, *blocks)).float()
        for dim, part in ((-2, rows), (-1, columns)):
            of_each = torch.arange(part.start, part.stop) // _FP8_BLOCK_SIDE - part.start // _FP8_BLOCK_SIDE
            factors = factors.index_select(dim, of_each)
        return (self.values.read((*lead, rows, columns)).float() * factors).bfloat16()


def _fp4_pairs() -> Tensor:
    """[256, 2] float32: the values of a byte's halves, the low one first."""
    magnitudes = torch.tensor(_FP4_MAGNITUDES)
    values = torch.cat([magnitudes, -magnitudes])
    return torch.cartesian_prod(values, values).flip(1)
