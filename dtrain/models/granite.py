"""Granite 3, and the dense models of Granite 4 (https://huggingface.co/ibm-granite): Llama's layer with four factors.

The factors multiply the embeddings, q·k and each residual branch, and divide the logits. Granite 4's files are those of
a mixture of experts, of which the dense models only have the shared expert. Gate and up are joined in them.
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
    """Decoder layer whose residual branches are multiplied by a factor."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.multiplier = config.residual_multiplier

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `Layer.after_attention`."""
        hidden = hidden + self.self_attn.o_proj(attended, adapters) * self.multiplier
        del attended  # free its memory for the MLP
        return hidden + self.run_mlp(self.post_attention_layernorm(hidden), adapters) * self.multiplier

    def run_mlp(self, normed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Compute the MLP, [B, S, D] -> [B, S, D]."""
        return self.mlp(normed, adapters)


class GraniteDecoder(Decoder):
    """Decoder whose hidden states are divided by `logits_scaling`, so that the logits need not be.

    The head, and every loss that reads the head's weight and hidden states, then computes scaled logits.
    """

    def states(self, input_ids: Tensor, context: MicroBatchContext) -> Tensor:
        """Override `Decoder.states`."""
        return super().states(input_ids, context) / self.config.logits_scaling

    def _scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Override `Decoder._scale_embeddings`."""
        return hidden * self.config.embedding_multiplier


class GraniteForCausalLM(CausalLM):
    """Granite 3."""

    layer = GraniteLayer

    def __init__(self, config: ModelConfig):
        super().__init__(config, GraniteDecoder(config, self.layer))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
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
    """`GatedMLP` whose last layer has the name `output_linear`."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.output_linear = self.down_proj
        del self.down_proj

    def forward(self, x: Tensor, adapters: AdapterContext | None = None) -> Tensor:
        """Override `GatedMLP.forward`."""
        x = self.enter(x)
        inner = gated_activation(self.gate_proj(x, adapters), self.up_proj(x, adapters), self.activation)
        return self.output_linear(inner, adapters)


class GraniteMoeHybridLayer(GraniteLayer):
    """Layer whose MLP has the name `shared_mlp`."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        del self.mlp
        self.shared_mlp = SharedMLP(config)

    def run_mlp(self, normed: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Override `GraniteLayer.run_mlp`."""
        return self.shared_mlp(normed, adapters)


_DENSE = "only Granite 4's dense models are read, such as ibm-granite/granite-4.0-micro"
# Fields for experts and mamba layers, which dense models do not have.
_UNUSED = """num_experts_per_tok output_router_logits router_aux_loss_coef time_step_limit init_method mamba_n_heads
mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias"""


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Dense models of Granite 4."""

    layer = GraniteMoeHybridLayer
    plan = {
        name.replace(".mlp", ".shared_mlp").replace("down_proj", "output_linear"): style
        for name, style in DECODER_PLAN.items()
    }

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults({"intermediate_size": 11_008, "position_embedding_type": "none"})
        fields.ignore(*_UNUSED.split(), "layers_block_type")
        fields.must_be_off("mlp_bias", "the MLPs of this architecture have no biases")
        num_experts = fields.integer("num_local_experts", 8, minimum=0)
        if num_experts:
            fields.add_problem(f"num_local_experts {num_experts}: a mixture of experts; {_DENSE}")
        types = fields.get("layers_block_type") or fields.get("layer_types") or []
        if not isinstance(types, list) or not types or any(kind not in ("attention", FULL) for kind in types):
            fields.add_problem(f"layer_types {format_value(types or 'missing')}: layers of mamba; {_DENSE}")
        fields.choice("position_embedding_type", ("rope",), "rope")
        fields.choice("normalization_function", ("rmsnorm",), "rmsnorm")
        intermediate_size = fields.integer("shared_intermediate_size", 1024)
        # `layer_types` is checked above. The other fields are those of Granite 3.
        config = super().read(fields.without("layer_types"))
        fused_modules = {"input_linear": ("gate_proj", "up_proj")}
        return replace(config, intermediate_size=intermediate_size, fused_modules=fused_modules)
