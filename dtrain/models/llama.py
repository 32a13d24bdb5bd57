"""Llama 2, 3, 3.1 and 3.2 (arXiv:2307.09288, 2407.21783), and Mistral, whose only difference is its sliding window.

Pre-norm layers, SwiGLU, rotary positions (with Llama 3.1's scaling where the config has it), grouped-query attention.
What varies between checkpoints is all in the config: biases, tied embeddings, window, rotary scaling.
"""

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM, Decoder, PreNormLayer


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, PreNormLayer))
