"""`ModelConfig`: sizes and layer types of a model of any family. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dtrain.models.common.rope_config import Rope

if TYPE_CHECKING:
    from dtrain.models.common.vision_config import VisionConfig

__all__ = [
    "FULL",
    "KVHeads",
    "LINEAR",
    "LatentAttention",
    "LinearAttention",
    "ModelConfig",
    "PerLayerEmbeddings",
    "Rope",
    "RouterSettings",
    "SIGMOID",
    "SLIDING",
    "SOFTMAX",
    "TransformersModel",
]

EXPERT_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacks of experts as transformers names them, and the model's modules that each joins."""
# Types of layers, as in config.json's `layer_types`.
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
# How a router turns logits into scores.
SOFTMAX = "softmax"
SIGMOID = "sigmoid"
VISION_MODULES = ("visual", "vision_tower", "multi_modal_projector", "embed_vision")
"""Children of a multimodal model's `model` that belong to its vision tower, over all families."""


def is_in_vision_tower(name: str) -> bool:
    """Check whether a module or parameter belongs to the vision tower.

    Example:
        >>> is_in_vision_tower("model.visual.blocks.0.attn.qkv.weight")
        True
        >>> is_in_vision_tower("model.layers.0.mlp.up_proj")
        False
    """
    first, _, rest = name.partition(".")
    child = rest.partition(".")[0]
    return first == "model" and child in VISION_MODULES


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of layers of linear attention.

    Attributes:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values.
        key_dim: Elements of a head of queries and keys.
        value_dim: Elements of a head of values.
        conv_width: Tokens that the convolution before the attention sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def total_key_dim(self) -> int:
        """Elements of a token's keys, over all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def total_value_dim(self) -> int:
        """Elements of a token's values, over all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Elements of the recurrent state of one row: a matrix [key_dim, value_dim] per value head."""
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Queries are projected down to a latent vector and up to heads. Keys and values have one latent vector together. A
    part of each head has rotary positions, and this part of the keys is the same for all heads. For example,
    DeepSeek-V3 has heads of 128 + 64 elements in queries and keys, and of 128 in values.

    Attributes:
        q_rank: Size of the latent of queries. None: queries are projected at once.
        kv_rank: Size of the latent of keys and values.
        nope_dim: Elements of a head of queries and keys without rotary positions.
        rope_dim: Elements of a head of queries and keys with rotary positions.
        value_dim: Elements of a head of values.
        is_interleaved: Whether the two dimensions of a rotary pair are neighbours. If not, they are half of `rope_dim`
            apart.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool = True

    @property
    def query_dim(self) -> int:
        """Elements of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    def num_parameters(self, hidden: int, heads: int) -> int:
        """Return the number of weights in the projections of a layer.

        Example:
            >>> LatentAttention(q_rank=None, kv_rank=8, nope_dim=4, rope_dim=2, value_dim=4).num_parameters(16, heads=2)
            608
        """
        if self.q_rank is None:
            q_weights = hidden * heads * self.query_dim
        else:
            q_weights = self.q_rank * (hidden + heads * self.query_dim)
        kv_down = hidden * (self.kv_rank + self.rope_dim)
        kv_up = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        output = heads * self.value_dim * hidden
        return q_weights + kv_down + kv_up + output


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a router: scoring experts, choosing some for each token, and weighting their outputs.

    Attributes:
        is_normalized: Whether a token's weights are divided by their sum.
        score_function: SOFTMAX or SIGMOID of the logits. Logits of a sigmoid are computed in float32 or better, those
            of a softmax in the dtype of the hidden states, as transformers does.
        num_groups: Groups of neighbouring experts. The score of a group is the sum of its two largest scores.
        num_top_groups: Groups that are chosen for a token. Its experts come from these groups only.
        has_selection_bias: Whether each expert has a bias that is added to its score for the choice, but not for the
            weight. It is not trained (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        scale: Factor of the weights.
    """

    is_normalized: bool
    score_function: str = SOFTMAX
    num_groups: int = 1
    num_top_groups: int = 1
    has_selection_bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of the mixtures of experts in sparse layers, and how files store them.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        intermediate_size: Inner size of one expert's MLP.
        router: How experts are chosen.
        layers: Numbers of the sparse layers.
        shared_intermediate_size: Inner size of the shared expert, which computes all tokens. 0 without one.
        has_shared_gate: Whether a gate multiplies the output of the shared expert.
        is_stacked: Whether files store a layer's experts as two tensors, `gate_up_proj` and `down_proj`.
        has_dense_mlp: Whether sparse layers have an MLP for all tokens too.
        has_biases: Whether router and experts have biases.
        is_transposed: Whether stacks in files are transposed, with the rows of gate and up in turn (gpt-oss).
        clamp: Gain and limit of gpt-oss's clamped activation. None for the activation of the config.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: RouterSettings
    layers: tuple[int, ...]
    shared_intermediate_size: int = 0
    has_shared_gate: bool = True
    is_stacked: bool = False
    has_dense_mlp: bool = False
    has_biases: bool = False
    is_transposed: bool = False
    clamp: tuple[float, float] | None = None

    @property
    def active_fraction(self) -> float:
        """Fraction of a layer's experts that compute a token."""
        return self.top_k / self.num_experts


@dataclass(frozen=True)
class KVHeads:
    """The heads of keys and values in layers of one type.

    Attributes:
        count: Number of heads.
        head_dim: Elements of a head of keys and queries.
        value_dim: Elements of a head of values.
        is_tied: Whether keys and values come from one projection.
    """

    count: int
    head_dim: int
    value_dim: int
    is_tied: bool = False

    def num_elements(self, tp: int = 1) -> int:
        """Return the elements of a token's keys and values on one of `tp` ranks. Each rank has at least one head.

        Example:
            >>> KVHeads(count=2, head_dim=64, value_dim=64).num_elements(tp=4)
            128
        """
        return max(1, self.count // tp) * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """A second embedding table, of which every layer reads its own columns (Gemma 4).

    Attributes:
        vocab_size: Rows of the table.
        size: Columns of each layer.
    """

    vocab_size: int
    size: int


@dataclass(frozen=True)
class TransformersModel:
    """A model whose modules are those of the transformers library (`models.transformers`).

    Attributes:
        version: Version of the library.
        values: The fields of config.json.
        omitted_noise: Fields of dropout and router jitter that are not 0 in config.json. dtrain trains without them.
        prefix: Name of the decoder in files, such as "model" or "transformer". dtrain's name is always "model".
        embedding: Name of the embedding in the decoder.
        layers: Name of the list of layers in the decoder.
        head: Name of the head in files. dtrain's name is always "lm_head".
        has_head_bias: Whether the head has a bias.
        logit_factor: Factor of the logits.
        num_parameters: Number of parameters in matrices.
        max_document_length: Longest document whose rotary tables do not depend on other rows. None: any length.
        windows: For each layer, the number of keys that a query sees. None: all, or the layer has no attention.
        num_experts: Number of experts of a layer that are stored in stacks. None: there are none, or not only such.
        experts_per_token: Number of experts that compute a token. None: the model has no experts.
    """

    version: str
    values: Mapping[str, Any]
    omitted_noise: tuple[str, ...]
    prefix: str
    embedding: str
    layers: str
    head: str
    has_head_bias: bool
    logit_factor: float
    num_parameters: int
    max_document_length: int | None
    windows: tuple[int | None, ...]
    num_experts: int | None
    experts_per_token: int | None

    def library_name(self, name: str) -> str:
        """Return transformers' name of a module, parameter or buffer of the model.

        Example: `model.layers.0.mlp` of GPT-NeoX is `gpt_neox.layers.0.mlp`, and `lm_head.weight` `embed_out.weight`.
        """
        return _with_other_prefix(name, {"model": self.prefix, "lm_head": self.head})

    def own_name(self, name: str) -> str:
        """Return the name of a module, parameter or buffer of the model from transformers' name."""
        return _with_other_prefix(name, {self.prefix: "model", self.head: "lm_head"})


def _with_other_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with another first part, if `prefixes` has it."""
    first, dot, rest = name.partition(".")
    return f"{prefixes.get(first, first)}{dot}{rest}"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and layer types of a model, under config.json's names where config.json has them.

    Attributes:
        architecture: Key of `registry.FAMILIES`.
        num_key_value_heads: Key heads of the layer types that `kv_heads_by_type` does not name.
        head_dim: Elements of a head, of the same layer types.
        max_position_embeddings: Longest document. With LongRoPE, the original length.
        hidden_act: Key of `functions.ACTIVATIONS`.
        layer_types: FULL, SLIDING or LINEAR for each layer.
        sliding_window: Number of keys that a query sees in SLIDING layers, its own included. None without such layers.
        ropes: Rotary embedding by layer type.
        attention_scale: Factor of q·k.
        attention_gate: Whether `q_proj` also computes a gate of the attention's output.
        linear_attention: Sizes of LINEAR layers.
        latent_attention: Sizes of the attention of all layers, in a family with latent attention.
        kv_heads_by_type: Heads of keys and values of the layer types that differ from the fields above.
        num_kv_shared_layers: The last layers that read keys and values of an earlier layer of their type.
        kv_shared_mlp_factor: `intermediate_size` of those layers is multiplied by it.
        per_layer_embeddings: Second embedding table.
        experts: Mixtures of experts.
        has_sinks: Whether each query head has a learned score that takes part in the softmax (`attention.blocks`).
        no_rope_layers: Layers without rotary positions.
        logits_scaling: Divisor of the logits.
        pad_token_id: Its embedding starts at zero and gets no gradient as an input, as in transformers.
        dtype: Dtype of the weights in the files, for example "bfloat16".
        is_text_tower: Whether the model is one part of a multimodal checkpoint.
        vision: Sizes of the vision tower that is built with the model.
        bidirectional_types: Layer types in which the tokens of an image see one another.
        unquantized_modules: Patterns of the modules that a 4-bit checkpoint stores unquantised. None if the checkpoint
            is not in 4 bits.
        fused_modules: Module of the files -> modules of the model whose rows it joins, in order. For example,
            `qkv_proj` -> (`q_proj`, `k_proj`, `v_proj`).
        unnamed_modules: Modules of the model whose parameters the files name as their parent's.
        num_nextn_predict_layers: Layers in the files after the last one, which dtrain does not train.
        num_labels: Outputs of the head `score` of a classifier. None for a language model.
        has_new_head: Whether the files are those of a language model and have no head `score`.
        transformers: The model in the transformers library, if dtrain uses that library's modules. None: its own.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    ropes: dict[str, Rope]
    attention_scale: float
    attention_gate: bool = False
    linear_attention: LinearAttention | None = None
    latent_attention: LatentAttention | None = None
    kv_heads_by_type: Mapping[str, KVHeads] = field(default_factory=dict)
    num_kv_shared_layers: int = 0
    kv_shared_mlp_factor: int = 1
    per_layer_embeddings: PerLayerEmbeddings | None = None
    experts: ExpertsConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    has_sinks: bool = False
    mlp_bias: bool = False
    final_logit_softcapping: float | None = None
    no_rope_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None
    is_text_tower: bool = False
    vision: "VisionConfig | None" = None
    bidirectional_types: tuple[str, ...] = ()
    unquantized_modules: tuple[str, ...] | None = None
    fused_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed_modules: tuple[str, ...] = ()
    num_nextn_predict_layers: int = 0
    num_labels: int | None = None
    has_new_head: bool = False
    transformers: TransformersModel | None = None

    def model_modules(self, name: str) -> list[str]:
        """Return the model's modules that a module of the files contains.

        Most modules are the same in both. A fused module contains several, and so does a stack of experts: for example,
        `model.layers.0.mlp.experts.gate_up_proj` contains `...experts.gate_proj` and `...experts.up_proj`.

        Args:
            name: Name of a module in the files.
        """
        if self.transformers is not None:
            return [self.transformers.own_name(name)]
        parent, _, module = name.rpartition(".")
        if self.experts is not None and parent.endswith((".experts", ".router")):
            if self.experts.has_dense_mlp and ".sparse." not in parent:
                # The model has these modules in a block of their own, which the files do not name.
                layer, _, last = parent.rpartition(".")
                parent = f"{layer}.sparse.{last}"
            return [f"{parent}.{part}" for part in EXPERT_STACKS.get(module, (module,))]
        if module in self.fused_modules:
            return [f"{parent}.{part}" for part in self.fused_modules[module]]
        return [name]

    def file_module(self, name: str) -> str:
        """Return the module of the files that contains a module of the model, as transformers names it.

        Args:
            name: Name of a module in the model.
        """
        if self.transformers is not None:
            return self.transformers.library_name(name)
        parent, _, module = name.rpartition(".")
        if self.experts is not None and (parent.endswith(".experts") or name.endswith(".router.proj")):
            parent = parent.replace(".sparse.", ".")
            return f"{parent}.{_find_owner(EXPERT_STACKS, module) or module}"
        fused = _find_owner(self.fused_modules, module)
        return name if fused is None else f"{parent}.{fused}"

    @cached_property
    def max_document_length(self) -> int | None:
        """Longest document for which the rotary tables are right. None if any length is.

        With LongRoPE, longer documents have other tables, which dtrain does not implement (`Rope`).
        """
        if self.transformers is not None:
            return self.transformers.max_document_length
        has_longrope = any(rope.kind == "longrope" for rope in self.ropes.values())
        return self.max_position_embeddings if has_longrope else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of keys that a query sees. None: all. Models of transformers may have several."""
        if self.transformers is not None:
            return self.transformers.windows
        windows: list[int | None] = []
        for kind in self.layer_types:
            windows.append(self.sliding_window if kind == SLIDING else None)
        return tuple(windows)

    @property
    def num_experts(self) -> int | None:
        """Experts of a sparse layer. None for a dense model."""
        if self.transformers is not None:
            return self.transformers.num_experts
        return None if self.experts is None else self.experts.num_experts

    @property
    def num_linear_key_heads(self) -> int | None:
        """Key heads of linear attention. None for a model without it."""
        return None if self.linear_attention is None else self.linear_attention.num_key_heads

    def kv_heads_of(self, kind: str) -> KVHeads:
        """Return the heads of keys and values in layers of type `kind`."""
        if kind in self.kv_heads_by_type:
            return self.kv_heads_by_type[kind]
        return KVHeads(self.num_key_value_heads, self.head_dim, self.head_dim)

    def rotary_dim(self, kind: str) -> int:
        """Return the elements of a head for which rotary tables are made, in layers of type `kind`."""
        if self.latent_attention is not None:
            return self.latent_attention.rope_dim
        return self.kv_heads_of(kind).head_dim

    @property
    def kv_heads(self) -> dict[str, int]:
        """Number of key heads by the type of layers with attention."""
        attention_types = dict.fromkeys(kind for kind in self.layer_types if kind != LINEAR)
        return {kind: self.kv_heads_of(kind).count for kind in attention_types}

    def attention_shapes(self, tp: int = 1) -> list[dict[str, Any]]:
        """Return the sizes of attention on one of `tp` ranks, once for each kind of key heads.

        Returns:
            Keyword arguments for the checks of attention kernels: heads, key_heads, head_dim, value_dim, window, sinks.
        """
        window = self.sliding_window if SLIDING in self.layer_types else None
        shapes = []
        for heads in dict.fromkeys(self.kv_heads_of(kind) for kind in self.kv_heads):
            shapes.append(
                {
                    "key_heads": max(1, heads.count // tp),
                    "head_dim": heads.head_dim,
                    "value_dim": heads.value_dim,
                    "heads": self.num_attention_heads // tp,
                    "window": window,
                    "sinks": self.has_sinks,
                }
            )
        return shapes

    @property
    def _num_layers_with_kv(self) -> int:
        """Number of the first layers, which have keys and values of their own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads.

        This is the layer itself, or the last layer of its type that has keys and values.
        """
        last_of_type = {kind: index for index, kind in enumerate(self.layer_types[: self._num_layers_with_kv])}
        sources = []
        for index, kind in enumerate(self.layer_types):
            sources.append(index if index < self._num_layers_with_kv else last_of_type[kind])
        return tuple(sources)

    @cached_property
    def cached_kv_heads(self) -> tuple[KVHeads, ...]:
        """Heads of keys and values of each attention layer whose keys and values are cached."""
        cached = []
        for index, kind in enumerate(self.layer_types):
            if self.kv_sources[index] == index and kind != LINEAR:
                cached.append(self.kv_heads_of(kind))
        return tuple(cached)

    def is_sparse(self, layer: int) -> bool:
        """Check whether the layer of a number has a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    def has_dense_mlp(self, layer: int) -> bool:
        """Check whether the layer of a number has an MLP that computes all tokens."""
        return self.experts is None or self.experts.has_dense_mlp or layer not in self.experts.layers

    @property
    def mlp_sizes(self) -> set[int]:
        """Inner sizes of all MLPs, those of experts included."""
        sizes = {self.mlp_size(layer) for layer in range(self.num_hidden_layers) if self.has_dense_mlp(layer)}
        if self.experts is not None:
            sizes.add(self.experts.intermediate_size)
            sizes.add(self.experts.shared_intermediate_size)
        sizes.discard(0)
        return sizes

    def mlp_size(self, layer: int) -> int:
        """Return the inner size of the dense MLP in the layer of a number."""
        factor = self.kv_shared_mlp_factor if layer >= self._num_layers_with_kv else 1
        return self.intermediate_size * factor

    @property
    def num_parameters(self) -> int:
        """Number of parameters in matrices. Norms and biases are not counted."""
        if self.transformers is not None:
            return self.transformers.num_parameters
        total = self._num_embedding_parameters()
        for index, kind in enumerate(self.layer_types):
            total += self._num_mlp_parameters(index)
            if kind == LINEAR and self.linear_attention is not None:
                total += self._num_linear_attention_parameters(self.linear_attention)
            elif self.latent_attention is not None:
                total += self.latent_attention.num_parameters(self.hidden_size, self.num_attention_heads)
            else:
                total += self._num_attention_parameters(index)
        return total

    def _num_embedding_parameters(self) -> int:
        """Number of parameters in embeddings, the projections of per-layer embeddings, and the head."""
        num_outputs = self.vocab_size if self.num_labels is None else self.num_labels
        if self.num_labels is None and self.tie_word_embeddings:
            num_outputs = 0
        total = (self.vocab_size + num_outputs) * self.hidden_size
        if self.per_layer_embeddings is not None:
            width = self.num_hidden_layers * self.per_layer_embeddings.size
            total += self.per_layer_embeddings.vocab_size * width
            total += 3 * self.hidden_size * width  # the model's projection, and each layer's gate and projection
        return total

    def _num_mlp_parameters(self, index: int) -> int:
        """Number of parameters in the MLPs of a layer."""
        rows = 0
        experts = self.experts
        if experts is not None and self.is_sparse(index):
            rows += experts.num_experts * (3 * experts.intermediate_size + 1)  # one row of the router for each expert
            rows += 3 * experts.shared_intermediate_size
            if experts.shared_intermediate_size and experts.has_shared_gate:
                rows += 1
        if self.has_dense_mlp(index):
            rows += 3 * self.mlp_size(index)
        return rows * self.hidden_size

    def _num_linear_attention_parameters(self, linear: LinearAttention) -> int:
        """Number of parameters in the projections of linear attention: q, k, v, z, output, and a and b."""
        rows = 2 * linear.total_key_dim + 3 * linear.total_value_dim + 2 * linear.num_value_heads
        return rows * self.hidden_size

    def _num_attention_parameters(self, index: int) -> int:
        """Number of parameters in the projections of an attention layer."""
        heads = self.kv_heads_of(self.layer_types[index])
        num_projected = (3 if self.attention_gate else 2) * self.num_attention_heads  # q, output, and a gate
        if self.kv_sources[index] == index:
            num_projected += (1 if heads.is_tied else 2) * heads.count
        return heads.head_dim * num_projected * self.hidden_size


def _find_owner(parts_by_owner: Mapping[str, tuple[str, ...]], part: str) -> str | None:
    """Return the key whose tuple contains `part`."""
    for owner, parts in parts_by_owner.items():
        if part in parts:
            return owner
    return None
