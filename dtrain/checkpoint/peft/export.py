"""An adapter's directory for others: alone, folded, or merged into its base. On one process, tensor by tensor."""

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
    """The adapter in `directory`. model: of its base, on meta. Raises UserError for one that does not fit that.
    adapted: the layers that have one. whole: the linear layers that are trained whole, by their names in files.
    parameters: the shapes of the model's own, by name."""

    def __init__(self, directory: Path, model: CausalLM):
        self.directory, self.model, self.config = directory, model, read_adapter_config(directory)
        self.adapted = self.config.select_layers(adaptable_shapes(model.config))
        self.whole = tuple(self.config.select_saved_modules(linear_shapes(model.config)))
        self.parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        wanted = adapter_shapes(self.config, model.config, self.parameters)
        self.files = adapter_weights(directory, wanted, model.config)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's own parameters and of its adapters', by name."""
        shapes = dict(self.parameters)
        for name, layer in self.adapted.items():
            for part in self.model.config.model_modules(name):
                own = adapter_parameter_shapes(self.parameters[f"{part}.weight"], layer.rank, dora=True)
                shapes |= {f"{part}.{parameter}": shape for parameter, shape in own.items()}
        return shapes

    def read(self, name: str) -> Tensor:
        """The parameter that the model calls `name`, [its shape], as it is stored; an A that several share too."""
        (fused,) = fused_weights(self.model, [name])
        rows = locate_parts(fused, self._outer(name)[0], self.shapes)[1]
        return rows.get(name, rows[fused.parts[0]]).read(self.files)

    def saves(self, name: str) -> bool:
        """Return whether the model's parameter of this name is trained whole."""
        return bool(self._outer(name))

    def merged(self, name: str, base: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """The model's parameter `name`, [its shape], in `dtype`, from what reads the base's."""
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
        """Write it to the directory `out` as it is, in `dtype` or its own.

        Raises UserError if PEFT would misread it.
        """
        if problem := misread_problem(self.config, self.model.config):
            raise UserError(f"--adapter: {problem}. Export it --merged")
        entries = [stored_weight(self.files, name, dtype) for name in self.files.stored]
        fields = read_json(self.directory / ADAPTER_CONFIG)
        fields |= {BASE: self._base} if BASE in fields else {}
        text = json.dumps(fields, indent=2) + "\n"
        _write(out, entries, lambda new: atomic_write_text(new / ADAPTER_CONFIG, text), companions)

    def fold(self, out: Path, companions: list[Path], dtype: torch.dtype | None) -> None:
        """Write the adapter to `out` that is the same to a reader of r and lora_alpha alone: the scale is multiplied
        into B, lora_alpha is r, and all ranks are the largest, by zeros. UserError where that cannot be."""
        self.refuse_more_than_lora("--folded")
        rank = max(layer.rank for layer in self.adapted.values())
        names = tuple(self.adapted)
        config = AdapterConfig(rank=rank, alpha=rank, dropout=self.config.dropout, target=names)
        form = AdapterFiles(config, self.model.config, self._base)
        sizes: TensorSpecs = {}
        for name in (f"{module}.{part}" for module in names for part in ("lora_A", "lora_B")):
            stored = self.files.stored[self._outer(name)[0]]
            sizes[name] = self.padded_shape(name, rank), torch.promote_types(DTYPES[stored.kind], torch.float32)

        def read(name: str) -> Tensor:
            scale = self.adapted[name.rpartition(".")[0]].scale
            return fold_scale(name, self.stored(name).to(sizes[name][1]), rank, scale)

        _write(out, form.entries(sizes, read, dtype), form.finish, companions)

    def stored(self, name: str) -> Tensor:
        """The A [r, in] or B [out, r] of a layer of the files, the parameter `name`, as it is stored."""
        return self.files.read(self._outer(name)[0])

    def padded_shape(self, name: str, rank: int) -> tuple[int, int]:
        """The shape of such a parameter at this `rank`."""
        rows, columns = self.files.stored[self._outer(name)[0]].shape
        return (rank, columns) if name.endswith("A") else (rows, rank)

    def refuse_more_than_lora(self, option: str) -> None:
        """Raise UserError, which begins with the `option`, where a reader of plain LoRA has no place for a part of it,
        or where it is empty."""
        if self.config.dora or self.config.modules_to_save:
            has = "DoRA's magnitudes" if self.config.dora else "modules that are trained whole (modules_to_save)"
            raise UserError(
                f"{option}: the adapter has {has}, which a reader of plain LoRA has no place for: export it --merged"
            )
        if self.config.select_parameters(self.adapted):
            raise UserError(
                f"{option}: a reader of plain LoRA has no place for adapters of experts: export it --merged"
            )
        if not self.adapted:
            raise UserError(f"{option}: {self.directory} has no adapter of a layer: there is nothing to write")

    @property
    def _base(self) -> str | None:
        """base_model_name_or_path as it is understood from anywhere: a directory's whole path."""
        name: str | None = read_json(self.directory / ADAPTER_CONFIG).get(BASE)
        if not name or Path(name).is_absolute():
            return name
        candidates = Path(name), self.directory / name
        return next((str(path.resolve()) for path in candidates if (path / CONFIG).is_file()), name)

    def _outer(self, name: str) -> list[str]:
        return peft_names(name, self.config, self.model.config)


def _write(out: Path, entries: list[FullWeight], config: Callable[[Path], None], companions: list[Path]) -> None:
    """companions: the directories whose tokenizer and template are copied along, a later one's over an earlier's."""

    def finish(new: Path) -> None:
        config(new)
        write_companions(new, companions, None, None)

    write_files({ADAPTER_WEIGHTS: entries}, finish, resolve_links(out), ranks=Ranks(single_process=True))
