"""The vision tower of Gemma 3 (arXiv:2503.19786, section 2.1): SigLIP (arXiv:2303.15343), and the projector that pools
its features.

All images have one size, whose positions are learned. The projector averages squares of patches, norms and projects.
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
    """Sizes of tower and projector. side: patches at each side of an image."""

    side: int
    layer_norm_eps: float

    def size_problem(self, rows: int, columns: int) -> str | None:
        """Override `VisionConfig.size_problem`: there is one size."""
        return None if (rows, columns) == (self.side, self.side) else f"all images have {self.side} x {self.side}"


class SiglipEmbeddings(nn.Module):
    """A linear map of patches, and a vector for each place of an image."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        shape = (config.num_channels, config.patch_size, config.patch_size)
        self.patch_embedding = PatchProjection(config.hidden_size, shape, bias=True)
        self.position_embedding = PositionTable(config.side**2, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, values] -> [P, D]"""
        hidden = self.patch_embedding(pixels).unflatten(0, (-1, self.position_embedding.num_embeddings))
        places = torch.arange(hidden.shape[1], device=pixels.device)
        return (hidden + self.position_embedding(places)).flatten(0, 1)


class SiglipAttention(nn.Module):
    """Attention of every patch to all of its image."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(size, size) for _ in range(4))

    def forward(self, hidden: Tensor, lengths: Sequence[int], adapters: AdapterContext | None = None) -> Tensor:
        """hidden [P, D], lengths of the images -> [P, D]"""
        q, k, v = (
            projection(hidden, adapters).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [P, H, hd]
        return self.out_proj(segment_attention(q, k, v, lengths).flatten(1), adapters)


class SiglipMLP(nn.Module):
    """fc2(act(fc1(x)))"""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act].forward

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[P, D] -> [P, D]"""
        return self.fc2(self.activation(self.fc1(x, adapters)), adapters)


class SiglipLayer(nn.Module):
    """A norm before attention and one before the MLP, each in its residual branch."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, hidden: Tensor, lengths: Sequence[int], adapters: AdapterContext | None = None) -> Tensor:
        """hidden [P, D], lengths of the images -> [P, D]"""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), lengths, adapters)
        return hidden + self.mlp(self.layer_norm2(hidden), adapters)


class SiglipVisionModel(nn.Module):
    """Embeddings, layers and a last norm."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.embeddings = SiglipEmbeddings(config)
        self.encoder = Encoder(SiglipLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels: Tensor, lengths: Sequence[int], adapters: AdapterContext | None = None) -> Tensor:
        """pixels [P, values], lengths of the images -> [P, D]"""
        hidden = self.embeddings(pixels)
        for layer in self.encoder.layers:
            hidden = layer(hidden, lengths, adapters)
        return self.post_layernorm(hidden)


class Gemma3MultiModalProjector(LocalParameters):
    """From squares of patches to tokens."""

    def __init__(self, config: Gemma3VisionConfig):
        super().__init__()
        self.pool = config.pool
        self.mm_input_projection_weight = nn.Parameter(torch.empty(config.hidden_size, config.out_hidden_size))
        self.mm_soft_emb_norm = Gemma3RMSNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor, frames: Sequence[Frame]) -> Tensor:
        """hidden [P, D] of images of `frames` -> [T, E]"""
        pooled = self.mm_soft_emb_norm(pool_squares(hidden, frames, self.pool))  # [T, D]
        return pooled @ self.local("mm_input_projection_weight")


class Gemma3Vision(VisionTower):
    """Tower and projector of Gemma 3. Patches come row by row; their values by channel, row and column."""

    config: Gemma3VisionConfig
    initial_values = {"multi_modal_projector.*": "zeros", "*norm*.weight": "ones", "*.bias": "zeros", "*": "normal"}
    projector_patterns = ("multi_modal_projector.*",)
    file_prefixes = {
        "vision_tower.": (
            "vision_tower.vision_model.",  # transformers 4's
            "vision_tower.",  # 5's
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
        fields, tokens = vision_fields(outer), outer.integer("mm_tokens_per_image", 256)
        fields.ignore("vision_use_head", "projection_dim")  # of a head that Gemma 3 does not read
        fields.must_be_off("attention_dropout", "dropout is not implemented; set it to 0.0")
        hidden, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
        image, patch = fields.integer("image_size", 224), fields.integer("patch_size", 16)
        side, tokens_side = image // patch, isqrt(tokens)
        if image % patch:
            fields.add_problem(f"image_size {image} is not a multiple of patch_size {patch}")
        elif tokens_side**2 != tokens or side % tokens_side:
            outer.add_problem(
                f"mm_tokens_per_image {tokens}: must be a square whose side divides the {side} patches of one"
            )
            tokens_side = 1
        config = Gemma3VisionConfig(
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 3072),
            num_hidden_layers=fields.integer("num_hidden_layers", 12),
            num_attention_heads=heads,
            head_dim=split_heads(fields, hidden, heads),
            patch_size=patch,
            pool=max(side // tokens_side, 1),
            hidden_act=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
            out_hidden_size=hidden_size,
            num_channels=fields.integer("num_channels", 3),
            initializer_range=fields.number("initializer_range", 0.02, zero=True, most=100.0) or 0.02,
            layer_norm_eps=fields.number("layer_norm_eps", 1e-6, most=1.0),
            side=side,
        )
        fields.refuse_the_rest()
        return config

    @property
    def layers(self) -> nn.ModuleList:
        return self.vision_tower.encoder.layers

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Override `VisionTower.encode`: [P, values] -> [T, E]"""
        hidden = self.vision_tower(pixels, [rows * columns for rows, columns in frames], adapters)
        return Features(self.multi_modal_projector(hidden, frames), {})
