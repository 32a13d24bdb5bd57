"""Llama 2, 3, 3.1 and 3.2 (arXiv:2307.09288, 2407.21783).

Pre-norm layers, SwiGLU, rotary positions (with Llama 3.1's scaling where the config has it), grouped-query attention.
What varies between checkpoints is all in the config: biases, tied embeddings, rotary scaling. The tensor-parallel plan
is `DECODER_PLAN` of common/decoder.py.
"""

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.model_fields import ModelFields


class LlamaForCausalLM(CausalLM):
    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        common = fields.read_common(cls.__name__, bias=False)
        return fields.build_config(**common, mlp_bias=fields.flag("mlp_bias", False))
