"""Phi-3, 3.5, 4 and 4 mini (arXiv:2404.14219, 2412.08905, 2503.01743): Llama's layer with partly rotated heads.

The files join q, k and v, and gate and up. The model has them as separate modules (`ModelConfig.fused_modules`).
"""

from dataclasses import replace

from dtrain.models.common.config import FULL, SLIDING, ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.model_fields import ModelFields

_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32_000, "original_max_position_embeddings": 4096}


class Phi3ForCausalLM(CausalLM):
    """Phi-3 and 4."""

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_DEFAULTS)
        common = fields.read_common(cls.__name__, pad=32_000)
        window = fields.optional_integer("sliding_window")
        for key in ("full_attn_mod", "interpolate_factor"):  # fields of the code that came with the first files
            if fields.integer(key, 1) != 1:
                fields.add_problem(f"{key} {fields.get(key)}: only 1 is implemented")
        config = fields.build_config(
            rotary_fraction=1.0,
            kinds=("default", "longrope"),
            **common,
            sliding_window=window,
            fused_modules={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        )
        max_length = config.max_document_length
        if window is None or max_length is None or window < max_length:
            return config
        # A window that no document exceeds is no window.
        layer_types = (FULL,) * config.num_hidden_layers
        return replace(config, layer_types=layer_types, sliding_window=None, ropes={FULL: config.ropes[SLIDING]})
