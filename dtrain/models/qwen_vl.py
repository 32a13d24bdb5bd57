"""The text towers of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (https://huggingface.co/Qwen): Qwen2.5 and Qwen3.

Rotary positions of an image's tokens have three axes; those of a text are equal on all, which is plain rotation.
"""

from functools import partial

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import Decoder, PreNormLayer, RMSNorm
from dtrain.models.common.tower import TextTower
from dtrain.models.qwen import Qwen3ForCausalLM


class Qwen2_5_VLText(TextTower):
    tower_names = ("model.language_model.", "model.")
    carried = (r"(model\.)?visual\..*",)

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, PreNormLayer))


class Qwen3_VLText(TextTower):
    tower_names = ("model.language_model.",)
    carried = (r"model\.visual\..*",)
    plan = Qwen3ForCausalLM.plan

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, partial(PreNormLayer, qk_norm=RMSNorm)))
