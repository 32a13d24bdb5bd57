"""Phi-3, 3.5, 4 and 4 mini (arXiv:2404.14219, 2412.08905, 2503.01743): Llama's layer, a part of each head rotated.

The files join q, k and v, and gate and up, which the model holds apart (`ModelConfig.fused_modules`).
"""

from dataclasses import replace

from dtrain.models.common.config import FULL, SLIDING, ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.model_fields import ModelFields

_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32_000, "original_max_position_embeddings": 4096}


class Phi3ForCausalLM(CausalLM):
    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_DEFAULTS)
        common = fields.read_common(cls.__name__, pad=32_000)
        window = fields.optional_integer("sliding_window")
        fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        for key in ("full_attn_mod", "interpolate_factor"):  # of the code beside the first files; 1 is off
            if fields.integer(key, 1) != 1:
                fields.add_problem(f"{key} {fields.get(key)}: only 1 is implemented")
        kinds = ("default", "longrope")
        config = fields.build_config(1.0, kinds=kinds, **common, sliding_window=window, fused_modules=fused)
        if window is None or config.max_document_length is None or window < config.max_document_length:
            return config
        types = (FULL,) * config.num_hidden_layers
        return replace(config, layer_types=types, sliding_window=None, ropes={FULL: config.ropes[SLIDING]})
