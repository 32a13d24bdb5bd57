"""Comparison of the base that an adapter names with the model at hand: by place, by id, or by content. Imports no
torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.base import hub
from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.base.model_directory import ADAPTER_CONFIG, files_of_weights, is_adapter_directory, read_header
from dtrain.base.problems import Problem
from dtrain.checkpoint.peft.config import BASE, base_of

_COMPARED = 4096  # bytes of a tensor; training changes some of them


def base_problems(directory: Path, model: Path) -> list[Problem]:
    """Check that the adapter in `directory` was trained on the model in the directory `model`."""
    if _is_base(directory, model) is not False:
        return []
    base = base_of(directory)
    text = f"{directory / ADAPTER_CONFIG}: {BASE} is {_named(directory)}, and model.path={model} has other weights"
    fix = f"Set model.path={base}, or write {model} there if the adapter was trained on it"
    return [Problem("lora.path", text, fix)]


def base_notes(directory: Path, model: Path) -> list[str]:
    """Return notes for the user where it cannot be known that the adapter in `directory` is of `model`."""
    try:
        if not is_adapter_directory(directory) or _is_base(directory, model) is not None:
            return []
        name = _named(directory)
    except UserError:  # a problem that others tell
        return []
    reason = f"{BASE} is {name}" if name else f"it names no base ({BASE})"
    return [
        f"note: {directory / ADAPTER_CONFIG}: {reason}; whether that is the model at model.path={model} cannot be told "
        "here, and on another one the adapter means nothing"
    ]


def _named(directory: Path) -> Any:
    return read_json(directory / ADAPTER_CONFIG).get(BASE)


def _is_base(directory: Path, model: Path) -> bool | None:
    """Return whether `model` is the base of the adapter in `directory`; None where it cannot be known."""
    name = _named(directory)
    if name and name in (str(model), hub.id_of(model)):
        return True
    try:
        base = base_of(directory)
        return True if base.resolve() == model.resolve() else _same_weights(base, model)
    except UserError:
        return None


def _same_weights(base: Path, model: Path) -> bool | None:
    """Compare a part of each tensor that both hold in the same form. Raises UserError for files that cannot be read."""
    first, second = dict(_tensors(base)), dict(_tensors(model))
    both = [name for name in first if name in second and first[name][0] == second[name][0]]
    if any(_part(*first[name]) != _part(*second[name]) for name in both):
        return False
    return True if both and len(both) == len(first) == len(second) else None


def _tensors(directory: Path) -> Iterator[tuple[str, tuple[tuple, Path, int]]]:
    """The tensors of a model by name: what they are (dtype, shape, bytes), the file, and where they begin there."""
    for file in files_of_weights(directory) or ():
        entries, start = read_header(directory / file)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            yield name, ((entry["dtype"], tuple(entry["shape"]), end - begin), directory / file, start + begin)


def _part(kind: tuple, file: Path, begin: int) -> bytes:
    size = kind[2]
    try:
        with file.open("rb") as stream:
            stream.seek(begin + max(0, size - _COMPARED) // 2)
            return stream.read(min(size, _COMPARED))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
