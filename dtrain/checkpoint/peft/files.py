"""Adapters in and out, in PEFT's layout: adapter_model.safetensors beside the adapter_config.json of `peft_config`.

Names of tensors come from the model's own names, which no wrapper changes, so that a file fits wherever it is read.
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
    """Fill the adapters of `model`, and its modules that they train whole, from an adapter's directory.

    model: with the parameters that adapter_config.json asks for, on CPU or CUDA, plain tensors or DTensors of any mesh:
    a rank reads the slices that it holds, cast to the parameter's dtype. No collective. Raises one UserError that lists
    what `adapter_weights` does; another for damaged files, and for a tied embedding whose two copies differ. Nothing is
    written then.
    """
    directory = Path(directory)
    config, tensors = read_adapter_config(directory), model_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if peft_names(name, config, model.config)}
    wanted: dict[str, tuple[int, ...]] = {}
    sources: dict[str, FileRows] = {}
    copies: dict[str, str] = {}
    for fused in fused_weights(model, shapes):
        first, *others = peft_names(fused.name, config, model.config)
        shape, rows = locate_parts(fused, first, shapes)
        sources |= rows
        wanted |= dict.fromkeys([first, *others], shape)
        copies |= dict.fromkeys(others, first)
    files = adapter_weights(directory, wanted, model.config)
    for second, first in copies.items():  # every rank compares all of the two, so that all find the same
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


def adapter_weights(directory: Path, wanted: Mapping[str, tuple[int, ...]], model: ModelConfig) -> WeightFiles:
    """Open the tensors of an adapter of `model`, which must be those `wanted`: PEFT's names and shapes.

    Raises UserError that lists all names that are missing or unexpected, all shapes that differ and all dtypes that are
    not read.
    """
    files = WeightFiles(directory, ADAPTER_WEIGHTS)
    shapes = {name: entry.shape for name, entry in files.stored.items()}
    problems = mismatches(directory, shapes, wanted, model=model)
    problems += [
        f"{entry.file}: dtype: {name} is {entry.kind}; quantized adapters are not read"
        for name, entry in files.stored.items()
        if entry.dtype is None
    ]
    if problems:
        raise UserError("\n".join(problems))
    return files


@dataclass(frozen=True)
class AdapterFiles:
    """Writer of the adapter of a model of this kind, which lies at `base`."""

    config: AdapterConfig
    model: ModelConfig
    base: str | None

    def entries(
        self, sizes: TensorSpecs, read: Read, dtype: torch.dtype | None = None, *, collective: bool = False
    ) -> list[FullWeight]:
        """Return what is written of tensors with these shapes and dtypes, by parameter name; others are passed over. A
        tied embedding has two names. dtype: None for theirs. collective: every rank reads."""

        def weight(name: str) -> FullWeight:
            shape, kept = torch.Size(adapter_shape_in_file(name, sizes[name][0])), sizes[name][1]
            return FullWeight(
                [name], shape, kept, lambda dtype: adapter_in_file(name, read(name)).to(dtype), collective
            )

        weights = {name: weight(name) for name in sizes if peft_names(name, self.config, self.model)}
        return [
            whole.in_file(outer, dtype)
            for name, whole in weights_in_files(self.model, weights).items()
            for outer in peft_names(name, self.config, self.model)
        ]

    def write_into_step(self, step: Path, sizes: TensorSpecs, read: Read) -> dict[str, FileRecord]:
        """Write `adapter/`, synced, into an unpublished step's directory, as `CheckpointStore.save` asks for it."""
        own = {name.removeprefix("model."): size for name, size in sizes.items() if name.startswith("model.")}
        directory, entries = step / ADAPTER, self.entries(own, lambda name: read(f"model.{name}"))
        directory.mkdir()
        file = SafetensorsFile(directory / ADAPTER_WEIGHTS, entries)
        for entry in entries:
            file.add(entry, None)
        file.close()
        self.finish(directory)
        return {f"{directory.name}/{name}": checksum(directory / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)}

    def finish(self, directory: Path) -> None:
        """Put adapter_config.json into `directory`."""
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
    """Write an adapter, `config`, of a model of this kind in PEFT's layout.

    tensors: by the model's parameter names, [any shape], plain or DTensors; others than the adapter's are passed over.
    base: what base_model_name_or_path says. companions: the directory whose tokenizer and template are copied along;
    chat_template, saved_step, replace: as of `write_directory`. Collective over `ranks` (default: all): one
    all-gather per
    sharded tensor. `directory` appears whole or not at all. UserError where it is there and not empty, or cannot be
    written."""
    form = AdapterFiles(config, model, base)
    sizes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    is_sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    entries = form.entries(sizes, lambda name: gather_full_tensor(tensors[name]), collective=is_sharded)

    def finish(new: Path) -> None:
        form.finish(new)
        write_companions(new, [] if companions is None else [companions], chat_template, saved_step)

    out = resolve_links(Path(directory))
    write_files({ADAPTER_WEIGHTS: entries}, finish, out, replace=replace, ranks=ranks or Ranks())
