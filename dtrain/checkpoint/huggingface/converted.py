"""Files of models of the transformers library, whose tensors transformers may convert on loading.

`models.transformers.conversion` describes the conversions. A tensor that is only renamed is read in slices, as those of
dtrain's own models are (`FileRows`). A converted tensor, such as a stack of experts, is computed on every rank from the
tensors of the files that it needs, and the rank's slice is taken from the result (`ConvertedRows`). A rank's memory is
that of one such tensor, twice. If row i of a stack only comes from the i-th expert of the files, as it does for most
mixtures of experts, a rank reads only the experts of its shard.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from dtrain.checkpoint.dcp.training_state import tensor_aliases
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.file_rows import FileRows
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models.common.config import ModelConfig

if TYPE_CHECKING:
    from dtrain.models.transformers.conversion import Conversion
    from dtrain.models.transformers.model import TransformersCausalLM

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ConvertedRows(FileRows):
    """Location of a model's tensor that transformers computes from several tensors of the files.

    Attributes:
        conversion: The conversion.
        target: Name of the tensor among its results.
    """

    conversion: "Conversion | None" = None
    target: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Override `FileRows.names`."""
        assert self.conversion is not None
        return tuple(self.conversion.source_names)

    def fill(self, files: WeightFiles, local: Tensor, local_slices: tuple[slice, ...]) -> None:
        """Override `FileRows.fill`."""
        assert self.conversion is not None
        conversion = self.conversion
        if conversion.is_by_expert:
            conversion = conversion.for_experts(local_slices[0])
            local_slices = (slice(None), *local_slices[1:])
        local.copy_(self._convert(files, conversion)[local_slices])

    def read(self, files: WeightFiles) -> Tensor:
        """Override `FileRows.read`."""
        assert self.conversion is not None
        return self._convert(files, self.conversion)

    def _convert(self, files: WeightFiles, conversion: "Conversion") -> Tensor:
        return conversion.convert({name: files.read(name) for name in conversion.source_names})[self.target]


@dataclass(frozen=True)
class Located:
    """Where the tensors of a model are stored in files, and which of them do not fit. Used for every model.

    Attributes:
        sources: Location of each tensor, by its name in the model.
        matches: All tensors of the files for each tensor of the model. There are several for a tied head.
        missing: Errors of the tensors that the files do not have.
        mismatches: Errors of the tensors with other shapes or dtypes.
        unexpected: Tensors of the files that belong to no tensor of the model, without those that transformers ignores.
    """

    sources: dict[str, FileRows]
    matches: dict[str, list[str]]
    missing: list[str]
    mismatches: list[str]
    unexpected: list[str]


def is_library_model(model: object) -> "TypeGuard[TransformersCausalLM]":
    """Check whether the modules of a model are those of transformers."""
    config = getattr(model, "config", None)  # any module may be read into
    return isinstance(config, ModelConfig) and config.transformers is not None


def locate_converted(
    model: "TransformersCausalLM", files: WeightFiles, shapes: Mapping[str, Shape], may_be_missing: Collection[str]
) -> Located:
    """Compare files with a model of transformers. Only headers are read.

    Args:
        model: The model.
        files: The files.
        shapes: Shapes of the tensors that the files must have, by their names in the model.
        may_be_missing: Names of tensors that no file has.
    """
    from dtrain.models.transformers.conversion import plan_loading, plan_saving  # loads transformers

    aliases = tensor_aliases(model)
    library_shapes: dict[str, Shape] = {}  # by transformers' names, each tensor once
    own_names: dict[str, str] = {}  # name in the model by transformers' names, with all names of shared tensors
    for name, shape in shapes.items():
        if name in may_be_missing:
            continue
        names = [model.library_name(quantized.file_name(alias)) for alias in aliases.get(name, [name])]
        library_shapes[names[0]] = shape
        own_names |= dict.fromkeys(names, name)

    plan = plan_loading(model.library_model, own_names, {name: entry.shape for name, entry in files.stored.items()})
    rows_by_name: dict[str, FileRows] = {}  # by transformers' names
    for conversion in plan.conversions:
        for target, shape in conversion.targets.items():
            if target in own_names and shape == shapes[own_names[target]]:
                rows = FileRows(conversion.source_names[0])
                if conversion.converter is not None:
                    rows = ConvertedRows(conversion.source_names[0], conversion=conversion, target=target)
                rows_by_name[target] = rows
    sources: dict[str, FileRows] = {}
    matches: dict[str, list[str]] = {}
    for library_name, own_name in own_names.items():
        if library_name in rows_by_name:
            sources.setdefault(own_name, rows_by_name[library_name])
            matches.setdefault(own_name, []).append(rows_by_name[library_name].name)

    # Tensors that are not there are reported by the names that `save_pretrained` would write.
    missing: dict[str, None] = {}  # ordered sets
    mismatches: dict[str, None] = {}
    expected_names: set[str] = set()
    for conversion in plan_saving(model.library_model, library_shapes):
        expected_names.update(conversion.targets)
        if all(own_names[name] in sources for name in conversion.source_names):
            continue
        for file_name, shape in conversion.targets.items():
            stored = files.stored.get(file_name)
            if stored is None:
                missing[f"missing: {file_name}"] = None
            elif stored.shape != shape:
                mismatches[f"shape: {file_name} is {list(stored.shape)}, the model has {list(shape)}"] = None
    used = {name for names in matches.values() for name in names}
    used.update(name for rows in sources.values() for name in rows.names)
    for file_name in sorted(used):
        if files.stored[file_name].dtype is None:
            kind = files.stored[file_name].kind
            mismatches[f"dtype: {file_name} is {kind}; quantized weights are not read"] = None
    known_names = used | expected_names
    unexpected = list(plan.unexpected)
    for conversion in plan.conversions:
        unexpected += [name for name in conversion.source_names if name not in known_names]
    if not (missing or mismatches or unexpected):
        # The files have what `save_pretrained` would write, but transformers makes other tensors of it.
        missing |= dict.fromkeys(f"missing: {name}" for name in library_shapes if own_names[name] not in sources)
    return Located(sources, matches, list(missing), list(mismatches), unexpected)
