"""Gemma 4's text models (E2B, E4B, 31B, 26B-A4B), also as the text tower of a multimodal checkpoint.

They differ from Gemma 3 in five ways:

- Full layers have heads of another size than sliding layers, and may take values from the keys' projection. Heads of q,
  k and v are normalised.
- The last layers have no keys and values of their own. Each of them reads the keys and values of the last layer of its
  type that has some. That layer returns them with its output, gathered over cp if the kernel gathers keys.
- A second embedding table (`embed_tokens_per_layer`) has columns for each layer. A gate in the layer multiplies them.
- The output of a layer is multiplied by a factor of the layer (`layer_scalar`).
- Mixtures of experts come in addition to a layer's MLP. They have norms and a router of their own, in a block `sparse`
  that the files do not name.
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
from dtrain.models.common.moe import Choose, RoutedTokens, Router, SparseMLP
from dtrain.models.common.rope_config import ROPE_KINDS, read_rope_object
from dtrain.models.common.tower import TextTower
from dtrain.models.gemma3 import Gemma3Layer
from dtrain.models.olmo import OlmoRMSNorm
from dtrain.models.vision.gemma4 import Gemma4Vision
from dtrain.parallel.tensor import VocabEmbedding

Keys = tuple[Tensor, Tensor]
"""Keys and values of one layer, as the kernel gathers them."""

# Fields that published checkpoints may leave out.
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
    """Attention over the layer's own keys and values, or over those of an earlier layer.

    Attributes:
        source: Number of the layer whose keys and values are read. The layer itself, or an earlier one.
        is_source: Whether later layers read this layer's keys and values.
        is_tied: Whether values come from the keys' projection.
    """

    qk_norm = OlmoRMSNorm

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.source, self.eps = config.kv_sources[index], config.rms_norm_eps
        self.has_keys = self.source == index
        self.is_source = self.has_keys and index in config.kv_sources[index + 1 :]
        self.is_tied = config.kv_heads_of(config.layer_types[index]).is_tied
        if not self.has_keys:
            del self.k_proj, self.k_norm
        if not self.has_keys or self.is_tied:
            del self.v_proj

    def project_keys(self, hidden: Tensor, rotary: Rotary, adapters: AdapterContext | None) -> tuple[Tensor, ...]:
        """Override `Attention.project_keys`. Returns nothing in a layer without keys of its own."""
        if not self.has_keys:
            return ()
        heads = -1, self.head_dim
        k = self.k_proj(hidden, adapters).unflatten(-1, heads)  # [B, S, kv, hd]
        v = k if self.is_tied else self.v_proj(hidden, adapters).unflatten(-1, heads)
        return self.norm_and_rotate(k, self.k_norm, rotary), normalize_rms(v, self.eps)

    def attend(
        self, q: Tensor, own: tuple[Tensor, ...], mask: Any, cache: DecodingCache | None, shared: Keys | None
    ) -> tuple[Tensor, Keys | None]:
        """Compute attention over own keys and values, or over those of an earlier layer.

        Args:
            q: [B, S, H, hd].
            own: Keys and values of this layer, [B, S, kv, hd] each. Empty in a layer without any.
            mask: The kernel's form of the mask.
            cache: KV cache, which attends in place of the kernel.
            shared: Keys and values that are gathered already: those of layer `source`, or this layer's own if they were
                gathered while queries were projected. None otherwise.

        Returns:
            [B, S, H · hd], and the keys and values for later layers, or None if no later layer reads them.
        """
        if cache is not None:
            k, v = shared or own
            out = cache.attend(self.source, q, k, v, self.scale, is_stored=shared is not None)
        elif shared is None and not self.is_source:
            k, v = own
            out = self.kernel(q, k, v, mask, self.scale)
        else:
            if shared is None:
                # Gathered once, for this layer and the later ones.
                own_k, own_v = own
                shared = self.kernel.begin_gather(own_k, own_v, mask)()
            k, v = shared
            out = self.kernel.over(q, k, v, mask, self.scale)
        return out.flatten(2), (k, v) if self.is_source else None


class Gemma4Router(Router):
    """Router that normalises and scales its input, and multiplies the weight of each expert by a factor.

    Attributes:
        proj: Projection to the logits, in place of `Router.weight`.
        scale: Factor of each element of the input, [D].
        per_expert_scale: Factor of each expert's weight, [E].
    """

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__(config, sizes)
        del self.weight
        self.proj = Linear(config.hidden_size, sizes.num_experts, bias=False)
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(sizes.num_experts))
        self.eps = config.rms_norm_eps

    def logits(self, x: Tensor, adapters: AdapterContext | None) -> Tensor:
        """Override `Router.logits`: [T, D] -> [T, E]."""
        return cast(Tensor, self.proj(x, adapters))

    def route_tokens(self, x: Tensor, choose: Choose | None, adapters: AdapterContext | None) -> RoutedTokens:
        """Override `Router.route_tokens`."""
        scaled = normalize_rms(x, self.eps) * self.local("scale") * x.shape[-1] ** -0.5
        routed = super().route_tokens(scaled, choose, adapters)
        return routed._replace(weights=routed.weights * self.local("per_expert_scale")[routed.experts])


class Gemma4Experts(SparseMLP):
    """Mixture of experts whose router sees the residual stream, and whose experts see normalised states."""

    def __init__(self, config: ModelConfig, sizes: ExpertsConfig):
        super().__init__(config, sizes)
        del self.gate
        self.router = Gemma4Router(config, sizes)
        self.pre_feedforward_layernorm_2 = OlmoRMSNorm(config.hidden_size, config.rms_norm_eps)

    def route(self, x: Tensor, choose: Choose | None, adapters: AdapterContext | None) -> RoutedTokens:
        """Override `SparseMLP.route`: the router has another name."""
        return cast(RoutedTokens, self.router(x, choose, adapters))

    def expert_input(self, x: Tensor) -> Tensor:
        """Override `SparseMLP.expert_input`."""
        return cast(Tensor, self.pre_feedforward_layernorm_2(x))


class Gemma4Layer(Gemma3Layer):
    """Decoder layer whose residual branches (attention, MLP, the layer's embeddings) are each between two norms.

    Attributes:
        sparse: Mixture of experts, whose output is added to that of the MLP. Not set in a dense layer.
        layer_scalar: Factor of the layer's output.
    """

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

    def after_attention(  # type: ignore[override]  # compiled parts take tensors first, so the embeddings come earlier
        self,
        hidden: Tensor,
        adapters: AdapterContext | None,
        attended: Tensor,
        layer_embeddings: Tensor | None = None,
        context: LayerContext | None = None,
    ) -> Tensor:
        """Override `Layer.after_attention`.

        Args:
            hidden: The layer's input, [B, S, D].
            adapters: Whether adapters take part, and their dropout.
            attended: Output of the attention, [B, S, H · hd].
            layer_embeddings: The layer's own embeddings, [B, S, P]. None in a model without them.
            context: The layer's context in sparse layers.
        """
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended, adapters))
        del attended  # free its memory for the MLP
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden), adapters)
        if context is not None:  # a sparse layer
            routed = self.sparse(hidden, context.is_real, context.routing, adapters)
            of_experts = self.post_feedforward_layernorm_2(routed)
            del routed
            mixed = self.post_feedforward_layernorm_1(mixed) + of_experts
        hidden = hidden + self.post_feedforward_layernorm(mixed)
        if layer_embeddings is not None:
            inner = gated_activation(self.per_layer_input_gate(hidden, adapters), layer_embeddings, self.activation)
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(inner, adapters))
        return hidden * self.layer_scalar.to(hidden.dtype)

    def forward(  # type: ignore[override]  # its decoder passes more, and gets more
        self,
        hidden: Tensor,
        context: LayerContext,
        layer_embeddings: Tensor | None = None,
        shared: Keys | None = None,
    ) -> tuple[Tensor, Keys | None]:
        """Compute the layer.

        Args:
            hidden: [B, S, D].
            context: The layer's context.
            layer_embeddings: The layer's own embeddings, [B, S, P].
            shared: Keys and values of an earlier layer, if this layer has none.

        Returns:
            The output [B, S, D], and this layer's keys and values if later layers read them.
        """
        rotary, mask, cache, adapters = context.rotary, context.mask, context.cache, context.adapters
        before, after = self.before_attention, self.after_attention
        if self.regions is not None and cache is None:
            before, after = self.regions
        exchange = None
        if self.keys_first is not None and cache is None and shared is None:
            before, exchange = self.keys_first.start_exchange(mask)
        q, *own = before(hidden, adapters, *rotary)
        if exchange is not None:
            shared = exchange.wait()
        attended, keys = self.self_attn.attend(q, tuple(own), mask, cache, shared)
        if self.is_sparse:
            return after(hidden, adapters, attended, layer_embeddings, context), keys
        # A compiled part takes tensors only, so embeddings that do not exist are left out.
        embeddings = () if layer_embeddings is None else (layer_embeddings,)
        return after(hidden, adapters, attended, *embeddings), keys


class Gemma4Decoder(Decoder):
    """Decoder whose layers pass keys and values on to later layers, and have embeddings of their own."""

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
        skips_hooks: bool,
        placed: PlacedFeatures | None = None,
    ) -> Tensor:
        """Override `Decoder.run_layers`. Image tokens have the layer embeddings of the padding token."""
        if placed is not None:
            input_ids = input_ids.masked_fill(placed.is_image, self.config.pad_token_id or 0)
        embeddings = self.layer_embeddings(hidden, input_ids, skips_hooks, layer_contexts[0].adapters)
        sources = self.config.kv_sources
        keys_of_layer: dict[int, Keys] = {}
        for index, (layer, context) in enumerate(zip(self.layers, layer_contexts, strict=True)):
            run_layer = layer.forward if skips_hooks else layer
            hidden, keys = run_layer(hidden, context, embeddings[index], keys_of_layer.get(sources[index]))
            if keys is not None:
                keys_of_layer[index] = keys
        return hidden

    def layer_embeddings(
        self, hidden: Tensor, input_ids: Tensor, skips_hooks: bool, adapters: AdapterContext | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the embeddings of each layer, [B, S, P] each.

        They are the sum of a row of the second table and of a projection of the model's embeddings.

        Args:
            hidden: The model's embeddings, [B, S, D], or [B, S/tp, D] under sequence parallel.
            input_ids: [B, S].
            skips_hooks: As in `run_layers`.
            adapters: Whether adapters take part, and their dropout.

        Returns:
            One entry for each layer, [B, S, P] or [B, S/tp, P]. None in a model without the second table.
        """
        sizes = self.config.per_layer_embeddings
        if sizes is None:
            return (None,) * self.config.num_hidden_layers
        look_up = self.embed_tokens_per_layer.forward if skips_hooks else self.embed_tokens_per_layer
        embedded = look_up(input_ids) * round_scale(sizes.size**0.5, hidden.dtype)  # [B, S, L · P]
        projected = self.per_layer_model_projection(hidden, adapters) * self.config.hidden_size**-0.5
        normed = self.per_layer_projection_norm(projected.unflatten(-1, (-1, sizes.size)))  # [B, S, L, P]
        return ((normed + embedded.unflatten(-1, (-1, sizes.size))) * 2**-0.5).unbind(2)


class Gemma4ForCausalLM(TextTower):
    """Gemma 4 as a text model. Also the base of the text tower of multimodal checkpoints."""

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
        """Override `TextTower.text_name`: files do not name the block of the experts."""
        return name.replace(".sparse.", ".")

    @property
    def carried_checkpoint_names(self) -> tuple[str, ...]:
        """Override `CausalLM.carried_checkpoint_names`.

        Files contain unused projections of keys and values for the layers that read another layer's.
        """
        carried = super().carried_checkpoint_names
        sharing = [str(index) for index, source in enumerate(self.config.kv_sources) if source != index]
        if not sharing:
            return carried
        prefix = r"model\.language_model\." if self.config.is_text_tower else r"model\."
        unused = rf"{prefix}layers\.({'|'.join(sharing)})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        return (*carried, unused)

    @classmethod
    def read(cls, fields: ModelFields) -> ModelConfig:
        """Override `CausalLM.read`."""
        fields = fields.with_defaults(_DEFAULTS)
        fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")  # read below if experts are switched on
        # "vision" means that the tokens of an image see one another. Text stays causal.
        has_bidirectional_images = fields.get("use_bidirectional_attention") == "vision"
        if has_bidirectional_images:
            fields = fields.without("use_bidirectional_attention")
        common = fields.read_common(
            cls.__name__, activation=("hidden_activation", None), head_dim=256, bias=False, pad=0, tie=True
        )
        common["attention_scale"] = 1.0  # q and k are normalised, and the norms' weights include the scale
        num_layers = common["num_hidden_layers"]
        default_types = [SLIDING if (index + 1) % 6 else FULL for index in range(num_layers)]
        layer_types = fields.read_layer_types(num_layers, default_types)
        layer_types = (*layer_types[:-1], FULL)  # transformers makes the last layer full, whatever the file says
        heads = _read_heads(fields, layer_types, common)
        values = {
            **common,
            "layer_types": layer_types,
            "kv_heads_by_type": heads,
            "num_kv_shared_layers": _read_num_shared_layers(fields, layer_types),
            "per_layer_embeddings": _read_per_layer_embeddings(fields, common["vocab_size"]),
            "experts": _read_experts(fields, num_layers),
            "sliding_window": fields.check_window(layer_types, fields.read_window()),
            "ropes": _read_ropes(fields, common["max_position_embeddings"], heads),
            "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
            "kv_shared_mlp_factor": 2 if fields.flag("use_double_wide_mlp", False) else 1,
            "bidirectional_types": (SLIDING,) if has_bidirectional_images else (),
        }
        fields.refuse_the_rest()
        return ModelConfig(**values)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Text tower of a multimodal checkpoint. `text_config` describes it."""


def _read_num_shared_layers(fields: ModelFields, layer_types: tuple[str, ...]) -> int:
    """Read the number of the last layers that read an earlier layer's keys and values."""
    num_layers = len(layer_types)
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    first_types = layer_types[: max(0, num_layers - num_shared)]
    missing = sorted(set(layer_types) - set(first_types))
    if missing:
        fields.add_problem(
            f"num_kv_shared_layers {num_shared} of {num_layers}: no layer before these has keys of "
            f"{' and '.join(missing)}"
        )
        return 0
    return num_shared


def _read_per_layer_embeddings(fields: ModelFields, vocab_size: int) -> PerLayerEmbeddings | None:
    """Read the sizes of the second embedding table. None if its size is 0."""
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if not size:
        return None
    if rows < vocab_size:
        fields.add_problem(
            f"vocab_size_per_layer_input {rows} is less than vocab_size {vocab_size}: the tokens beyond it have no row"
        )
    return PerLayerEmbeddings(rows, size)


def _read_experts(fields: ModelFields, num_layers: int) -> ExpertsConfig | None:
    """Read the experts, which all layers have in addition to their MLP. None if they are switched off."""
    if not fields.flag("enable_moe_block", False):
        return None
    return fields.read_experts(
        num_experts=None,
        top_k=None,
        intermediate_size=fields.integer("moe_intermediate_size"),
        router=RouterSettings(is_normalized=True),
        layers=tuple(range(num_layers)),
        top_key="top_k_experts",
        is_stacked=True,
        has_dense_mlp=True,
    )


def _read_heads(fields: ModelFields, types: tuple[str, ...], common: Mapping[str, Any]) -> dict[str, KVHeads]:
    """Read the heads of keys and values of each layer type.

    Full layers have sizes of their own: `global_head_dim` and `num_global_key_value_heads`. A file that transformers
    has written contains `per_layer_config` instead, an object for each layer.
    """
    is_tied = fields.flag("attention_k_eq_v", False)
    of_full_layers = {"head_dim": fields.integer("global_head_dim", 512)}
    num_full_heads = fields.optional_integer("num_global_key_value_heads") if is_tied else None
    fields.ignore("num_global_key_value_heads")  # without attention_k_eq_v, it has no effect
    if num_full_heads is not None:
        of_full_layers["num_key_value_heads"] = num_full_heads
    by_layer = fields.get("per_layer_config")
    if by_layer is None:
        by_layer = {str(index): of_full_layers for index, kind in enumerate(types) if kind == FULL}
    problem = (
        f"per_layer_config {format_value(by_layer)}: must give head_dim and num_key_value_heads, alike in layers of a "
        "type"
    )
    heads: dict[str, KVHeads] = {}
    for index, kind in enumerate(types):
        values = by_layer.get(str(index), {}) if isinstance(by_layer, dict) else None
        if not isinstance(values, dict) or set(values) - {"head_dim", "num_key_value_heads"}:
            fields.add_problem(problem)
            values = {}
        of_layer = Fields(values, fields.problems, prefix=f"per_layer_config.{index}.")
        num_heads = of_layer.integer("num_key_value_heads", common["num_key_value_heads"])
        head_dim = of_layer.integer("head_dim", common["head_dim"])
        kv_heads = KVHeads(num_heads, head_dim, head_dim, is_tied and kind == FULL)
        if heads.setdefault(kind, kv_heads) != kv_heads:
            fields.add_problem(problem)
    num_queries = common["num_attention_heads"]
    for kind, kv_heads in heads.items():
        if num_queries % kv_heads.count:
            fields.add_problem(
                f"num_attention_heads {num_queries} is not a multiple of the {kv_heads.count} KV heads of {kind}"
            )
        if kv_heads.head_dim % 2:
            fields.add_problem(f"head_dim {kv_heads.head_dim} of {kind} is odd, rotary embeddings need pairs")
    return heads


def _read_ropes(fields: ModelFields, max_positions: int, heads: Mapping[str, KVHeads]) -> dict[str, Rope]:
    """Read the rope of each layer type. Full layers rotate a part of each head."""
    written = fields.get("rope_parameters")
    defaults = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }
    nested = defaults if written is None else written
    if not isinstance(nested, dict) or set(nested) - set(defaults) or set(heads) - set(nested):
        fields.add_problem(f"rope_parameters {format_value(written)}: must be nested under {FULL} and {SLIDING}")
        nested = defaults
    kinds = (*ROPE_KINDS, "proportional")
    ropes = {}
    for kind in heads:
        values = nested[kind]
        is_proportional = isinstance(values, dict) and values.get("rope_type") == "proportional"
        default_fraction = 1.0 if is_proportional else None
        ropes[kind] = read_rope_object(
            fields, f"rope_parameters.{kind}", values, 10_000.0, max_positions, kinds, rotary_fraction=default_fraction
        )
    return ropes
