"""The vision towers of Qwen2.5-VL (arXiv:2502.13923, section 2.1.1) and Qwen3-VL (arXiv:2511.21631). That of Qwen3.5 is
Qwen3-VL's without deepstack.

Layers have rotary positions, and each square of merged patches becomes a token. In Qwen2.5-VL most layers attend within
windows of an image, some over the whole of it. Patches are put window by window before the layers, and tokens back in
their order after them. In Qwen3-VL a table of positions is interpolated to the size of each image. Deepstack: the
states after some layers, merged by mergers of their own, are added behind the first layers of the decoder
(arXiv:2406.04334).
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
    """The linear map of patches of Qwen's towers: values by channel, frame, row and column."""

    def __init__(self, config: VisionConfig, bias: bool):
        super().__init__()
        shape = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = PatchProjection(config.hidden_size, shape, bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, values] -> [P, D]"""
        return self.proj(pixels)


class QwenAttention(nn.Module):
    """Attention of Qwen's towers: one projection gives q, k and v; rotary positions turn whole heads, half of the
    frequencies by the row and half by the column, in max(float32, the dtype)."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, turns: RotaryTables, lengths: Sequence[int], adapters: AdapterContext | None = None
    ) -> Tensor:
        """hidden [P, D], turns [P, 1, hd], lengths of the segments -> [P, D]"""
        q, k, v = self.qkv(hidden, adapters).unflatten(-1, (3, self.heads, -1)).unbind(1)  # [P, H, hd]
        q, k = (apply_rotary(x.to(turns[0].dtype), *turns).to(x.dtype) for x in (q, k))
        return self.proj(segment_attention(q, k, v, lengths).flatten(1), adapters)


class QwenBlock(nn.Module):
    """A layer of Qwen's towers: a norm before attention and one before the MLP, each in its residual branch."""

    def __init__(self, config: VisionConfig, norm: Callable[[int, float], nn.Module], mlp: nn.Module):
        super().__init__()
        self.norm1 = norm(config.hidden_size, 1e-6)
        self.norm2 = norm(config.hidden_size, 1e-6)
        self.attn = QwenAttention(config)
        self.mlp = mlp

    def forward(
        self, hidden: Tensor, turns: RotaryTables, lengths: Sequence[int], adapters: AdapterContext | None = None
    ) -> Tensor:
        """hidden [P, D], turns [P, 1, hd], lengths of the segments -> [P, D]"""
        hidden = hidden + self.attn(self.norm1(hidden), turns, lengths, adapters)
        return hidden + self.mlp(self.norm2(hidden), adapters)


class QwenVision(VisionTower):
    """Base of the towers. Patches come square by square, in the order of `patch_positions`; their values by channel,
    frame, row and column. model: the module with the layers."""

    initial_values = {"*norm*.weight": "ones", "*ln_q.weight": "ones", "*.bias": "zeros", "*": "normal"}
    projector_patterns = ("visual.merger.*", "visual.deepstack_merger_list.*")
    model: "type[Qwen2_5VLVisionModel | Qwen3VLVisionModel]"

    def __init__(self, config: Any):  # that of `model`
        super().__init__()
        self.config = config
        self.visual = self.model(config)

    @property
    def layers(self) -> nn.ModuleList:
        return self.visual.blocks

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Override `VisionTower.encode`: [P, values] -> [T, E]"""
        return self.visual(pixels, frames, adapters)


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig(VisionConfig):
    """Sizes of the tower. window: tokens at each side of a window. full_layers: layers that see the whole image."""

    window: int
    full_layers: tuple[int, ...]

    def attended_patches(self, layer: int, patches: int) -> int:
        """Override `VisionConfig.reach`: of whole windows."""
        return patches if layer in self.full_layers else min(patches, (self.window * self.pool) ** 2)


class Qwen2_5VLMerger(nn.Module):
    """Map from the patches of a square to a token."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.size = config.hidden_size * config.pool**2
        self.ln_q = RMSNorm(config.hidden_size, 1e-6)
        self.mlp = nn.Sequential(Linear(self.size, self.size), nn.GELU(), Linear(self.size, config.out_hidden_size))

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[P, D] -> [T, E]"""
        first, activation, last = self.mlp
        return last(activation(first(self.ln_q(x).view(-1, self.size), adapters)), adapters)


class Qwen2_5VLVisionModel(nn.Module):
    """The layers, with what comes before and after them."""

    def __init__(self, config: Qwen2_5VLVisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = QwenPatchEmbed(config, bias=False)
        self.blocks = nn.ModuleList(
            QwenBlock(config, RMSNorm, GatedMLP(config, partial(Linear, bias=True)))
            for _ in range(config.num_hidden_layers)
        )
        self.merger = Qwen2_5VLMerger(config)

    def forward(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None = None) -> Features:
        """pixels [P, values] -> features [T, E]"""
        config, square = self.config, self.config.pool**2
        tokens = [(rows // config.pool, columns // config.pool) for rows, columns in frames]
        order, windows = window_order(tokens, config.window)
        positions = patch_positions(frames, config.pool).unflatten(0, (-1, square))[order].flatten(0, 1)  # [P, 2]
        order, positions = (index.to(pixels.device, non_blocking=True) for index in (order, positions))
        hidden = self.patch_embed(pixels).unflatten(0, (-1, square))[order].flatten(0, 1)  # [P, D]
        turns = rotary_tables_of_angles(axial_angles(positions, config.head_dim, config.theta, hidden.dtype).flatten(1))
        of_windows = [count * square for count in windows]
        of_frames = [rows * columns for rows, columns in frames]
        for index, block in enumerate(self.blocks):
            lengths = of_frames if index in config.full_layers else of_windows
            hidden = block(hidden, turns, lengths, adapters)
        return Features(self.merger(hidden, adapters)[order.argsort()], {})


def window_order(frames: Sequence[Frame], window: int) -> tuple[Tensor, list[int]]:
    """Return which token comes at each place when tokens stand window by window, [T] int64 on the CPU, and how many
    each window has. frames: rows and columns of tokens, which stand row by row. A frame's windows stay together; those
    of one size are neighbours, whose attention is computed together."""
    parts, lengths, start = [torch.empty(0, dtype=torch.int64, device="cpu")], [], 0
    for rows, columns in frames:
        tokens = torch.arange(start, start + rows * columns, device="cpu").view(rows, columns)
        windows = [part.flatten() for band in tokens.split(window) for part in band.split(window, 1)]
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
        fields = vision_fields(outer)
        fields.ignore("tokens_per_second")  # of videos
        fields.ignore("in_chans", "spatial_patch_size")  # copies of in_channels and patch_size, which are read
        values = read_qwen(fields, _QWEN2_5_DEFAULTS, hidden_size)
        size, square = fields.integer("window_size", 112), values["pool"] * values["patch_size"]
        if size < square:
            fields.add_problem(f"window_size {size} is less than the {square} pixels of a token")
        full = read_indexes(fields, "fullatt_block_indexes", [7, 15, 23, 31])
        fields.refuse_the_rest()
        return Qwen2_5VLVisionConfig(**values, window=max(size // square, 1), full_layers=full)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(VisionConfig):
    """Sizes of the tower. table_side: rows and columns of the table of positions. deepstack: the layers whose states
    the decoder gets."""

    table_side: int
    deepstack: tuple[int, ...] = ()


class Qwen3VLMLP(nn.Module):
    """fc2(act(fc1(x)))"""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act].forward

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[P, D] -> [P, D]"""
        return self.linear_fc2(self.activation(self.linear_fc1(x, adapters)), adapters)


class Qwen3VLMerger(nn.Module):
    """Map from the patches of a square to a token. joined: whether the norm sees them as one vector."""

    def __init__(self, config: VisionConfig, joined: bool):
        super().__init__()
        self.square, self.joined = config.pool**2, joined
        size = config.hidden_size * self.square
        self.norm = LayerNorm(size if joined else config.hidden_size, 1e-6)
        self.linear_fc1 = Linear(size, size)
        self.linear_fc2 = Linear(size, config.out_hidden_size)

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[P, D] -> [T, E]"""
        size = x.shape[-1] * self.square
        x = self.norm(x.reshape(-1, size)) if self.joined else self.norm(x).view(-1, size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x, adapters)), adapters)


class Qwen3VLVisionModel(nn.Module):
    """The layers, with what comes before and after them."""

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
        """pixels [P, values] -> features [T, E]"""
        config = self.config
        hidden = self.patch_embed(pixels)  # [P, D]
        positions = patch_positions(frames, config.pool)  # [P, 2]
        hidden = hidden + self.interpolated(positions, frames, hidden.dtype, pixels.device)
        positions = positions.to(pixels.device, non_blocking=True)
        turns = rotary_tables_of_angles(axial_angles(positions, config.head_dim, config.theta, hidden.dtype).flatten(1))
        lengths = [rows * columns for rows, columns in frames]
        deepstack: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, turns, lengths, adapters)
            if index in config.deepstack:
                layer = len(deepstack)
                deepstack[layer] = self.deepstack_merger_list[layer](hidden, adapters)
        return Features(self.merger(hidden, adapters), deepstack)

    def interpolated(
        self, positions: Tensor, frames: Sequence[Frame], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the table's vectors at `positions` [P, 2], on the CPU: [P, D] in `dtype` on `device`. The corners of a
        frame lie on those of the table; between its points it is bilinear, in max(float32, dtype)."""
        side, wide = self.config.table_side, torch.promote_types(dtype, torch.float32)
        last = torch.tensor(frames, dtype=wide, device="cpu").view(-1, 2) - 1  # [frames, 2]
        counts = torch.tensor([rows * columns for rows, columns in frames], dtype=torch.int64, device="cpu")
        places = positions.to(wide) * (side - 1) / last.clamp(min=1).repeat_interleave(counts, 0)  # [P, 2]
        first = places.floor()
        share = places - first
        low = first.long()
        ends = (low, 1 - share), ((low + 1).clamp(max=side - 1), share)  # each [P, 2]
        corners = [
            (row[:, 0] * side + column[:, 1], of_row[:, 0] * of_column[:, 1])
            for row, of_row in ends
            for column, of_column in ends
        ]
        index, weight = (torch.stack(parts).to(device, non_blocking=True) for parts in zip(*corners, strict=True))
        summed = torch.zeros((), dtype=wide, device=device)
        for place, factor in zip(index, weight, strict=True):
            summed = summed + self.pos_embed(place) * factor[:, None]  # [P, D]
        return summed.to(dtype)


class Qwen3VLVision(QwenVision):
    """Tower of Qwen3-VL."""

    model = Qwen3VLVisionModel
    file_prefixes = {"visual.": ("model.visual.",)}
    has_deepstack = True

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Qwen3VLVisionConfig:
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
    """Return the numbers of layers in the list `key`; () for a list with a problem."""
    written = default if fields.get(key) is None else fields.get(key)
    is_list = isinstance(written, list) and all(type(index) is int and index >= 0 for index in written)
    if not is_list or sorted({*written}) != written:
        fields.add_problem(f"{key} {format_value(written)}: must be numbers of layers, each once and in order")
        return ()
    return tuple(written)


def read_qwen(fields: ModelFields, defaults: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the fields that Qwen's towers read alike; defaults: those in which they differ. hidden_size: E."""
    fields = fields.with_defaults(defaults)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_heads", 16)
    head_dim, out = split_heads(fields, hidden, heads), fields.integer("out_hidden_size", 3584)
    if out != hidden_size:
        fields.add_problem(f"out_hidden_size {out} where the text's hidden_size is {hidden_size}")
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("depth"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "patch_size": fields.integer("patch_size"),
        "pool": fields.integer("spatial_merge_size", 2),
        "hidden_act": read_activation(fields, "hidden_act", "silu"),
        "out_hidden_size": out,
        "num_channels": fields.integer("in_channels", 3),
        "temporal_patch_size": fields.integer("temporal_patch_size", 2),
        "initializer_range": fields.number("initializer_range", 0.02, zero=True, most=100.0) or 0.02,
        "theta": read_axial_theta(fields, head_dim, 10_000.0),
    }
