"""The text towers of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (https://huggingface.co/Qwen).

They are Qwen2.5 and Qwen3 with rotary positions on three axes: time, height and width. The positions of text are the
same on all axes, so text is rotated as in Qwen2.5 and Qwen3.
"""

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.rope_config import Sections
from dtrain.models.common.tower import TextTower
from dtrain.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3Layer
from dtrain.models.vision.qwen import Qwen2_5VLVision, Qwen3VLVision

# Defaults in which Qwen2.5-VL differs from Qwen2.5.
_QWEN2_5_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "eos_token_id": 151_645,
    "rope_theta": 1_000_000.0,
}


class Qwen2_5_VLForConditionalGeneration(TextTower):
    """Text tower of Qwen2.5-VL."""

    tower_prefixes = ("model.language_model.", "model.")
    carried_patterns = (r"(model\.)?visual\..*",)
    vision_tower = Qwen2_5VLVision
    allows_flat_config = True  # as in the first files

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        sections = Sections((16, 24, 24), interleaved=False)
        return Qwen2ForCausalLM.read(fields.with_defaults(_QWEN2_5_DEFAULTS), sections)


class Qwen3VLForConditionalGeneration(TextTower):
    """Text tower of Qwen3-VL."""

    tower_prefixes = ("model.language_model.",)
    carried_patterns = (r"model\.visual\..*",)
    vision_tower = Qwen3VLVision
    plan = Qwen3ForCausalLM.plan
    layer = Qwen3Layer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        common = fields.read_common(cls.__name__, kv_heads=32, head_dim=128, bias=False)
        fields = fields.with_defaults({"rope_theta": 500_000.0})
        return fields.build_config(**common, sections=Sections((24, 20, 20), interleaved=True))
