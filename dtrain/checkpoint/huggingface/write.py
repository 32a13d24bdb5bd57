"""Weights out: a directory that transformers loads, from plain tensors or DTensors, and never the model on one rank.

Files are shared out over the ranks. All ranks gather one tensor at a time for each rank that writes, then the writers
write at once; a rank holds its shard, the tensor in transit and the one that it writes.
"""

import ctypes
import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dtrain.adapters.lora import adapted_layers
from dtrain.base.errors import UserError, describe_error
from dtrain.base.files import check_can_publish, publish, resolve_links, set_aside, staging_path, write_synced
from dtrain.base.model_directory import CONFIG, WEIGHTS, WEIGHTS_INDEX, has_weights
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.merged import FullWeight, full_weights, stored_weight
from dtrain.checkpoint.huggingface.model_files import (
    classifier_config,
    has_untrained_parts,
    read_model_config,
    text_tower_config,
    with_dtype,
    write_companions,
)
from dtrain.checkpoint.huggingface.read import candidate_names, is_carried
from dtrain.checkpoint.huggingface.safetensor_files import COPIED_DTYPES, DTYPES, WeightFiles
from dtrain.models.common.config import ModelConfig, is_in_vision_tower

T = TypeVar("T")
MAX_SHARD_BYTES = 5_000_000_000
_KINDS = {dtype: kind for kind, dtype in COPIED_DTYPES.items()}


def write_directory(
    model: nn.Module,
    out: str | Path,
    source: str | Path,
    dtype: torch.dtype | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    chat_template: str | None = None,
    saved_step: Mapping[str, Any] | None = None,
    replace: bool = False,
    tower_in_files: bool = False,
    ranks: Ranks | None = None,
) -> None:
    """Write `model` to the directory `out` in Hugging Face's layout: safetensors of at most `max_shard_bytes` (with an
    index where there are several), config.json, generation_config.json, tokenizer and chat template, an adapter merged.

    source: the directory that the model came from: config.json and the small files are copied from it, and the weights
    that dtrain does not train (a vision tower), under their own names; where it has none the text tower is written as a
    model of its own. dtype: of the floating tensors that the model holds; None keeps theirs. chat_template: the one
    trained with, where it is not the source's. saved_step: the step that this is and its save's mark, for
    `model_files.held_by`. tower_in_files: what of a vision tower is frozen is copied from `source` too. Collective: one
    all-gather per sharded tensor. `out` appears whole or not at all; one that is there and not empty is a UserError, or
    with `replace` gives way when the new one is whole."""
    ranks, out, source = ranks or Ranks(), Path(out), Path(source)
    config = getattr(model, "config", None)
    has_tower = isinstance(config, ModelConfig) and config.vision is not None
    layout = ranks.run_on_all(lambda: layout_of(source, has_tower=has_tower))
    kept = _frozen_of_tower(model) if tower_in_files else set()
    entries = [layout.entry(model, weight, dtype, kept) for weight in full_weights(model).values()]
    layout = dataclasses.replace(layout, chat_template=chat_template, saved_step=saved_step)
    write_entries(model, entries, layout, out, max_shard_bytes=max_shard_bytes, replace=replace, ranks=ranks)


@dataclass(frozen=True)
class Layout:
    """The layout of a directory like `source`: its config.json, the names its files use, what is copied from it.
    chat_template, saved_step: as `write_directory` takes them. companions: directories whose tokenizer and template
    take the
    place of the source's. has_tower: whether the model is built with its vision tower."""

    source: Path
    config: dict[str, Any]
    files: WeightFiles | None
    chat_template: str | None = None
    saved_step: Mapping[str, Any] | None = None
    companions: tuple[Path, ...] = ()
    has_tower: bool = False

    @property
    def is_text_tower_only(self) -> bool:
        """Return whether the model has parts of which there are no weights."""
        return has_untrained_parts(self.config) and self.files is None and not self.has_tower

    def name(self, model: nn.Module, names: list[str]) -> str:
        """The name in the files of the tensor that `model` knows by `names`: the source's own word for it."""
        if self.is_text_tower_only:
            return cast(str, model.text_name(names[0]))  # type: ignore[operator]  # of a `TextTower`
        candidates = candidate_names(model, names)
        if self.files is not None:
            candidates = [name for name in candidates if name in self.files.stored] or candidates
        return candidates[0]

    def entry(
        self, model: nn.Module, weight: FullWeight, dtype: torch.dtype | None, kept: Collection[str] = ()
    ) -> FullWeight:
        """Return what is written of a `weight` of `model`, in `dtype` or its own; of those named in `kept` what the
        source's files have."""
        name = self.name(model, weight.names)
        if self.files is not None and name in self.files.stored and weight.names[0] in kept:
            return stored_weight(self.files, name)
        return weight.in_file(name, dtype)


def layout_of(source: Path, weights: Path | None = None, *, has_tower: bool = False) -> Layout:
    """The layout that `source`, a model's directory, asks for, with the weights of the directory `weights` (default:
    the same), where it has some. What is written is in no 4 bits, whatever the source is. has_tower: as of `Layout`."""
    weights = weights or source
    config = {key: value for key, value in read_model_config(source).items() if key != "quantization_config"}
    return Layout(source, config, WeightFiles(weights) if has_weights(weights) else None, has_tower=has_tower)


def _frozen_of_tower(model: nn.Module) -> set[str]:
    """Return the names of the tensors of the vision tower that no training changes."""
    adapted = adapted_layers(model)
    return {
        name
        for name, tensor in model_tensors(model).items()
        if is_in_vision_tower(name) and not tensor.requires_grad and name.rpartition(".")[0] not in adapted
    }


def write_entries(
    model: nn.Module,
    entries: Sequence[FullWeight],
    layout: Layout,
    out: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replace: bool = False,
    ranks: Ranks,
) -> None:
    """Write `entries`, what is trained of `model`, and what is copied, to `out`, or where it leads as a symbolic link.
    Collective; see `write_directory`."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.shape.numel()
    known = set(DTYPES.values())
    if foreign := sizes.keys() - known:
        raise UserError(f"safetensors are written in {sorted(map(str, known))}, not {sorted(map(str, foreign))}")
    copied: list[FullWeight] = []  # as it is in the source, for `model` has no part in it
    if layout.files is not None:
        copied = [stored_weight(layout.files, name) for name in layout.files.stored if is_carried(model, name)]
    files = _files([*entries, *copied], max_shard_bytes)
    dtype = sizes.most_common(1)[0][0]
    described = getattr(model, "config", None)
    if isinstance(described, ModelConfig) and described.num_labels is not None:
        config = classifier_config(layout.config, described.architecture, described.num_labels, layout.source)
        layout = dataclasses.replace(layout, config=config)
    write_files(files, lambda new: _finish(new, files, layout, dtype), resolve_links(out), replace=replace, ranks=ranks)


def write_files(
    files: Mapping[str, Sequence[FullWeight]],
    finish: Callable[[Path], None],
    out: Path,
    *,
    replace: bool = False,
    ranks: Ranks,
) -> None:
    """Write safetensors `files`, by name, and what rank 0's `finish` puts beside them, to the directory `out`, which
    appears whole or not at all. Collective; `replace` as of `write_directory`."""
    partial = staging_path(out)

    def begin() -> None:
        if not replace and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is already there: delete it, or choose another directory")
        check_can_publish(out)
        partial.mkdir()

    def end() -> None:
        finish(partial)
        replaced = set_aside(out) if out.exists() else None
        publish(partial, out)
        if replaced is not None:
            shutil.rmtree(replaced)

    ranks.run_on_first(begin)
    try:
        for start in range(0, len(files), ranks.size):
            _write_side_by_side(list(files.items())[start : start + ranks.size], partial, ranks)
        ranks.run_on_first(end)
    except UserError:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _files(entries: Iterable[FullWeight], max_bytes: int) -> dict[str, list[FullWeight]]:
    """Entries in order, by file, cut where one would grow beyond `max_bytes`; a larger tensor has a file to itself."""
    shards: list[list[FullWeight]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + entry.nbytes > max_bytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return dict(zip(names, shards, strict=True)) if count > 1 else {WEIGHTS: shards[0]}


def _write_side_by_side(files: list[tuple[str, Sequence[FullWeight]]], directory: Path, ranks: Ranks) -> None:
    """Write one file per rank: entry by entry, all ranks gather for every writer, then the writers write."""
    name, mine = files[ranks.rank] if ranks.rank < len(files) else ("", [])
    file = SafetensorsFile(directory / name, mine) if name else None
    for position in range(max(len(entries) for _, entries in files)):
        kept = None
        for writer, (_, entries) in enumerate(files):
            if position < len(entries) and entries[position].collective:
                tensor = entries[position].read(entries[position].dtype)
                kept = tensor if writer == ranks.rank else kept
        if file is not None and position < len(mine):
            file.add(mine[position], kept)
    ranks.gather_results(file.close if file is not None else lambda: None)


class SafetensorsFile:
    """A safetensors file written tensor by tensor. An error of the disk waits for `close`: the other ranks go on
    gathering meanwhile, and would hang without this one."""

    def __init__(self, path: Path, entries: Sequence[FullWeight]):
        self.path = path
        self._failure: OSError | UserError | None = None
        self._stream: IO[bytes] | None = None
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            offsets = [end, end := end + entry.nbytes]
            header[entry.names[0]] = {"dtype": _KINDS[entry.dtype], "shape": [*entry.shape], "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, entry: FullWeight, tensor: Tensor | None) -> None:
        """tensor: [entry.shape], what was gathered of it; None where it is this rank's alone to read."""
        if tensor is None and (tensor := self._attempt(lambda: entry.read(entry.dtype))) is None:
            return
        tensor = tensor.to(device="cpu", dtype=entry.dtype).contiguous()
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"{entry.names[0]} is {tuple(tensor.shape)}, announced as {tuple(entry.shape)}")
        # Tensors offer their memory as a buffer only through numpy, which dtrain goes without.
        self._write((ctypes.c_char * entry.nbytes).from_address(tensor.data_ptr()) if entry.nbytes else b"")

    def close(self) -> None:
        """Sync and close; raises the first error that the disk gave."""
        if self._stream is not None:
            with self._stream as stream:
                if self._failure is None:
                    os.fsync(stream.fileno())
        if self._failure is not None:
            raise UserError(f"{self.path}: {describe_error(self._failure)}") from self._failure

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """The result of `act`; None after a failure, of `act` or before."""
        if self._failure is None:
            try:
                return act()
            except (OSError, UserError) as error:
                self._failure = error
        return None

    def _write(self, data) -> None:
        def write() -> None:
            self._stream = self._stream or self.path.open("wb", buffering=0)
            view = memoryview(data).cast("B")
            while view:  # the system may take less than it is given, 2 GiB at most
                view = view[self._stream.write(view) :]

        self._attempt(write)


def _finish(partial: Path, files: Mapping[str, list[FullWeight]], layout: Layout, dtype: torch.dtype) -> None:
    if len(files) > 1:
        places = {entry.names[0]: name for name, entries in files.items() for entry in entries}
        size = sum(entry.nbytes for entries in files.values() for entry in entries)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_synced(partial / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    config = text_tower_config(layout.config) if layout.is_text_tower_only else layout.config
    config = with_dtype(config, str(dtype).removeprefix("torch."))
    write_synced(partial / CONFIG, json.dumps(config, indent=2) + "\n")
    write_companions(partial, (layout.source, *layout.companions), layout.chat_template, layout.saved_step)
