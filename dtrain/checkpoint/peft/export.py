"""An adapter's directory, to be copied, folded or merged by `dtrain export`. In one process, tensor by tensor.

A layer with an adapter computes (W + s · B · A) · x. Three forms of the same adapter:

    copied    A, B, and s from lora_alpha and r, as the file has them
    folded    A, s · B, and a scale of 1, for programs that ignore some of PEFT's fields (rsLoRA, patterns)
    merged    W + s · B · A
"""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from dtrain.adapters.config import AdapterConfig, adapter_parameter_shapes
from dtrain.base.errors import UserError
from dtrain.base.files import atomic_write_text, resolve_links
from dtrain.base.json_files import read_json
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.store import TensorSpecs
from dtrain.checkpoint.huggingface.file_rows import fused_weights, locate_parts
from dtrain.checkpoint.huggingface.merged import FullWeight, fold_scale, merge_adapter, stored_weight
from dtrain.checkpoint.huggingface.model_files import write_companions
from dtrain.checkpoint.huggingface.safetensor_files import DTYPES
from dtrain.checkpoint.huggingface.write import write_files
from dtrain.checkpoint.peft.config import BASE, misread_problem, read_adapter_config
from dtrain.checkpoint.peft.files import AdapterFiles, adapter_weights
from dtrain.checkpoint.peft.tensors import adapter_shapes, peft_names
from dtrain.models.building import adaptable_shapes, linear_shapes
from dtrain.models.common.decoder import CausalLM


class StoredAdapter:
    """An adapter in PEFT's layout, compared with the model of its base. Weights are read on request.

    Args:
        directory: The adapter's directory.
        model: The model of its base on meta.

    Attributes:
        directory: The adapter's directory.
        model: The model of its base.
        config: The adapter's config.
        adapted: Rank and scale of each adapted layer, by its name in files.
        full_layers: Names in files of the linear layers that are trained in full (`modules_to_save`).
        parameters: Shapes of the model's parameters, by name.
        files: The adapter's tensors.

    Raises:
        UserError: If the adapter does not fit the model.
    """

    def __init__(self, directory: Path, model: CausalLM):
        self.directory, self.model = directory, model
        self.config = read_adapter_config(directory)
        self.adapted = self.config.select_layers(adaptable_shapes(model.config))
        self.full_layers = tuple(self.config.select_saved_modules(linear_shapes(model.config)))
        self.parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        expected_shapes = adapter_shapes(self.config, model.config, self.parameters)
        self.files = adapter_weights(directory, expected_shapes, model.config)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's own parameters and of its adapters', by name."""
        shapes = dict(self.parameters)
        for name, layer in self.adapted.items():
            for part in self.model.config.model_modules(name):
                adapter_parts = adapter_parameter_shapes(self.parameters[f"{part}.weight"], layer.rank, dora=True)
                for parameter, shape in adapter_parts.items():
                    shapes[f"{part}.{parameter}"] = shape
        return shapes

    def read(self, name: str) -> Tensor:
        """Read a parameter by its name in the model, in its stored dtype."""
        (fused,) = fused_weights(self.model, [name])
        rows = locate_parts(fused, self._peft_names(name)[0], self.shapes).rows
        # Layers that the files join share one A, which is stored under the first layer's name.
        location = rows[name] if name in rows else rows[fused.parts[0]]
        return location.read(self.files)

    def saves(self, name: str) -> bool:
        """Check whether the adapter has a parameter of the model itself, which is trained fully."""
        return bool(self._peft_names(name))

    def merged(self, name: str, base: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """Compute a parameter of the model with the adapter merged.

        Args:
            name: Name of the parameter in the model.
            base: Reads the base's parameter.
            dtype: Dtype of the result.
        """
        module, _, parameter = name.rpartition(".")
        if self.saves(name):
            return self.read(name).to(dtype)
        layer = self.adapted.get(self.model.config.file_module(module))
        if parameter != "weight" or layer is None:
            return base().to(dtype)
        a, b = self.read(f"{module}.lora_A"), self.read(f"{module}.lora_B")
        magnitude = self.read(f"{module}.lora_magnitude") if self.config.dora else None
        return merge_adapter(base(), a, b, layer.scale, magnitude, dtype)

    def copy(self, out: Path, companions: list[Path], dtype: torch.dtype | None) -> None:
        """Write the adapter as it is.

        Args:
            out: The new directory.
            companions: Directories whose tokenizer and template are copied. A later one's files replace those of an
                earlier one.
            dtype: Dtype of the tensors. None keeps their own dtypes.

        Raises:
            UserError: If PEFT would misread the adapter.
        """
        problem = misread_problem(self.config, self.model.config)
        if problem:
            raise UserError(f"--adapter: {problem}. Export it --merged")
        entries = [stored_weight(self.files, name, dtype) for name in self.files.stored]
        fields = read_json(self.directory / ADAPTER_CONFIG)
        if BASE in fields:
            fields[BASE] = self._base
        text = json.dumps(fields, indent=2) + "\n"
        _write(out, entries, lambda new: atomic_write_text(new / ADAPTER_CONFIG, text), companions)

    def fold(self, out: Path, companions: list[Path], dtype: torch.dtype | None) -> None:
        """Write an equal adapter for programs that only read r and lora_alpha.

        The scale is multiplied into B, lora_alpha is r, and all layers get the largest rank, filled up with zeros.
        Arguments are those of `copy`.

        Raises:
            UserError: If plain LoRA has no equal adapter.
        """
        self.refuse_more_than_lora("--folded")
        rank = max(layer.rank for layer in self.adapted.values())
        names = tuple(self.adapted)
        config = AdapterConfig(rank=rank, alpha=rank, dropout=self.config.dropout, target=names)
        form = AdapterFiles(config, self.model.config, self._base)
        specs: TensorSpecs = {}
        for module in names:
            for part in ("lora_A", "lora_B"):
                name = f"{module}.{part}"
                stored = self.files.stored[self._peft_names(name)[0]]
                specs[name] = self.padded_shape(name, rank), torch.promote_types(DTYPES[stored.kind], torch.float32)

        def read(name: str) -> Tensor:
            scale = self.adapted[name.rpartition(".")[0]].scale
            _, wide = specs[name]
            return fold_scale(name, self.stored(name).to(wide), rank, scale)

        _write(out, form.entries(specs, read, dtype), form.finish, companions)

    def stored(self, name: str) -> Tensor:
        """Read the A [r, in] or B [out, r] of a layer, by the layer's name in files, in its stored dtype."""
        return self.files.read(self._peft_names(name)[0])

    def padded_shape(self, name: str, rank: int) -> tuple[int, int]:
        """Return the shape of a layer's A or B after `fold_scale` with this rank."""
        rows, columns = self.files.stored[self._peft_names(name)[0]].shape
        return (rank, columns) if name.endswith("A") else (rows, rank)

    def refuse_more_than_lora(self, option: str) -> None:
        """Raise UserError if plain LoRA cannot express the adapter, or if it is empty.

        Args:
            option: The command line option that needs plain LoRA, for the message.
        """
        if self.config.dora or self.config.modules_to_save:
            part = "DoRA's magnitudes" if self.config.dora else "fully trained modules (modules_to_save)"
            raise UserError(f"{option}: the adapter has {part}, which plain LoRA does not have: export it --merged")
        if self.config.select_parameters(self.adapted):
            raise UserError(f"{option}: plain LoRA does not have adapters of experts: export it --merged")
        if not self.adapted:
            raise UserError(f"{option}: {self.directory} has no adapter of a layer: there is nothing to write")

    @property
    def _base(self) -> str | None:
        """base_model_name_or_path for the new directory: relative paths are made absolute."""
        name: str | None = read_json(self.directory / ADAPTER_CONFIG).get(BASE)
        if not name or Path(name).is_absolute():
            return name
        for path in (Path(name), self.directory / name):
            if (path / CONFIG).is_file():
                return str(path.resolve())
        return name

    def _peft_names(self, name: str) -> list[str]:
        return peft_names(name, self.config, self.model.config)


def _write(out: Path, entries: list[FullWeight], config: Callable[[Path], None], companions: list[Path]) -> None:
    """Write an adapter's directory. `config` writes adapter_config.json into it. `companions` as in `copy`."""

    def finish(new: Path) -> None:
        config(new)
        write_companions(new, companions, None, None)

    write_files({ADAPTER_WEIGHTS: entries}, finish, resolve_links(out), ranks=Ranks(single_process=True))
