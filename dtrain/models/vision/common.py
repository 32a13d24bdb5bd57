"""Parts that vision towers share: interface, attention within images, positions on a grid of patches, FLOPs.

A tower takes the patches of all images of a call, concatenated over the images, and attends within each image only
(arXiv:2307.06304, section 2.1). For example, two images of 2 x 2 and 2 x 4 patches make P = 12 patches, and with a
pooling of 2 x 2 T = 3 tokens.

Letters in shapes: P patches, T tokens of the text that they become, H heads, kv key heads, hd head size, D hidden size
of the tower, E hidden size of the text model.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
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

RotaryTables = tuple[Tensor, Tensor]  # cosines and signed sines, as `apply_rotary` takes them


class VisionTower(nn.Module):
    """Base of the vision towers. A tower includes the projector into the text model's embeddings.

    The names of a tower's children, and all names below them, are those that Hugging Face's model has below `model.`.
    A tower is built on the meta device. `init_weights` or files fill it.

    Attributes:
        config: Sizes of the tower.
        initial_values: As `CausalLM.initial_values`.
        initial_buffers: Buffer pattern -> value.
        projector_patterns: Patterns (fnmatch) of the parameters that `train.vision=projector` trains.
        lookup_patterns: Patterns of embedding tables, which take no part in matrix products.
        file_prefixes: Prefix of names in the tower -> prefixes of these names in files, the most common first.
        carried_patterns: Patterns (re.fullmatch) of tensors in files that the tower does not read.
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
        """Return the config that `vision_config` of a config.json describes.

        Every field is used, known to change no number, or added to `outer.problems`. Defaults are transformers'.

        Args:
            outer: Fields of the model.
            hidden_size: Hidden size of the text model, E.
        """
        raise NotImplementedError

    @classmethod
    def file_names(cls, name: str) -> list[str]:
        """Return the names that a parameter or buffer may have in files, the most common name first.

        Raises:
            KeyError: If the name begins with no prefix of `file_prefixes`.
        """
        for own_prefix, file_prefixes in cls.file_prefixes.items():
            if name.startswith(own_prefix):
                return [prefix + name.removeprefix(own_prefix) for prefix in file_prefixes]
        raise KeyError(name)

    def initial_patterns(self) -> Iterator[tuple[str, str]]:
        """Yield the patterns of `initial_values` and their values. Every pattern begins with the name of a child."""
        for pattern, value in self.initial_values.items():
            if pattern.startswith("*"):
                for child, _ in self.named_children():
                    yield f"{child}.{pattern}", value
            else:
                yield pattern, value

    def plan(self) -> dict[str, str]:
        """Return the tensor-parallel plan: every rank has the full tower, and the ranks' gradients are summed."""
        modules = (name for name, module in self.named_modules() if isinstance(module, LocalParameters))
        return dict.fromkeys(modules, "summed")

    @cached_property
    def reduces_over_tp(self) -> bool:
        """True if the gradients of all parameters are summed over tp. Only to be read after a plan is applied."""
        for module in self.modules():
            if isinstance(module, LocalParameters):
                for view in module.local_views.values():
                    if not isinstance(view.grad_placement, Partial):
                        return False
        return True

    def place_features(
        self,
        images: Images,
        length: int,
        tp: TensorParallel | None,
        cp: Any,
        adapters: AdapterContext | None = None,
    ) -> PlacedFeatures:
        """Compute the features of images, and locate them among the tokens that this rank embeds.

        Args:
            images: Images of the rows.
            length: Tokens of a row that this rank embeds.
            tp: Tensor parallelism. None for one rank.
            cp: Process group of context parallel. None for one rank.
            adapters: As in `forward`.

        Collectives:
            Those of `encode_balanced`. Under sequence parallel, if images are not balanced over tp, an all-reduce in
            the backward.
        """
        features = encode_balanced(self, images, tp, cp, adapters)
        is_image = images.feature_index >= 0
        if tp is None or not tp.sequence_parallel:
            return PlacedFeatures(features, images.feature_index, is_image)
        if not self.reduces_over_tp:
            # This rank's tokens give it only a part of the features' gradients, so the parts are summed.
            deepstack = {layer: all_reduce_in_backward(added, tp.group) for layer, added in features.deepstack.items()}
            features = Features(all_reduce_in_backward(features.tokens, tp.group), deepstack)
        local_index = images.feature_index[:, tp.rank * length : (tp.rank + 1) * length]
        return PlacedFeatures(features, local_index, is_image)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers. FSDP gathers, and activation checkpointing recomputes, one at a time."""
        raise NotImplementedError

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Compute the features of images whose sizes are checked. The arguments are those of `forward`."""
        raise NotImplementedError

    def forward(self, pixels: Tensor, grids: Sequence[Grid], adapters: AdapterContext | None = None) -> Features:
        """Compute the features of images, each as if it were the only one. Issues no collective of its own.

        Args:
            pixels: Patches of all images in the order of the family's image processor, [P, values], in the tower's
                dtype or float32.
            grids: Size of each image, as integers on the host. Without an image all results are [0, ...], with a graph
                through every trained parameter.
            adapters: Whether the tower's adapters take part, without dropout. None: they do.

        Returns:
            Features in the tower's dtype. Without a graph if no parameter is trained.

        Raises:
            ValueError: If the sizes do not fit the tower or one another.
        """
        is_trained = any(parameter.requires_grad for parameter in self.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            return self.encode(pixels, self.config.frames(pixels.shape, grids), adapters)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None) -> Tensor:
    """Compute attention of every patch to the patches of its own segment.

    Neighbouring segments of the same length are computed together.

    Args:
        q: [P, H, hd].
        k: [P, kv, hd]. H is a multiple of kv.
        v: [P, kv, hd].
        lengths: Lengths of the segments, whose sum is P.
        scale: Factor of q·k. None: 1/sqrt(hd).

    Returns:
        [P, H, hd].
    """
    if not lengths:
        return q + (k.sum() + v.sum())  # [0, H, hd], with all three in its graph
    # One call for each run of equal lengths. A mask over all patches would need memory that grows with P².
    parts = []
    start = 0
    for length, run in groupby(lengths):
        num_segments = len(list(run))
        end = start + num_segments * length
        queries, keys, values = (
            x[start:end].unflatten(0, (num_segments, length)).transpose(1, 2) for x in (q, k, v)
        )  # [n, H or kv, length, hd]
        has_groups = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=has_groups)
        parts.append(mixed.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(parts)


def patch_positions(frames: Sequence[Frame], block: int = 1) -> Tensor:
    """Return row and column of every patch.

    The patches of a frame are ordered in blocks of block x block patches. The blocks of a frame, and the patches of a
    block, are ordered row by row.

    Args:
        frames: Rows and columns of each frame.
        block: Patches at each side of a block.

    Returns:
        [P, 2] int64 on the CPU.

    Example:
        >>> patch_positions([(2, 4)], block=2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    parts = [torch.empty(0, 2, dtype=torch.int64, device="cpu")]
    for height, width in frames:
        # Axes: row of blocks, column of blocks, row within a block, column within a block.
        shape = (height // block, width // block, block, block)
        rows = torch.arange(height, device="cpu").view(-1, 1, block, 1).expand(shape)
        columns = torch.arange(width, device="cpu").view(1, -1, 1, block).expand(shape)
        parts.append(torch.stack([rows.flatten(), columns.flatten()], -1))
    return torch.cat(parts)


def block_order(frames: Sequence[Frame], block: int) -> Tensor:
    """Return the permutation from patches that are ordered row by row to the order of `patch_positions`.

    Args:
        frames: Rows and columns of each frame.
        block: Patches at each side of a block.

    Returns:
        Index of the row-by-row patch at each position of the new order, [P] int64 on the CPU.

    Example:
        >>> block_order([(2, 4)], block=2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    start = 0
    for height, width in frames:
        rows, columns = patch_positions([(height, width)], block).unbind(1)
        parts.append(start + rows * width + columns)
        start += height * width
    return torch.cat(parts)


def pool_squares(hidden: Tensor, frames: Sequence[Frame], pool: int) -> Tensor:
    """Average each square of pool x pool patches. torch sums half precision in float32.

    Args:
        hidden: [P, D], the patches of a frame row by row.
        frames: Rows and columns of each frame.
        pool: Patches at each side of a square.

    Returns:
        [T, D].
    """
    order = block_order(frames, pool).to(hidden.device, non_blocking=True)
    return hidden[order].unflatten(0, (-1, pool**2)).mean(1)


def axial_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Compute the angles of two-dimensional rotary positions (arXiv:2104.09864, once for each axis).

    Args:
        positions: Row and column, [P, 2].
        head_dim: Elements of a head, a multiple of 4.
        theta: Base of the frequencies.
        dtype: Angles are computed in max(float32, dtype).

    Returns:
        [P, 2, hd/4].
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = rotary_frequencies(Rope(theta=theta), head_dim // 2, wide)  # [hd/4]
    return positions[..., None].to(wide) * frequencies.to(positions.device, non_blocking=True)


def rotary_tables_of_angles(angles: Tensor) -> RotaryTables:
    """Return the tables for `apply_rotary`, [P, 1, ..., 2n], of angles [P, ..., n]."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


class LayerNorm(LocalParameters, nn.LayerNorm):
    """torch's LayerNorm (arXiv:1607.06450), which computes half precision in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., D]."""
        return F.layer_norm(x, self.normalized_shape, self.local("weight"), self.local("bias"), self.eps)


class PositionTable(LocalParameters, nn.Embedding):
    """Learned vectors of positions, [positions, D]."""

    def forward(self, index: Tensor) -> Tensor:
        """Look up vectors [..., D] by index [...] int64."""
        return F.embedding(index, self.local("weight"))


class PatchProjection(LocalParameters):
    """Linear map of patches, stored as the convolution that it is in files.

    The convolution's stride equals its kernel size, so it is one matrix product with each patch.

    Args:
        size: Outputs, D.
        shape: Shape of a patch: channels, ..., rows, columns.
        bias: Whether there is a bias.
    """

    def __init__(self, size: int, shape: tuple[int, ...], bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, *shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if bias else None)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map patches [P, values], flattened in the order of `shape`, to [P, D] in the weights' dtype."""
        weight = self.local("weight").flatten(1)  # [D, values]
        bias = None if self.bias is None else self.local("bias")
        return F.linear(pixels.to(weight.dtype), weight, bias)


class Encoder(nn.Module):
    """Container of the layers, under the name that they have in Google's towers."""

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class GatedMLP(nn.Module):
    """Gated MLP: down(act(gate(x)) · up(x)).

    Args:
        config: Sizes of the tower.
        linear: Makes a linear layer from its input and output sizes.
    """

    def __init__(self, config: VisionConfig, linear: Callable[[int, int], nn.Module]):
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute the MLP, [P, D] -> [P, D]."""
        inner = gated_activation(self.gate_proj(x, adapters), self.up_proj(x, adapters), self.activation)
        return self.down_proj(inner, adapters)


def vision_fields(outer: ModelFields) -> ModelFields:
    """Return the fields of `vision_config`. Problems are added to those of `outer`."""
    values = outer.get("vision_config")
    if values is not None and not isinstance(values, dict):
        outer.add_problem(f"vision_config {format_value(values)} is no object")
    return ModelFields(values if isinstance(values, dict) else {}, outer.problems, prefix="vision_config.")


def read_activation(fields: ModelFields, key: str, default: str) -> str:
    """Read the name of an activation."""
    return fields.choice(key, tuple(ACTIVATIONS), default)


def read_axial_theta(fields: ModelFields, head_dim: int, default: float) -> float:
    """Read the base of two-dimensional rotary positions from `rope_parameters` or `rope_theta`."""
    if head_dim % 4:
        fields.add_problem(f"heads of {head_dim}: rotary positions of two axes need a multiple of 4")
    theta = read_theta(fields, "rope_theta", default)
    values = fields.get("rope_parameters") or {}
    if not isinstance(values, dict):
        fields.add_problem(f"rope_parameters {format_value(values)} is no object")
        return theta
    inner = Fields(values, fields.problems, prefix="vision_config.rope_parameters.")
    inner.choice("rope_type", ("axial", "default"), "axial")
    theta = read_theta(inner, "rope_theta", theta)
    inner.refuse_the_rest()
    return theta


def split_heads(fields: ModelFields, hidden: int, heads: int) -> int:
    """Return the size of a head, `hidden` / `heads`. If that is no integer, a problem is added to `fields`."""
    if hidden % heads:
        fields.add_problem(f"hidden_size {hidden} is not a multiple of {heads} heads")
    return max(hidden // heads, 1)


def flops_per_patch(tower: VisionTower, patches: int) -> float:
    """Return the FLOPs per patch of a training step, for an image of `patches` patches.

    A product with a matrix counts once for the forward, once more if the gradient of its input is computed, because
    something before it is trained, and once more if the matrix itself is trained. Attention counts once, or three times
    if its gradient is computed. As in `TextFlops`, attention to all patches that a layer sees is counted in full, and
    nothing that is computed again. Matrices of the projector compute tokens and not patches.
    """
    config = tower.config
    layer_numbers = {id(layer): index for index, layer in enumerate(tower.layers)}
    patches_per_token = config.pool**2
    total = 0.0
    needs_input_grad = False  # whether a parameter of an earlier module is trained
    for name, module in _children_first("", tower):
        parameters = {f"{name}.{key}": parameter for key, parameter in module.named_parameters(recurse=False)}
        for path, parameter in parameters.items():
            is_lookup = isinstance(module, nn.Embedding) or matches_any([path], tower.lookup_patterns)
            if parameter.dim() < 2 or is_lookup:
                continue
            num_products = 1
            if needs_input_grad:
                num_products += 1
            if parameter.requires_grad:
                num_products += 1
            divisor = patches_per_token if matches_any([path], tower.projector_patterns) else 1
            total += 2.0 * num_products * parameter.numel() / divisor
        needs_input_grad = needs_input_grad or any(parameter.requires_grad for parameter in parameters.values())
        if id(module) in layer_numbers:
            seen_patches = config.attended_patches(layer_numbers[id(module)], patches)
            attention = 4.0 * config.num_attention_heads * config.head_dim * seen_patches
            total += attention * (3 if needs_input_grad else 1)
    return total


class ImageFlops:
    """Training FLOPs of a tower for images. `flops_per_patch` is computed once for each size of an image.

    Args:
        tower: The tower.
    """

    def __init__(self, tower: VisionTower):
        self.tower = tower
        self._by_patches: dict[int, float] = {}

    def total(self, images: RowImages) -> float:
        """Return the FLOPs for the images of a micro-batch. Images with the same key are encoded once."""
        grids_by_key: dict[Hashable, Grid] = {}
        for row, grids in enumerate(images.grids):
            for index, grid in enumerate(grids):
                key = (row, index) if images.keys is None else images.keys[row][index]
                grids_by_key[key] = grid
        return sum(frames * self._of_frame(rows * columns) for frames, rows, columns in grids_by_key.values())

    def _of_frame(self, patches: int) -> float:
        if patches not in self._by_patches:
            self._by_patches[patches] = patches * flops_per_patch(self.tower, patches)
        return self._by_patches[patches]


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below `module` and itself by name, children before their parents."""
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module
