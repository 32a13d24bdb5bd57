"""Reading Hugging Face's safetensors into a sharded model. Each rank reads only the slices that it needs.

`check_fit` compares names, shapes and dtypes of the files with those of the model, and returns where each tensor is
stored. `read_weights` then fills the model tensor by tensor. So a model that does not fit is not changed.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import nn

from dtrain.adapters.config import is_adapter
from dtrain.base.errors import UserError, limit_problems
from dtrain.checkpoint.dcp.training_state import model_tensors, tensor_aliases
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.converted import Located, is_library_model, locate_converted
from dtrain.checkpoint.huggingface.file_rows import FileRows, fused_weights, locate_parts
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.placement import local_slices, local_tensor

_HEAD_HINT = " (config.json has tie_word_embeddings: false, so the head has weights of its own)"


def read_weights(model: nn.Module, directory: str | Path, not_read: Collection[str] = ()) -> None:
    """Fill the parameters and persistent buffers of a model from the safetensors files of a directory.

    A rank reads the slices of its shards, one tensor at a time, cast to the tensor's dtype. Next to its shards it needs
    memory for one slice. Weights that the model stores in 4 bits (`adapters.nf4`) are rounded from the files' values in
    float32, or copied as bitsandbytes has stored them. A tied head is read once. No collective.

    Args:
        model: The model on CPU or CUDA, with plain tensors or DTensors. `model.checkpoint_names(name)` lists the names
            that a tensor may have in files. `model.ignored_checkpoint_names` has patterns for tensors of the files that
            the model does not need.
        directory: The directory.
        not_read: Names of tensors that keep their values. The files need not have them.

    Raises:
        UserError: For damaged files. One error that lists all names that are missing or unexpected, all shapes that
            differ, all heads whose values differ from the embedding to which config.json ties them, and all dtypes
            other than float64, float32, float16 and bfloat16. Then no tensor has been changed.
    """
    files = WeightFiles(Path(directory))
    sources = check_fit(model, files, not_read)
    tensors = model_tensors(model)
    for name, source in sources.items():
        local = local_tensor(tensors[name]).detach()
        if local.is_meta:
            raise ValueError(f"{name} is on meta: give the model memory (to_empty) before reading")
        if name.endswith(quantized.CODES):
            scales = tensors[name.removesuffix(quantized.CODES) + quantized.SCALES]
            quantized.fill_codes(files, source, tensors[name], scales)
        elif local.numel():
            source.fill(files, local, local_slices(tensors[name]))


def check_fit(model: nn.Module, files: WeightFiles, not_read: Collection[str] = ()) -> dict[str, FileRows]:
    """Compare the files with a model, and return where each of its tensors is stored. Only headers are read.

    Args:
        model: The model on any device, meta too.
        files: The files.
        not_read: Names of tensors of the model that the files need not have.

    Returns:
        The location of each tensor, by its name in the model. A weight in 4 bits has the name of its codes.

    Raises:
        UserError: One error that lists everything that does not fit, as in `read_weights`.
    """
    shapes = _required_shapes(model, not_read)
    located = _locate(model, files, shapes)
    mismatches = list(located.mismatches)
    for names in located.matches.values():
        mismatches += _tie_mismatches(files, names)
    unexpected = _unexpected(model, located.unexpected)
    if located.missing or mismatches or unexpected:
        lines = [f"{files.directory}: the weights do not fit the model that config.json describes:"]
        for problems in (located.missing, mismatches, unexpected):
            lines += limit_problems(problems, name_kind=True)
        raise UserError("\n  ".join(lines))
    return located.sources


def _locate(model: nn.Module, files: WeightFiles, shapes: Mapping[str, tuple[int, ...]]) -> Located:
    """Find the tensors of a model in files. `shapes` has those that the files must have, by the model's names."""
    may_be_missing = _new_weights(model)
    if is_library_model(model):
        return locate_converted(model, files, shapes, may_be_missing)
    names = tensor_aliases(model)
    sources: dict[str, FileRows] = {}
    matches_by_name: dict[str, list[str]] = {}
    used: set[str] = set()  # names in the files
    missing: list[str] = []
    mismatches: list[str] = []
    for fused in fused_weights(model, shapes, files.stored):
        name = fused.parts[0]
        if name in may_be_missing:
            continue
        aliases = [quantized.file_name(alias) for alias in names.get(fused.name, [fused.name])]
        matches = [candidate for candidate in candidate_names(model, aliases) if candidate in files.stored]
        used.update(matches)
        if not matches:
            hint = _HEAD_HINT if name == "lm_head.weight" else ""
            missing.append(f"missing: {aliases[0]}{hint}")
            continue
        file_name = matches[0]
        matches_by_name[fused.name] = matches
        shape, rows = locate_parts(fused, file_name, shapes)
        for part, location in rows.items():
            earlier = sources.get(part)
            if earlier is not None:  # a further expert of a stack whose matrices the files store one by one
                location = replace(earlier, expert_names=earlier.expert_names + location.expert_names)
            sources[part] = location
        quantization = quantized.quantization_tensors(files, file_name)
        used.update(quantization)
        # The codes of stacked experts are not read from files: their weights are rounded.
        is_codes = name.endswith(quantized.CODES) and len(shapes[name]) == 2
        mismatches += _mismatches(files, file_name, shape, is_codes, bool(quantization))
    return Located(sources, matches_by_name, missing, mismatches, list(files.stored.keys() - used))


def _required_shapes(model: nn.Module, not_read: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that the files must have, by the model's names.

    Adapters are in files of their own. The scales of a weight in 4 bits come with its codes.
    """
    shapes = {}
    for name, tensor in model_tensors(model).items():
        if name not in not_read and not is_adapter(name) and not name.endswith(quantized.SCALES):
            shapes[name] = quantized.weight_shape(name, tensor)
    return shapes


def _new_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights that are new in the model, so that no file has them."""
    config = getattr(model, "config", None)  # any module may be read into
    return {"score.weight"} if isinstance(config, ModelConfig) and config.has_new_head else set()


def _tie_mismatches(files: WeightFiles, names: list[str]) -> list[str]:
    """Return an error for each tensor that differs from the first, if the model has one tensor for all of them.

    For example, a head that config.json ties to the embedding, though the files have different values for the two.
    """
    first = names[0]
    mismatches = []
    for other in names[1:]:
        if files.tensors_differ(first, other):
            mismatches.append(
                f"differ: {first} and {other}, one tensor by config.json; set its tie_word_embeddings to false"
            )
    return mismatches


def _unexpected(model: nn.Module, names: Collection[str]) -> list[str]:
    """Return an error for each tensor of the files that no part of the model needs, by their names in the files."""
    patterns = cast(tuple[str, ...], model.ignored_checkpoint_names)
    unexpected = []
    for name in sorted(names):
        is_ignored = any(re.fullmatch(pattern, name) for pattern in patterns)
        if not is_carried(model, name) and not is_ignored:
            unexpected.append(f"unexpected: {name}")
    return unexpected


def _mismatches(
    files: WeightFiles, name: str, shape: tuple[int, ...], is_codes: bool, has_quantization: bool
) -> list[str]:
    """Return the errors of a tensor of the files.

    Args:
        files: The files.
        name: Name of the tensor.
        shape: The shape that it must have.
        is_codes: Whether the model stores this weight in 4 bits.
        has_quantization: Whether the files have bitsandbytes' tensors for it.
    """
    stored = files.stored[name]
    if is_codes and stored.kind == "U8":
        return quantized.stored_mismatches(files, name, shape)
    if has_quantization and not is_codes:
        return [
            f"dtype: {name} is {stored.kind}, codes of 4 bits; they are read where config.json has bitsandbytes' "
            "quantization_config, for layers that are not fully trained"
        ]
    mismatches = []
    if stored.shape != shape:
        mismatches.append(f"shape: {name} is {list(stored.shape)}, the model has {list(shape)}")
    if stored.dtype is None:
        mismatches.append(f"dtype: {name} is {stored.kind}; quantized weights are not read")
    return mismatches


def candidate_names(model: nn.Module, names: list[str]) -> list[str]:
    """Return the names that a tensor may have in files, the usual one first.

    Args:
        model: The model.
        names: All names of the tensor in the model.
    """
    candidates: dict[str, None] = {}  # a set in order of appearance
    for name in names:
        # nn.Module's stub has a Tensor or a Module for every attribute.
        candidates.update(dict.fromkeys(model.checkpoint_names(name)))  # type: ignore[operator]
    return list(candidates)


def is_carried(model: nn.Module, name: str) -> bool:
    """Check whether a tensor of the files belongs to a part that dtrain does not train. Exports copy such tensors."""
    patterns: tuple[str, ...] = getattr(model, "carried_checkpoint_names", ())
    return any(re.fullmatch(pattern, name) for pattern in patterns)
