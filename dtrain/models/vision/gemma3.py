"""The vision tower of Gemma 3 (arXiv:2503.19786, section 2.1): SigLIP (arXiv:2303.15343), and a projector.

All images have one size, whose positions are learned. The projector averages squares of patches, normalises the
averages and projects them to the text model's hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, nn

from dtrain.models.common.functions import ACTIVATIONS, Gemma3RMSNorm
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.vision.common import (
    Encoder,
    Features,
    Frame,
    LayerNorm,
    PatchProjection,
    PositionTable,
    VisionConfig,
    VisionTower,
    pool_squares,
    read_activation,
    segment_attention,
    split_heads,
    vision_fields,
)
from dtrain.parallel.tensor import LocalParameters


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig(VisionConfig):
    """Sizes of tower and projector.

    Attributes:
        side: Patches at each side of an image.
    """

    side: int
    layer_norm_eps: float

    def size_problem(self, rows: int, columns: int) -> str | None:
        """Override `VisionConfig.size_problem`: there is one size."""
        if (rows, columns) == (self.side, self.side):
            return None
        return f"all images have {self.side} x {self.side}"


class SiglipEmbeddings(nn.Module):
    """Linear map of patches, and a learned vector for each position of an image."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        shape = (config.num_channels, config.patch_size, config.patch_size)
        self.patch_embedding = PatchProjection(config.hidden_size, shape, bias=True)
        self.position_embedding = PositionTable(config.side**2, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed patches, [P, values] -> [P, D]."""
        num_positions = self.position_embedding.num_embeddings
        hidden = self.patch_embedding(pixels).unflatten(0, (-1, num_positions))  # [images, positions, D]
        positions = torch.arange(hidden.shape[1], device=pixels.device)
        return (hidden + self.position_embedding(positions)).flatten(0, 1)


class SiglipAttention(nn.Module):
    """Attention of every patch to all patches of its image."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj = Linear(size, size)
        self.k_proj = Linear(size, size)
        self.v_proj = Linear(size, size)
        self.out_proj = Linear(size, size)

    def forward(self, hidden: Tensor, lengths: Sequence[int], adapters: AdapterContext | None = None) -> Tensor:
        """Compute attention, [P, D] -> [P, D]. lengths: patches of each image."""
        q = self.q_proj(hidden, adapters).unflatten(-1, (self.heads, -1))  # [P, H, hd]
        k = self.k_proj(hidden, adapters).unflatten(-1, (self.heads, -1))
        v = self.v_proj(hidden, adapters).unflatten(-1, (self.heads, -1))
        return self.out_proj(segment_attention(q, k, v, lengths).flatten(1), adapters)


class SiglipMLP(nn.Module):
    """MLP: fc2(act(fc1(x)))."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act].forward

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute the MLP, [P, D] -> [P, D]."""
        return self.fc2(self.activation(self.fc1(x, adapters)), adapters)


class SiglipLayer(nn.Module):
    """Layer with a norm before attention and a norm before the MLP."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, hidden: Tensor, lengths: Sequence[int], adapters: AdapterContext | None = None) -> Tensor:
        """Compute the layer, [P, D] -> [P, D]. lengths: patches of each image."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), lengths, adapters)
        return hidden + self.mlp(self.layer_norm2(hidden), adapters)


class SiglipVisionModel(nn.Module):
    """Embeddings, layers and a final norm."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.embeddings = SiglipEmbeddings(config)
        self.encoder = Encoder(SiglipLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels: Tensor, lengths: Sequence[int], adapters: AdapterContext | None = None) -> Tensor:
        """Encode patches, [P, values] -> [P, D]. lengths: patches of each image."""
        hidden = self.embeddings(pixels)
        for layer in self.encoder.layers:
            hidden = layer(hidden, lengths, adapters)
        return self.post_layernorm(hidden)


class Gemma3MultiModalProjector(LocalParameters):
    """Projector from squares of patches to tokens."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.pool = config.pool
        self.mm_input_projection_weight = nn.Parameter(torch.empty(config.hidden_size, config.out_hidden_size))
        self.mm_soft_emb_norm = Gemma3RMSNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor, frames: Sequence[Frame]) -> Tensor:
        """Pool and project, [P, D] -> [T, E]. frames: rows and columns of each image."""
        pooled = self.mm_soft_emb_norm(pool_squares(hidden, frames, self.pool))  # [T, D]
        return pooled @ self.local("mm_input_projection_weight")


class Gemma3Vision(VisionTower):
    """Tower and projector of Gemma 3.

    The patches of an image come row by row. The values of a patch are ordered by channel, row and column.
    """

    config: Gemma3VisionConfig
    initial_values = {"multi_modal_projector.*": "zeros", "*norm*.weight": "ones", "*.bias": "zeros", "*": "normal"}
    projector_patterns = ("multi_modal_projector.*",)
    file_prefixes = {
        "vision_tower.": (
            "vision_tower.vision_model.",  # of transformers 4
            "vision_tower.",  # of transformers 5
            "model.vision_tower.vision_model.",
            "model.vision_tower.",
        ),
        "multi_modal_projector.": ("multi_modal_projector.", "model.multi_modal_projector."),
    }
    carried_patterns = (r"(model\.)?vision_tower\.(vision_model\.)?head\..*",)

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.config = config
        self.vision_tower = SiglipVisionModel(config)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Gemma3VisionConfig:
        """Override `VisionTower.read`."""
        fields = vision_fields(outer)
        num_tokens = outer.integer("mm_tokens_per_image", 256)
        fields.ignore("vision_use_head", "projection_dim")  # of a head that Gemma 3 does not read
        fields.must_be_off("attention_dropout", "dropout is not implemented; set it to 0.0")
        tower_size = fields.integer("hidden_size", 768)
        num_heads = fields.integer("num_attention_heads", 12)
        image_size, patch_size = fields.integer("image_size", 224), fields.integer("patch_size", 16)
        side, token_side = image_size // patch_size, isqrt(num_tokens)
        if image_size % patch_size:
            fields.add_problem(f"image_size {image_size} is not a multiple of patch_size {patch_size}")
        elif token_side**2 != num_tokens or side % token_side:
            outer.add_problem(
                f"mm_tokens_per_image {num_tokens}: must be a square whose side divides the {side} patches of one"
            )
            token_side = 1
        config = Gemma3VisionConfig(
            hidden_size=tower_size,
            intermediate_size=fields.integer("intermediate_size", 3072),
            num_hidden_layers=fields.integer("num_hidden_layers", 12),
            num_attention_heads=num_heads,
            head_dim=split_heads(fields, tower_size, num_heads),
            patch_size=patch_size,
            pool=max(side // token_side, 1),
            hidden_act=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
            out_hidden_size=hidden_size,
            num_channels=fields.integer("num_channels", 3),
            initializer_range=fields.number("initializer_range", 0.02, allow_zero=True, maximum=100.0) or 0.02,
            layer_norm_eps=fields.number("layer_norm_eps", 1e-6, maximum=1.0),
            side=side,
        )
        fields.refuse_the_rest()
        return config

    @property
    def layers(self) -> nn.ModuleList:
        """Override `VisionTower.layers`."""
        return self.vision_tower.encoder.layers

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Override `VisionTower.encode`."""
        hidden = self.vision_tower(pixels, [rows * columns for rows, columns in frames], adapters)
        return Features(self.multi_modal_projector(hidden, frames), deepstack={})
