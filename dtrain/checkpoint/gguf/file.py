"""Writing of a GGUF file: tensor by tensor, beside its place, renamed when it is whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.base.errors import UserError, in_words
from dtrain.base.files import publish, real, staged

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "q8_0": torch.float32}
"""Types of a file's matrices -> what their values are rounded to before they are written."""
_BLOCK = 32  # values of a row that q8_0 gives one scale


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file: its name there, its shape, its type, and what reads it in a dtype."""

    name: str
    shape: Sequence[int]
    kind: str
    read: Callable[[torch.dtype], Tensor]


def type_of(shape: Sequence[int], kind: str) -> str:
    """Return the type of a tensor in a file of type `kind`: f32 where it has one dimension, f16 where q8_0 cannot cut
    its rows into blocks."""
    if len(shape) == 1:
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % _BLOCK else kind


def check_place(out: Path, kind: str) -> None:
    """Raise UserError where no file of type `kind` could be written to `out`, which is not there yet."""
    if kind not in TYPES:
        raise UserError(f"--type {kind}: choose one of {', '.join(TYPES)}")
    if find_spec("gguf") is None:
        raise UserError(
            "GGUF files are written by the package gguf, which is not installed: pip install 'dtrain[gguf]'"
        )
    if out.exists():
        raise UserError(f"{out} is already there: delete it, or choose another file")


@contextmanager
def writing(out: Path, arch: str) -> Iterator[Any]:
    """Return a GGUFWriter of a file that gets the name `out` when the block ends without an error, and is gone when it
    ends with one. UserError where the disk does not take it."""
    from gguf import GGUFWriter

    out = real(out)
    partial = staged(out)
    writer = GGUFWriter(partial, arch)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield writer
        writer.close()
        publish(partial, out)
    except OSError as error:
        raise UserError(f"{out}: {in_words(error)}") from error
    finally:
        if writer.fout is not None:
            writer.close()
        partial.unlink(missing_ok=True)


def write_tensors(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write the header of a GGUFWriter, whose keys are all there, and then one tensor after another."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    float32 = torch.empty(0).numpy().dtype
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind.upper()]
        block, size = GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(tensor.name, tensor.shape, float32, prod(tensor.shape) // block * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        rounded = tensor.read(TYPES[tensor.kind])
        if tensor.kind == "f16" and not rounded.isfinite().all():
            raise UserError(f"{tensor.name} has values that float16 does not: choose --type bf16, or f32")
        values = rounded.float().contiguous().numpy()
        writer.write_tensor_data(quantize(values, GGMLQuantizationType[tensor.kind.upper()]))
