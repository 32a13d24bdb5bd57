"""The tp sizes that a model's sizes allow. Imports no torch, so that a recipe can be checked without it."""

import math
from typing import Protocol


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
    def inner_sizes(self) -> set[int]: ...
    @property
    def linear_key_heads(self) -> int | None: ...
    @property
    def expert_count(self) -> int | None: ...  # of a layer


def mesh_problems_of_model(model: ModelSizes, tp: int, ep: int = 1) -> list[str]:
    """Return what keeps tensor parallel over `tp` ranks, or expert parallel over `ep`, from sharing a model out, one
    line each; empty where nothing does.

    Every rank computes whole query heads, and whole key heads or one that it shares, and holds some of the vocabulary
    and of every MLP: FSDP2 cannot reduce the gradient of an empty shard.
    """
    fitting = [size for size in range(1, model.num_attention_heads + 1) if not _problems(model, size)]
    problems = [f"{problem}; tp may be {', '.join(map(str, fitting))}" for problem in _problems(model, tp)]
    count = model.expert_count
    if ep > 1 and count is None:
        problems.append(f"parallel.ep={ep}: this model has no experts; leave it out")
    elif count is not None and count % ep:
        dividing = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        problems.append(f"parallel.ep={ep} does not divide the model's {count} experts; ep may be {dividing}")
    return problems


def _problems(model: ModelSizes, tp: int) -> list[str]:
    problems = []
    if model.num_attention_heads % tp:
        problems.append(f"parallel.tp={tp} does not divide the model's {model.num_attention_heads} query heads")
    of_one_kind = len(set(model.kv_heads.values())) == 1
    for kind, kv in list(model.kv_heads.items())[: 1 if of_one_kind else None]:
        whose = "the model's" if of_one_kind else f"its {kind} layers'"
        if kv % tp and tp % kv:
            problems.append(f"parallel.tp={tp} and {whose} {kv} KV heads: neither divides the other")
    if model.linear_key_heads is not None and model.linear_key_heads % tp:
        linear = model.linear_key_heads
        problems.append(f"parallel.tp={tp} does not divide the {linear} key heads of the model's linear attention")
    if _leaves_one_empty(model.vocab_size, tp):
        problems.append(f"parallel.tp={tp} leaves a rank none of the model's {model.vocab_size} tokens")
    for inner in (size for size in sorted(model.inner_sizes) if _leaves_one_empty(size, tp)):
        problems.append(f"parallel.tp={tp} leaves a rank none of the {inner} inner dimensions of the model's MLPs")
    return problems


def _leaves_one_empty(length: int, tp: int) -> bool:
    """Return whether the last of tp shards of ceil(length / tp) rows begins beyond the end."""
    return math.ceil(length / tp) * (tp - 1) >= length
