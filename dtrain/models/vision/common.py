"""Parts that vision towers share: config and interface, attention within images, positions on a grid of patches.

A tower takes the patches of all images of a call one behind the other, and attends within each image alone
(arXiv:2307.06304, section 2.1). Letters: P patches, T tokens that they become in the text, H heads, kv key heads, hd
head size, D hidden size of the tower, E that of the text.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial

from dtrain.base.batch import Grid, RowImages
from dtrain.base.name_patterns import matches_any
from dtrain.models.common.config import Rope
from dtrain.models.common.config_fields import Fields, format_value
from dtrain.models.common.functions import ACTIVATIONS, gated_activation, rotary_frequencies
from dtrain.models.common.micro_batch import AdapterContext, Features, Images, PlacedFeatures
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.rope_config import read_theta
from dtrain.models.common.vision_config import Frame, VisionConfig
from dtrain.models.vision.image_balancing import encode_balanced
from dtrain.parallel.collectives import all_reduce_in_backward
from dtrain.parallel.tensor import LocalParameters, TensorParallel

RotaryTables = tuple[Tensor, Tensor]  # cosines and signed sines, as `rotate` takes them


class VisionTower(nn.Module):
    """Base of the towers, with the projector into the text's embeddings.

    A tower's children, and all names below them, are those that Hugging Face's model has below `model.`. Built on meta
    by its config; starting values and files fill it.

    initial: as `CausalLM.initial_values`; initial_buffers: buffer pattern -> value. projector: patterns (fnmatch) of
    the parameters that `train.vision=projector` trains; lookups: of tables that no product has. prefixes: how a name
    begins -> how it begins in files, the likeliest first. carried: patterns (re.fullmatch) of tensors that no feature
    needs.
    """

    config: VisionConfig
    initial_values: Mapping[str, str]
    initial_buffers: Mapping[str, float] = {}
    projector_patterns: tuple[str, ...]
    lookup_patterns: tuple[str, ...] = ()
    file_prefixes: Mapping[str, tuple[str, ...]]
    carried_patterns: tuple[str, ...] = ()

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> VisionConfig:
        """Return the config that `vision_config` of a model's fields `outer` describes; every field is used, known to
        change nothing, or one of `outer.problems`. Defaults are transformers'. hidden_size: E."""
        raise NotImplementedError

    @classmethod
    def file_names(cls, name: str) -> list[str]:
        """Return the names that parameter or buffer `name` may have in files, the likeliest first."""
        own = next(own for own in cls.file_prefixes if name.startswith(own))
        return [prefix + name.removeprefix(own) for prefix in cls.file_prefixes[own]]

    def initial_patterns(self) -> Iterator[tuple[str, str]]:
        """Yield the patterns of `initial`, each with the name of a child at its beginning, and their values."""
        for pattern, value in self.initial_values.items():
            if pattern.startswith("*"):
                yield from ((f"{child}.{pattern}", value) for child, _ in self.named_children())
            else:
                yield pattern, value

    def plan(self) -> dict[str, str]:
        """Return the tensor-parallel styles: every rank has the whole tower, and computes some of the images."""
        modules = (name for name, module in self.named_modules() if isinstance(module, LocalParameters))
        return dict.fromkeys(modules, "summed")

    @cached_property
    def reduces_over_tp(self) -> bool:
        """Return whether the gradients of all parameters are summed over tp; for after a plan is applied."""
        views = [module.local_views for module in self.modules() if isinstance(module, LocalParameters)]
        return all(isinstance(view.grad, Partial) for of_module in views for view in of_module.values())

    def place_features(
        self,
        images: Images,
        length: int,
        tp: TensorParallel | None,
        cp: Any,
        adapters: AdapterContext | None = None,
    ) -> PlacedFeatures:
        """Return the features of images that several ranks hold, and where they stand among the `length` tokens of a
        row that this rank embeds. adapters: as of `forward`. Collectives as of `encode_balanced`; under sequence
        parallel, where that deals nothing over tp, an all-reduce backward."""
        features, is_image = encode_balanced(self, images, tp, cp, adapters), images.feature_index >= 0
        if tp is None or not tp.sequence_parallel:
            return PlacedFeatures(features, images.feature_index, is_image)
        if not self.reduces_over_tp:  # a rank's tokens give it a part of the features' gradients, which are summed
            deepstack = {layer: all_reduce_in_backward(added, tp.group) for layer, added in features.deepstack.items()}
            features = Features(all_reduce_in_backward(features.tokens, tp.group), deepstack)
        return PlacedFeatures(features, images.feature_index[:, tp.rank * length : (tp.rank + 1) * length], is_image)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, which FSDP gathers and checkpointing recomputes one by one."""
        raise NotImplementedError

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Compute `forward` of images that fit. pixels [P, values]"""
        raise NotImplementedError

    def forward(self, pixels: Tensor, grids: Sequence[Grid], adapters: AdapterContext | None = None) -> Features:
        """Return the features of images, each as if it were alone.

        pixels: [P, values] in the tower's dtype or float32, the patches of all images, in the order of the family's
        image processor. grids: host integers, one for each image; without an image all is [0, ...], with a graph
        through every trained parameter. Where none is trained there is no graph. adapters: whether the tower's adapters
        take part, without dropout; None: they do. Features are in the tower's dtype.
        Raises ValueError as `VisionConfig.frames` does. No collective of its own.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(own.requires_grad for own in self.parameters())):
            return self.encode(pixels, self.config.frames(pixels.shape, grids), adapters)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None) -> Tensor:
    """Return attention of every patch to those of its own segment, [P, H, hd].

    q: [P, H, hd]; k, v: [P, kv, hd], H a multiple of kv. lengths: of the segments, whose sum is P; neighbours of equal
    length are computed together. scale: of q·k; by default 1/sqrt(hd)."""
    if not lengths:
        return q + (k.sum() + v.sum())  # [0, H, hd], whose graph has all three
    parts, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        end = start + count * length
        queries, keys, values = (
            x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )  # [n, H or kv, L, hd]
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=grouped)
        parts.append(mixed.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(parts)


def patch_positions(frames: Sequence[Frame], block: int = 1) -> Tensor:
    """Return row and column of every patch of `frames`, [P, 2] int64 on the CPU: blocks of block x block patches one
    behind the other, the blocks of a frame, and the patches of a block, row by row."""
    parts = [torch.empty(0, 2, dtype=torch.int64, device="cpu")]
    for height, width in frames:
        shape = (height // block, width // block, block, block)
        rows = torch.arange(height, device="cpu").view(-1, 1, block, 1).expand(shape)
        columns = torch.arange(width, device="cpu").view(1, -1, 1, block).expand(shape)
        parts.append(torch.stack([rows.flatten(), columns.flatten()], -1))
    return torch.cat(parts)


def block_order(frames: Sequence[Frame], block: int) -> Tensor:
    """Return which patch comes at each place, [P] int64 on the CPU, to have patches that stand row by row in the order
    of `patch_positions` with this block."""
    parts, start = [torch.empty(0, dtype=torch.int64, device="cpu")], 0
    for height, width in frames:
        rows, columns = patch_positions([(height, width)], block).unbind(1)
        parts.append(start + rows * width + columns)
        start += height * width
    return torch.cat(parts)


def pool_squares(hidden: Tensor, frames: Sequence[Frame], pool: int) -> Tensor:
    """Return the average of each square of pool x pool patches, [T, D]; torch sums half precision in float32. hidden:
    [P, D], a frame's patches row by row."""
    order = block_order(frames, pool).to(hidden.device, non_blocking=True)
    return hidden[order].unflatten(0, (-1, pool**2)).mean(1)


def axial_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return the angles of two-dimensional rotary positions (arXiv:2104.09864, once for each axis), [P, 2, hd/4] in
    max(float32, dtype). positions: [P, 2]; hd a multiple of 4."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = rotary_frequencies(Rope(theta=theta), head_dim // 2, wide).to(positions.device, non_blocking=True)  # [hd/4]
    return positions[..., None].to(wide) * steps


def rotary_tables_of_angles(angles: Tensor) -> RotaryTables:
    """Return the tables of `rotate`, [P, 1, ..., 2n], for angles [P, ..., n]."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


class LayerNorm(LocalParameters, nn.LayerNorm):
    """torch's LayerNorm (arXiv:1607.06450), in half precision computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return F.layer_norm(x, self.normalized_shape, self.local("weight"), self.local("bias"), self.eps)


class PositionTable(LocalParameters, nn.Embedding):
    """Learned vectors of positions, [positions, D]."""

    def forward(self, index: Tensor) -> Tensor:
        """index [...] int64 -> [..., D]"""
        return F.embedding(index, self.local("weight"))


class PatchProjection(LocalParameters):
    """Convolution whose stride is its kernel, `shape` (channels, ..., rows, columns): a product with each patch."""

    def __init__(self, size: int, shape: tuple[int, ...], bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, *shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if bias else None)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [P, values], a patch's in the order of `shape` -> [P, D] in the weights' dtype"""
        weight = self.local("weight").flatten(1)  # [D, values]
        return F.linear(pixels.to(weight.dtype), weight, None if self.bias is None else self.local("bias"))


class Encoder(nn.Module):
    """The layers of a tower of Google's."""

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)). linear: makes a linear layer of its sizes, called as `Linear`."""

    def __init__(self, config: VisionConfig, linear: Callable[[int, int], nn.Module]):
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[P, D] -> [P, D]"""
        inner = gated_activation(self.gate_proj(x, adapters), self.up_proj(x, adapters), self.activation)
        return self.down_proj(inner, adapters)


def vision_fields(outer: ModelFields) -> ModelFields:
    """Return the fields of `vision_config`, whose problems are those of `outer`."""
    written = outer.get("vision_config")
    if written is not None and not isinstance(written, dict):
        outer.add_problem(f"vision_config {format_value(written)} is no object")
    return ModelFields(written if isinstance(written, dict) else {}, outer.problems, prefix="vision_config.")


def read_activation(fields: ModelFields, key: str, default: str) -> str:
    return fields.choice(key, tuple(ACTIVATIONS), default)


def read_axial_theta(fields: ModelFields, head_dim: int, default: float) -> float:
    """Return the base of two-dimensional rotary positions, by `rope_parameters` or `rope_theta`."""
    if head_dim % 4:
        fields.add_problem(f"heads of {head_dim}: rotary positions of two axes need a multiple of 4")
    theta, written = read_theta(fields, "rope_theta", default), fields.get("rope_parameters") or {}
    if not isinstance(written, dict):
        fields.add_problem(f"rope_parameters {format_value(written)} is no object")
        return theta
    inner = Fields(written, fields.problems, prefix="vision_config.rope_parameters.")
    inner.choice("rope_type", ("axial", "default"), "axial")
    theta = read_theta(inner, "rope_theta", theta)
    inner.refuse_the_rest()
    return theta


def split_heads(fields: ModelFields, hidden: int, heads: int) -> int:
    """Return the size of each of `heads` heads."""
    if hidden % heads:
        fields.add_problem(f"hidden_size {hidden} is not a multiple of {heads} heads")
    return max(hidden // heads, 1)


def flops_per_patch(tower: VisionTower, patches: int) -> float:
    """Return the FLOPs per patch of `tower`, for an image of so many `patches`, in a step that trains what of it is
    trained: of each matrix, and of the attention of each layer, those of the forward; as many again where the gradient
    goes on to the layers before, for some of these are trained; and of a trained matrix as many for its own gradient.

    Matrices of the projector see the tokens alone. Counted in full, as `TextFlops` counts, are attention to all
    patches in reach, and no recomputation.
    """
    config, total, goes_on = tower.config, 0.0, False
    layers = {id(layer): index for index, layer in enumerate(tower.layers)}
    for name, module in _children_first("", tower):
        own = {f"{name}.{key}": parameter for key, parameter in module.named_parameters(recurse=False)}
        for path, parameter in own.items():
            if parameter.dim() < 2 or isinstance(module, nn.Embedding) or matches_any([path], tower.lookup_patterns):
                continue
            products = 1 + goes_on + parameter.requires_grad
            share = config.pool**2 if matches_any([path], tower.projector_patterns) else 1
            total += 2.0 * products * parameter.numel() / share
        goes_on = goes_on or any(parameter.requires_grad for parameter in own.values())
        if (index := layers.get(id(module))) is not None:
            attention = 4.0 * config.num_attention_heads * config.head_dim * config.attended_patches(index, patches)
            total += attention * (3 if goes_on else 1)
    return total


class ImageFlops:
    """Training FLOPs of `tower` for images, by `flops_per_patch`, which is asked once for each size of an image."""

    def __init__(self, tower: VisionTower):
        self.tower = tower
        self._by_patches: dict[int, float] = {}

    def total(self, images: RowImages) -> float:
        """Return the FLOPs for the images of a micro-batch, each different one once."""
        places = [[(row, image) for image in range(len(grids))] for row, grids in enumerate(images.grids)]
        keys: Sequence[Sequence[Hashable]] = places if images.keys is None else images.keys
        pairs = zip(chain.from_iterable(keys), chain.from_iterable(images.grids), strict=True)
        return sum(frames * self._of_frame(rows * columns) for frames, rows, columns in dict(pairs).values())

    def _of_frame(self, patches: int) -> float:
        if patches not in self._by_patches:
            self._by_patches[patches] = patches * flops_per_patch(self.tower, patches)
        return self._by_patches[patches]


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module
