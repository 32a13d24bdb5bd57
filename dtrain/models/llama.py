"""Llama 2, 3, 3.1 and 3.2 (arXiv:2307.09288, 2407.21783).

Pre-norm layers, SwiGLU, rotary positions (with Llama 3.1's scaling where the config has it), grouped-query attention.
What varies between checkpoints is all in the config: biases, tied embeddings, rotary scaling.
"""

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.config_fields import Fields
from dtrain.models.common.decoder import CausalLM, Decoder, PreNormLayer
from dtrain.models.common.shared_fields import common_fields, layers_alike, read_biases, with_one_rope


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, PreNormLayer))

    @classmethod
    def read(cls, fields: Fields) -> ModelConfig:
        common = common_fields(cls.__name__, fields)
        common |= read_biases(fields) | layers_alike(fields, common["num_hidden_layers"])
        return with_one_rope(fields, **common, mlp_bias=fields.flag("mlp_bias", False))
