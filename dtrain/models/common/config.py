"""`ModelConfig`: sizes and kinds of the layers of a model, whatever its family. Imports no torch."""

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
]

EXPERT_STACKS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # of experts, and what they join
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
SOFTMAX = "softmax"
SIGMOID = "sigmoid"
VISION_MODULES = ("visual", "vision_tower", "multi_modal_projector", "embed_vision")
"""Children of a multimodal model's `model` that belong to its vision tower, over all families."""


def is_in_vision_tower(name: str) -> bool:
    """Return whether a module or parameter belongs to the vision tower.

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
    """The sizes of layers of linear attention. width: of the convolution, in tokens."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def total_key_dim(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def total_value_dim(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def state_size(self) -> int:  # elements of one row's
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Queries are projected down to a latent vector and up to heads, and so are keys and values together. A part of each
    head has rotary positions. Keys have one such part, which all heads share. For example, DeepSeek-V3 has heads of
    128 + 64 elements in queries and keys, and of 128 in values.

    Attributes:
        q_rank: Size of the latent of queries. None if they are projected at once.
        kv_rank: Size of the latent of keys and values.
        nope: Elements of a head of queries and keys without rotary positions.
        rope: Elements of a head of queries and keys with rotary positions.
        value: Elements of a head of values.
        interleaved: Whether a pair of rotary dimensions are neighbours, and not half of `rope` apart.
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
        """Return the number of weights in the projections of a layer."""
        if self.q_rank is None:
            of_queries = hidden * heads * self.query_dim
        else:
            of_queries = self.q_rank * (hidden + heads * self.query_dim)
        of_keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return of_queries + of_keys + heads * self.value_dim * hidden


@dataclass(frozen=True)
class RouterSettings:
    """How a router scores the experts of a token, chooses some, and weighs them.

    Attributes:
        normed: Whether a token's weights are divided by their sum.
        score: SOFTMAX or SIGMOID of the logits. Logits of a sigmoid are computed in float32 or better, others in the
            dtype of the hidden states, as transformers does.
        groups: Number of groups of neighbouring experts, of each of which the two largest scores are added up.
        top_groups: Number of groups with the largest sums. A token goes to experts of these only.
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
    """The experts of sparse layers. count: of a layer; top: of a token; inner: each one's MLP size; router: how they
    are chosen; layers: the sparse ones' numbers; shared: the MLP size of an expert of all tokens, 0 for none;
    has_shared_gate: whether a gate multiplies that expert; stacked: whether files have a layer's experts as two
    tensors, one of which joins gate and up; beside: whether sparse layers have an MLP of their own too; biased: whether
    router and experts have biases; turned: whether files have a stack's matrices transposed, gate and up joined row by
    row in turn; clamp: a clamped gate's gain and limit."""

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
        """The share of a layer's experts that a token goes to."""
        return self.top_k / self.num_experts


@dataclass(frozen=True)
class KVHeads:
    """The heads of keys and values of layers of one kind. size: of a head of keys and of queries; value_size: of a
    head of values; tied: whether keys and values come from one projection."""

    count: int
    head_dim: int
    value_dim: int
    is_tied: bool = False

    def num_elements(self, tp: int = 1) -> int:
        """Return the elements of a token's keys and values on one of `tp` ranks, each of which has at least a head."""
        return max(1, self.count // tp) * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """A second table of embeddings, of which every layer has `size` columns. vocab: its rows."""

    vocab_size: int
    size: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, with config.json's names where it has them. Sizes in elements, of the whole model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # as `head_dim`, of the kinds of layers that `key_heads` does not name
    head_dim: int
    max_position_embeddings: int  # of LongRoPE the original length
    hidden_act: str  # a key of functions.ACTIVATIONS
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]  # FULL, SLIDING or LINEAR, one a layer
    sliding_window: int | None  # keys that a SLIDING layer sees, the query's own included; None without such layers
    ropes: dict[str, Rope]  # by layer type
    attention_scale: float  # what q·k is multiplied by
    attention_gate: bool = False  # whether q_proj gives a gate of attention's output beside the queries
    linear_attention: LinearAttention | None = None  # of LINEAR layers
    latent_attention: LatentAttention | None = None  # of all layers, in a family that has it
    kv_heads_by_type: Mapping[str, KVHeads] = field(default_factory=dict)  # by layer type
    num_kv_shared_layers: int = 0  # the last layers, which read the keys and values of an earlier one of their type
    kv_shared_mlp_factor: int = 1  # times intermediate_size: the MLPs of those
    per_layer_embeddings: PerLayerEmbeddings | None = None
    experts: ExpertsConfig | None = None  # of layers whose MLP is a mixture
    qkv_bias: bool = False
    o_bias: bool = False
    has_sinks: bool = False  # whether each query head has a score that takes part in its softmax (`attention.blocks`)
    mlp_bias: bool = False
    final_logit_softcapping: float | None = None
    no_rope_layers: tuple[int, ...] = ()  # the layers without rotary positions
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # what logits are divided by
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None  # its embedding starts at zero and gets no gradient as an input, as in transformers
    dtype: str | None = None  # of the weights in the files, such as "bfloat16"
    is_text_tower: bool = False  # one part of a multimodal checkpoint
    vision: "VisionConfig | None" = None  # of the tower that is built beside the text's
    bidirectional_types: tuple[str, ...] = ()  # types of layers in which the tokens of an image see one another
    unquantized_modules: tuple[str, ...] | None = None  # modules that a checkpoint in 4 bits leaves as they were
    # A layer's module in the files -> the model's modules whose rows it joins, in order; the others are alike.
    fused_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed_modules: tuple[str, ...] = ()  # modules of the model whose parameters the files name as their parent's
    num_nextn_predict_layers: int = 0  # behind the last layer of the files, which dtrain does not train
    num_labels: int | None = None  # outputs of the head `score`, which a classifier has in place of the vocabulary's
    has_new_head: bool = False  # whether the files are of a language model, and have no such head

    def model_modules(self, name: str) -> list[str]:
        """The model's modules that the module `name` of the files is: itself, or those whose rows it joins; of experts
        those of one of their stacks."""
        parent, _, module = name.rpartition(".")
        if self.experts is not None and parent.endswith((".experts", ".router")):
            if self.experts.has_dense_mlp and ".sparse." not in parent:
                parent = ".sparse.".join(parent.rsplit(".", 1))
            return [f"{parent}.{part}" for part in EXPERT_STACKS.get(module, (module,))]
        return [f"{parent}.{part}" for part in self.fused_modules[module]] if module in self.fused_modules else [name]

    def file_module(self, name: str) -> str:
        """The module of the files that the model's module `name` is, or is a part of; of experts the stack, as
        transformers names it."""
        parent, _, module = name.rpartition(".")
        if self.experts is not None and (parent.endswith(".experts") or name.endswith(".router.proj")):
            parent = parent.replace(".sparse.", ".")
            return f"{parent}.{next((stack for stack, parts in EXPERT_STACKS.items() if module in parts), module)}"
        return next((f"{parent}.{fused}" for fused, parts in self.fused_modules.items() if module in parts), name)

    @cached_property
    def max_document_length(self) -> int | None:
        """Tokens of a document beyond which the files mean another rotary table (LongRoPE's, see `Rope`); None: any."""
        scaled = any(rope.kind == "longrope" for rope in self.ropes.values())
        return self.max_position_embeddings if scaled else None

    @property
    def num_experts(self) -> int | None:
        return None if self.experts is None else self.experts.num_experts

    @property
    def num_linear_key_heads(self) -> int | None:
        return None if self.linear_attention is None else self.linear_attention.num_key_heads

    def kv_heads_of(self, kind: str) -> KVHeads:
        return self.kv_heads_by_type.get(kind) or KVHeads(self.num_key_value_heads, self.head_dim, self.head_dim)

    def rotary_dim(self, kind: str) -> int:
        """Return the elements of a head for which rotary tables are made."""
        return self.kv_heads_of(kind).head_dim if self.latent_attention is None else self.latent_attention.rope_dim

    @property
    def kv_heads(self) -> dict[str, int]:
        """Numbers of key heads by the type of layers with attention."""
        kinds = dict.fromkeys(kind for kind in self.layer_types if kind != LINEAR)
        return {kind: self.kv_heads_of(kind).count for kind in kinds}

    def attention_shapes(self, tp: int = 1) -> list[dict[str, Any]]:
        """Return the sizes of attention on one of `tp` ranks, for each number of key heads and size of a head: what a
        proof of a kernel takes by these names."""
        window = self.sliding_window if SLIDING in self.layer_types else None
        shared = {"heads": self.num_attention_heads // tp, "window": window, "sinks": self.has_sinks}
        kinds = dict.fromkeys(self.kv_heads_of(kind) for kind in self.kv_heads)
        shapes = []
        for heads in kinds:
            sizes = {"key_heads": max(1, heads.count // tp), "head_dim": heads.head_dim, "value_dim": heads.value_dim}
            shapes.append({**sizes, **shared})
        return shapes

    @cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads: itself, or the last one of its type that has some."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        last = {kind: index for index, kind in enumerate(self.layer_types[:own])}
        return tuple(index if index < own else last[kind] for index, kind in enumerate(self.layer_types))

    @cached_property
    def cached_kv_heads(self) -> tuple[KVHeads, ...]:
        """Heads of keys and values of each layer that keeps its own."""
        own = (kind for index, kind in enumerate(self.layer_types) if self.kv_sources[index] == index)
        return tuple(self.kv_heads_of(kind) for kind in own if kind != LINEAR)

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    def has_dense_mlp(self, layer: int) -> bool:
        """Return whether a layer, by its number, has an MLP that all tokens go through."""
        return self.experts is None or self.experts.has_dense_mlp or layer not in self.experts.layers

    @property
    def mlp_sizes(self) -> set[int]:
        """Inner sizes of the MLPs that there are, experts among them."""
        dense = {self.mlp_size(layer) for layer in range(self.num_hidden_layers) if self.has_dense_mlp(layer)}
        sparse = () if self.experts is None else (self.experts.intermediate_size, self.experts.shared_intermediate_size)
        return dense | {size for size in sparse if size}

    def mlp_size(self, layer: int) -> int:
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return self.intermediate_size * (self.kv_shared_mlp_factor if layer >= own else 1)

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the matrices; norms and biases are left out."""
        hidden, widths, latent = self.hidden_size, 0, 0
        for index, (kind, source) in enumerate(zip(self.layer_types, self.kv_sources, strict=True)):
            if self.experts is not None and self.is_sparse(index):
                widths += self.experts.num_experts * (3 * self.experts.intermediate_size + 1)
                widths += 3 * self.experts.shared_intermediate_size + bool(
                    self.experts.shared_intermediate_size and self.experts.has_shared_gate
                )
            if self.has_dense_mlp(index):
                widths += 3 * self.mlp_size(index)
            if kind == LINEAR and self.linear_attention is not None:
                widths += (
                    2 * self.linear_attention.total_key_dim
                    + 3 * self.linear_attention.total_value_dim
                    + 2 * self.linear_attention.num_value_heads
                )
                continue
            if self.latent_attention is not None:
                latent += self.latent_attention.num_parameters(hidden, self.num_attention_heads)
                continue
            heads = self.kv_heads_of(kind)
            keys = 0 if source != index else (2 - heads.is_tied) * heads.count
            widths += heads.head_dim * ((2 + self.attention_gate) * self.num_attention_heads + keys)
        vocabulary = (2 - self.tie_word_embeddings) * self.vocab_size * hidden
        if self.num_labels is not None:
            vocabulary = (self.vocab_size + self.num_labels) * hidden
        if self.per_layer_embeddings is not None:
            widths += 3 * self.num_hidden_layers * self.per_layer_embeddings.size
            vocabulary += self.per_layer_embeddings.vocab_size * self.num_hidden_layers * self.per_layer_embeddings.size
        return hidden * widths + latent + vocabulary
