"""Granite 3, and the dense ones of Granite 4 (https://huggingface.co/ibm-granite): Llama's layer with four multipliers.

They are of the embeddings, of q·k, of each residual branch, and (a divisor) of the logits. Granite 4's files have the
names of a mixture of experts, of which the dense ones use the shared expert alone; gate and up are joined there.
"""

from dataclasses import replace

from torch import Tensor

from dtrain.models.common.config import FULL, ModelConfig
from dtrain.models.common.config_fields import format_value
from dtrain.models.common.decoder import DECODER_PLAN, CausalLM, Decoder, GatedMLP, PreNormLayer
from dtrain.models.common.functions import gated_activation
from dtrain.models.common.micro_batch import AdapterContext, LayerContext, MicroBatchContext
from dtrain.models.common.model_fields import ModelFields


class GraniteLayer(PreNormLayer):
    """Decoder layer with each residual branch multiplied."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.multiplier = config.residual_multiplier

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `Layer.after_attention`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]"""
        hidden = hidden + self.self_attn.o_proj(attended, adapters) * self.multiplier
        del attended  # the MLP needs its memory
        return hidden + self.mixed(self.post_attention_layernorm(hidden), adapters) * self.multiplier

    def mixed(self, normed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        return self.mlp(normed, adapters)


class GraniteDecoder(Decoder):
    """A decoder whose hidden states are divided by the logits' divisor: the head, and every loss that reaches it by
    hidden states, then computes the logits as they are."""

    def states(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor:
        """Override `Decoder.states`: ids [B, S] -> [B, S, D]"""
        return super().states(input_ids, context) / self.config.logits_scaling

    def _scale_embeddings(self, hidden: Tensor) -> Tensor:
        return hidden * self.config.embedding_multiplier


class GraniteForCausalLM(CausalLM):
    layer = GraniteLayer

    def __init__(self, config: ModelConfig):
        super().__init__(config, GraniteDecoder(config, self.layer))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults({"bos_token_id": 1, "eos_token_id": 2})
        common = fields.read_common(cls.__name__, bias=False)
        if "attention_multiplier" in fields and fields.get("attention_multiplier") is None:
            fields.add_problem("attention_multiplier null: must be a number; a file without it has 1.0")
        common["attention_scale"] = fields.number("attention_multiplier", 1.0)
        return fields.build_config(
            **common,
            mlp_bias=fields.flag("mlp_bias", False),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            residual_multiplier=fields.number("residual_multiplier", 1.0),
            logits_scaling=fields.number("logits_scaling", 1.0),
        )


class SharedMLP(GatedMLP):
    """A `GatedMLP` whose last product the files call output_linear."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.output_linear = self.down_proj
        del self.down_proj

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        x = self.enter(x)
        mixed = gated_activation(self.gate_proj(x, adapters), self.up_proj(x, adapters), self.activation)
        return self.output_linear(mixed, adapters)


class GraniteMoeHybridLayer(GraniteLayer):
    """The layer with its MLP under Granite 4's name."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        del self.mlp
        self.shared_mlp = SharedMLP(config)

    def mixed(self, normed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Override `GraniteLayer.mixed`: [B, S, D] -> [B, S, D]"""
        return self.shared_mlp(normed, adapters)


_DENSE = "only Granite 4's dense models are read, such as ibm-granite/granite-4.0-micro"
# Of experts and mamba layers, which dense models do not have.
_UNUSED = """num_experts_per_tok output_router_logits router_aux_loss_coef time_step_limit init_method mamba_n_heads
mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias"""


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    layer = GraniteMoeHybridLayer
    plan = {
        name.replace(".mlp", ".shared_mlp").replace("down_proj", "output_linear"): style
        for name, style in DECODER_PLAN.items()
    }

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults({"intermediate_size": 11_008, "position_embedding_type": "none"})
        fields.ignore(*_UNUSED.split(), "layers_block_type")
        fields.must_be_off("mlp_bias", "the MLPs of this architecture have no biases")
        experts = fields.integer("num_local_experts", 8, minimum=0)
        if experts:
            fields.add_problem(f"num_local_experts {experts}: a mixture of experts; {_DENSE}")
        types = fields.get("layers_block_type") or fields.get("layer_types") or []
        if not isinstance(types, list) or not types or any(kind not in ("attention", FULL) for kind in types):
            fields.add_problem(f"layer_types {format_value(types or 'missing')}: layers of mamba; {_DENSE}")
        for key, only in (("position_embedding_type", "rope"), ("normalization_function", "rmsnorm")):
            fields.choice(key, (only,), only)
        inner = fields.integer("shared_intermediate_size", 1024)
        # Said already; the rest of the file is that of Granite 3.
        config = super().read(fields.without("layer_types"))
        return replace(config, intermediate_size=inner, fused_modules={"input_linear": ("gate_proj", "up_proj")})
