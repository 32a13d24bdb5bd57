"""The safetensors files of a directory: what they hold, and slices of it.

https://huggingface.co/docs/safetensors fixes the format: eight bytes of header length, a JSON header, then the data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.model_directory import INDEX, SINGLE, files_of_weights
from dtrain.checkpoint.huggingface.stored import Stored, opened

_OF_FEW_BITS = ("_blocks", "_scale_inv")  # names of tensors beside others
_ROWS = 4096  # of two tensors that are compared


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

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """(A slice of) tensor `name`, [any shape], as `stored` has it. The file is mapped for this one tensor only, so
        that the process holds its pages no longer than that. No collective."""
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
