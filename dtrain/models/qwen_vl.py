"""The text towers of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (https://huggingface.co/Qwen): Qwen2.5 and Qwen3.

Rotary positions of an image's tokens have three axes; those of a text are equal on all, which is plain rotation.
"""

from dataclasses import replace

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.tower import TextTower
from dtrain.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3Layer

IMAGES = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_QWEN2_5_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "eos_token_id": 151_645,
    "rope_theta": 1_000_000.0,
}


class Qwen2_5_VLForConditionalGeneration(TextTower):
    tower_names = ("model.language_model.", "model.")
    carried = (r"(model\.)?visual\..*",)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`: the text tower, described by `text_config`, or, in the first files, beside the
        rest."""
        fields.known(*IMAGES, "vision_token_id")

        def read(text: ModelFields) -> ModelConfig:
            return Qwen2ForCausalLM.read(text.over(_QWEN2_5_DEFAULTS))

        if isinstance(fields.get("text_config"), dict):
            return fields.text_tower(cls.__name__, read)
        return replace(read(fields), architecture=cls.__name__, is_text_tower=True)


class Qwen3VLForConditionalGeneration(TextTower):
    tower_names = ("model.language_model.",)
    carried = (r"model\.visual\..*",)
    plan, layer = Qwen3ForCausalLM.plan, Qwen3Layer

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields.known(*IMAGES)

        def read(text: ModelFields) -> ModelConfig:
            common = text.common(cls.__name__, kv_heads=32, head_dim=128, bias=False)
            return text.over({"rope_theta": 500_000.0}).with_one_rope(**common)

        return fields.text_tower(cls.__name__, read)
