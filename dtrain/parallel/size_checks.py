"""The tp sizes that a model's sizes allow."""

import math
from typing import Protocol

from dtrain.base.errors import Problem
from dtrain.base.ranges import join_with_or


class ModelSizes(Protocol):
    """The sizes of a model's config.json that tensor parallel shares out."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def kv_heads(self) -> dict[str, int]: ...  # by the type of layers
    @property
    def vocab_size(self) -> int: ...
    @property
    def mlp_sizes(self) -> set[int]: ...
    @property
    def num_linear_key_heads(self) -> int | None: ...
    @property
    def num_experts(self) -> int | None: ...  # of a layer


def check_model_mesh(model: ModelSizes, tp: int, ep: int = 1) -> list[Problem]:
    """Check that a model can be sharded over `tp` tensor-parallel and `ep` expert-parallel ranks.

    Every rank computes complete query heads, and complete key heads or one that it shares. It stores a part of the
    vocabulary and of every MLP, because FSDP2 cannot reduce the gradient of an empty shard.
    """
    reasons = _reasons_against(model, tp)
    fitting = [size for size in range(1, model.num_attention_heads + 1) if not _reasons_against(model, size)]
    fix = f"Use {join_with_or(map(str, fitting))}"
    problems = [Problem("parallel.tp", reason, fix) for reason in reasons]
    count = model.num_experts
    if ep > 1 and count is None:
        problems.append(Problem("parallel.ep", f"parallel.ep={ep}: this model has no experts", "Leave it out"))
    elif count is not None and count % ep:
        dividing = [str(size) for size in range(1, count + 1) if count % size == 0]
        text = f"parallel.ep={ep} does not divide the model's {count} experts"
        problems.append(Problem("parallel.ep", text, f"Use {join_with_or(dividing)}"))
    return problems


def _reasons_against(model: ModelSizes, tp: int) -> list[str]:
    """Return the reasons why a model cannot be sharded over `tp` ranks."""
    reasons = []
    if model.num_attention_heads % tp:
        reasons.append(f"parallel.tp={tp} does not divide the model's {model.num_attention_heads} query heads")
    is_uniform = len(set(model.kv_heads.values())) == 1
    kinds = list(model.kv_heads)
    if is_uniform:  # one reason stands for all types of layers
        kinds = kinds[:1]
    for kind in kinds:
        kv = model.kv_heads[kind]
        whose = "the model's" if is_uniform else f"its {kind} layers'"
        if kv % tp and tp % kv:
            reasons.append(f"parallel.tp={tp} and {whose} {kv} KV heads: neither divides the other")
    if model.num_linear_key_heads is not None and model.num_linear_key_heads % tp:
        linear = model.num_linear_key_heads
        reasons.append(f"parallel.tp={tp} does not divide the {linear} key heads of the model's linear attention")
    if _leaves_one_empty(model.vocab_size, tp):
        reasons.append(f"parallel.tp={tp} leaves a rank none of the model's {model.vocab_size} tokens")
    for inner in sorted(model.mlp_sizes):
        if _leaves_one_empty(inner, tp):
            reasons.append(f"parallel.tp={tp} leaves a rank none of the {inner} inner dimensions of the model's MLPs")
    return reasons


def _leaves_one_empty(length: int, tp: int) -> bool:
    """Return whether the last of tp shards of ceil(length / tp) rows begins beyond the end."""
    return math.ceil(length / tp) * (tp - 1) >= length
