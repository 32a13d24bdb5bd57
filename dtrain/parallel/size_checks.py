"""Checks whether a model's sizes can be sharded over tensor- and expert-parallel ranks."""

import math
from typing import Protocol

from dtrain.base.errors import Problem
from dtrain.base.ranges import join_with_or


class ModelSizes(Protocol):
    """Sizes of a model's config.json that tensor and expert parallel divide.

    Attributes:
        num_attention_heads: Query heads of a layer.
        num_key_value_heads: Key heads of a layer.
        kv_heads: Key heads by the type of layer, for example {"full_attention": 8, "sliding_attention": 4}.
        vocab_size: Tokens of the vocabulary.
        mlp_sizes: Inner sizes of the model's MLPs.
        num_linear_key_heads: Key heads of linear attention. None if the model has none.
        num_experts: Experts of a layer. None if the model has none.
    """

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def kv_heads(self) -> dict[str, int]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def mlp_sizes(self) -> set[int]: ...
    @property
    def num_linear_key_heads(self) -> int | None: ...
    @property
    def num_experts(self) -> int | None: ...


def check_model_mesh(model: ModelSizes, tp: int, ep: int = 1) -> list[Problem]:
    """Check that a model can be sharded over `tp` tensor-parallel and `ep` expert-parallel ranks.

    Every rank computes complete query heads, and complete key heads or one key head that it shares with other ranks.
    Every rank must also store a part of the vocabulary and of every MLP, because FSDP2 cannot reduce the gradient of an
    empty shard.

    Args:
        model: The sizes.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.

    Returns:
        The problems of `parallel.tp` and `parallel.ep`, none if the sizes fit.
    """
    possible_sizes = []
    for size in range(1, model.num_attention_heads + 1):
        if not _tp_problems(model, size):
            possible_sizes.append(str(size))
    fix = f"Use {join_with_or(possible_sizes)}"
    problems = [Problem("parallel.tp", text, fix) for text in _tp_problems(model, tp)]

    num_experts = model.num_experts
    if num_experts is None:
        if ep > 1:
            problems.append(Problem("parallel.ep", f"parallel.ep={ep}: this model has no experts", "Leave it out"))
    elif num_experts % ep:
        divisors = [str(size) for size in range(1, num_experts + 1) if num_experts % size == 0]
        text = f"parallel.ep={ep} does not divide the model's {num_experts} experts"
        problems.append(Problem("parallel.ep", text, f"Use {join_with_or(divisors)}"))
    return problems


def _tp_problems(model: ModelSizes, tp: int) -> list[str]:
    """Return the reasons why a model cannot be sharded over `tp` ranks."""
    texts = []
    if model.num_attention_heads % tp:
        texts.append(f"parallel.tp={tp} does not divide the model's {model.num_attention_heads} query heads")

    is_uniform = len(set(model.kv_heads.values())) == 1
    layer_types = list(model.kv_heads)
    if is_uniform:  # one text is enough
        layer_types = layer_types[:1]
    for layer_type in layer_types:
        kv_heads = model.kv_heads[layer_type]
        owner = "the model's" if is_uniform else f"its {layer_type} layers'"
        if kv_heads % tp and tp % kv_heads:
            texts.append(f"parallel.tp={tp} and {owner} {kv_heads} KV heads: neither divides the other")

    linear_heads = model.num_linear_key_heads
    if linear_heads is not None and linear_heads % tp:
        texts.append(f"parallel.tp={tp} does not divide the {linear_heads} key heads of the model's linear attention")

    if _has_empty_shard(model.vocab_size, tp):
        texts.append(f"parallel.tp={tp} leaves a rank none of the model's {model.vocab_size} tokens")
    for inner in sorted(model.mlp_sizes):
        if _has_empty_shard(inner, tp):
            texts.append(f"parallel.tp={tp} leaves a rank none of the {inner} inner dimensions of the model's MLPs")
    return texts


def _has_empty_shard(length: int, tp: int) -> bool:
    """Check whether the last of `tp` shards is empty, as for 9 rows over 4 ranks: 3, 3, 3 and 0 rows."""
    return math.ceil(length / tp) * (tp - 1) >= length
