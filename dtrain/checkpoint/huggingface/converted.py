"""Files of models of the transformers library, whose tensors transformers may convert on loading.

`models.transformers.conversion` describes the conversions. Reading depends on the kind of a tensor:

- A tensor that is only renamed is read in slices, like the tensors of dtrain's own models (`FileRows`).
- A converted tensor, such as a stack of experts, is computed on every rank from all of its tensors in the files. The
  rank then copies its slice of the result (`ConvertedRows`). This needs memory for the tensor twice.
- In most stacks of experts, row i only depends on expert i of the files. A rank then reads the experts of its shard.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor

from dtrain.checkpoint.dcp.training_state import tensor_aliases
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.file_rows import FileRows
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models.common.decoder import CausalLM

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

    conversion: "Conversion" = field(kw_only=True)
    target: str = field(kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Override `FileRows.names`."""
        return tuple(self.conversion.source_names)

    def fill(self, files: WeightFiles, local: Tensor, local_slices: tuple[slice, ...]) -> None:
        """Override `FileRows.fill`."""
        conversion = self.conversion
        if conversion.is_by_expert:
            # The result then has this rank's experts only, so nothing is left to select in the first dimension.
            conversion = conversion.for_experts(local_slices[0])
            local_slices = (slice(None), *local_slices[1:])
        local.copy_(self._convert(files, conversion)[local_slices])

    def read(self, files: WeightFiles) -> Tensor:
        """Override `FileRows.read`."""
        return self._convert(files, self.conversion)

    def _convert(self, files: WeightFiles, conversion: "Conversion") -> Tensor:
        tensors = {name: files.read(name) for name in conversion.source_names}
        return conversion.convert(tensors)[self.target]


@dataclass(frozen=True)
class Located:
    """Locations of a model's tensors in files, and the tensors that do not fit. Used for every model.

    Attributes:
        sources: Location of each tensor, by its name in the model.
        matches: Names in the files of each tensor, by its name in the model. A tied head may have several.
        missing: Errors of the tensors that the files do not have.
        mismatches: Errors of the tensors with other shapes or dtypes.
        unexpected: Tensors of the files that belong to no tensor of the model. For a model of transformers, without
            the tensors that transformers ignores.
    """

    sources: dict[str, FileRows]
    matches: dict[str, list[str]]
    missing: list[str]
    mismatches: list[str]
    unexpected: list[str]


def is_library_model(model: object) -> "TypeGuard[TransformersCausalLM]":
    """Check whether the modules of a model are those of transformers. Weights may be read into any module."""
    return isinstance(model, CausalLM) and model.config.transformers is not None


def locate_converted(
    model: "TransformersCausalLM", files: WeightFiles, shapes: Mapping[str, Shape], may_be_missing: Collection[str]
) -> Located:
    """Find the tensors of a model of transformers in files. Only headers are read.

    Args:
        model: The model.
        files: The files.
        shapes: Shapes of the tensors that the files must have, by their names in the model.
        may_be_missing: Names of new tensors, such as a new head, that no file has.
    """
    from dtrain.models.transformers.conversion import plan_loading, plan_saving  # loads transformers

    library_shapes: dict[str, Shape] = {}  # by transformers' names, a shared tensor only under its first name
    own_names: dict[str, str] = {}  # from transformers' names to dtrain's, a shared tensor under all of its names
    aliases = tensor_aliases(model)
    for name, shape in shapes.items():
        if name in may_be_missing:
            continue
        names = [model.library_name(quantized.file_name(alias)) for alias in aliases.get(name, [name])]
        library_shapes[names[0]] = shape
        for library_name in names:
            own_names[library_name] = name

    plan = plan_loading(model.library_model, own_names, {name: entry.shape for name, entry in files.stored.items()})
    sources: dict[str, FileRows] = {}
    matches: dict[str, list[str]] = {}
    rows_by_library_name = _locate_targets(plan.conversions)
    for library_name, own_name in own_names.items():
        located = rows_by_library_name.get(library_name)
        if located is not None and located.shape == shapes[own_name]:
            sources.setdefault(own_name, located.rows)
            matches.setdefault(own_name, []).append(located.rows.name)

    used: set[str] = set()
    for own_name, rows in sources.items():
        used.update(matches[own_name])
        used.update(rows.names)
    # Tensors that are not in the files are reported by the names that `save_pretrained` would write.
    expected = plan_saving(model.library_model, library_shapes)
    not_read = []
    for conversion in expected:
        if any(own_names[name] not in sources for name in conversion.source_names):
            not_read.append(conversion)
    missing, mismatches = _describe_not_read(not_read, files)
    mismatches += _describe_quantized(used, files)

    known_names = set(used)
    for conversion in expected:
        known_names.update(conversion.targets)
    unexpected = list(plan.unexpected)
    for conversion in plan.conversions:
        unexpected += [name for name in conversion.source_names if name not in known_names]
    if not (missing or mismatches or unexpected):
        # The files have what `save_pretrained` would write, but transformers makes other tensors of it.
        missing = [f"missing: {name}" for name in library_shapes if own_names[name] not in sources]
    return Located(sources, matches, missing, mismatches, unexpected)


class _LocatedTarget(NamedTuple):
    """A tensor that loading produces: its shape, and its location in the files."""

    shape: Shape
    rows: FileRows


def _locate_targets(conversions: "Iterable[Conversion]") -> dict[str, _LocatedTarget]:
    """Return the tensors that conversions of files produce, by transformers' names."""
    located: dict[str, _LocatedTarget] = {}
    for conversion in conversions:
        for target, shape in conversion.targets.items():
            file_name = conversion.source_names[0]
            rows = FileRows(file_name)
            if conversion.converter is not None:
                rows = ConvertedRows(file_name, conversion=conversion, target=target)
            located[target] = _LocatedTarget(shape, rows)
    return located


def _describe_not_read(conversions: "Iterable[Conversion]", files: WeightFiles) -> tuple[list[str], list[str]]:
    """Return the errors of tensors that the files do not have, and of those that have another shape.

    Args:
        conversions: Conversions to files (`plan_saving`) of the model's tensors that cannot be read.
        files: The files.
    """
    # A tensor of the files may be the target of several conversions, and is reported once.
    file_shapes: dict[str, Shape] = {}
    for conversion in conversions:
        file_shapes.update(conversion.targets)
    missing: list[str] = []
    mismatches: list[str] = []
    for file_name, shape in file_shapes.items():
        stored = files.stored.get(file_name)
        if stored is None:
            missing.append(f"missing: {file_name}")
        elif stored.shape != shape:
            mismatches.append(f"shape: {file_name} is {list(stored.shape)}, the model has {list(shape)}")
    return missing, mismatches


def _describe_quantized(file_names: Iterable[str], files: WeightFiles) -> list[str]:
    """Return the errors of tensors whose dtype torch does not have."""
    errors: list[str] = []
    for file_name in sorted(file_names):
        entry = files.stored[file_name]
        if entry.dtype is None:
            errors.append(f"dtype: {file_name} is {entry.kind}; quantized weights are not read")
    return errors
