"""Weights in 4 bits from files: rounded while they are read, or as bitsandbytes has stored them.

A file holds a layer's `weight` [out, in] in floats; or, as bitsandbytes writes it, `weight` uint8 [out·in/2, 1] with,
flat over the blocks of 64, either `weight.absmax` float32, or (double quantization) `weight.absmax` uint8, whose values
`weight.nested_quant_map` gives, times those of `weight.nested_absmax` by blocks of 256 absmax, plus an offset. The rest
is JSON in the bytes of `weight.quant_state.bitsandbytes__nf4`.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.adapters.nf4 import BLOCK, LEVELS, nf4_layer_shapes, quantize, quantize_weights
from dtrain.base.model_directory import has_weights
from dtrain.checkpoint.huggingface.file_rows import FileRows
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models.building import linear_shapes
from dtrain.models.common.config_fields import is_unquantized
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.placement import local_slices, local_tensor

CODES, SCALES = ".weight_codes", ".weight_scales"
_STATE = "quant_state.bitsandbytes__nf4"
_NESTED = 256  # absmax that share one of theirs
_TILE = 2**22  # weights that are in memory at once


def file_name(name: str) -> str:
    """The name of the tensor in files that the model holds as `name`: a layer's codes are its weight."""
    return f"{name.removesuffix(CODES)}.weight" if name.endswith(CODES) else name


def weight_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """The shape of the model's tensor `name`, or of the weight that it has the codes of."""
    return (*tensor.shape[:-1], 2 * tensor.shape[-1]) if name.endswith(CODES) else tuple(tensor.shape)


def convert_to_4_bits(
    model: CausalLM, directory: Path, dtype: torch.dtype, *, nf4: bool, except_for: Collection[str] = ()
) -> list[str]:
    """Let layers of `model`, on meta, hold their weights in 4 bits, and return their names in files.

    Of a checkpoint that bitsandbytes has quantized, whole or in part, they are those of which the files in `directory`
    hold codes; where no files are, as for a plan, those that config.json does not skip. Of any other checkpoint they
    are all `nf4_layer_shapes` with `nf4`, and none without. dtype: what they compute in. except_for: names of layers
    that are trained whole. The headers are read; no collective.
    """
    of_config = (
        nf4_layer_shapes(model.config) if model.config.unquantized_modules is None else linear_shapes(model.config)
    )
    names, skipped = [name for name in of_config if name not in except_for], model.config.unquantized_modules
    if skipped is None:
        names = names if nf4 else []
    elif not has_weights(directory):
        names = [name for name in names if not is_unquantized(skipped, name)]
    else:
        stored = WeightFiles(directory).stored
        in_files = {name: model.checkpoint_names(f"{name}.weight") for name in names}
        names = [name for name in names if any(f"{weight}.{_STATE}" in stored for weight in in_files[name])]
    quantize_weights(model, dtype, names)
    return names


def quantization_tensors(files: WeightFiles, weight: str) -> list[str]:
    """The tensors beside `weight` that bitsandbytes stores of it."""
    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)
    return [name for part in parts if (name := f"{weight}.{part}") in files.stored]


def stored_mismatches(files: WeightFiles, weight: str, shape: tuple[int, ...]) -> list[str]:
    """Return what keeps bitsandbytes' `weight`, uint8 in `files`, from being the codes of a weight [out, in]."""
    state = _state(files, weight)
    if state is None:
        return [f"dtype: {weight} is {files.stored[weight].kind}, and {weight}.{_STATE} does not say how to read it"]
    blocks = shape[0] * shape[1] // BLOCK
    wanted = {weight: ((blocks * BLOCK // 2, 1), "U8"), f"{weight}.quant_map": ((16,), "F32")}
    expected = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape)}
    if "nested_offset" in state:
        wanted[f"{weight}.absmax"] = ((blocks,), "U8")
        wanted[f"{weight}.nested_absmax"] = ((-(-blocks // _NESTED),), "F32")
        wanted[f"{weight}.nested_quant_map"] = ((256,), "F32")
        expected["nested_blocksize"] = _NESTED
    else:
        wanted[f"{weight}.absmax"] = ((blocks,), "F32")
    mismatches = [
        f"shape: {weight} was quantized with {key} {state.get(key)}, dtrain reads {value}"
        for key, value in expected.items()
        if state.get(key) != value
    ]
    for name, (size, kind) in wanted.items():
        entry = files.stored.get(name)
        if entry is None:
            mismatches.append(f"missing: {name}")
        elif (entry.shape, entry.kind) != (size, kind):
            mismatches.append(f"shape: {name} is {entry.kind} {list(entry.shape)}, its layer needs {kind} {list(size)}")
    if not mismatches and not torch.equal(files.read(f"{weight}.quant_map"), torch.tensor(LEVELS)):
        mismatches.append(f"shape: {weight}.quant_map holds other levels than NF4's")
    return mismatches


@torch.no_grad()
def fill_codes(files: WeightFiles, source: FileRows, codes: Tensor, scales: Tensor) -> None:
    """Fill what this rank holds of codes uint8 [out, in/2] or [E, out, in/2] and scales int32 [.., in/64] from the rows
    `source` of a weight in `files`. A tile of the file is in memory at once. No collective. Raises ValueError where it
    does not hold the same blocks of both."""
    if not local_tensor(codes).numel():
        return
    (*lead, half), (*same_lead, blocks), weight = local_slices(codes), local_slices(scales), source.name
    across = slice(2 * half.start, 2 * half.stop)
    if lead != same_lead or across != slice(BLOCK * blocks.start, BLOCK * blocks.stop):
        raise ValueError(f"{weight}: this rank holds codes {lead}, {half} and scales {same_lead}, {blocks}")
    columns = 2 * codes.shape[-1]
    stored = _Stored(files, weight, columns) if files.stored[weight].kind == "U8" else None
    codes, scales = local_tensor(codes), local_tensor(scales)
    for part in _tiles(lead, columns):
        here = tuple(slice(p.start - held.start, p.stop - held.start) for p, held in zip(part, lead, strict=True))
        if stored is None:
            size = (place.stop - place.start for place in (*part, across))
            tile = torch.empty(*size, device=codes.device)
            source.fill(files, tile, (*part, across))
            codes[here], scales[here] = quantize(tile)
        else:
            (rows,) = source.slices(part)
            codes[here] = stored.codes(rows)[:, half].to(codes.device)
            scales[here] = stored.absmax(rows)[:, blocks].view(torch.int32).to(scales.device)


def _tiles(lead: list[slice], columns: int) -> Iterator[tuple[slice, ...]]:
    """The rows, or the experts and rows, of a weight that are in memory at once: whole matrices where these are small,
    else rows of one."""
    *experts, rows = lead
    height = max(1, min(_TILE // columns, rows.stop - rows.start))
    for matrices in _steps(experts[0], max(1, _TILE // (columns * (rows.stop - rows.start)))) if experts else [None]:
        for part in _steps(rows, height):
            yield (part,) if matrices is None else (matrices, part)


def _steps(whole: slice, step: int) -> list[slice]:
    return [slice(start, min(start + step, whole.stop)) for start in range(whole.start, whole.stop, step)]


class _Stored:
    """A matrix of so many columns as bitsandbytes stores it; `second`: of its double quantization, the values [256] of
    an absmax's byte, the factors and the offset."""

    def __init__(self, files: WeightFiles, weight: str, columns: int):
        self.files, self.weight, self.columns = files, weight, columns
        offset = (_state(files, weight) or {}).get("nested_offset")
        nested = [f"{weight}.nested_quant_map", f"{weight}.nested_absmax"]
        self.second = None if offset is None else (*map(files.read, nested), offset)

    def codes(self, rows: slice) -> Tensor:
        """[rows, columns/2] uint8."""
        half = self.columns // 2
        return self.files.read(self.weight, (slice(rows.start * half, rows.stop * half), slice(0, 1))).view(-1, half)

    def absmax(self, rows: slice) -> Tensor:
        """[rows, columns/64] float32."""
        blocks = self.columns // BLOCK
        flat = slice(rows.start * blocks, rows.stop * blocks)
        absmax = self.files.read(f"{self.weight}.absmax", (flat,))
        if self.second is not None:
            values, factors, offset = self.second
            absmax = values[absmax.int()] * factors[torch.arange(flat.start, flat.stop) // _NESTED] + offset
        return absmax.view(-1, blocks)


def _state(files: WeightFiles, weight: str) -> dict[str, Any] | None:
    """Return bitsandbytes' JSON for `weight`; None where there is none."""
    state, entry = None, files.stored.get(f"{weight}.{_STATE}")
    if entry is not None and entry.kind == "U8":
        with suppress(ValueError):
            state = json.loads(bytes(files.read(f"{weight}.{_STATE}").flatten().tolist()))
    return state if isinstance(state, dict) else None
