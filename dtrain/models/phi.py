"""Phi-3, 3.5, 4 and 4 mini (arXiv:2404.14219, 2412.08905, 2503.01743): Llama's layer, a part of each head rotated.

The files join q, k and v, and gate and up, which the model holds apart (`ModelConfig.fused`).
"""

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM, Decoder, PreNormLayer


class Phi3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, PreNormLayer))
