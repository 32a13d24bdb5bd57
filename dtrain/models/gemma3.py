"""Gemma 3's text model (arXiv:2503.19786), also as the text tower of a multimodal checkpoint.

There are five sliding layers to each full layer, with different rotary bases. Norms come before and after attention and
MLP, and over each head of q and k, and multiply by 1 + weight. Embeddings are scaled by sqrt(D).
"""

from torch import Tensor

from dtrain.models.common.config import FULL, SLIDING, ModelConfig
from dtrain.models.common.decoder import DECODER_PLAN, QK_NORMS, Attention, Decoder, PreNormLayer
from dtrain.models.common.functions import Gemma3RMSNorm, RMSNorm
from dtrain.models.common.micro_batch import AdapterContext, LayerContext
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.rope_config import read_ropes_by_kind, read_theta
from dtrain.models.common.tower import TextTower
from dtrain.models.vision.gemma3 import Gemma3Vision

# Fields that published checkpoints leave out of their text_config.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


class Gemma3Attention(Attention):
    """Attention with a norm over each head of q and k."""

    qk_norm = Gemma3RMSNorm


class Gemma3Layer(PreNormLayer):
    """Decoder layer with each residual branch between two norms."""

    attention: type[Attention] = Gemma3Attention
    norm: type[RMSNorm] = Gemma3RMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.pre_feedforward_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)

    def after_attention(
        self, hidden: Tensor, adapters: AdapterContext | None, attended: Tensor, context: LayerContext | None = None
    ) -> Tensor:
        """Override `PreNormLayer.after_attention`."""
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended, adapters))
        del attended  # free its memory for the MLP
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden), adapters)
        return hidden + self.post_feedforward_layernorm(mixed)


class Gemma3ForCausalLM(TextTower):
    """Gemma 3."""

    tower_prefixes = ("language_model.model.", "model.language_model.")  # of transformers 4 and 5
    head_prefixes = ("lm_head.", "language_model.lm_head.")
    carried_patterns = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
    vision_tower = Gemma3Vision
    plan = {
        **DECODER_PLAN,
        **QK_NORMS,
        "model.layers.*.pre_feedforward_layernorm": "sequence",
        "model.layers.*.post_feedforward_layernorm": "sequence",
    }
    is_tied_by_default = True
    initial_values = {"*norm.weight": "zeros", "*.bias": "zeros", "*": "normal"}

    def __init__(self, config: ModelConfig):
        super().__init__(config, Decoder(config, Gemma3Layer, Gemma3RMSNorm, embed_scale=config.hidden_size**0.5))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`. Only full layers have rotary scaling. Sliding layers have their own base."""
        fields = fields.with_defaults(_DEFAULTS)
        fields.must_be_off("attn_logit_softcapping", "capping attention logits is not implemented")
        if fields.get("hidden_act") is not None:
            fields.add_problem("hidden_act: Gemma3 reads hidden_activation")
        common = fields.read_common(cls.__name__, activation=("hidden_activation", None), pad=0, tie=True, bias=False)
        common["attention_scale"] = fields.number("query_pre_attn_scalar", 256) ** -0.5
        num_layers = common["num_hidden_layers"]
        # The field has two spellings.
        pattern = fields.optional_integer("sliding_window_pattern")
        private_pattern = fields.optional_integer("_sliding_window_pattern")
        interval = pattern or private_pattern or 6
        default_types = [SLIDING if (index + 1) % interval else FULL for index in range(num_layers)]
        layer_types = fields.read_layer_types(num_layers, default_types)
        window = fields.check_window(layer_types, fields.read_window())
        bases = {
            FULL: read_theta(fields, "rope_theta", 1_000_000.0),
            SLIDING: read_theta(fields, "rope_local_base_freq", 10_000.0),
        }
        kinds = ("default", "linear", "llama3")
        ropes = read_ropes_by_kind(fields, common["max_position_embeddings"], bases, kinds)
        cap = fields.optional_number("final_logit_softcapping")
        fields.refuse_the_rest()
        return ModelConfig(
            **common,
            layer_types=layer_types,
            sliding_window=window,
            ropes=ropes,
            final_logit_softcapping=cap,
            bidirectional_types=(FULL, SLIDING),
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Text tower of a multimodal checkpoint. `text_config` describes it."""
