"""Reading and writing of adapters in PEFT's layout: adapter_model.safetensors and adapter_config.json.

The names of the tensors are derived from the names of the model's parameters, which FSDP, compilation and activation
checkpointing do not change. So a file can be read into a model on any mesh.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.adapters.config import AdapterConfig
from dtrain.base.errors import UserError
from dtrain.base.files import FileRecord, atomic_write_text, checksum, resolve_links
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import TensorSpecs
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.file_rows import (
    FileRows,
    adapter_in_file,
    adapter_shape_in_file,
    fused_weights,
    locate_parts,
)
from dtrain.checkpoint.huggingface.merged import FullWeight, gather_full_tensor, weights_in_files
from dtrain.checkpoint.huggingface.model_files import write_companions
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.checkpoint.huggingface.write import SafetensorsFile, write_files
from dtrain.checkpoint.peft.config import ADAPTER, peft_config, read_adapter_config
from dtrain.checkpoint.peft.tensors import mismatches, peft_names
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.placement import local_slices, local_tensor

Read = Callable[[str], Tensor]


def read_adapter(model: CausalLM, directory: str | Path) -> None:
    """Fill the adapters of a model, and its fully trained modules, from an adapter's directory. No collective.

    Args:
        model: The model with the parameters that adapter_config.json describes, on CPU or CUDA, plain or sharded. A
            rank reads the slices of its shards, cast to the parameter's dtype.
        directory: The directory.

    Raises:
        UserError: For damaged files, for everything that `adapter_weights` refuses, and for a tied embedding whose two
            copies differ. Then no parameter has been changed.
    """
    directory = Path(directory)
    config, tensors = read_adapter_config(directory), model_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if peft_names(name, config, model.config)}
    expected_shapes: dict[str, tuple[int, ...]] = {}  # by PEFT's names
    sources: dict[str, FileRows] = {}  # by the model's names
    copies: dict[str, str] = {}  # of a tied embedding: PEFT's name of the second copy, and of the first
    for fused in fused_weights(model, shapes):
        first, *others = peft_names(fused.name, config, model.config)
        shape, rows = locate_parts(fused, first, shapes)
        sources |= rows
        expected_shapes |= dict.fromkeys([first, *others], shape)
        copies |= dict.fromkeys(others, first)
    files = adapter_weights(directory, expected_shapes, model.config)
    # Every rank compares the full tensors, so that all ranks find the same.
    for second, first in copies.items():
        if files.tensors_differ(first, second):
            raise UserError(
                f"{files.stored[first].file}: {first} and {second} differ, and the model's head is tied to its "
                "embedding, one weight: train the adapter with PEFT's ensure_weight_tying, or give an untied model as "
                "model.path"
            )
    for name, source in sources.items():
        local = local_tensor(tensors[name]).detach()
        if local.numel():
            source.fill(files, local, local_slices(tensors[name]))


def adapter_weights(directory: Path, expected_shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> WeightFiles:
    """Open the tensors of an adapter, and compare their names and shapes with the tensors that a model needs.

    Args:
        directory: The adapter's directory.
        expected_shapes: Shapes of the tensors by PEFT's names.
        model: Config of the model.

    Raises:
        UserError: One error that lists all names that are missing or unexpected, all shapes that differ, and all dtypes
            that are not read.
    """
    files = WeightFiles(directory, ADAPTER_WEIGHTS)
    shapes = {name: entry.shape for name, entry in files.stored.items()}
    problems = mismatches(directory, shapes, expected_shapes, model=model)
    for name, entry in files.stored.items():
        if entry.dtype is None:
            problems.append(f"{entry.file}: dtype: {name} is {entry.kind}; quantized adapters are not read")
    if problems:
        raise UserError("\n".join(problems))
    return files


@dataclass(frozen=True)
class AdapterFiles:
    """Writes an adapter in PEFT's layout.

    Attributes:
        config: The adapter.
        model: Config of the adapted model.
        base: Directory or id of the base model; None if no files have it.
    """

    config: AdapterConfig
    model: ModelConfig
    base: str | None

    def entries(
        self, sizes: TensorSpecs, read: Read, dtype: torch.dtype | None = None, *, collective: bool = False
    ) -> list[FullWeight]:
        """Return the tensors of the adapter's file.

        Args:
            sizes: Shape and dtype of the model's parameters by name. Only those of the adapter are used.
            read: Reads a parameter.
            dtype: Dtype of the file's tensors. None keeps their own dtypes.
            collective: Whether `read` communicates, so that every rank must call it.

        Returns:
            The tensors by PEFT's names. A tied embedding appears under two names.
        """

        def weight(name: str) -> FullWeight:
            shape, own_dtype = sizes[name]
            return FullWeight(
                [name],
                shape=torch.Size(adapter_shape_in_file(name, shape)),
                dtype=own_dtype,
                read=lambda dtype: adapter_in_file(name, read(name)).to(dtype),
                collective=collective,
            )

        weights = {name: weight(name) for name in sizes if peft_names(name, self.config, self.model)}
        entries = []
        for name, entry in weights_in_files(self.model, weights).items():
            for peft_name in peft_names(name, self.config, self.model):
                entries.append(entry.in_file(peft_name, dtype))
        return entries

    def write_into_step(self, step: Path, sizes: TensorSpecs, read: Read) -> dict[str, FileRecord]:
        """Write `adapter/`, synced, into a step that is not published yet.

        It is the argument `write_extra_files` of `CheckpointStore.save`.

        Args:
            step: Directory of the step.
            sizes: Shape and dtype of the step's tensors by name.
            read: Reads a tensor of the step.

        Returns:
            Size and checksum of each file, by its name in the step.
        """
        prefix = "model."
        model_sizes = {name.removeprefix(prefix): size for name, size in sizes.items() if name.startswith(prefix)}
        entries = self.entries(model_sizes, lambda name: read(f"{prefix}{name}"))
        directory = step / ADAPTER
        directory.mkdir()
        file = SafetensorsFile(directory / ADAPTER_WEIGHTS, entries)
        for entry in entries:
            file.add(entry, None)
        file.close()
        self.finish(directory)
        return {f"{directory.name}/{name}": checksum(directory / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)}

    def finish(self, directory: Path) -> None:
        """Write adapter_config.json into a directory."""
        text = json.dumps(peft_config(self.config, self.model, self.base), indent=2, sort_keys=True) + "\n"
        atomic_write_text(directory / ADAPTER_CONFIG, text)


def write_adapter(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    config: AdapterConfig,
    model: ModelConfig,
    base: str | None,
    *,
    companions: Path | None = None,
    chat_template: str | None = None,
    saved_step: Mapping[str, Any] | None = None,
    replace: bool = False,
    ranks: Ranks | None = None,
) -> None:
    """Write an adapter in PEFT's layout. The directory appears when it is complete.

    Args:
        directory: The new directory.
        tensors: The model's parameters by name, plain or DTensors. Only the adapter's parameters are written.
        config: The adapter.
        model: Config of the adapted model.
        base: Value of base_model_name_or_path.
        companions: Directory whose tokenizer and template are copied. None copies none.
        chat_template: As in `write_directory`.
        saved_step: As in `write_directory`.
        replace: As in `write_directory`.
        ranks: The ranks that write. None: all ranks.

    Raises:
        UserError: If the directory cannot be written, or is not empty without `replace`.

    Collectives:
        One all-gather per sharded tensor.
    """
    form = AdapterFiles(config, model, base)
    sizes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    entries = form.entries(sizes, lambda name: gather_full_tensor(tensors[name]), collective=is_sharded)

    def finish(new: Path) -> None:
        form.finish(new)
        write_companions(new, [] if companions is None else [companions], chat_template, saved_step)

    out = resolve_links(Path(directory))
    write_files({ADAPTER_WEIGHTS: entries}, finish, out, replace=replace, ranks=ranks or Ranks())
