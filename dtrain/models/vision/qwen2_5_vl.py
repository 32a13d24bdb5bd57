"""The vision tower of Qwen2.5-VL (arXiv:2502.13923, section 2.1.1).

Most layers attend within windows of an image, some over the whole of it. Patches are put window by window before the
layers, and tokens back in their order after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.models.common.decoder import Linear
from dtrain.models.common.functions import RMSNorm
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.vision.common import (
    Features,
    Frame,
    GatedMLP,
    QwenBlock,
    QwenPatchEmbed,
    QwenVisionConfig,
    VisionConfig,
    VisionTower,
    axial_angles,
    patch_positions,
    read_indexes,
    read_qwen,
    turns_of,
    vision_fields,
)

_DEFAULTS = {"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "patch_size": 14}


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig(QwenVisionConfig):
    """Sizes of the tower. window: tokens at each side of a window. full_layers: those that see the whole image."""

    window: int
    full_layers: tuple[int, ...]

    def reach(self, layer: int, patches: int) -> int:
        """Override `VisionConfig.reach`: of whole windows."""
        return patches if layer in self.full_layers else min(patches, (self.window * self.pool) ** 2)


class Qwen2_5VLMerger(nn.Module):
    """From the patches of a square to a token."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.size = config.hidden_size * config.pool**2
        self.ln_q = RMSNorm(config.hidden_size, 1e-6)
        self.mlp = nn.Sequential(Linear(self.size, self.size), nn.GELU(), Linear(self.size, config.out_hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """[P, D] -> [T, E]"""
        return self.mlp(self.ln_q(x).view(-1, self.size))


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

    def forward(self, pixels: Tensor, frames: Sequence[Frame]) -> Features:
        """pixels [P, values] -> features [T, E]"""
        config, square = self.config, self.config.pool**2
        tokens = [(rows // config.pool, columns // config.pool) for rows, columns in frames]
        order, windows = window_order(tokens, config.window)
        positions = patch_positions(frames, config.pool).unflatten(0, (-1, square))[order].flatten(0, 1)  # [P, 2]
        order, positions = (index.to(pixels.device, non_blocking=True) for index in (order, positions))
        hidden = self.patch_embed(pixels).unflatten(0, (-1, square))[order].flatten(0, 1)  # [P, D]
        turns = turns_of(axial_angles(positions, config.head_dim, config.theta, hidden.dtype).flatten(1))
        of_windows = [count * square for count in windows]
        of_frames = [rows * columns for rows, columns in frames]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, turns, of_frames if index in config.full_layers else of_windows)
        return Features(self.merger(hidden)[order.argsort()], {})


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


class Qwen2_5VLVision(VisionTower):
    """Tower of Qwen2.5-VL. Patches come square by square, in the order of `patch_positions`; their values by channel,
    frame, row and column."""

    config: Qwen2_5VLVisionConfig
    initial = {"*norm*.weight": "ones", "*ln_q.weight": "ones", "*.bias": "zeros", "*": "normal"}
    projector = ("visual.merger.*",)
    prefixes = {"visual.": ("visual.", "model.visual.")}

    def __init__(self, config: Qwen2_5VLVisionConfig):
        super().__init__()
        self.config = config
        self.visual = Qwen2_5VLVisionModel(config)

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Qwen2_5VLVisionConfig:
        fields = vision_fields(outer)
        fields.known("tokens_per_second")  # of videos
        fields.known("in_chans", "spatial_patch_size")  # copies of in_channels and patch_size, which are read
        values = read_qwen(fields, _DEFAULTS, hidden_size)
        size, square = fields.integer("window_size", 112), values["pool"] * values["patch_size"]
        if size < square:
            fields.problem(f"window_size {size} is less than the {square} pixels of a token")
        full = read_indexes(fields, "fullatt_block_indexes", [7, 15, 23, 31])
        fields.refuse_the_rest()
        return Qwen2_5VLVisionConfig(**values, window=max(size // square, 1), full_layers=full)

    @property
    def layers(self) -> nn.ModuleList:
        return self.visual.blocks

    def encode(self, pixels: Tensor, frames: Sequence[Frame]) -> Features:
        """Override `VisionTower.encode`: [P, values] -> [T, E]"""
        return self.visual(pixels, frames)
