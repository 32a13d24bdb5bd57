"""The vision tower of Gemma 4 (https://huggingface.co/google), and its embedder.

Images keep their shape. The position of a patch has a learned vector for its column and one for its row, and rotary
positions rotate one half of each head by the column and the other by the row. Squares of patches are averaged. Some
models shift and scale the averages by constants, and clamp inputs and outputs of linear layers. The constants and
bounds are in the files, and are not trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.models.common.functions import apply_rotary, normalize_rms
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.olmo import OlmoRMSNorm
from dtrain.models.vision.common import (
    Encoder,
    Features,
    Frame,
    GatedMLP,
    RotaryTables,
    VisionConfig,
    VisionTower,
    axial_angles,
    patch_positions,
    pool_squares,
    read_activation,
    read_axial_theta,
    rotary_tables_of_angles,
    segment_attention,
    vision_fields,
)
from dtrain.parallel.tensor import LocalParameters


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """Sizes of tower and embedder.

    Attributes:
        table_size: Rows, and columns, that have a learned vector.
        clipped: Whether inputs and outputs of linear layers are clamped.
        standardize: Whether averages are shifted and scaled.
    """

    num_key_value_heads: int
    rms_norm_eps: float
    table_size: int
    clipped: bool
    standardize: bool

    def size_problem(self, rows: int, columns: int) -> str | None:
        """Override `VisionConfig.size_problem`."""
        if max(rows, columns) > self.table_size:
            return f"there are positions for {self.table_size} at each side"
        return super().size_problem(rows, columns)


class ClippableLinear(nn.Module):
    """Linear layer without bias, whose inputs and outputs are clamped if the model is `clipped`."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, inputs: int, outputs: int, clipped: bool):
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=False)
        self.clipped = clipped
        if clipped:
            for name in ("input_min", "input_max", "output_min", "output_max"):
                self.register_buffer(name, torch.empty(()))

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Compute the layer, [P, in] -> [P, out]."""
        if not self.clipped:
            return self.linear(x, adapters)
        out = self.linear(torch.clamp(x, self.input_min, self.input_max), adapters)
        return torch.clamp(out, self.output_min, self.output_max)


class Gemma4PatchEmbedder(LocalParameters):
    """Linear map of patches, and a learned vector for each column and each row."""

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        self.input_proj = Linear(config.values_per_patch, config.hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.table_size, config.hidden_size))

    def forward(self, pixels: Tensor, positions: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Embed patches.

        Args:
            pixels: Values from 0 to 1, [P, values].
            positions: Column and row, [P, 2].
            adapters: Whether adapters take part.

        Returns:
            [P, D].
        """
        table = self.local("position_embedding_table")
        columns, rows = positions.t()
        column_table, row_table = table
        of_columns, of_rows = F.embedding(columns, column_table), F.embedding(rows, row_table)
        return self.input_proj((2 * (pixels - 0.5)).to(table.dtype), adapters) + (of_columns + of_rows)


class Gemma4VisionAttention(nn.Module):
    """Attention of every patch to all patches of its image, with normalised queries, keys and values."""

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        size, self.head_dim, self.eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = ClippableLinear(size, queries, config.clipped)
        self.k_proj = ClippableLinear(size, keys, config.clipped)
        self.v_proj = ClippableLinear(size, keys, config.clipped)
        self.o_proj = ClippableLinear(queries, size, config.clipped)
        self.q_norm = OlmoRMSNorm(self.head_dim, self.eps)
        self.k_norm = OlmoRMSNorm(self.head_dim, self.eps)

    def forward(
        self, hidden: Tensor, rotary: RotaryTables, lengths: Sequence[int], adapters: AdapterContext | None = None
    ) -> Tensor:
        """Compute attention.

        Args:
            hidden: [P, D].
            rotary: [P, 1, 2, hd/2] each, where the axes are those of column and row.
            lengths: Patches of each image.
            adapters: Whether adapters take part.

        Returns:
            [P, D].
        """
        q = self.q_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))  # [P, H, hd]
        k = self.k_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))  # [P, kv, hd]
        v = self.v_proj(hidden, adapters).unflatten(-1, (-1, self.head_dim))
        q = self._rotate(self.q_norm(q), rotary)
        k = self._rotate(self.k_norm(k), rotary)
        v = normalize_rms(v, self.eps)
        return self.o_proj(segment_attention(q, k, v, lengths, scale=1.0).flatten(1), adapters)

    def _rotate(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        """Rotate one half of each head [P, heads, hd] by the column, and the other by the row."""
        cos, signed_sin = rotary
        return apply_rotary(x.unflatten(-1, (2, -1)), cos, signed_sin).flatten(-2)


class Gemma4VisionLayer(nn.Module):
    """Layer whose residual branches are each between two norms."""

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Gemma4VisionAttention(config)
        self.mlp = GatedMLP(config, partial(ClippableLinear, clipped=config.clipped))
        self.input_layernorm = OlmoRMSNorm(size, eps)
        self.post_attention_layernorm = OlmoRMSNorm(size, eps)
        self.pre_feedforward_layernorm = OlmoRMSNorm(size, eps)
        self.post_feedforward_layernorm = OlmoRMSNorm(size, eps)

    def forward(
        self, hidden: Tensor, rotary: RotaryTables, lengths: Sequence[int], adapters: AdapterContext | None = None
    ) -> Tensor:
        """Compute the layer, [P, D] -> [P, D]. The arguments are those of `Gemma4VisionAttention.forward`."""
        attended = self.self_attn(self.input_layernorm(hidden), rotary, lengths, adapters)
        hidden = hidden + self.post_attention_layernorm(attended)
        return hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden), adapters))


class Gemma4VisionModel(nn.Module):
    """Embedding of patches, layers, and pooling."""

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embedder = Gemma4PatchEmbedder(config)
        self.encoder = Encoder(Gemma4VisionLayer(config) for _ in range(config.num_hidden_layers))
        if config.standardize:
            self.register_buffer("std_bias", torch.empty(config.hidden_size))
            self.register_buffer("std_scale", torch.empty(config.hidden_size))

    def forward(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None = None) -> Tensor:
        """Encode patches, [P, values] -> [T, D]. frames: rows and columns of each image."""
        config = self.config
        positions = patch_positions(frames).flip(1).to(pixels.device, non_blocking=True)  # column and row, [P, 2]
        hidden = self.patch_embedder(pixels, positions, adapters)
        angles = axial_angles(positions, config.head_dim, config.theta, hidden.dtype)  # [P, 2, hd/4]
        cos, signed_sin = rotary_tables_of_angles(angles)
        rotary = cos.to(hidden.dtype), signed_sin.to(hidden.dtype)
        lengths = [rows * columns for rows, columns in frames]
        for layer in self.encoder.layers:
            hidden = layer(hidden, rotary, lengths, adapters)
        return self.pool(hidden, frames)

    def pool(self, hidden: Tensor, frames: Sequence[Frame]) -> Tensor:
        """Average squares of patches, [P, D] -> [T, D], and multiply the averages by sqrt(D).

        This is computed in max(float32, the dtype), because the products may exceed float16.
        """
        config, dtype = self.config, hidden.dtype
        wide = torch.promote_types(dtype, torch.float32)
        scaled = pool_squares(hidden, frames, config.pool).to(wide) * config.hidden_size**0.5
        if config.standardize:
            scaled = (scaled - self.std_bias.to(wide)) * self.std_scale.to(wide)
        return scaled.to(dtype)


class Gemma4Embedder(nn.Module):
    """Projection of normalised features to the text model's embeddings."""

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embedding_projection = Linear(config.hidden_size, config.out_hidden_size, bias=False)

    def forward(self, features: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Normalise and project, [T, D] -> [T, E]."""
        return self.embedding_projection(normalize_rms(features, self.eps), adapters)


class Gemma4Vision(VisionTower):
    """Tower and embedder of Gemma 4.

    The patches of an image come row by row. The values of a patch, from 0 to 1, are ordered by row, column and channel.
    """

    config: Gemma4VisionConfig
    initial_values = {"*norm.weight": "ones", "*position_embedding_table": "ones", "*": "normal"}
    initial_buffers = {"*_min": -inf, "*_max": inf, "*.std_bias": 0.0, "*.std_scale": 1.0}
    projector_patterns = ("embed_vision.*",)
    lookup_patterns = ("*.position_embedding_table",)
    file_prefixes = {"vision_tower.": ("model.vision_tower.",), "embed_vision.": ("model.embed_vision.",)}

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        self.config = config
        self.vision_tower = Gemma4VisionModel(config)
        self.embed_vision = Gemma4Embedder(config)

    @classmethod
    def read(cls, outer: ModelFields, hidden_size: int) -> Gemma4VisionConfig:
        """Override `VisionTower.read`."""
        fields = vision_fields(outer)
        # Fields of the image processor, and fields that the tower does not read.
        fields.ignore("default_output_length", "global_head_dim", "max_position_embeddings", "attention_bias")
        fields.must_be_off("attention_dropout", "dropout is not implemented; set it to 0.0")
        num_heads, num_kv_heads = fields.integer("num_attention_heads", 12), fields.integer("num_key_value_heads", 12)
        if num_heads % num_kv_heads:
            fields.add_problem(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = fields.integer("head_dim", 64)
        config = Gemma4VisionConfig(
            hidden_size=fields.integer("hidden_size", 768),
            intermediate_size=fields.integer("intermediate_size", 3072),
            num_hidden_layers=fields.integer("num_hidden_layers", 16),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            patch_size=fields.integer("patch_size", 16),
            pool=fields.integer("pooling_kernel_size", 3),
            hidden_act=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            out_hidden_size=hidden_size,
            initializer_range=fields.number("initializer_range", 0.02, allow_zero=True, maximum=100.0) or 0.02,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, maximum=1.0),
            table_size=fields.integer("position_embedding_size", 10_240),
            clipped=fields.flag("use_clipped_linears", False),
            standardize=fields.flag("standardize", False),
            theta=read_axial_theta(fields, head_dim, 100.0),
        )
        fields.refuse_the_rest()
        return config

    @property
    def layers(self) -> nn.ModuleList:
        """Override `VisionTower.layers`."""
        return self.vision_tower.encoder.layers

    def encode(self, pixels: Tensor, frames: Sequence[Frame], adapters: AdapterContext | None) -> Features:
        """Override `VisionTower.encode`."""
        hidden = self.vision_tower(pixels, frames, adapters)
        return Features(self.embed_vision(hidden, adapters), deepstack={})
