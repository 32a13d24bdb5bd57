"""`ModelFields`: the fields of a config.json, and how families read what they share. Imports no torch.

Shared are sizes, layer types, windows, experts, and the text tower of a multimodal model.
"""

from dataclasses import replace
from typing import Any

from dtrain.models.common.config import FULL, SLIDING, ExpertsConfig, ModelConfig, RouterSettings
from dtrain.models.common.config_fields import Fields, format_value
from dtrain.models.common.rope_config import ROPE_KINDS, Sections, read_rope

# transformers' names of activations -> keys of `functions.ACTIVATIONS`.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",  # the same formula, written out
    "relu": "relu",
}
# Fields of multimodal models that describe their other parts.
_OTHER_PARTS = """vision_config audio_config initializer_range language_model_only mm_tokens_per_image
vision_soft_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id boa_token_id
eoa_token_id eoa_token_index image_token_id video_token_id audio_token_id vision_token_id vision_start_token_id
vision_end_token_id projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size""".split()


class ModelFields(Fields):
    """The fields of a model's config.json, or of its text_config."""

    def read_common(
        self,
        architecture: str,
        *,
        activation: tuple[str, str | None] = ("hidden_act", "silu"),
        kv_heads: int | None = None,
        head_dim: int | None = None,
        pad: int | None = None,
        tie: bool = False,
        bias: bool | None = None,
    ) -> dict[str, Any]:
        """Read the fields that every family reads in the same way.

        Args:
            architecture: Name of the family's class.
            activation: Field of the activation, and the family's default for it.
            kv_heads: The family's default number of key heads. None: one for each query head.
            head_dim: The family's default size of a head. None: hidden_size / num_attention_heads.
            pad: The family's default padding token.
            tie: The family's default of `tie_word_embeddings`.
            bias: The family's default of `attention_bias`, for all four projections. None if it is not read.

        Returns:
            Keyword arguments of `ModelConfig`.
        """
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        # A missing key takes the family's default. null means one key head for each query head.
        default_kv_heads = num_heads if "num_key_value_heads" in self else kv_heads or num_heads
        num_kv_heads = self.integer("num_key_value_heads", default_kv_heads)
        if num_heads % num_kv_heads:
            self.add_problem(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        if head_dim is None and self.get("head_dim") is None and hidden_size % num_heads:
            self.add_problem(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
        head_dim = self.integer("head_dim", head_dim or max(hidden_size // num_heads, 1))
        if head_dim % 2:
            self.add_problem(f"head_dim {head_dim} is odd, rotary embeddings need pairs")
        vocab_size = self.integer("vocab_size")
        pad = self.token_id("pad_token_id", pad)
        if pad is not None and not -vocab_size <= pad < vocab_size:
            self.add_problem(f"pad_token_id {pad} outside of the vocabulary of {vocab_size}")
        for key in ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
            self.must_be_off(key, "dropout is not implemented; set it to 0.0")
        self.must_be_off("use_bidirectional_attention", "only causal attention is implemented")
        if self.get("is_causal") not in (None, True):
            self.add_problem(f"is_causal {format_value(self.get('is_causal'))}: only causal attention is implemented")
        values: dict[str, Any] = {}
        if bias is not None:
            has_bias = self.flag("attention_bias", bias)
            values |= {"qkv_bias": has_bias, "o_bias": has_bias}
        activation_key, default_activation = activation
        return values | {
            "architecture": architecture,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size"),
            "num_hidden_layers": self.integer("num_hidden_layers"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("max_position_embeddings"),
            "hidden_act": _ACTIVATIONS[self.choice(activation_key, tuple(_ACTIVATIONS), default_activation)],
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6, maximum=1.0),
            # transformers reads 0 as "unset"
            "initializer_range": self.number("initializer_range", 0.02, allow_zero=True, maximum=100.0) or 0.02,
            "tie_word_embeddings": self.flag("tie_word_embeddings", tie),
            "attention_scale": head_dim**-0.5,
            "bos_token_id": self.token_id("bos_token_id"),
            "eos_token_ids": self.token_ids("eos_token_id"),
            "pad_token_id": pad,
            "dtype": self.dtype(),
        }

    def build_config(
        self,
        rotary_fraction: float | None = None,
        scales_queries: bool = False,
        kinds: tuple[str, ...] = ROPE_KINDS,
        sections: Sections | None = None,
        **values: Any,
    ) -> ModelConfig:
        """Read the rope that all layers share, refuse fields that were not read, and return the config.

        Args:
            rotary_fraction: As in `read_rope`.
            scales_queries: As in `read_rope`.
            kinds: As in `read_rope`.
            sections: As in `read_rope`.
            **values: Fields of `ModelConfig`. Without `layer_types`, all layers see the window, or all tokens.
        """
        if "layer_types" not in values:
            num_layers = values["num_hidden_layers"]
            kind = FULL if values.setdefault("sliding_window", None) is None else SLIDING
            values["layer_types"] = self.read_layer_types(num_layers, [kind] * num_layers, fixed=True)
        max_positions = values["max_position_embeddings"]
        rope = read_rope(self, max_positions, values["head_dim"], rotary_fraction, scales_queries, kinds, sections)
        if rope.kind == "longrope":
            values["max_position_embeddings"] = min(max_positions, rope.original_max_positions)
        self.refuse_the_rest()
        return ModelConfig(**values, ropes=dict.fromkeys(values["layer_types"], rope))

    def read_layer_types(
        self, count: int, default: list[str], fixed: bool = False, kinds: tuple[str, str] = (FULL, SLIDING)
    ) -> tuple[str, ...]:
        """Read `layer_types`.

        Args:
            count: Number of layers.
            default: Types if the field is missing.
            fixed: Whether the family fixes the types, so that the field must equal the default.
            kinds: Types that the family has.
        """
        entries = self.get("layer_types")
        if entries is None:
            return tuple(default)
        if not isinstance(entries, list) or not all(kind in kinds for kind in entries):
            self.add_problem(f"layer_types {format_value(entries)}: entries must be {' or '.join(kinds)}")
        elif len(entries) != count:
            self.add_problem(f"layer_types has {len(entries)} entries for num_hidden_layers {count}")
        elif fixed and entries != default:
            self.add_problem(
                f"layer_types {format_value(entries)}: in this architecture every layer is {default[0]} here"
            )
        else:
            return tuple(entries)
        return tuple(default)

    def read_experts(
        self,
        num_experts: int | None,
        top_k: int | None,
        intermediate_size: int,
        router: RouterSettings,
        layers: tuple[int, ...],
        top_key: str = "num_experts_per_tok",
        **more: Any,
    ) -> ExpertsConfig | None:
        """Read the mixtures of experts.

        Args:
            num_experts: The family's default number of experts. None: the field is required.
            top_k: The family's default number of experts of a token. None: the field is required.
            intermediate_size: Inner size of an expert.
            router: How experts are chosen.
            layers: Numbers of the sparse layers.
            top_key: Field of the number of experts of a token.
            **more: Further fields of `ExpertsConfig`.

        Returns:
            None if there are no experts, or no sparse layers.
        """
        # The number of experts has two names.
        counts = {}
        for key in ("num_local_experts", "num_experts"):
            if key in self:
                counts[key] = self.integer(key, num_experts, minimum=0)
        if len(set(counts.values())) > 1:
            self.add_problem(
                f"num_local_experts {counts['num_local_experts']} and num_experts {counts['num_experts']} are two "
                "names of one number"
            )
        if counts:
            num_experts = list(counts.values())[0]
        else:
            num_experts = self.integer("num_experts", num_experts, minimum=0)
        top_k = self.integer(top_key, top_k)
        self.ignore("num_experts", "num_local_experts", "router_aux_loss_coef")
        self.must_be_off("output_router_logits", "moe.balance adds a balance loss")
        if 0 < num_experts < top_k:
            self.add_problem(f"{top_key} {top_k} of {num_experts} experts")
        if not num_experts or not layers:
            return None
        if router.num_groups > 1:
            self._check_groups(num_experts, top_k, router)
        return ExpertsConfig(num_experts, top_k, intermediate_size, router, layers, **more)

    def _check_groups(self, num_experts: int, top_k: int, router: RouterSettings) -> None:
        """Check that groups of experts have one size, and that the chosen groups have enough experts."""
        group_size = num_experts // router.num_groups
        if num_experts % router.num_groups or group_size < 2:
            self.add_problem(
                f"n_group {router.num_groups} of {num_experts} experts: must divide them into groups of two or more"
            )
        elif router.num_top_groups > router.num_groups or router.num_top_groups * group_size < top_k:
            self.add_problem(
                f"topk_group {router.num_top_groups} of {router.num_groups} groups of {group_size} experts: a token "
                f"goes to {top_k} experts"
            )

    def read_window(self) -> int | None:
        """Read the sliding window. null means none. If the key is missing, it is 4096, as in transformers."""
        return self.optional_integer("sliding_window", None if "sliding_window" in self else 4096)

    def check_window(self, layer_types: tuple[str, ...], window: int | None) -> int | None:
        """Return the window if a layer is SLIDING, else None. A SLIDING layer without a window is a problem."""
        if SLIDING not in layer_types:
            return None
        if window is None:
            self.add_problem("layer_types has sliding_attention, but no sliding_window is set")
        return window

    def read_text_tower(self, architecture: str, model: Any, vision: bool = False) -> ModelConfig:
        """Read the text model of a multimodal model.

        Args:
            architecture: Architecture of the multimodal model.
            model: Class of the model, a `TextTower`.
            vision: Whether to read the vision tower too.
        """
        config = self._read_text_config(architecture, model)
        if not vision:
            return config
        if model.vision_tower is None:
            self.add_problem("images: dtrain trains this architecture on text only")
            return config
        return replace(config, vision=model.vision_tower.read(self, config.hidden_size))

    def _read_text_config(self, architecture: str, model: Any) -> ModelConfig:
        """Read `text_config`, with a few fields of the top level."""
        self.ignore(*_OTHER_PARTS)
        text = self.get("text_config") or {}
        if not text and model.allows_flat_config:
            return replace(model.read(self), architecture=architecture, is_text_tower=True)
        if not isinstance(text, dict):
            self.add_problem(f"text_config {format_value(text)} is no object")
            text = {}
        # The end-of-turn tokens of these files are at the top level, which overrides the text model's.
        overrides = {}
        for key in ("eos_token_id", "torch_dtype", "dtype"):
            value = self.get(key)
            if value is not None:
                overrides[key] = value
        is_tied = model.is_tied_by_default
        if self.get("tie_word_embeddings") is not None:
            is_tied = self.flag("tie_word_embeddings", model.is_tied_by_default)
            if text.get("tie_word_embeddings", is_tied) != is_tied:
                self.add_problem("tie_word_embeddings is not the same at the top and in text_config")
        self.refuse_the_rest()
        inner = ModelFields({**text, **overrides}, self.problems, prefix="text_config.")
        config = model.read(inner.with_defaults({"tie_word_embeddings": is_tied}))
        return replace(config, architecture=architecture, is_text_tower=True)
