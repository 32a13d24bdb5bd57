"""Weights in: Hugging Face's safetensors into a model of any placement, each rank reading only what it holds."""

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import cast

from torch import nn

from dtrain.adapters.config import is_adapter
from dtrain.base.errors import UserError, limit_problems
from dtrain.checkpoint.dcp.training_state import model_tensors, tensor_aliases
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.file_rows import FileRows, fused_weights, locate_parts
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models.common.config import ModelConfig
from dtrain.parallel.placement import local_slices, local_tensor

_HEAD_HINT = " (config.json has tie_word_embeddings: false, so the head has weights of its own)"


def read_weights(model: nn.Module, directory: str | Path, kept: Collection[str] = ()) -> None:
    """Fill the parameters and persistent buffers of `model` from the safetensors files of `directory`.

    model: on CPU or CUDA (not meta), plain tensors or DTensors; `model.checkpoint_names(name)` lists the names that its
    tensor `name` may have in files, `model.ignored_checkpoint_names` patterns of those that the model has none of. A
    rank reads the slices that it holds, one tensor at a time, cast to the tensor's dtype: beside its shard it needs the
    memory of one slice. Weights that the model holds in 4 bits (`adapters.nf4`) are rounded from the files' values
    in float32, or taken as bitsandbytes has stored them. A tied head is read once. kept: tensors of the model that stay
    as they are, of which the files need have none. No collective.

    Raises one UserError that lists all names that are missing or unexpected, all shapes that differ, heads that files
    have beside an embedding of other values though config.json ties them, and all dtypes other than float64, float32,
    float16 and bfloat16 (quantized weights); another for damaged files. Nothing is written then.
    """
    files = WeightFiles(Path(directory))
    sources, tensors = check_fit(model, files, kept), model_tensors(model)
    for name, source in sources.items():
        local = local_tensor(tensors[name]).detach()
        if local.is_meta:
            raise ValueError(f"{name} is on meta: give the model memory (to_empty) before reading")
        if name.endswith(quantized.CODES):
            quantized.fill_codes(
                files, source, tensors[name], tensors[name.removesuffix(quantized.CODES) + quantized.SCALES]
            )
        elif local.numel():
            source.fill(files, local, local_slices(tensors[name]))


def check_fit(model: nn.Module, files: WeightFiles, kept: Collection[str] = ()) -> dict[str, FileRows]:
    """Return the place in `files` of every tensor of `model` (on any device, meta too) but those `kept`; of a weight in
    4 bits that of its codes. Raises what `read_weights` lists."""
    names, sources, used = tensor_aliases(model), dict[str, FileRows](), set[str]()
    missing, mismatches = [], []
    held = {name: tensor for name, tensor in model_tensors(model).items() if name not in kept}
    tensors = {name: tensor for name, tensor in held.items() if not is_adapter(name)}
    shapes = {name: quantized.weight_shape(name, tensor) for name, tensor in tensors.items()}
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(quantized.SCALES)}
    config = getattr(model, "config", None)  # any module may be read into
    new = {"score.weight"} if isinstance(config, ModelConfig) and config.has_new_head else set()
    for fused in fused_weights(model, shapes, files.stored):
        name = fused.parts[0]
        if name in new:
            continue
        known = [quantized.file_name(alias) for alias in names.get(fused.name, [fused.name])]
        matches = [candidate for candidate in candidate_names(model, known) if candidate in files.stored]
        used.update(matches)
        if not matches:
            missing.append(f"missing: {known[0]}{_HEAD_HINT if name == 'lm_head.weight' else ''}")
            continue
        shape, rows = locate_parts(fused, matches[0], shapes)
        for part, place in rows.items():
            before = sources.get(part)  # of a stack, whose matrices come one after another
            sources[part] = (
                place if before is None else replace(before, expert_names=before.expert_names + place.expert_names)
            )
        beside = quantized.quantization_tensors(files, matches[0])
        used.update(beside)
        is_codes = name.endswith(quantized.CODES) and len(shapes[name]) == 2  # of experts no files' codes are read
        mismatches += _mismatches(files, matches[0], shape, is_codes, bool(beside))
        mismatches += [
            f"differ: {matches[0]} and {other}, one tensor by config.json; set its tie_word_embeddings to false"
            for other in matches[1:]
            if files.tensors_differ(matches[0], other)
        ]
    patterns = cast(tuple[str, ...], model.ignored_checkpoint_names)
    left = [name for name in sorted(files.stored.keys() - used) if not is_carried(model, name)]
    unexpected = [f"unexpected: {name}" for name in left if not any(re.fullmatch(key, name) for key in patterns)]
    if missing or mismatches or unexpected:
        head = f"{files.directory}: the weights do not fit the model that config.json describes:"
        kinds = (limit_problems(problems, name_kind=True) for problems in (missing, mismatches, unexpected))
        raise UserError("\n  ".join([head, *chain.from_iterable(kinds)]))
    return sources


def _mismatches(files: WeightFiles, name: str, shape: tuple[int, ...], is_codes: bool, has_beside: bool) -> list[str]:
    """Return what keeps tensor `name` of `files` from being one of this shape, or from giving its codes."""
    stored = files.stored[name]
    if is_codes and stored.kind == "U8":
        return quantized.stored_mismatches(files, name, shape)
    if has_beside and not is_codes:
        return [
            f"dtype: {name} is {stored.kind}, codes of 4 bits; they are read where config.json has bitsandbytes' "
            "quantization_config, for layers that are not trained whole"
        ]
    mismatches = []
    if stored.shape != shape:
        mismatches.append(f"shape: {name} is {list(stored.shape)}, the model has {list(shape)}")
    if stored.dtype is None:
        mismatches.append(f"dtype: {name} is {stored.kind}; quantized weights are not read")
    return mismatches


def candidate_names(model: nn.Module, names: list[str]) -> list[str]:
    """The names under which files may hold a tensor that the model knows by `names`, the likeliest first."""
    # nn.Module's stub has a Tensor or a Module for every attribute.
    candidates = (model.checkpoint_names(name) for name in names)  # type: ignore[operator]
    return list(dict.fromkeys(chain.from_iterable(candidates)))


def is_carried(model: nn.Module, name: str) -> bool:
    """Return whether a tensor of the files is of a part that dtrain does not train, and that an export has as it is."""
    patterns: tuple[str, ...] = getattr(model, "carried_checkpoint_names", ())
    return any(re.fullmatch(pattern, name) for pattern in patterns)
