"""Conversions between the tensors of files and those of a model of transformers.

Most tensors have the same name in both. For some architectures, transformers renames tensors when it loads a model, or
computes one from several. For example, files of DeepSeek-V3 store experts one by one, and the model has stacks of them:

    files   model.layers.3.mlp.experts.0.gate_proj.weight  [F, D]    ...and up_proj, and 255 more experts
    model   model.layers.3.mlp.experts.gate_up_proj        [256, 2·F, D]

`save_pretrained` reverses this. `plan_loading` and `plan_saving` follow transformers' own functions step by step
(`convert_and_load_state_dict_in_model`, `revert_weight_conversion`), but return the conversions instead of computing
them for the whole model at once. A `Conversion` is then computed when its tensors are needed. Its shapes are found on
the meta device, so that files are compared with a model by their headers.

All names of models in this module are those of transformers.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

Shape = tuple[int, ...]


class Source(NamedTuple):
    """An input of a conversion.

    Attributes:
        name: Name of the tensor.
        pattern: The pattern of `Conversion.converter` that the name matches. The name itself without a converter.
    """

    name: str
    pattern: str


@dataclass(frozen=True)
class Conversion:
    """A conversion of transformers from tensors of the files to tensors of the model, or in the other direction.

    Attributes:
        sources: The inputs.
        targets: Shapes of the results by name. Empty if the shapes of the sources do not fit each other.
        converter: Conversion of transformers. None: the only source becomes the only target, perhaps renamed.
        key: Name that transformers gives to this group of sources, for example `...mlp.experts.gate_up_proj`.
        renamings: Applied to the names of the results.
        model: The model of transformers, whose config some conversions read.
    """

    sources: tuple[Source, ...]
    targets: Mapping[str, Shape]
    converter: WeightConverter | None
    key: str
    renamings: tuple[WeightRenaming, ...]
    model: PreTrainedModel

    @property
    def source_names(self) -> list[str]:
        """Names of the tensors that are converted."""
        return [source.name for source in self.sources]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the results, by name.

        Args:
            tensors: The sources by name. With tensors on meta, the results are on meta.
        """
        if self.converter is None:
            (target,) = self.targets
            return {target: tensors[self.sources[0].name]}
        converter = deepcopy(self.converter)  # because a converter keeps the tensors that are added
        for source in self.sources:
            converter.add_tensor(self.key, source.name, source.pattern, tensors[source.name])
        converted = converter.convert(self.key, model=self.model, config=self.model.config)
        results = {}
        for name, result in converted.items():
            tensor = result[0] if isinstance(result, list) else result
            results[apply_renamings(name, list(self.renamings))] = tensor
        return results

    def for_experts(self, experts: slice) -> "Conversion":
        """Return the conversion of some experts of a stack. Only for a conversion that `is_by_expert`.

        For example, the sources of a stack of 256 experts are 256 gate_proj and 256 up_proj. With `slice(0, 64)` they
        are the first 64 of each, and the result has 64 rows. `targets` stays that of the full stack.

        Args:
            experts: Rows of the first dimension of the results.
        """
        by_pattern: dict[str, list[Source]] = {}
        for source in self.sources:
            by_pattern.setdefault(source.pattern, []).append(source)
        selected: list[Source] = []
        for sources in by_pattern.values():
            selected += sources[experts]
        return replace(self, sources=tuple(selected))

    @property
    def is_by_expert(self) -> bool:
        """Whether row i of every result is computed from expert i only. Other experts then need not be read."""
        return self.converter is not None and _stacks_first_dim(self.converter.operations)


def _stacks_first_dim(operations: list[ConversionOps]) -> bool:
    """Check whether row i of the results depends only on the i-th source of each pattern.

    The first operation must stack the sources along dimension 0, and the others must leave that dimension as it is.
    """
    first, *others = operations
    if not isinstance(first, MergeModulelist) or first.dim != 0:
        return False
    for operation in others:
        if isinstance(operation, Concatenate | Interleave):
            dims = [operation.dim]
        elif isinstance(operation, Transpose):
            dims = [operation.dim0, operation.dim1]
        else:
            return False
        if any(dim <= 0 for dim in dims):
            return False
    return True


@dataclass(frozen=True)
class LoadingPlan:
    """The conversions from the tensors of files to those of a model.

    Attributes:
        conversions: All conversions, with those that only rename.
        unexpected: Tensors of the files that belong to no tensor of the model, and are not ignored.
    """

    conversions: list[Conversion] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def plan_loading(model: PreTrainedModel, names: Iterable[str], stored: Mapping[str, Shape]) -> LoadingPlan:
    """Return the conversions by which transformers loads the tensors of files.

    Args:
        model: The model of transformers, on any device.
        names: Names of the model's tensors, with all names of shared ones.
        stored: Shapes of the tensors of the files, by name.
    """
    transforms = get_model_conversion_mapping(model)
    renamings, converters = _split(transforms)
    by_pattern = _by_pattern(converters)
    known = dict.fromkeys(names, True)  # `rename_source_key` takes a dictionary
    groups: dict[str, _Group] = {}
    plan = LoadingPlan()
    for name in sorted(stored, key=dot_natural_key):
        # `renamed` is the model's tensor, or the key of the group of sources that the pattern collects.
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if renamed in known:
            _add_source(groups, renamed, name, pattern, by_pattern)
        elif not _is_ignored(model, renamed) and not _is_ignored(model, name):
            plan.unexpected.append(name)
    for key, group in groups.items():
        plan.conversions.append(group.finish(key, (), model, stored))
    return plan


def plan_saving(model: PreTrainedModel, shapes: Mapping[str, Shape]) -> list[Conversion]:
    """Return the conversions by which `save_pretrained` writes the tensors of a model.

    Args:
        model: The model of transformers, on any device.
        shapes: Shapes of the model's tensors by name. A shared tensor has its first name only.
    """
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    # A PrefixChange is left out, as `save_pretrained` does for a model that was not loaded from files: only the files
    # show whether their names have the prefix.
    transforms = [transform for transform in transforms if not isinstance(transform, PrefixChange)]
    reverse_renamings, reverse_converters = _split([transform.reverse_transform() for transform in transforms[::-1]])
    by_pattern = _by_pattern(reverse_converters)
    groups: dict[str, _Group] = {}
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = apply_converters(name, reverse_converters)
        if pattern is None:
            renamed = apply_renamings(name, reverse_renamings)
        _add_source(groups, renamed, name, pattern, by_pattern)
    renamings = tuple(reverse_renamings)
    return [group.finish(key, renamings, model, shapes) for key, group in groups.items()]


def _split(transforms: list[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return the transforms that only rename, and those that compute."""
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return renamings, converters


def _by_pattern(converters: list[WeightConverter]) -> dict[str, WeightConverter]:
    return {pattern: converter for converter in converters for pattern in converter.source_patterns}


def _is_ignored(model: PreTrainedModel, name: str) -> bool:
    """Check whether transformers ignores a tensor of the files that is not part of the model."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _add_source(
    groups: "dict[str, _Group]",
    key: str,
    name: str,
    pattern: str | None,
    converter_by_pattern: Mapping[str, WeightConverter],
) -> None:
    """Add a tensor to the group of sources `key`.

    Args:
        groups: The groups, which are changed.
        key: Key of the group.
        name: Name of the tensor.
        pattern: The pattern of a converter that the name matches. None: the tensor is only renamed.
        converter_by_pattern: The converters.
    """
    converter = None if pattern is None else converter_by_pattern[pattern]
    group = groups.setdefault(key, _Group(converter))
    group.sources.append(Source(name, pattern or name))


@dataclass
class _Group:
    """The sources of a conversion, while they are collected.

    Attributes:
        converter: As in `Conversion`.
        sources: As in `Conversion`.
    """

    converter: WeightConverter | None
    sources: list[Source] = field(default_factory=list)

    def finish(
        self, key: str, renamings: tuple[WeightRenaming, ...], model: PreTrainedModel, shapes: Mapping[str, Shape]
    ) -> Conversion:
        """Return the conversion, with the shapes of its results.

        Args:
            key: As in `Conversion`.
            renamings: As in `Conversion`.
            model: As in `Conversion`.
            shapes: Shapes of the sources.
        """
        if self.converter is None:
            first = self.sources[0].name
            return Conversion(tuple(self.sources), {key: tuple(shapes[first])}, None, key, (), model)
        conversion = Conversion(tuple(self.sources), {}, self.converter, key, renamings, model)
        meta_tensors = {name: torch.empty(shapes[name], device="meta") for name in conversion.source_names}
        try:
            results = conversion.convert(meta_tensors)
        except (RuntimeError, ValueError, IndexError):
            return conversion  # the shapes do not fit each other, such as those of experts of different sizes
        return replace(conversion, targets={name: tuple(result.shape) for name, result in results.items()})
