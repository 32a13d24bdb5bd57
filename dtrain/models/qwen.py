"""Qwen2 and 2.5 (arXiv:2407.10671, 2412.15115), and Qwen3 (arXiv:2505.09388), dense and with experts.

Llama's layer; Qwen2 with biases on q, k and v, Qwen3 without them and with an RMSNorm over each head of q and k.
"""

from functools import partial

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, CausalLM, Decoder, PreNormLayer, RMSNorm, plan_of
from dtrain.models.common.moe import SPARSE_PLAN, SparseLayer


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, PreNormLayer))


class Qwen3ForCausalLM(CausalLM):
    plan = {
        **DECODER_PLAN,
        "model.layers.*.self_attn.q_norm": "head_norm",
        "model.layers.*.self_attn.k_norm": "head_norm",
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, partial(PreNormLayer, qk_norm=RMSNorm)))


class Qwen3MoeForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        def layer(config: ModelConfig, index: int) -> PreNormLayer:
            return (SparseLayer if config.is_sparse(index) else PreNormLayer)(config, index, qk_norm=RMSNorm)

        super().__init__(config, Decoder(config, layer))
        self.plan = plan_of(self, {**Qwen3ForCausalLM.plan, **SPARSE_PLAN})
