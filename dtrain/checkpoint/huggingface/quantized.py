"""Weights that a model stores in 4 bits (NF4), read from files: rounded while reading, or copied from bitsandbytes.

A file has a layer's weight [out, in] in one of these forms:

    floats             weight             [out, in]
    bitsandbytes       weight             uint8 [out·in/2, 1], two codes per byte
                       weight.absmax      float32 [out·in/64], the scale of each block of 64 weights
    double-quantized   weight.absmax             uint8 [out·in/64], indices of scales
                       weight.nested_quant_map   float32 [256], the value of each index
                       weight.nested_absmax      float32, a factor for each 256 scales
                       and an offset; scale = nested_quant_map[absmax] · nested_absmax + offset

bitsandbytes stores the other facts (block sizes, shape, offset) as JSON, as the bytes of the tensor
`weight.quant_state.bitsandbytes__nf4`.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
_NESTED = 256  # scales that share a factor
_TILE = 2**22  # weights that are in memory at once as floats


def file_name(name: str) -> str:
    """Return the name in files of a model's tensor: a layer's codes are its weight.

    >>> file_name("q_proj.weight_codes"), file_name("norm.weight")
    ('q_proj.weight', 'norm.weight')
    """
    return f"{name.removesuffix(CODES)}.weight" if name.endswith(CODES) else name


def weight_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a model's tensor. For 4-bit codes, return the shape of the weight (two codes per byte)."""
    if name.endswith(CODES):
        return (*tensor.shape[:-1], 2 * tensor.shape[-1])
    return tuple(tensor.shape)


def convert_to_4_bits(
    model: CausalLM, directory: Path, dtype: torch.dtype, *, nf4: bool, except_for: Collection[str] = ()
) -> list[str]:
    """Change the layers of a model that store their weights in 4 bits. Only headers of files are read. No collective.

    Which layers are changed depends on the checkpoint:

    - quantized by bitsandbytes, with files: the layers for which the files have 4-bit codes
    - quantized by bitsandbytes, without files (as for a plan): the layers that config.json does not skip
    - any other checkpoint: with `nf4`, the layers of `nf4_layer_shapes`; without, none

    Args:
        model: The model on meta.
        directory: Directory of the files.
        dtype: Dtype in which these layers compute.
        nf4: Whether weights are rounded to 4 bits if the files have floats.
        except_for: Names of layers that are trained fully.

    Returns:
        The names of the layers in files.
    """
    # The layers that bitsandbytes left in full precision. None if bitsandbytes has not quantized the checkpoint.
    skipped = model.config.unquantized_modules
    candidates = nf4_layer_shapes(model.config) if skipped is None else linear_shapes(model.config)
    names = [name for name in candidates if name not in except_for]
    if skipped is None:
        names = names if nf4 else []
    elif not has_weights(directory):
        names = [name for name in names if not is_unquantized(skipped, name)]
    else:
        stored = WeightFiles(directory).stored
        coded = []
        for name in names:
            file_names = model.checkpoint_names(f"{name}.weight")
            if any(f"{file_name}.{_STATE}" in stored for file_name in file_names):
                coded.append(name)
        names = coded
    quantize_weights(model, dtype, names)
    return names


def quantization_tensors(files: WeightFiles, weight: str) -> list[str]:
    """Return the further tensors that bitsandbytes stores for a weight."""
    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)
    names = [f"{weight}.{part}" for part in parts]
    return [name for name in names if name in files.stored]


def stored_mismatches(files: WeightFiles, weight: str, shape: tuple[int, ...]) -> list[str]:
    """Compare a weight that bitsandbytes has quantized, and its further tensors, with the model's layer.

    Args:
        files: The files.
        weight: Name of the weight, uint8 in the files.
        shape: The shape of the weight, (out, in).

    Returns:
        The errors; empty if the weight can be read.
    """
    state = _state(files, weight)
    if state is None:
        return [f"dtype: {weight} is {files.stored[weight].kind}, and {weight}.{_STATE} does not say how to read it"]
    blocks = shape[0] * shape[1] // BLOCK
    expected_tensors = {weight: ((blocks * BLOCK // 2, 1), "U8"), f"{weight}.quant_map": ((16,), "F32")}
    expected_state = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape)}
    if "nested_offset" in state:
        expected_tensors[f"{weight}.absmax"] = ((blocks,), "U8")
        expected_tensors[f"{weight}.nested_absmax"] = ((-(-blocks // _NESTED),), "F32")  # rounded up
        expected_tensors[f"{weight}.nested_quant_map"] = ((256,), "F32")
        expected_state["nested_blocksize"] = _NESTED
    else:
        expected_tensors[f"{weight}.absmax"] = ((blocks,), "F32")
    mismatches = []
    for key, value in expected_state.items():
        if state.get(key) != value:
            mismatches.append(f"shape: {weight} was quantized with {key} {state.get(key)}, dtrain reads {value}")
    for name, (size, kind) in expected_tensors.items():
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
    """Fill this rank's shards of a weight's codes and scales, a tile at a time. No collective.

    Args:
        files: The files.
        source: Where the weight is stored.
        codes: uint8 [out, in/2] or [E, out, in/2], plain or a DTensor.
        scales: int32 [out, in/64] or [E, out, in/64]: the bits of float32 scales.

    Raises:
        ValueError: If this rank's shards of the two belong to different blocks.
    """
    if not local_tensor(codes).numel():
        return
    weight = source.name
    # A byte of codes has two columns of the weight, and a scale has a block of 64 columns. Both shards must cover the
    # same columns.
    *lead, half = local_slices(codes)  # slices of experts and rows, and of bytes in a row
    *scale_lead, blocks = local_slices(scales)
    columns_slice = slice(2 * half.start, 2 * half.stop)
    if lead != scale_lead or columns_slice != slice(BLOCK * blocks.start, BLOCK * blocks.stop):
        raise ValueError(f"{weight}: this rank has codes {lead}, {half} and scales {scale_lead}, {blocks}")
    columns = 2 * codes.shape[-1]
    stored = _BitsAndBytesWeight(files, weight, columns) if files.stored[weight].kind == "U8" else None
    codes, scales = local_tensor(codes), local_tensor(scales)
    for tile in _tiles(lead, columns):
        local = _relative_to(tile, lead)
        if stored is None:
            sizes = [part.stop - part.start for part in (*tile, columns_slice)]
            values = torch.empty(*sizes, device=codes.device)
            source.fill(files, values, (*tile, columns_slice))
            codes[local], scales[local] = quantize(values)
        else:
            (rows,) = source.slices(tile)
            codes[local] = stored.codes(rows)[:, half].to(codes.device)
            scales[local] = stored.absmax(rows)[:, blocks].view(torch.int32).to(scales.device)


def _tiles(lead: list[slice], columns: int) -> Iterator[tuple[slice, ...]]:
    """Yield tiles of about `_TILE` weights, as slices of the rows, or of the experts and rows.

    They are several full matrices if these are small, otherwise some rows of one.
    """
    rows = lead[-1]
    num_rows = rows.stop - rows.start
    height = max(1, min(_TILE // columns, num_rows))
    if len(lead) == 1:
        for part in _split(rows, height):
            yield (part,)
        return
    for matrices in _split(lead[0], max(1, _TILE // (columns * num_rows))):
        for part in _split(rows, height):
            yield matrices, part


def _split(rows: slice, step: int) -> list[slice]:
    return [slice(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]


def _relative_to(tile: tuple[slice, ...], shard: list[slice]) -> tuple[slice, ...]:
    """Return a tile of the full tensor as slices of this rank's shard.

    Example:
        >>> _relative_to((slice(6, 8),), [slice(4, 12)])
        (slice(2, 4, None),)
    """
    relative = []
    for part, dim in zip(tile, shard, strict=True):
        relative.append(slice(part.start - dim.start, part.stop - dim.start))
    return tuple(relative)


class _DoubleQuantization(NamedTuple):
    """bitsandbytes' quantization of the scales: scale = levels[code] * factor + offset.

    Attributes:
        levels: The 256 levels of a code, float32 [256].
        factors: The factor of each block of scales, float32.
        offset: The offset.
    """

    levels: Tensor
    factors: Tensor
    offset: float


class _BitsAndBytesWeight:
    """Reads rows of a matrix that bitsandbytes has quantized.

    Args:
        files: The files.
        weight: Name of the weight.
        columns: Its number of columns.
    """

    def __init__(self, files: WeightFiles, weight: str, columns: int):
        self.files, self.weight, self.columns = files, weight, columns
        self._double_quantization: _DoubleQuantization | None = None
        offset = (_state(files, weight) or {}).get("nested_offset")
        if offset is not None:
            levels, factors = files.read(f"{weight}.nested_quant_map"), files.read(f"{weight}.nested_absmax")
            self._double_quantization = _DoubleQuantization(levels, factors, offset)

    def codes(self, rows: slice) -> Tensor:
        """Read the codes of some rows, uint8 [rows, columns/2]."""
        half = self.columns // 2
        flat = slice(rows.start * half, rows.stop * half)
        return self.files.read(self.weight, (flat, slice(0, 1))).view(-1, half)

    def absmax(self, rows: slice) -> Tensor:
        """Read the scales of some rows, float32 [rows, columns/64]."""
        blocks = self.columns // BLOCK
        flat = slice(rows.start * blocks, rows.stop * blocks)
        absmax = self.files.read(f"{self.weight}.absmax", (flat,))
        if self._double_quantization is not None:
            levels, factors, offset = self._double_quantization
            blocks_of_scales = torch.arange(flat.start, flat.stop) // _NESTED
            absmax = levels[absmax.int()] * factors[blocks_of_scales] + offset
        return absmax.view(-1, blocks)


def _state(files: WeightFiles, weight: str) -> dict[str, Any] | None:
    """Return bitsandbytes' JSON for a weight; None if there is none."""
    name = f"{weight}.{_STATE}"
    entry = files.stored.get(name)
    if entry is None or entry.kind != "U8":
        return None
    try:
        state = json.loads(bytes(files.read(name).flatten().tolist()))
    except ValueError:
        return None
    return state if isinstance(state, dict) else None
