"""Granite 3 (https://huggingface.co/ibm-granite): Llama's layer with four multipliers.

They are of the embeddings, of q·k, of each residual branch, and (a divisor) of the logits.
"""

from torch import Tensor

from dtrain.models.config import ModelConfig
from dtrain.models.layers import CausalLM, Decoder, PreNormLayer


class GraniteLayer(PreNormLayer):
    """Each residual branch multiplied."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.multiplier = config.residual_multiplier

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """As `Layer.after`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.self_attn.o_proj(attended) * self.multiplier
        del attended  # the MLP needs its memory
        return hidden + self.mlp(self.post_attention_layernorm(hidden)) * self.multiplier


class GraniteDecoder(Decoder):
    """A decoder whose hidden states are divided by the logits' divisor: the head, and every loss that reaches it by
    hidden states, then computes the logits as they are."""

    def states(self, *args, **kwargs) -> Tensor:
        """As `Decoder.states`: [B, S, D]"""
        return super().states(*args, **kwargs) / self.config.logits_scaling

    def _embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) * self.config.embedding_multiplier


class GraniteForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, GraniteDecoder(config, GraniteLayer))
