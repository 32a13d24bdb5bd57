"""`ModelFields`: the fields of a config.json, and what families read alike: sizes, types of layers, windows, experts, a
text tower. Imports no torch."""

from dataclasses import replace
from typing import Any

from dtrain.models.common.config import FULL, SLIDING, ExpertsConfig, ModelConfig, RouterSettings
from dtrain.models.common.config_fields import Fields, format_value
from dtrain.models.common.rope_config import ROPE_KINDS, Sections, read_rope

# transformers' names of activations, and ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",  # the same formula, written out
    "relu": "relu",
}
# What files of multimodal models say of their other parts.
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
        """Read what every family reads in the same way; the keywords are its own defaults (activation: the key, its
        default; bias: that of `attention_bias`, of all four projections, None where it is not read)."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        # A missing key takes the family's default, null means one for each query head.
        kv_heads = self.integer("num_key_value_heads", heads if "num_key_value_heads" in self else kv_heads or heads)
        if heads % kv_heads:
            self.add_problem(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim is None and self.get("head_dim") is None and hidden % heads:
            self.add_problem(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = self.integer("head_dim", head_dim or max(hidden // heads, 1))
        if head_dim % 2:
            self.add_problem(f"head_dim {head_dim} is odd, rotary embeddings need pairs")
        vocab = self.integer("vocab_size")
        pad = self.token_id("pad_token_id", pad)
        if pad is not None and not -vocab <= pad < vocab:
            self.add_problem(f"pad_token_id {pad} outside of the vocabulary of {vocab}")
        for key in ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
            self.must_be_off(key, "dropout is not implemented; set it to 0.0")
        self.must_be_off("use_bidirectional_attention", "only causal attention is implemented")
        if self.get("is_causal") not in (None, True):
            self.add_problem(f"is_causal {format_value(self.get('is_causal'))}: only causal attention is implemented")
        biases = {} if bias is None else dict.fromkeys(("qkv_bias", "o_bias"), self.flag("attention_bias", bias))
        return biases | {
            "architecture": architecture,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_hidden_layers": self.integer("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("max_position_embeddings"),
            "hidden_act": _ACTIVATIONS[self.choice(activation[0], tuple(_ACTIVATIONS), activation[1])],
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6, most=1.0),
            # transformers reads 0 as "unset"
            "initializer_range": self.number("initializer_range", 0.02, zero=True, most=100.0) or 0.02,
            "tie_word_embeddings": self.flag("tie_word_embeddings", tie),
            "attention_scale": head_dim**-0.5,
            "bos_token_id": self.token_id("bos_token_id"),
            "eos_token_ids": self.token_ids("eos_token_id"),
            "pad_token_id": pad,
            "dtype": self.dtype(),
        }

    def build_config(
        self,
        share: float | None = None,
        scales_queries: bool = False,
        kinds: tuple[str, ...] = ROPE_KINDS,
        sections: Sections | None = None,
        **values: Any,
    ) -> ModelConfig:
        """Return the config of `values` and the rope that all layers share (share, scales_queries, kinds, sections: as
        of `read_rope`), once no field is left over. Without `layer_types` all layers see the window, or all tokens."""
        if "layer_types" not in values:
            window, count = values.setdefault("sliding_window", None), values["num_hidden_layers"]
            values["layer_types"] = self.read_layer_types(
                count, [FULL if window is None else SLIDING] * count, fixed=True
            )
        positions, head_dim = values["max_position_embeddings"], values["head_dim"]
        rope = read_rope(self, positions, head_dim, share, scales_queries, kinds, sections)
        if rope.kind == "longrope":
            values["max_position_embeddings"] = min(positions, rope.original_max_positions)
        self.refuse_the_rest()
        return ModelConfig(**values, ropes=dict.fromkeys(values["layer_types"], rope))

    def read_layer_types(
        self, count: int, default: list[str], fixed: bool = False, kinds: tuple[str, str] = (FULL, SLIDING)
    ) -> tuple[str, ...]:
        """`layer_types` as written, or the default; where the family fixes them, what is written must agree."""
        written = self.get("layer_types")
        if written is None:
            return tuple(default)
        if not isinstance(written, list) or not all(kind in kinds for kind in written):
            self.add_problem(f"layer_types {format_value(written)}: entries must be {' or '.join(kinds)}")
        elif len(written) != count:
            self.add_problem(f"layer_types has {len(written)} entries for num_hidden_layers {count}")
        elif fixed and written != default:
            self.add_problem(
                f"layer_types {format_value(written)}: in this architecture every layer is {default[0]} here"
            )
        else:
            return tuple(written)
        return tuple(default)

    def read_experts(
        self,
        count: int | None,
        top: int | None,
        inner: int,
        router: RouterSettings,
        layers: tuple[int, ...],
        top_key: str = "num_experts_per_tok",
        **more: Any,
    ) -> ExpertsConfig | None:
        """Read the experts of the sparse `layers`; count, top: the family's own defaults; None: there are no experts,
        or no such layer."""
        named = [self.integer(key, count, minimum=0) for key in ("num_local_experts", "num_experts") if key in self]
        if len({*named}) > 1:
            self.add_problem(f"num_local_experts {named[0]} and num_experts {named[1]} are two names of one number")
        count, top = named[0] if named else self.integer("num_experts", count, minimum=0), self.integer(top_key, top)
        self.ignore("num_experts", "num_local_experts", "router_aux_loss_coef")
        self.must_be_off("output_router_logits", "moe.balance adds a balance loss")
        if 0 < count < top:
            self.add_problem(f"{top_key} {top} of {count} experts")
        if count and layers and router.num_groups > 1:
            self._check_groups(count, top, router)
        return ExpertsConfig(count, top, inner, router, layers, **more) if count and layers else None

    def _check_groups(self, count: int, top: int, router: RouterSettings) -> None:
        """Check that groups of experts are of one size, and that those chosen have enough experts."""
        size = count // router.num_groups
        if count % router.num_groups or size < 2:
            self.add_problem(
                f"n_group {router.num_groups} of {count} experts: must divide them into groups of two or more"
            )
        elif router.num_top_groups > router.num_groups or router.num_top_groups * size < top:
            chosen = f"topk_group {router.num_top_groups} of {router.num_groups} groups of {size} experts"
            self.add_problem(f"{chosen}: a token goes to {top} experts")

    def read_window(self) -> int | None:
        """Read the window: null is none; transformers takes an absent key for 4096, in every family that has one."""
        return self.optional_integer("sliding_window", None if "sliding_window" in self else 4096)

    def check_window(self, layer_types: tuple[str, ...], window: int | None) -> int | None:
        if SLIDING not in layer_types:
            return None
        if window is None:
            self.add_problem("layer_types has sliding_attention, but no sliding_window is set")
        return window

    def read_text_tower(self, architecture: str, model: Any, vision: bool = False) -> ModelConfig:
        """Return what `model`, a `TextTower`, reads of `text_config`, as part of a multimodal model; vision: with what
        its vision tower reads."""
        config = self._text_tower(architecture, model)
        if not vision:
            return config
        if model.vision_tower is None:
            self.add_problem("images: dtrain trains this architecture on text only")
            return config
        return replace(config, vision=model.vision_tower.read(self, config.hidden_size))

    def _text_tower(self, architecture: str, model: Any) -> ModelConfig:
        self.ignore(*_OTHER_PARTS)
        text = self.get("text_config") or {}
        if not text and model.allows_flat_config:
            return replace(model.read(self), architecture=architecture, is_text_tower=True)
        if not isinstance(text, dict):
            self.add_problem(f"text_config {format_value(text)} is no object")
            text = {}
        # The files' own end-of-turn tokens stand at the top, beside those of the text model.
        outer = {key: self.get(key) for key in ("eos_token_id", "torch_dtype", "dtype") if self.get(key) is not None}
        tied = (
            None
            if self.get("tie_word_embeddings") is None
            else self.flag("tie_word_embeddings", model.is_tied_by_default)
        )
        if tied is not None and text.get("tie_word_embeddings", tied) != tied:
            self.add_problem("tie_word_embeddings is not the same at the top and in text_config")
        self.refuse_the_rest()
        inner = ModelFields({**text, **outer}, self.problems, prefix="text_config.")
        config = model.read(
            inner.with_defaults({"tie_word_embeddings": model.is_tied_by_default if tied is None else tied})
        )
        return replace(config, architecture=architecture, is_text_tower=True)
