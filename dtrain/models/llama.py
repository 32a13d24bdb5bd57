"""Llama 2, 3, 3.1 and 3.2 (arXiv:2307.09288, 2407.21783).

Layers have a norm before attention and a norm before the MLP, SwiGLU, rotary positions (with Llama 3.1's scaling if the
config has it) and grouped-query attention. All of this is in `common.decoder`, with the tensor-parallel plan
`DECODER_PLAN`. Biases, tied embeddings and rotary scaling come from the config.
"""

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.model_fields import ModelFields


class LlamaForCausalLM(CausalLM):
    """Llama."""

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        common = fields.read_common(cls.__name__, bias=False)
        return fields.build_config(**common, mlp_bias=fields.flag("mlp_bias", False))
