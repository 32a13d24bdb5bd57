"""Writing a model directory that transformers loads, from plain tensors or DTensors, without a full model on a rank.

Files are distributed over the ranks. For 3 files on 2 ranks, with the tensors a1, a2 in the first file and so on:

    round 1    all ranks gather a1 (kept by rank 0), then b1 (kept by rank 1); both write
               all ranks gather a2 (kept by rank 0), then b2 (kept by rank 1); both write
    round 2    all ranks gather c1 (kept by rank 0); rank 0 writes

So a rank needs memory for its shards, the tensor that is being gathered, and the one that it writes.
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
from dtrain.checkpoint.huggingface.converted import is_library_model
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
from dtrain.models.read_config import classifier_name

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
    """Write a model in Hugging Face's layout, with its adapters merged.

    The directory has safetensors (with an index if there are several files), config.json, generation_config.json, the
    tokenizer and the chat template. It appears when it is complete.

    Args:
        model: The model, plain or sharded.
        out: The new directory.
        source: The directory that the model came from. config.json, the small files, and weights that dtrain does not
            train (such as a vision tower) are copied from there. If it does not have such weights, the text tower is
            written as a model of its own.
        dtype: Dtype of the model's floating tensors. None keeps their own dtypes.
        max_shard_bytes: Largest size of a file. A larger tensor gets a file to itself.
        chat_template: Text of the chat template of the training, if it is not the source's.
        saved_step: {"step", "save"}: the step, and the mark of its save, for `model_files.read_saved_step`.
        replace: Replace `out` when the new directory is complete. Otherwise it must be missing or empty.
        tower_in_files: Copy the frozen part of a vision tower from `source` too.
        ranks: The ranks that write. None: all ranks.

    Raises:
        UserError: If `out` cannot be written, or is not empty without `replace`.

    Collectives:
        One all-gather per sharded tensor.
    """
    ranks, out, source = ranks or Ranks(), Path(out), Path(source)
    config = getattr(model, "config", None)
    has_tower = isinstance(config, ModelConfig) and config.vision is not None
    layout = ranks.run_on_all(lambda: layout_of(source, has_tower=has_tower))
    from_source = _frozen_tower_tensors(model) if tower_in_files else set()
    entries = [layout.entry(model, weight, dtype, from_source) for weight in full_weights(model).values()]
    layout = dataclasses.replace(layout, chat_template=chat_template, saved_step=saved_step)
    write_entries(model, entries, layout, out, max_shard_bytes=max_shard_bytes, replace=replace, ranks=ranks)


@dataclass(frozen=True)
class Layout:
    """Layout of the directory to write, which follows that of a source directory.

    Attributes:
        source: The source directory.
        config: Content of its config.json.
        files: Its weights, or None if it has none.
        chat_template: As in `write_directory`.
        saved_step: As in `write_directory`.
        companions: Directories whose tokenizer and template replace the source's.
        has_tower: Whether the model was built with its vision tower.
    """

    source: Path
    config: dict[str, Any]
    files: WeightFiles | None
    chat_template: str | None = None
    saved_step: Mapping[str, Any] | None = None
    companions: tuple[Path, ...] = ()
    has_tower: bool = False

    @property
    def is_text_tower_only(self) -> bool:
        """True if only the text tower of a multimodal model is written, because there are no other weights."""
        return has_untrained_parts(self.config) and self.files is None and not self.has_tower

    def name(self, model: nn.Module, names: list[str]) -> str:
        """Return the name of a tensor in the files: the one that the source uses, if there are several.

        Args:
            model: The model.
            names: All names of the tensor in the model.
        """
        if self.is_text_tower_only:
            return cast(str, model.text_name(names[0]))  # type: ignore[operator]  # of a `TextTower`
        if is_library_model(model):
            return names[0]  # `merged.weights_in_files` has converted it to the name of `save_pretrained`
        candidates = candidate_names(model, names)
        if self.files is not None:
            for candidate in candidates:
                if candidate in self.files.stored:
                    return candidate
        return candidates[0]

    def entry(
        self, model: nn.Module, weight: FullWeight, dtype: torch.dtype | None, from_source: Collection[str] = ()
    ) -> FullWeight:
        """Return the tensor of the files for a weight of the model.

        Args:
            model: The model.
            weight: The weight, by its names in the model.
            dtype: Dtype of the tensor. None keeps the weight's.
            from_source: Names of weights that are copied from the source's files.
        """
        name = self.name(model, weight.names)
        if self.files is not None and name in self.files.stored and weight.names[0] in from_source:
            return stored_weight(self.files, name)
        return weight.in_file(name, dtype)


def layout_of(source: Path, weights: Path | None = None, *, has_tower: bool = False) -> Layout:
    """Read the layout of a model's directory.

    Args:
        source: The directory.
        weights: Directory of its weights, which may have none. None: `source`.
        has_tower: As in `Layout`.
    """
    weights = weights or source
    config = read_model_config(source)
    config.pop("quantization_config", None)  # weights are written as floats, also if the source has 4 bits
    files = WeightFiles(weights) if has_weights(weights) else None
    return Layout(source, config, files, has_tower=has_tower)


def _frozen_tower_tensors(model: nn.Module) -> set[str]:
    """Return the names of the vision tower's tensors that training does not change."""
    adapted = adapted_layers(model)
    names = set()
    for name, tensor in model_tensors(model).items():
        has_adapter = name.rpartition(".")[0] in adapted
        if is_in_vision_tower(name) and not tensor.requires_grad and not has_adapter:
            names.add(name)
    return names


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
    """Write the tensors of a model, and those that are copied from the source. See `write_directory`.

    Args:
        model: The model.
        entries: Its tensors by their names in the files.
        layout: Layout of the directory.
        out: The directory, or a symbolic link to it.
        max_shard_bytes: As in `write_directory`.
        replace: As in `write_directory`.
        ranks: The ranks that write.

    Raises:
        UserError: As in `write_files`, or if a tensor has a dtype that is not written.

    Collectives:
        Those of `write_files`.
    """
    num_elements: Counter[torch.dtype] = Counter()
    for entry in entries:
        num_elements[entry.dtype] += entry.shape.numel()
    supported = set(DTYPES.values())
    unsupported = num_elements.keys() - supported
    if unsupported:
        raise UserError(
            f"safetensors are written in {sorted(map(str, supported))}, not {sorted(map(str, unsupported))}"
        )
    copied: list[FullWeight] = []
    if layout.files is not None:
        copied = [stored_weight(layout.files, name) for name in layout.files.stored if is_carried(model, name)]
    files = _split_into_files([*entries, *copied], max_shard_bytes)
    config_dtype = num_elements.most_common(1)[0][0]
    model_config = getattr(model, "config", None)
    if isinstance(model_config, ModelConfig) and model_config.num_labels is not None:
        classifier = classifier_name(model_config)
        assert classifier is not None, "a config with labels was read for a family with a classifier"
        config = classifier_config(layout.config, classifier, model_config.num_labels, layout.source)
        layout = dataclasses.replace(layout, config=config)

    def finish(new: Path) -> None:
        _write_small_files(new, files, layout, config_dtype)

    write_files(files, finish, resolve_links(out), replace=replace, ranks=ranks)


def write_files(
    files: Mapping[str, Sequence[FullWeight]],
    finish: Callable[[Path], None],
    out: Path,
    *,
    replace: bool = False,
    ranks: Ranks,
) -> None:
    """Write a directory of safetensors files, which appears when it is complete.

    Args:
        files: The tensors of each file, by its name.
        finish: Writes further files into the directory, on rank 0.
        out: The directory.
        replace: As in `write_directory`.
        ranks: The ranks that write.

    Raises:
        UserError: If the directory cannot be written, or is not empty without `replace`.

    Collectives:
        Those of the tensors' `read`, one all-gather of objects for every `ranks.size` files, and two broadcasts of
        objects.
    """
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
            _write_one_file_per_rank(list(files.items())[start : start + ranks.size], partial, ranks)
        ranks.run_on_first(end)
    except UserError:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _split_into_files(entries: Iterable[FullWeight], max_bytes: int) -> dict[str, list[FullWeight]]:
    """Distribute tensors over files of at most `max_bytes`, in order. A larger tensor gets a file to itself."""
    shards: list[list[FullWeight]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + entry.nbytes > max_bytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    if count == 1:
        return {WEIGHTS: shards[0]}
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return dict(zip(names, shards, strict=True))


def _write_one_file_per_rank(files: list[tuple[str, Sequence[FullWeight]]], directory: Path, ranks: Ranks) -> None:
    """Write at most one file per rank. All ranks gather one tensor for every writer, then the writers write them."""
    file = None
    entries_to_write: Sequence[FullWeight] = ()
    if ranks.rank < len(files):
        name, entries_to_write = files[ranks.rank]
        file = SafetensorsFile(directory / name, entries_to_write)
    for position in range(max(len(entries) for _, entries in files)):
        gathered = None
        for writer, (_, entries) in enumerate(files):
            if position >= len(entries) or not entries[position].collective:
                continue
            entry = entries[position]
            tensor = entry.read(entry.dtype)  # on every rank
            if writer == ranks.rank:
                gathered = tensor
        if file is not None and position < len(entries_to_write):
            file.add(entries_to_write[position], gathered)
    ranks.gather_results(file.close if file is not None else lambda: None)


class SafetensorsFile:
    """A safetensors file that is written tensor by tensor.

    An error of the disk is raised only by `close`. If `add` raised it, this rank would leave the loop in which all
    ranks gather tensors, and the other ranks would wait for it forever.

    Args:
        path: The file.
        entries: Its tensors, in the order in which `add` writes them.
    """

    def __init__(self, path: Path, entries: Sequence[FullWeight]):
        self.path = path
        self._failure: OSError | UserError | None = None
        self._stream: IO[bytes] | None = None
        header: dict = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in entries:
            end = start + entry.nbytes
            header[entry.names[0]] = {
                "dtype": _KINDS[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data must begin at a multiple of 8 bytes
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, entry: FullWeight, tensor: Tensor | None) -> None:
        """Write the next tensor.

        Args:
            entry: The tensor.
            tensor: Its values, if they were gathered. None: they are read here.

        Raises:
            ValueError: If the values have another shape than `entry`.
        """
        if tensor is None:
            tensor = self._attempt(lambda: entry.read(entry.dtype))
        if tensor is None:  # after a failure
            return
        tensor = tensor.to(device="cpu", dtype=entry.dtype).contiguous()
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"{entry.names[0]} is {tuple(tensor.shape)}, announced as {tuple(entry.shape)}")
        if entry.nbytes:
            # Write from the tensor's memory without a copy. `tensor.numpy()` would do so too, but not for bfloat16.
            memory = (ctypes.c_char * entry.nbytes).from_address(tensor.data_ptr())
            self._write(memory)

    def close(self) -> None:
        """Sync and close the file. Raises UserError for the first error of the disk."""
        if self._stream is not None:
            with self._stream as stream:
                if self._failure is None:
                    os.fsync(stream.fileno())
        if self._failure is not None:
            raise UserError(f"{self.path}: {describe_error(self._failure)}") from self._failure

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act`, or None after a failure of `act` or before."""
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
            while view:  # one call may write only a part, at most 2 GiB
                num_written = self._stream.write(view)
                view = view[num_written:]

        self._attempt(write)


def _write_small_files(
    partial: Path, files: Mapping[str, list[FullWeight]], layout: Layout, dtype: torch.dtype
) -> None:
    """Write the index, config.json and the files of the tokenizer."""
    if len(files) > 1:
        file_names: dict[str, str] = {}  # of each tensor
        total_size = 0
        for name, entries in files.items():
            for entry in entries:
                file_names[entry.names[0]] = name
                total_size += entry.nbytes
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(file_names.items()))}
        write_synced(partial / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    config = text_tower_config(layout.config) if layout.is_text_tower_only else layout.config
    config = with_dtype(config, str(dtype).removeprefix("torch."))
    write_synced(partial / CONFIG, json.dumps(config, indent=2) + "\n")
    write_companions(partial, (layout.source, *layout.companions), layout.chat_template, layout.saved_step)
