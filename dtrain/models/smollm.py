"""SmolLM3 (https://huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama's layer.

One layer in four has no rotary positions (arXiv:2501.18795).
"""

from torch import Tensor, nn

from dtrain.models.common.config import FULL, SLIDING, ModelConfig
from dtrain.models.common.config_fields import format_value
from dtrain.models.common.decoder import Attention, CausalLM, PreNormLayer
from dtrain.models.common.micro_batch import Rotary
from dtrain.models.common.model_fields import ModelFields

_DEFAULTS = {
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
}


class NoRopeAttention(Attention):
    """Attention without rotary positions, which sees the order of tokens through the causal mask only."""

    def norm_and_rotate(self, x: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
        """Override `Attention.norm_and_rotate`: return x unchanged."""
        return x


class SmolLM3Layer(PreNormLayer):
    """Layer with or without rotary positions, by its number."""

    def add_mixer(self, config: ModelConfig, index: int) -> None:
        """Override `PreNormLayer.add_mixer`."""
        attention = NoRopeAttention if index in config.no_rope_layers else Attention
        self.self_attn = attention(config, index)


class SmolLM3ForCausalLM(CausalLM):
    """SmolLM3."""

    layer = SmolLM3Layer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_DEFAULTS)
        common = fields.read_common(cls.__name__, kv_heads=4, pad=128_004, tie=True, bias=False)
        num_layers = common["num_hidden_layers"]
        fields.ignore("max_window_layers")  # left over from Qwen2's config
        no_rope_layers = _read_no_rope_layers(fields, num_layers)
        window = fields.optional_integer("sliding_window")
        if not fields.flag("use_sliding_window", False):
            window = None
        default = [FULL] * num_layers
        if window is not None:
            default = [SLIDING if index in no_rope_layers else FULL for index in range(num_layers)]
        layer_types = fields.read_layer_types(num_layers, default)
        return fields.build_config(
            **common,
            layer_types=layer_types,
            sliding_window=fields.check_window(layer_types, window),
            no_rope_layers=no_rope_layers,
            mlp_bias=fields.flag("mlp_bias", False),
        )


def _read_no_rope_layers(fields: ModelFields, num_layers: int) -> tuple[int, ...]:
    """Read the numbers of the layers without rotary positions.

    The field `no_rope_layers` has a 1 for each layer WITH rotary positions. If it is missing, every
    `no_rope_layer_interval`-th layer has none.
    """
    interval = fields.integer("no_rope_layer_interval", 4)
    written = fields.get("no_rope_layers")
    if written is None:
        has_rope = [int((index + 1) % interval != 0) for index in range(num_layers)]
    else:
        has_rope = written
    if not isinstance(has_rope, list) or any(flag not in (0, 1) for flag in has_rope) or len(has_rope) < num_layers:
        fields.add_problem(f"no_rope_layers {format_value(written)}: must be a list of 0 and 1, one a layer")
        has_rope = [1] * num_layers
    return tuple(index for index in range(num_layers) if not has_rope[index])
