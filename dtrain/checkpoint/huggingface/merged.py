"""A model's weights as one without adapters has them: whole, one at a time, adapters merged, under the base's names.

The model's own weights are read and not written, so that nothing is left to undo, but by `merge_in_place`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dtrain.adapters.config import is_adapter
from dtrain.adapters.lora import Adapted, Adapter, adapted_layers, remove_adapters
from dtrain.adapters.nf4 import CODES, PARTS, SCALES, NF4Weight, holds_codes
from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.training_state import aliases, model_tensors
from dtrain.checkpoint.huggingface.file_rows import FusedWeight, joints
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.checkpoint.huggingface.stored import CARRIED
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.moe import Router
from dtrain.parallel.placement import on_its_device
from dtrain.parallel.tensor import exact_modules


@dataclass(frozen=True)
class WholeWeight:
    """A weight of [shape]. names: all that the model knows it by, or the one in a file. dtype: the base's own, or the
    file's. `read(dtype)` gives it whole, a new tensor or the model's own, on any device; collective: every rank calls
    it, and otherwise a file's writer alone. exact: it is written in float32 at least."""

    names: list[str]
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[torch.dtype], Tensor]
    collective: bool = False
    exact: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def in_file(self, name: str, dtype: torch.dtype | None) -> "WholeWeight":
        """The tensor `name` of a file, in `dtype`; None: its own."""
        own = self.dtype if dtype is None or not self.dtype.is_floating_point else wider(dtype, self.exact)
        return replace(self, names=[name], dtype=own)


def stored_weight(files: WeightFiles, name: str, dtype: torch.dtype | None = None) -> WholeWeight:
    """The tensor `name` of `files`, to be written in `dtype` or its own."""
    stored = files.stored[name]
    if (own := CARRIED.get(stored.kind)) is None:
        raise UserError(f"{files.directory}: {name} is {stored.kind}, which dtrain does not copy")
    return WholeWeight([name], torch.Size(stored.shape), dtype or own, lambda _: files.read(name))


def whole_weights(model: nn.Module) -> dict[str, WholeWeight]:
    """Return the weights of `model` by the name of files, in the model's order, each [any shape], tied ones once. No
    collective; FSDP modules go back to their shards. `read` gathers the weight, in its own dtype where an adapter is
    merged into it, and the adapter: an all-gather for each that is sharded."""
    layers = {name: submodule for name, submodule in model.named_modules() if isinstance(submodule, Adapted)}
    tensors, exact, weights = model_tensors(model), exact_names(model), {}
    for name, names in aliases(model).items():
        module, _, parameter = name.rpartition(".")
        layer = layers.get(module)
        if is_adapter(name) or (layer is not None and parameter == SCALES):
            continue
        if layer is not None and (parameter == CODES or (parameter == "weight" and layer.wrapper is not None)):
            name = f"{module}.weight"
            weights[name] = _of_layer(layer, name)
        else:
            tensor = tensors[name]
            read, is_sharded = partial(_cast, tensor), isinstance(tensor, DTensor)
            weights[name] = WholeWeight(names, tensor.shape, tensor.dtype, read, is_sharded, name in exact)
    return in_files(model, weights)


def in_files(model: nn.Module | ModelConfig, weights: Mapping[str, WholeWeight]) -> dict[str, WholeWeight]:
    """The weights of `model`, or of one of this ModelConfig, by files' names: joined where these join them, and of a
    stack the matrices where files have these."""
    stacks: dict[str, _ExpertStack] = {}
    whole: dict[str, WholeWeight] = {}
    for fused in joints(model, weights):
        first = weights[fused.parts[0]]
        if fused.expert is None:
            whole[fused.name] = _joined(fused, [weights[part] for part in fused.parts])
        else:
            stack = stacks.setdefault(fused.parts[0], _ExpertStack(first))
            read = partial(stack.matrix, fused.expert)
            whole[fused.name] = replace(first, names=[fused.name], shape=first.shape[1:], read=read)
    return whole


def exact_names(model: nn.Module) -> set[str]:
    """The names in `model` of parameters that are held, and written, in float32 at least."""
    return {f"{name}.{parameter}" for name, module in exact_modules(model).items() for parameter in module._parameters}


def wider(dtype: torch.dtype, exact: bool) -> torch.dtype:
    """`dtype`, or where a tensor is `exact` float32 at least."""
    return torch.promote_types(dtype, torch.float32) if exact else dtype


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None, dtype: torch.dtype) -> Tensor:
    """W + s·B·A of W [.., out, in], A [.., r, in] and B [.., out, r], of DoRA each row m / ‖row‖ times that, m [out]:
    [.., out, in], computed in max(float32, theirs), in PEFT's order, and rounded once, to `dtype`. No collective."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    merged = weight.to(wide) + (b.to(wide) @ a.to(wide)) * scale
    if magnitude is not None:
        norms = torch.linalg.norm(merged, dim=1).clamp_(min=torch.finfo(wide).tiny)  # a row of zeros stays one
        merged = (magnitude.to(wide) / norms)[:, None] * merged
    return merged.to(dtype)


def folded(name: str, tensor: Tensor, rank: int, scale: float) -> Tensor:
    """A layer's A [r, in] or B [out, r], the parameter `name`, as in an adapter of scale 1 and a rank of r or more: the
    scale is in B, and zeros fill both up, to [rank, in] and [out, rank]. No collective."""
    if name.endswith(".lora_A"):
        return F.pad(tensor, (0, 0, 0, rank - tensor.shape[0]))
    return F.pad(tensor * scale, (0, rank - tensor.shape[1]))


@torch.no_grad()
def merge_in_place(model: CausalLM) -> bool:
    """Merge the adapters of `model`, whole on one device, into its weights [.., out, in], and take them out; a merged
    weight that was in 4 bits is a whole one from here on. Returns whether it had any. No collective."""
    layers = adapted_layers(model)
    for name, layer in layers.items():
        weight = _of_layer(layer, name)
        whole = weight.read(weight.dtype)
        if holds_codes(layer):
            del layer.weight_storage  # that of its class is left
            for parameter in PARTS:
                del layer._parameters[parameter]
            layer.weight = nn.Parameter(whole, requires_grad=False)
        else:
            layer.weight.copy_(whole)
    remove_adapters(model)
    model.adapters = None
    return bool(layers)


def gathered(tensor: Tensor) -> Tensor:
    """`tensor`, [any shape], whole. One all-gather for each dimension of a mesh that shards it."""
    tensor = on_its_device(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    # One after another, FSDP's first, which cut last: torch warns of several in one call.
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            whole = [Replicate() if index == dim else held for index, held in enumerate(tensor.placements)]
            tensor = tensor.redistribute(placements=whole)
    return tensor.to_local()


def _joined(fused: FusedWeight, parts: list[WholeWeight]) -> WholeWeight:
    """Return the weight that joins `parts`. Every rank joins them, those too that do not keep the whole."""
    name = fused.name
    if len(parts) == 1 and not fused.transposed:
        return parts[0] if name in parts[0].names else replace(parts[0], names=[name])

    def read(dtype: torch.dtype) -> Tensor:
        return fused.join([part.read(dtype) for part in parts])

    shape = torch.Size(fused.shape([part.shape for part in parts]))
    is_collective, is_exact = any(part.collective for part in parts), any(part.exact for part in parts)
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    return WholeWeight([name], shape, dtype, read, is_collective, is_exact)


class _ExpertStack:
    """Reader of a stack [E, ..] of experts, one matrix at a time: the whole is read at the first, and let go of when
    each was asked for once."""

    def __init__(self, stack: WholeWeight):
        self._stack = stack
        self._whole: dict[torch.dtype, list[Tensor]] = {}  # and once for each matrix that is left

    def matrix(self, number: int, dtype: torch.dtype) -> Tensor:
        """The matrix of this number."""
        if not self._whole.get(dtype):
            self._whole[dtype] = [self._stack.read(dtype)] * self._stack.shape[0]
        return self._whole[dtype].pop()[number]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return gathered(on_its_device(tensor).to(dtype))  # cast first: half the bytes travel in half precision


def _of_layer(layer: Adapted, name: str) -> WholeWeight:
    def read(dtype: torch.dtype) -> Tensor:
        weight = gathered(layer.weight) if isinstance(layer, Router) else layer.matrix(gathered)
        if layer.wrapper is None:
            return weight.to(dtype)
        has_magnitude = isinstance(layer.wrapper, Adapter) and layer.wrapper.dora
        magnitude = gathered(layer.get_parameter("lora_magnitude")) if has_magnitude else None
        a, b = gathered(layer.get_parameter("lora_A")), gathered(layer.get_parameter("lora_B"))
        return merge(weight, a, b, layer.wrapper.scale, magnitude, dtype)

    if not isinstance(layer, Router) and isinstance(layer.weight_storage, NF4Weight):
        is_sharded = isinstance(layer.get_parameter(CODES), DTensor)
        return WholeWeight([name], layer.weight_storage.shape, layer.weight_storage.dtype, read, is_sharded)
    return WholeWeight([name], layer.weight.shape, layer.weight.dtype, read, isinstance(layer.weight, DTensor))
