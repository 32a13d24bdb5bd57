"""The safetensors files of a directory: what they hold, and slices of it.

https://huggingface.co/docs/safetensors fixes the format: eight bytes of header length, a JSON header, then the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.model_directory import INDEX, SINGLE, files_of_weights

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What an export carries of parts that dtrain does not train, beside these.
CARRIED = DTYPES | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
CARRIED |= {"BOOL": torch.bool}
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}  # as a recipe writes them
_OF_FEW_BITS = ("_blocks", "_scale_inv")  # names of tensors beside others
_ROWS = 4096  # of two tensors that are compared


@dataclass(frozen=True)
class Stored:
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
        with opened(self.file) as file:  # a tensor without dimensions has no slice
            return file.get_slice(self.name)[slices] if slices else file.get_tensor(self.name)


@contextmanager
def opened(path: Path) -> Iterator:
    """Context in which the file `path` is open. UserError, naming it, where it is missing or damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file, but {INDEX} names it; download it again") from error
    except SafetensorError as error:
        raise UserError(f"{path}: cut short or damaged ({error}); download it again") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


class WeightFiles:
    """The tensors of `directory`, a `single` file or what the index lists, by name in `stored`; weights in mxfp4 and in
    fp8 by blocks are bfloat16 there (`packed`). Reads the headers only.
    UserError, naming the file, for a directory without weights, a file of the index that is missing in the directory, a
    file that is cut short or damaged, and a tensor that is missing in its file."""

    def __init__(self, directory: Path, single: str = SINGLE):
        self.directory = directory
        self.stored: dict[str, Stored] = {}
        for file, names in _files(directory, single).items():
            self._add(directory / file, names)
        if any(name.endswith(_OF_FEW_BITS) for name in self.stored):
            from dtrain.checkpoint.huggingface import packed

            packed.unpack(self.stored)

    def copy_into(self, target: Tensor, name: str, slices: tuple[slice, ...] | None = None) -> None:
        """Fill the plain tensor `target` [any shape] with (a slice of) tensor `name`, cast to its dtype. The file is
        mapped for this one tensor only, so the process holds its pages no longer than the call takes."""
        with torch.no_grad():
            target.copy_(self.read(name, slices))

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """(A slice of) tensor `name`, [any shape], as `stored` has it. No collective."""
        return self.stored[name].read(slices)

    def differ(self, name: str, other: str) -> bool:
        """Return whether two tensors have other shapes or values; they are in memory a part at a time."""
        shape = self.stored[name].shape
        if shape != self.stored[other].shape:
            return True
        parts = ((slice(start, start + _ROWS),) for start in range(0, shape[0], _ROWS))
        return any(not self.read(name, part).double().equal(self.read(other, part).double()) for part in parts)

    def _add(self, path: Path, names: Sequence[str]) -> None:
        with opened(path) as file:
            held = set(file.keys())
            missing = sorted(set(names or held) - held)
            if missing:
                raise UserError(
                    f"{path} is missing {len(missing)} tensors that {INDEX} places there, first {missing[0]}"
                )
            for name in names or sorted(held):
                entry = file.get_slice(name)
                self.stored[name] = Stored(path, name, tuple(entry.get_shape()), entry.get_dtype())


def weight_files(directory: Path) -> list[Path]:
    """The files that `WeightFiles` reads, its index among them, by name. UserError where there are no weights."""
    files = _files(directory)
    return [directory / name for name in ([SINGLE] if SINGLE in files else [INDEX, *sorted(files)])]


def _files(directory: Path, single: str = SINGLE) -> Mapping[str, Sequence[str]]:
    """Return `files_of_weights`. Raises UserError where there are none."""
    if (files := files_of_weights(directory, single)) is not None:
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
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}{listing}")
