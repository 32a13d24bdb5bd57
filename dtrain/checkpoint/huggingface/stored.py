"""A tensor in a safetensors file: its place, shape and dtype, and slices of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.model_directory import INDEX

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What an export carries of parts that dtrain does not train, beside these.
CARRIED = DTYPES | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
CARRIED |= {"BOOL": torch.bool}
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}  # as a recipe writes them


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
