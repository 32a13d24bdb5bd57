"""SmolLM3 (https://huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama's layer, in one of four without rotary positions
(arXiv:2501.18795)."""

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
    """Attention that knows of positions by the mask alone."""

    def norm_and_rotate(self, x: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
        """Override `Attention.norm_and_rotate`: as they are"""
        return x


class SmolLM3Layer(PreNormLayer):
    def add_mixer(self, config: ModelConfig, index: int) -> None:
        self.self_attn = (NoRopeAttention if index in config.no_rope_layers else Attention)(config, index)


class SmolLM3ForCausalLM(CausalLM):
    layer = SmolLM3Layer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_DEFAULTS)
        common = fields.read_common(cls.__name__, kv_heads=4, pad=128_004, tie=True, bias=False)
        count = common["num_hidden_layers"]
        fields.ignore("max_window_layers")  # of Qwen2, whose config was the model's first
        interval = fields.integer("no_rope_layer_interval", 4)
        written = fields.get("no_rope_layers")  # 1 for a layer that is rotated
        turned = [int((index + 1) % interval != 0) for index in range(count)] if written is None else written
        if not isinstance(turned, list) or any(flag not in (0, 1) for flag in turned) or len(turned) < count:
            fields.add_problem(f"no_rope_layers {format_value(written)}: must be a list of 0 and 1, one a layer")
            turned = [1] * count
        no_rope_layers = tuple(index for index in range(count) if not turned[index])
        window = fields.optional_integer("sliding_window")
        window = window if fields.flag("use_sliding_window", False) else None
        default = [SLIDING if window is not None and index in no_rope_layers else FULL for index in range(count)]
        types = fields.read_layer_types(count, default)
        return fields.build_config(
            **common,
            layer_types=types,
            sliding_window=fields.check_window(types, window),
            no_rope_layers=no_rope_layers,
            mlp_bias=fields.flag("mlp_bias", False),
        )
