"""The vision towers of Qwen2.5-VL (arXiv:2502.13923, section 2.1.1), Qwen3-VL (arXiv:2511.21631) and Qwen3.5.

Layers have rotary positions, and each square of patches is merged into a token.

*Qwen2.5-VL.* Most layers attend within windows of an image, some over the full image. Patches are ordered window by
window before the layers, and tokens are put back into their order after them.

*Qwen3-VL.* A table of positions is interpolated to the size of each image. Deepstack (arXiv:2406.04334): the states
after some layers are merged by mergers of their own, and added to the outputs of the first layers of the decoder. The
tower of Qwen3.5 is the same without deepstack.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.models.common.config_fields import format_value
from dtrain.models.common.functions import ACTIVATIONS, RMSNorm, apply_rotary
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.vision.common import (
    Features,
    Frame,
    GatedMLP,
    LayerNorm,
    PatchProjection,
    PositionTable,
    RotaryTables,
    VisionConfig,
    VisionTower,
    axial_angles,
    patch_positions,
    read_activation,
    read_axial_theta,
    rotary_tables_of_angles,
    segment_attention,
    split_heads,
    vision_fields,
)

_QWEN2_5_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "patch_size": 14,
}
_QWEN3_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
}


class QwenPatchEmbed(nn.Module):
    """Linear map of patches, whose values are ordered by channel, frame, row and column."""

    def __init__(self, config: VisionConfig, bias: bool):
        super().__init__()
        shape = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = PatchProjection(config.hidden_size, shape, bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed patches, [P, values] -> [P, D]."""
        return self.proj(pixels)


class QwenAttention(nn.Module):
    """Attention of every patch to its segment: a window or an image.

    One projection computes q, k and v. Rotary positions rotate full heads, half of the frequencies by the row and half
    by the column, in max(float32, the dtype).
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, rotary: RotaryTables, lengths: Sequence[int], adapters: AdapterContext | None = None
    ) -> Tensor:
        """Compute attention.

        Args:
            hidden: [P, D].
            rotary: [P, 1, hd] each.
            lengths: Patches of each segment.
            adapters: Whether adapters take part.

        Returns:
            [P, D].
        """
        q, k, v = self.qkv(hidden, adapters).unflatten(-1, (3, self.heads, -1)).unbind(1)  # [P, H, hd]
        q = self._rotate(q, rotary)
        k = self._rotate(k, rotary)
        return self.proj(segment_attention(q, k, v, lengths).flatten(1), adapters)

    def _rotate(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        """Rotate heads [P, H, hd] in the tables' dtype."""
        cos, signed_sin = rotary
        return apply_rotary(x.to(cos.dtype), cos, signed_sin).to(x.dtype)


class QwenBlock(nn.Module):
    """Layer with a norm before attention and a norm before the MLP."""

    def __init__(self, config: VisionConfig, norm: Callable[[int, float], nn.Module], mlp: nn.Module):
        super().__init__()
        self.norm1 = norm(config.hidden_size, 1e-6)
        self.norm2 = norm(config.hidden_size, 1e-6)
        self.attn = QwenAttention(config)
        self.mlp = mlp

    def forward(
        self, hidden: Tensor, rotary: RotaryTables, lengths: Sequence[int], adapters: AdapterContext | None = None
    ) -> Tensor:
        """Compute the layer, [P, D] -> [P, D]. The arguments are those of `QwenAttention.forward`."""
        hidden = hidden + self.attn(self.norm1(hidden), rotary, lengths, adapters)
        return hidden + self.mlp(self.norm2(hidden), adapters)


class QwenVision(VisionTower):
    """Base of Qwen's towers.

    Patches come square by square, in the order of `patch_positions`. The values of a patch are ordered by channel,
    frame, row and column.

    Attributes:
        model: Class of the module with the layers.
    """

    initial_values = {"*norm*.weight": "ones", "*ln_q.weight": "ones", "*.bias": "zeros", "*": "normal"}
    projector_patterns = ("visual.merger.*", "visual.deepstack_merger_list.*")
    model: "type[Qwen2_5VLVisionModel | Qwen3VLVisionModel]"

    def __init__(self, config: Any):  # the config of `model`
        super().__init__()
        self.config = config
        self.visual = self.model(config)

    @property
    def layers(self) -> nn.ModuleList:
        """Override `VisionTower.layers`."""
        return self.visual.blocks

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Override `VisionTower.encode`."""
        return self.visual(pixels, frames, adapters)


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig(VisionConfig):
    """Sizes of Qwen2.5-VL's tower.

    Attributes:
        window: Tokens at each side of a window.
        full_layers: Layers that attend over the full image.
    """

    window: int
    full_layers: tuple[int, ...]

    def attended_patches(self, layer: int, patches: int) -> int:
        """Override `VisionConfig.attended_patches`: the patches of a full window."""
        if layer in self.full_layers:
            return patches
        return min(patches, (self.window * self.pool) ** 2)


class Qwen2_5VLMerger(nn.Module):
    """Merger of the patches of a square into a token."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.size = config.hidden_size * config.pool**2
        self.ln_q = RMSNorm(config.hidden_size, 1e-6)
        self.mlp = nn.Sequential(Linear(self.size, self.size), nn.GELU(), Linear(self.size, config.out_hidden_size))

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Merge patches, [P, D] -> [T, E]."""
        first, activation, last = self.mlp
        return last(activation(first(self.ln_q(x).view(-1, self.size), adapters)), adapters)


class Qwen2_5VLVisionModel(nn.Module):
    """Embedding of patches, layers, and mergers."""

    def __init__(self, config: Qwen2_5VLVisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = QwenPatchEmbed(config, bias=False)
        self.blocks = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            self.blocks.append(QwenBlock(config, RMSNorm, GatedMLP(config, partial(Linear, bias=True))))
        self.merger = Qwen2_5VLMerger(config)

    def forward(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None = None) -> Features:
        """Encode patches, [P, values] -> features [T, E]. frames: rows and columns of each frame."""
        config, device = self.config, pixels.device
        square = config.pool**2  # patches of a token
        token_frames = [(rows // config.pool, columns // config.pool) for rows, columns in frames]
        order, window_lengths = window_order(token_frames, config.window)
        positions = patch_positions(frames, config.pool).unflatten(0, (-1, square))[order].flatten(0, 1)  # [P, 2]
        order = order.to(device, non_blocking=True)
        positions = positions.to(device, non_blocking=True)

        # Tokens, with their patches, in the order of the windows.
        hidden = self.patch_embed(pixels).unflatten(0, (-1, square))[order].flatten(0, 1)  # [P, D]
        angles = axial_angles(positions, config.head_dim, config.theta, hidden.dtype).flatten(1)
        rotary = rotary_tables_of_angles(angles)
        patches_of_windows = [num_tokens * square for num_tokens in window_lengths]
        patches_of_frames = [rows * columns for rows, columns in frames]
        for index, block in enumerate(self.blocks):
            lengths = patches_of_frames if index in config.full_layers else patches_of_windows
            hidden = block(hidden, rotary, lengths, adapters)
        tokens = self.merger(hidden, adapters)[order.argsort()]  # back in the order of the image
        return Features(tokens, deepstack={})


def window_order(frames: Sequence[Frame], window: int) -> tuple[Tensor, list[int]]:
    """Return the permutation that orders tokens window by window.

    The windows of a frame stay together. Windows of the same size are neighbours, because their attention is computed
    together.

    Args:
        frames: Rows and columns of tokens of each frame. Tokens are ordered row by row.
        window: Tokens at each side of a window.

    Returns:
        Index of the row-by-row token at each position of the new order, [T] int64 on the CPU, and the number of tokens
        of each window.

    Example:
        A frame of 2 x 3 tokens has a window of 2 x 2 and one of 2 x 1, which comes first:

        >>> order, lengths = window_order([(2, 3)], window=2)
        >>> order.tolist(), lengths
        ([2, 5, 0, 1, 3, 4], [2, 4])
    """
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    lengths: list[int] = []
    start = 0
    for rows, columns in frames:
        tokens = torch.arange(start, start + rows * columns, device="cpu").view(rows, columns)
        windows = []
        for band in tokens.split(window):
            windows += [part.flatten() for part in band.split(window, 1)]
        windows.sort(key=len)
        parts += windows
        lengths += [len(part) for part in windows]
        start += rows * columns
    return torch.cat(parts), lengths


class Qwen2_5VLVision(QwenVision):
    """Tower of Qwen2.5-VL."""

    model = Qwen2_5VLVisionModel
    file_prefixes = {"visual.": ("visual.", "model.visual.")}

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Qwen2_5VLVisionConfig:
        """Override `VisionTower.read`."""
        fields = vision_fields(outer)
        fields.ignore("tokens_per_second")  # only for videos
        fields.ignore("in_chans", "spatial_patch_size")  # copies of in_channels and patch_size, which are read
        values = read_qwen(fields, _QWEN2_5_DEFAULTS, hidden_size)
        window_size = fields.integer("window_size", 112)  # in pixels
        token_size = values["pool"] * values["patch_size"]
        if window_size < token_size:
            fields.add_problem(f"window_size {window_size} is less than the {token_size} pixels of a token")
        full_layers = read_indexes(fields, "fullatt_block_indexes", [7, 15, 23, 31])
        fields.refuse_the_rest()
        return Qwen2_5VLVisionConfig(**values, window=max(window_size // token_size, 1), full_layers=full_layers)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(VisionConfig):
    """Sizes of Qwen3-VL's tower.

    Attributes:
        table_side: Rows and columns of the table of positions.
        deepstack: Layers whose states are added to the decoder.
    """

    table_side: int
    deepstack: tuple[int, ...] = ()


class Qwen3VLMLP(nn.Module):
    """MLP: fc2(act(fc1(x)))."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act].forward

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute the MLP, [P, D] -> [P, D]."""
        return self.linear_fc2(self.activation(self.linear_fc1(x, adapters)), adapters)


class Qwen3VLMerger(nn.Module):
    """Merger of the patches of a square into a token.

    Args:
        config: Sizes of the tower.
        joined: Whether the norm sees the patches of a square as one vector.
    """

    def __init__(self, config: VisionConfig, joined: bool):
        super().__init__()
        self.square, self.joined = config.pool**2, joined
        size = config.hidden_size * self.square
        self.norm = LayerNorm(size if joined else config.hidden_size, 1e-6)
        self.linear_fc1 = Linear(size, size)
        self.linear_fc2 = Linear(size, config.out_hidden_size)

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Merge patches, [P, D] -> [T, E]."""
        size = x.shape[-1] * self.square
        if self.joined:
            x = self.norm(x.reshape(-1, size))
        else:
            x = self.norm(x).view(-1, size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x, adapters)), adapters)


class Qwen3VLVisionModel(nn.Module):
    """Embedding of patches, layers, and mergers."""

    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = QwenPatchEmbed(config, bias=True)
        self.pos_embed = PositionTable(config.table_side**2, config.hidden_size)
        self.blocks = nn.ModuleList(
            QwenBlock(config, LayerNorm, Qwen3VLMLP(config)) for _ in range(config.num_hidden_layers)
        )
        self.merger = Qwen3VLMerger(config, joined=False)
        self.deepstack_merger_list = nn.ModuleList(Qwen3VLMerger(config, joined=True) for _ in config.deepstack)

    def forward(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None = None) -> Features:
        """Encode patches, [P, values] -> features [T, E]. frames: rows and columns of each frame."""
        config = self.config
        hidden = self.patch_embed(pixels)  # [P, D]
        positions = patch_positions(frames, config.pool)  # [P, 2]
        hidden = hidden + self.interpolate_positions(positions, frames, hidden.dtype, pixels.device)
        positions = positions.to(pixels.device, non_blocking=True)
        angles = axial_angles(positions, config.head_dim, config.theta, hidden.dtype).flatten(1)
        rotary = rotary_tables_of_angles(angles)
        lengths = [rows * columns for rows, columns in frames]
        deepstack: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, rotary, lengths, adapters)
            if index in config.deepstack:
                decoder_layer = len(deepstack)  # the first decoder layers, in order
                deepstack[decoder_layer] = self.deepstack_merger_list[decoder_layer](hidden, adapters)
        return Features(self.merger(hidden, adapters), deepstack)

    def interpolate_positions(
        self, positions: Tensor, frames: Sequence[Frame], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Interpolate the table of positions bilinearly, in max(float32, dtype).

        The corners of a frame have the vectors of the table's corners.

        Args:
            positions: Row and column of each patch, [P, 2], on the CPU.
            frames: Rows and columns of each frame.
            dtype: Dtype of the result.
            device: Device of the result.

        Returns:
            [P, D].
        """
        side, wide = self.config.table_side, torch.promote_types(dtype, torch.float32)
        last = torch.tensor(frames, dtype=wide, device="cpu").view(-1, 2) - 1  # last row and column, [frames, 2]
        num_patches = torch.tensor([rows * columns for rows, columns in frames], dtype=torch.int64, device="cpu")
        scaled = positions.to(wide) * (side - 1) / last.clamp(min=1).repeat_interleave(num_patches, 0)  # [P, 2]
        floor = scaled.floor()
        fraction = scaled - floor
        low = floor.long()
        high = (low + 1).clamp(max=side - 1)

        # The four neighbours of each position in the table, and their weights.
        indices, weights = [], []
        for row, row_weight in ((low, 1 - fraction), (high, fraction)):
            for column, column_weight in ((low, 1 - fraction), (high, fraction)):
                indices.append(row[:, 0] * side + column[:, 1])
                weights.append(row_weight[:, 0] * column_weight[:, 1])
        index = torch.stack(indices).to(device, non_blocking=True)  # [4, P]
        weight = torch.stack(weights).to(device, non_blocking=True)
        total = torch.zeros((), dtype=wide, device=device)
        for corner_index, corner_weight in zip(index, weight, strict=True):
            total = total + self.pos_embed(corner_index) * corner_weight[:, None]  # [P, D]
        return total.to(dtype)


class Qwen3VLVision(QwenVision):
    """Tower of Qwen3-VL.

    Attributes:
        has_deepstack: Whether states of some layers are added to the decoder.
    """

    model = Qwen3VLVisionModel
    file_prefixes = {"visual.": ("model.visual.",)}
    has_deepstack = True

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Qwen3VLVisionConfig:
        """Override `VisionTower.read`."""
        fields = vision_fields(outer)
        values = read_qwen(fields, _QWEN3_DEFAULTS, hidden_size)
        positions = fields.integer("num_position_embeddings", 2304)
        side = isqrt(positions)
        if side**2 != positions:
            fields.add_problem(f"num_position_embeddings {positions}: must be a square")
        deepstack: tuple[int, ...] = ()
        if cls.has_deepstack:
            deepstack = read_indexes(fields, "deepstack_visual_indexes", [8, 16, 24])
        if deepstack and deepstack[-1] >= values["num_hidden_layers"]:
            fields.add_problem(f"deepstack_visual_indexes {[*deepstack]} of {values['num_hidden_layers']} layers")
        fields.refuse_the_rest()
        return Qwen3VLVisionConfig(**values, table_side=side, deepstack=deepstack)


class Qwen3_5Vision(Qwen3VLVision):
    """Tower of Qwen3.5, dense or with experts."""

    has_deepstack = False


def read_indexes(fields: ModelFields, key: str, default: list[int]) -> tuple[int, ...]:
    """Read a list of layers' numbers, ascending and without repetition."""
    written = default if fields.get(key) is None else fields.get(key)
    is_list = isinstance(written, list) and all(type(index) is int and index >= 0 for index in written)
    if not is_list or sorted(set(written)) != written:
        fields.add_problem(f"{key} {format_value(written)}: must be numbers of layers, each once and in order")
        return ()
    return tuple(written)


def read_qwen(fields: ModelFields, defaults: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Read the fields that all of Qwen's towers have.

    Args:
        fields: Fields of `vision_config`.
        defaults: Defaults of the tower.
        hidden_size: Hidden size of the text model, E.

    Returns:
        Keyword arguments of `VisionConfig`.
    """
    fields = fields.with_defaults(defaults)
    tower_size, num_heads = fields.integer("hidden_size"), fields.integer("num_heads", 16)
    head_dim = split_heads(fields, tower_size, num_heads)
    out_size = fields.integer("out_hidden_size", 3584)
    if out_size != hidden_size:
        fields.add_problem(f"out_hidden_size {out_size} where the text's hidden_size is {hidden_size}")
    return {
        "hidden_size": tower_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("depth"),
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "patch_size": fields.integer("patch_size"),
        "pool": fields.integer("spatial_merge_size", 2),
        "hidden_act": read_activation(fields, "hidden_act", "silu"),
        "out_hidden_size": out_size,
        "num_channels": fields.integer("in_channels", 3),
        "temporal_patch_size": fields.integer("temporal_patch_size", 2),
        "initializer_range": fields.number("initializer_range", 0.02, allow_zero=True, maximum=100.0) or 0.02,
        "theta": read_axial_theta(fields, head_dim, 10_000.0),
    }
