"""Granite 3, and the dense ones of Granite 4 (https://huggingface.co/ibm-granite): Llama's layer with four multipliers.

They are of the embeddings, of q·k, of each residual branch, and (a divisor) of the logits. Granite 4's files have the
names of a mixture of experts, of which the dense ones use the shared expert alone; gate and up are joined there.
"""

from torch import Tensor

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, CausalLM, Decoder, GatedMLP, PreNormLayer
from dtrain.models.common.functions import gated


class GraniteLayer(PreNormLayer):
    """Decoder layer with each residual branch multiplied."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.multiplier = config.residual_multiplier

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Override `Layer.after`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.self_attn.o_proj(attended) * self.multiplier
        del attended  # the MLP needs its memory
        return hidden + self.mlp(self.post_attention_layernorm(hidden)) * self.multiplier


class GraniteDecoder(Decoder):
    """A decoder whose hidden states are divided by the logits' divisor: the head, and every loss that reaches it by
    hidden states, then computes the logits as they are."""

    def states(self, *args, **kwargs) -> Tensor:
        """Override `Decoder.states`: [B, S, D]"""
        return super().states(*args, **kwargs) / self.config.logits_scaling

    def _embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) * self.config.embedding_multiplier


class GraniteForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, GraniteDecoder(config, GraniteLayer))


class SharedMLP(GatedMLP):
    """A `GatedMLP` whose last product the files call output_linear."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.output_linear = self.down_proj
        del self.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        x = self.enter(x)
        return self.output_linear(gated(self.gate_proj(x), self.up_proj(x), self.activation))


class GraniteMoeHybridLayer(GraniteLayer):
    """The layer with its MLP under Granite 4's name."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        del self.mlp
        self.shared_mlp = SharedMLP(config)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Override `Layer.after`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.self_attn.o_proj(attended) * self.multiplier
        del attended  # the MLP needs its memory
        return hidden + self.shared_mlp(self.post_attention_layernorm(hidden)) * self.multiplier


class GraniteMoeHybridForCausalLM(CausalLM):
    plan = {
        name.replace(".mlp", ".shared_mlp").replace("down_proj", "output_linear"): style
        for name, style in DECODER_PLAN.items()
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config, GraniteDecoder(config, GraniteMoeHybridLayer))
