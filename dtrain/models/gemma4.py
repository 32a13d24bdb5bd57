"""Gemma 4's text models (E2B, E4B, 31B, 26B-A4B), alone or as the text tower of a multimodal checkpoint.

Full layers have heads of another size than sliding ones, and may take values from the keys' projection; heads of q, k
and v are normed. The last layers have no keys of their own: each reads those of the last layer of its type that has,
which hands them on as values, whole under a kernel that gathers them. A second table of embeddings has columns for each
layer (`embed_tokens_per_layer`), which a gate in the layer multiplies. What leaves a layer is multiplied by its factor.
Experts stand beside a layer's MLP, with norms and a router of their own, in a block that the files do not name.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.models.common.config import (
    FULL,
    SLIDING,
    ExpertsConfig,
    KVHeads,
    ModelConfig,
    PerLayerEmbeddings,
    Rope,
    RouterSettings,
)
from dtrain.models.common.config_fields import Fields, format_value
from dtrain.models.common.decoder import DECODER_PLAN, QK_NORMS, Attention, Decoder
from dtrain.models.common.functions import ACTIVATIONS, gated_activation, normalize_rms, round_scale
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import AdapterContext, DecodingCache, LayerContext, PlacedFeatures, Rotary
from dtrain.models.common.model_fields import ModelFields
from dtrain.models.common.moe import Choose, Router, SparseMLP
from dtrain.models.common.rope_config import ROPE_KINDS, read_rope_object
from dtrain.models.common.tower import TextTower
from dtrain.models.gemma3 import Gemma3Layer
from dtrain.models.olmo import OlmoRMSNorm
from dtrain.models.vision.gemma4 import Gemma4Vision
from dtrain.parallel.tensor import VocabEmbedding

Keys = tuple[Tensor, Tensor]  # of one layer, as the kernel gathers them
# What published checkpoints may leave out.
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


class Gemma4Attention(Attention):
    """Attention of a layer with keys and values of its own, or over those of layer `source`. hands_on: whether later
    layers read this one's."""

    qk_norm = OlmoRMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.source, self.eps = config.kv_sources[index], config.rms_norm_eps
        self.hands_on = self.source == index and index in config.kv_sources[index + 1 :]
        self.tied = config.kv_heads_of(config.layer_types[index]).is_tied
        if self.source != index:
            del self.k_proj, self.k_norm
        if self.source != index or self.tied:
            del self.v_proj

    def project_keys(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project_keys`; of a layer without keys nothing"""
        if self.source != self.index:
            return ()
        heads = -1, self.head_dim
        k = self.k_proj(hidden, adapters).unflatten(-1, heads)  # [B, S, kv, hd]
        v = k if self.tied else self.v_proj(hidden, adapters).unflatten(-1, heads)
        return self.norm_and_rotate(k, self.k_norm, rotary), normalize_rms(v, self.eps)

    def among(
        self, q: Tensor, fresh: tuple[Tensor, ...], mask: Any, cache: DecodingCache | None, handed: Keys | None
    ) -> tuple[Tensor, Keys | None]:
        """q [B, S, H, hd], and either fresh k and v [B, S, kv, hd] of this layer or those of `source`, handed on ->
        [B, S, H · hd], and the keys and values for later layers, where it has some to hand on"""
        if cache is not None:
            k, v = handed or fresh
            out = cache.attend(self.source, q, k, v, self.scale, is_stored=handed is not None)
            return out.flatten(2), (k, v) if self.hands_on else None
        if handed is None:
            k, v = fresh
            if not self.hands_on:
                return self.kernel(q, k, v, mask, self.scale).flatten(2), None
            handed = self.kernel.begin_gather(k, v, mask)()
        k, v = handed
        return self.kernel.over(q, k, v, mask, self.scale).flatten(2), (k, v) if self.hands_on else None


class Gemma4Router(Router):
    """A router over normed states, and a factor of each expert's weight."""

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__(config, sizes)
        del self.weight
        self.proj = Linear(config.hidden_size, sizes.num_experts, bias=False)
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(sizes.num_experts))
        self.eps = config.rms_norm_eps

    def logits(self, x: Tensor, adapters: AdapterContext | None) -> Tensor:
        return cast(Tensor, self.proj(x, adapters))

    def route_tokens(
        self, x: Tensor, choose: Choose | None, adapters: AdapterContext | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Override `Router.route_tokens`: x [T, D] -> [T, k], [T, k], [T, E]"""
        scaled = normalize_rms(x, self.eps) * self.local("scale") * x.shape[-1] ** -0.5
        chosen, weights, shares = super().route_tokens(scaled, choose, adapters)
        return chosen, weights * self.local("per_expert_scale")[chosen], shares


class Gemma4Experts(SparseMLP):
    """Experts that see normed states, and are routed by the layer's own."""

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__(config, sizes)
        del self.gate
        self.router = Gemma4Router(config, sizes)
        self.pre_feedforward_layernorm_2 = OlmoRMSNorm(config.hidden_size, config.rms_norm_eps)

    def route(self, x: Tensor, choose: Choose | None, adapters: AdapterContext | None) -> tuple[Tensor, Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor, Tensor], self.router(x, choose, adapters))

    def expert_input(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.pre_feedforward_layernorm_2(x))


class Gemma4Layer(Gemma3Layer):
    """Decoder layer with each residual branch between two norms, the last one the layer's own embeddings. sparse:
    experts, where it has some."""

    attention, norm = Gemma4Attention, OlmoRMSNorm
    self_attn: Gemma4Attention
    sparse: Gemma4Experts
    layer_scalar: Tensor

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.register_buffer("layer_scalar", torch.empty(1))
        self.is_sparse = config.is_sparse(index)
        if self.is_sparse and config.experts is not None:
            self.sparse = Gemma4Experts(config, config.experts)
            self.post_feedforward_layernorm_1 = OlmoRMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = OlmoRMSNorm(size, eps)
        if config.per_layer_embeddings is not None:
            self.activation = ACTIVATIONS[config.hidden_act]
            self.per_layer_input_gate = Linear(size, config.per_layer_embeddings.size, bias=False)
            self.per_layer_projection = Linear(config.per_layer_embeddings.size, size, bias=False)
            self.post_per_layer_input_norm = OlmoRMSNorm(size, eps)

    def after_attention(  # type: ignore[override]  # compiled parts get tensors first, so the layer's embeddings come before
        self,
        hidden: Tensor,
        adapters: AdapterContext | None,
        attended: Tensor,
        own: Tensor | None = None,
        context: LayerContext | None = None,
    ) -> Tensor:
        """Override `Layer.after_attention`: hidden [B, S, D], attended [B, S, H · hd] -> [B, S, D]; own: the layer's
        embeddings [B, S, P]"""
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended, adapters))
        del attended  # the MLP needs its memory
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden), adapters)
        if context is not None:  # a sparse layer
            routed = self.sparse(hidden, context.is_real, context.routing, adapters)
            of_experts = self.post_feedforward_layernorm_2(routed)
            del routed
            mixed = self.post_feedforward_layernorm_1(mixed) + of_experts
        hidden = hidden + self.post_feedforward_layernorm(mixed)
        if own is not None:
            seen = gated_activation(self.per_layer_input_gate(hidden, adapters), own, self.activation)
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(seen, adapters))
        return hidden * self.layer_scalar.to(hidden.dtype)

    def forward(  # type: ignore[override]  # its decoder hands it more, and takes more
        self, hidden: Tensor, context: LayerContext, own: Tensor | None = None, handed: Keys | None = None
    ) -> tuple[Tensor, Keys | None]:
        """Compute the layer.

        Args:
            hidden: [B, S, D].
            context: The layer's context.
            own: The layer's own embeddings, [B, S, P].
            handed: Keys and values of an earlier layer, if this one has none.

        Returns:
            The output [B, S, D], and this layer's keys and values if later layers read them.
        """
        rotary, mask, cache, adapters = context.rotary, context.mask, context.cache, context.adapters
        before, after = (
            self.regions
            if self.regions is not None and cache is None
            else (self.before_attention, self.after_attention)
        )
        if self.keys_first is not None and cache is None and handed is None:
            before, exchange = self.keys_first.start_exchange(mask)
            q, *fresh = before(hidden, adapters, *rotary)
            handed = exchange.wait()
        else:
            q, *fresh = before(hidden, adapters, *rotary)
        attended, keys = self.self_attn.among(q, tuple(fresh), mask, cache, handed)
        if self.is_sparse:
            return after(hidden, adapters, attended, own, context), keys
        return after(hidden, adapters, attended, *(() if own is None else (own,))), keys


class Gemma4Decoder(Decoder):
    """A decoder whose layers hand on keys and values, and have embeddings of their own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, Gemma4Layer, OlmoRMSNorm, embed_scale=config.hidden_size**0.5)
        if config.per_layer_embeddings is not None:
            width = config.num_hidden_layers * config.per_layer_embeddings.size
            self.embed_tokens_per_layer = VocabEmbedding(
                config.per_layer_embeddings.vocab_size, width, config.pad_token_id
            )
            self.per_layer_model_projection = Linear(config.hidden_size, width, bias=False)
            self.per_layer_projection_norm = OlmoRMSNorm(config.per_layer_embeddings.size, config.rms_norm_eps)

    def run_layers(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        layer_contexts: list[LayerContext],
        is_bare: bool,
        placed: PlacedFeatures | None = None,
    ) -> Tensor:
        """Override `Decoder.run_layers`: [B, S, D] -> [B, S, D]. Image tokens have the padding token's columns."""
        if placed is not None:
            input_ids = input_ids.masked_fill(placed.is_image, self.config.pad_token_id or 0)
        own = self.per_layer(hidden, input_ids, is_bare, layer_contexts[0].adapters)
        sources = self.config.kv_sources
        made: dict[int, Keys] = {}  # by the number of the layer that made them
        for index, (layer, context) in enumerate(zip(self.layers, layer_contexts, strict=True)):
            run = layer.forward if is_bare else layer
            hidden, keys = run(hidden, context, own[index], made.get(sources[index]))
            if keys is not None:
                made[index] = keys
        return hidden

    def per_layer(
        self, hidden: Tensor, input_ids: Tensor, bare: bool, adapters: AdapterContext | None
    ) -> tuple[Tensor | None, ...]:
        """The embeddings [B, S, P] of each layer, from the table and from those of the model, hidden [B, S, D], which
        sequence parallel has cut as the table's; bare: as in `DecodingCache`."""
        sizes = self.config.per_layer_embeddings
        if sizes is None:
            return (None,) * self.config.num_hidden_layers
        look_up = self.embed_tokens_per_layer.forward if bare else self.embed_tokens_per_layer
        embedded = look_up(input_ids) * round_scale(sizes.size**0.5, hidden.dtype)  # [B, S, L · P]
        projected = self.per_layer_model_projection(hidden, adapters) * self.config.hidden_size**-0.5
        normed = self.per_layer_projection_norm(projected.unflatten(-1, (-1, sizes.size)))  # [B, S, L, P]
        return ((normed + embedded.unflatten(-1, (-1, sizes.size))) * 2**-0.5).unbind(2)


class Gemma4ForCausalLM(TextTower):
    tower_prefixes = ("model.language_model.",)
    is_tied_by_default = True
    initial_values = {"*norm_[12].weight": "ones", "*scale": "ones", **TextTower.initial_values}
    carried_patterns = (r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",)
    vision_tower = Gemma4Vision

    plan = {
        **DECODER_PLAN,
        "model.embed_tokens_per_layer": "vocab_embedding",
        "model.per_layer_model_projection": "sequence",
        "model.per_layer_projection_norm": "sequence",
        **QK_NORMS,
        "model.layers.*.pre_feedforward_layernorm": "sequence",
        "model.layers.*.post_feedforward_layernorm": "sequence",
        "model.layers.*.post_feedforward_layernorm_1": "sequence",
        "model.layers.*.post_feedforward_layernorm_2": "sequence",
        "model.layers.*.sparse": "block",
        "model.layers.*.sparse.router": "router",
        "model.layers.*.sparse.router.proj": "router",
        "model.layers.*.sparse.pre_feedforward_layernorm_2": "router",
        "model.layers.*.sparse.experts.gate_proj": "expert_colwise",
        "model.layers.*.sparse.experts.up_proj": "expert_colwise",
        "model.layers.*.sparse.experts.down_proj": "expert_rowwise",
        "model.layers.*.per_layer_input_gate": "sequence",
        "model.layers.*.per_layer_projection": "sequence",
        "model.layers.*.post_per_layer_input_norm": "sequence",
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config, Gemma4Decoder(config))

    def text_name(self, name: str) -> str:
        return name.replace(".sparse.", ".")

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """The other towers, and what the files have of keys and values in layers that read another's."""
        prefix = r"model\.language_model\." if self.config.is_text_tower else r"model\."
        sharing = [index for index, source in enumerate(self.config.kv_sources) if source != index]
        unread = rf"{prefix}layers\.({'|'.join(map(str, sharing))})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        return (*super().carried_checkpoint_names, *((unread,) if sharing else ()))

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        fields = fields.with_defaults(_DEFAULTS)
        fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")  # of experts, which may be off
        images_see = fields.get("use_bidirectional_attention") == "vision"  # among an image's tokens; text is causal
        if images_see:
            fields = fields.without("use_bidirectional_attention")
        own: dict[str, Any] = {"activation": ("hidden_activation", None), "head_dim": 256, "bias": False}
        common = fields.read_common(cls.__name__, pad=0, tie=True, **own)
        common["attention_scale"] = 1.0  # q and k are normed, and their weights trained to it
        count = common["num_hidden_layers"]
        types = fields.read_layer_types(count, [SLIDING if (index + 1) % 6 else FULL for index in range(count)])
        types = (*types[:-1], FULL)  # as transformers has it, whatever is written
        heads = _read_heads(fields, types, common)
        shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
        if missing := sorted(set(types) - set(types[: max(0, count - shared)])):
            fields.add_problem(
                f"num_kv_shared_layers {shared} of {count}: no layer before these has keys of {' and '.join(missing)}"
            )
            shared = 0
        size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
        rows = fields.integer("vocab_size_per_layer_input", 262_144)
        if size and rows < common["vocab_size"]:
            fields.add_problem(
                f"vocab_size_per_layer_input {rows} is less than vocab_size {common['vocab_size']}: the tokens beyond "
                "it have no row"
            )
        experts = None
        if fields.flag("enable_moe_block", False):  # beside the MLP of every layer
            inner, layers = fields.integer("moe_intermediate_size"), tuple(range(count))
            router = RouterSettings(is_normalized=True)
            experts = fields.read_experts(
                None, None, inner, router, layers, "top_k_experts", is_stacked=True, has_dense_mlp=True
            )
        values = {
            **common,
            "layer_types": types,
            "sliding_window": fields.check_window(types, fields.read_window()),
            "ropes": _read_ropes(fields, common["max_position_embeddings"], heads),
            "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
            "kv_heads_by_type": heads,
            "num_kv_shared_layers": shared,
            "kv_shared_mlp_factor": 2 if fields.flag("use_double_wide_mlp", False) else 1,
            "per_layer_embeddings": PerLayerEmbeddings(rows, size) if size else None,
            "experts": experts,
            "bidirectional_types": (SLIDING,) if images_see else (),
        }
        fields.refuse_the_rest()
        return ModelConfig(**values)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text tower, described by `text_config`."""


def _read_heads(fields: ModelFields, types: tuple[str, ...], common: Mapping[str, Any]) -> dict[str, KVHeads]:
    """Full layers have sizes of their own: `global_head_dim` and `num_global_key_value_heads`, or, where transformers
    has written the file, `per_layer_config`, an object for each layer."""
    tied = fields.flag("attention_k_eq_v", False)
    size = fields.integer("global_head_dim", 512)
    count = fields.optional_integer("num_global_key_value_heads") if tied else None
    fields.ignore("num_global_key_value_heads")  # without attention_k_eq_v it says nothing
    own = {"head_dim": size} | ({} if count is None else {"num_key_value_heads": count})
    written = fields.get("per_layer_config")
    if written is None:
        written = {str(index): own for index, kind in enumerate(types) if kind == FULL}
    words = "must give head_dim and num_key_value_heads, alike in layers of a type"
    problem = f"per_layer_config {format_value(written)}: {words}"
    heads: dict[str, KVHeads] = {}
    for index, kind in enumerate(types):
        values = written.get(str(index), {}) if isinstance(written, dict) else None
        if not isinstance(values, dict) or set(values) - {"head_dim", "num_key_value_heads"}:
            fields.add_problem(problem)
            values = {}
        of_layer = Fields(values, fields.problems, prefix=f"per_layer_config.{index}.")
        key_count = of_layer.integer("num_key_value_heads", common["num_key_value_heads"])
        head_size = of_layer.integer("head_dim", common["head_dim"])
        key_heads = KVHeads(key_count, head_size, head_size, tied and kind == FULL)
        if heads.setdefault(kind, key_heads) != key_heads:
            fields.add_problem(problem)
    queries = common["num_attention_heads"]
    for kind, key_heads in heads.items():
        if queries % key_heads.count:
            fields.add_problem(
                f"num_attention_heads {queries} is not a multiple of the {key_heads.count} KV heads of {kind}"
            )
        if key_heads.head_dim % 2:
            fields.add_problem(f"head_dim {key_heads.head_dim} of {kind} is odd, rotary embeddings need pairs")
    return heads


def _read_ropes(fields: ModelFields, max_positions: int, heads: Mapping[str, KVHeads]) -> dict[str, Rope]:
    """The rope of full layers turns a part of each head."""
    written = fields.get("rope_parameters")
    defaults = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }
    nested = defaults if written is None else written
    if not isinstance(nested, dict) or set(nested) - set(defaults) or set(heads) - set(nested):
        fields.add_problem(f"rope_parameters {format_value(written)}: must be nested under {FULL} and {SLIDING}")
        nested = defaults
    ropes = {}
    for kind in heads:
        values, where = nested[kind], f"rope_parameters.{kind}"
        share = 1.0 if isinstance(values, dict) and values.get("rope_type") == "proportional" else None
        ropes[kind] = read_rope_object(
            fields, where, values, 10_000.0, max_positions, (*ROPE_KINDS, "proportional"), share=share
        )
    return ropes
