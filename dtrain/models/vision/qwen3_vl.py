"""The vision tower of Qwen3-VL (arXiv:2511.21631), and that of Qwen3.5, which is the same without deepstack.

A table of positions is interpolated to the size of each image; layers have rotary positions beside it. Each square of
merged patches becomes a token. Deepstack: the states after some layers, merged by mergers of their own, are added
behind the first layers of the decoder (arXiv:2406.04334).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.models.common.decoder import Linear
from dtrain.models.common.functions import ACTIVATIONS
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.vision.common import (
    Features,
    Frame,
    LayerNorm,
    QwenBlock,
    QwenPatchEmbed,
    QwenVisionConfig,
    Table,
    VisionConfig,
    VisionTower,
    axial_angles,
    patch_positions,
    read_indexes,
    read_qwen,
    turns_of,
    vision_fields,
)

_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
}


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(QwenVisionConfig):
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

    def forward(self, x: Tensor) -> Tensor:
        """[P, D] -> [P, D]"""
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


class Qwen3VLMerger(nn.Module):
    """From the patches of a square to a token. joined: whether the norm sees them as one vector."""

    def __init__(self, config: VisionConfig, joined: bool):
        super().__init__()
        self.square, self.joined = config.pool**2, joined
        size = config.hidden_size * self.square
        self.norm = LayerNorm(size if joined else config.hidden_size, 1e-6)
        self.linear_fc1 = Linear(size, size)
        self.linear_fc2 = Linear(size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[P, D] -> [T, E]"""
        size = x.shape[-1] * self.square
        x = self.norm(x.reshape(-1, size)) if self.joined else self.norm(x).view(-1, size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Qwen3VLVisionModel(nn.Module):
    """The layers, with what comes before and after them."""

    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = QwenPatchEmbed(config, bias=True)
        self.pos_embed = Table(config.table_side**2, config.hidden_size)
        self.blocks = nn.ModuleList(
            QwenBlock(config, LayerNorm, Qwen3VLMLP(config)) for _ in range(config.num_hidden_layers)
        )
        self.merger = Qwen3VLMerger(config, joined=False)
        self.deepstack_merger_list = nn.ModuleList(Qwen3VLMerger(config, joined=True) for _ in config.deepstack)

    def forward(self, pixels: Tensor, frames: Sequence[Frame]) -> Features:
        """pixels [P, values] -> features [T, E]"""
        config = self.config
        hidden = self.patch_embed(pixels)  # [P, D]
        positions = patch_positions(frames, config.pool)  # [P, 2]
        hidden = hidden + self.interpolated(positions, frames, hidden.dtype, pixels.device)
        positions = positions.to(pixels.device, non_blocking=True)
        turns = turns_of(axial_angles(positions, config.head_dim, config.theta, hidden.dtype).flatten(1))
        lengths = [rows * columns for rows, columns in frames]
        deepstack: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, turns, lengths)
            if index in config.deepstack:
                layer = len(deepstack)
                deepstack[layer] = self.deepstack_merger_list[layer](hidden)
        return Features(self.merger(hidden), deepstack)

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


class Qwen3VLVision(VisionTower):
    """Tower of Qwen3-VL. Patches come square by square, in the order of `patch_positions`; their values by channel,
    frame, row and column."""

    config: Qwen3VLVisionConfig
    initial = {"*norm*.weight": "ones", "*.bias": "zeros", "*": "normal"}
    projector = ("visual.merger.*", "visual.deepstack_merger_list.*")
    prefixes = {"visual.": ("model.visual.",)}
    has_deepstack = True

    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__()
        self.config = config
        self.visual = Qwen3VLVisionModel(config)

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Qwen3VLVisionConfig:
        fields = vision_fields(outer)
        values = read_qwen(fields, _DEFAULTS, hidden_size)
        positions = fields.integer("num_position_embeddings", 2304)
        side = isqrt(positions)
        if side**2 != positions:
            fields.problem(f"num_position_embeddings {positions}: must be a square")
        deepstack: tuple[int, ...] = ()
        if cls.has_deepstack:
            deepstack = read_indexes(fields, "deepstack_visual_indexes", [8, 16, 24])
        if deepstack and deepstack[-1] >= values["num_hidden_layers"]:
            fields.problem(f"deepstack_visual_indexes {[*deepstack]} of {values['num_hidden_layers']} layers")
        fields.refuse_the_rest()
        return Qwen3VLVisionConfig(**values, table_side=side, deepstack=deepstack)

    @property
    def layers(self) -> nn.ModuleList:
        return self.visual.blocks

    def encode(self, pixels: Tensor, frames: Sequence[Frame]) -> Features:
        """Override `VisionTower.encode`: [P, values] -> [T, E]"""
        return self.visual(pixels, frames)


class Qwen3_5Vision(Qwen3VLVision):
    """Tower of Qwen3.5, dense or with experts."""

    has_deepstack = False
