"""Safetensors files of a directory: names, shapes and dtypes of their tensors, and slices of them.

The format is https://huggingface.co/docs/safetensors: eight bytes with the length of the header, a JSON header, then
the data.

Weights in mxfp4 (gpt-oss) and fp8 (DeepSeek-V3) appear as bfloat16. To read a slice, only the blocks that contain the
slice are read, dequantised, and rounded to bfloat16 once.

    mxfp4   OCP Microscaling Formats, 1.0. A stack X [E, in, out] of experts is stored as
              X_blocks  uint8 [E, out, in/32, 16]   two FP4 values (E2M1) per byte, the first in the low half
              X_scales  uint8 [E, out, in/32]       the exponent of two plus 127, for 32 values
    fp8     arXiv:2412.19437, section 3.3. X [.., out, in] is stored as
              X            E4M3 [.., out, in]
              X_scale_inv  [.., out/128, in/128], rounded up: the factor of each block of 128 × 128
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
# Exports copy tensors of parts that dtrain does not train. These may have further dtypes.
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
_ROWS_COMPARED = 4096  # rows that are in memory when two tensors are compared

_MXFP4_BLOCKS, _MXFP4_SCALES, _FP8_SCALES = "_blocks", "_scales", "_scale_inv"
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign
_MXFP4_GROUP = 32  # values of mxfp4 that share an exponent
_FP8_BLOCK_SIDE = 128  # rows and columns of a block of fp8


class WeightFiles:
    """The tensors of a directory's safetensors files. Only headers are read until `read` is called.

    Args:
        directory: The directory.
        single: Name of the file if there is no index.

    Attributes:
        directory: The directory.
        stored: The tensors by name. Weights in mxfp4 and fp8 are bfloat16 there.

    Raises:
        UserError: For a directory without weights, a file that the index names and that is missing, a file that is cut
            short or damaged, and a tensor that is missing in its file.
    """

    def __init__(self, directory: Path, single: str = WEIGHTS):
        self.directory = directory
        self.stored: dict[str, StoredTensor] = {}
        for file, names in _weight_file_names(directory, single).items():
            self._add(directory / file, names)
        if any(name.endswith(_LOW_BIT_SUFFIXES) for name in self.stored):
            replace_low_bit_weights(self.stored)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor or a slice of it. No collective.

        The file is mapped for this one read only, so that its pages do not stay in memory.

        Args:
            name: Name of the tensor.
            slices: One slice per dimension; fewer mean the first dimensions. None reads the full tensor.
        """
        return self.stored[name].read(slices)

    def tensors_differ(self, name: str, other: str) -> bool:
        """Check whether two tensors differ in shape or values. Only a part of them is in memory at a time."""
        shape = self.stored[name].shape
        if shape != self.stored[other].shape:
            return True
        for start in range(0, shape[0], _ROWS_COMPARED):
            rows = (slice(start, start + _ROWS_COMPARED),)
            if not self.read(name, rows).double().equal(self.read(other, rows).double()):
                return True
        return False

    def _add(self, path: Path, names: Sequence[str]) -> None:
        """Add the tensors of a file: those in `names`, or all if `names` is empty."""
        with open_safetensors(path) as file:
            in_file = set(file.keys())
            missing = sorted(set(names or in_file) - in_file)
            if missing:
                raise UserError(
                    f"{path} is missing {len(missing)} tensors that {WEIGHTS_INDEX} places there, first {missing[0]}"
                )
            for name in names or sorted(in_file):
                entry = file.get_slice(name)
                self.stored[name] = StoredTensor(path, name, tuple(entry.get_shape()), entry.get_dtype())


def weight_files(directory: Path) -> list[Path]:
    """Return the files that `WeightFiles` reads, its index included, sorted. Raises UserError if there are none."""
    files = _weight_file_names(directory)
    names = [WEIGHTS] if WEIGHTS in files else [WEIGHTS_INDEX, *sorted(files)]
    return [directory / name for name in names]


def _weight_file_names(directory: Path, single: str = WEIGHTS) -> Mapping[str, Sequence[str]]:
    """Return the names of tensors by file, as `find_weight_files` does. Raises UserError if there are no weights."""
    files = find_weight_files(directory, single)
    if files is not None:
        return files
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
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
    """A tensor in a file.

    Attributes:
        file: The file.
        name: Name of the tensor.
        shape: Its shape.
        kind: Its dtype as safetensors call it, such as "BF16".
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> torch.dtype | None:
        """Its dtype; None for a dtype that dtrain does not read as weights."""
        return DTYPES.get(self.kind)

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Read the tensor or a slice of it, in its own dtype. No collective."""
        with open_safetensors(self.file) as file:
            if slices:
                return file.get_slice(self.name)[slices]
            return file.get_tensor(self.name)  # a tensor without dimensions has no slice


@contextmanager
def open_safetensors(path: Path) -> Iterator:
    """Context with an open safetensors file. Raises UserError if the file is missing or damaged."""
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
    """Replace each low-bit weight and its scales by one bfloat16 tensor.

    Weights whose shapes do not fit the formats stay as they are, and the reader refuses them.

    Args:
        stored: The tensors by name, which are changed in place.
    """
    for name, entry in list(stored.items()):
        base = name.removesuffix(_MXFP4_BLOCKS)
        scales = stored.get(f"{base}{_MXFP4_SCALES}")
        inverse = stored.get(f"{name}{_FP8_SCALES}")
        if base != name and scales is not None and base not in stored and _is_mxfp4(entry, scales):
            experts, rows, groups, _ = entry.shape
            del stored[name], stored[f"{base}{_MXFP4_SCALES}"]
            stored[base] = MxFp4(entry.file, base, (experts, groups * _MXFP4_GROUP, rows), "BF16", entry, scales)
        elif inverse is not None and _is_fp8(entry, inverse):
            del stored[f"{name}{_FP8_SCALES}"]
            stored[name] = BlockFp8(entry.file, name, entry.shape, "BF16", entry, inverse)


def _is_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> bool:
    if blocks.kind != "U8" or scales.kind != "U8" or len(blocks.shape) != 4:
        return False
    return blocks.shape[3] == _MXFP4_GROUP // 2 and blocks.shape[:3] == scales.shape


def _is_fp8(weight: StoredTensor, scales: StoredTensor) -> bool:
    if len(weight.shape) < 2:
        return False
    *lead, rows, columns = weight.shape
    scale_shape = (*lead, -(-rows // _FP8_BLOCK_SIDE), -(-columns // _FP8_BLOCK_SIDE))  # rounded up
    return weight.kind == "F8_E4M3" and scales.kind in ("F32", "BF16") and scales.shape == scale_shape


@dataclass(frozen=True)
class _LowBitWeight(StoredTensor):
    """A low-bit weight, which is read as bfloat16.

    Attributes:
        values: The tensor of its values in the file.
        scales: The tensor of its scales in the file.
    """

    values: StoredTensor
    scales: StoredTensor

    def _full_slices(self, slices: tuple[slice, ...] | None) -> list[slice]:
        """Return a slice with start and stop for every dimension."""
        parts = list(slices or ())
        parts += [slice(None)] * (len(self.shape) - len(parts))
        full = []
        for part, size in zip(parts, self.shape, strict=True):
            start, stop, _ = part.indices(size)
            full.append(slice(start, stop))
        return full


class MxFp4(_LowBitWeight):
    """A stack of experts [E, in, out] in mxfp4."""

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Override `StoredTensor.read`. The values of one expert are in memory at a time."""
        experts, inner, outer = self._full_slices(slices)
        # The groups of 32 values that contain the slice, and the slice within these groups.
        groups = slice(inner.start // _MXFP4_GROUP, -(-inner.stop // _MXFP4_GROUP))
        first_value = groups.start * _MXFP4_GROUP
        within = slice(inner.start - first_value, inner.stop - first_value)
        sizes = [part.stop - part.start for part in (experts, inner, outer)]
        result = torch.empty(*sizes, dtype=torch.bfloat16)
        pairs = _fp4_pairs()
        with open_safetensors(self.values.file) as of_values, open_safetensors(self.scales.file) as of_scales:
            blocks, scales = of_values.get_slice(self.values.name), of_scales.get_slice(self.scales.name)
            for matrix, number in zip(result, range(experts.start, experts.stop), strict=True):
                codes = blocks[number, outer, groups, :]  # [out, in/32, 16]
                exponents = scales[number, outer, groups].int() - 127  # [out, in/32]
                halves = F.embedding(codes.int(), pairs).flatten(2)  # [out, in/32, 32]
                values = torch.ldexp(halves, exponents[..., None]).flatten(1)  # [out, in]
                matrix.copy_(values[:, within].t())
        return result


class BlockFp8(_LowBitWeight):
    """Matrices [.., out, in] in fp8."""

    def read(self, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Override `StoredTensor.read`. It needs a few times the memory of the slice."""
        *lead, rows, columns = self._full_slices(slices)
        blocks = [slice(part.start // _FP8_BLOCK_SIDE, -(-part.stop // _FP8_BLOCK_SIDE)) for part in (rows, columns)]
        factors = self.scales.read((*lead, *blocks)).float()
        # Expand the factors of blocks to factors of rows, then of columns.
        for dim, part in ((-2, rows), (-1, columns)):
            block_of_index = torch.arange(part.start, part.stop) // _FP8_BLOCK_SIDE - part.start // _FP8_BLOCK_SIDE
            factors = factors.index_select(dim, block_of_index)
        return (self.values.read((*lead, rows, columns)).float() * factors).bfloat16()


def _fp4_pairs() -> Tensor:
    """Return the two FP4 values of every byte, float32 [256, 2], the one of the low half first."""
    magnitudes = torch.tensor(_FP4_MAGNITUDES)
    values = torch.cat([magnitudes, -magnitudes])
    return torch.cartesian_prod(values, values).flip(1)
