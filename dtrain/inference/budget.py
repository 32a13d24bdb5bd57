"""Budget of one engine: its share of the requests, the rows it decodes together, and the memory of their keys.

Shares (`share_out`) are of like cost, and the same on every rank that asks; the samples of one prompt stay together
where that is even.
Rows: decoding reads every weight once per step, whatever the rows, until the products are bound by arithmetic. A CPU is
there at a few dozen rows, and more of them only push keys and values out of its caches; a GPU at some hundreds.
Memory: on a GPU four fifths of what is free once the weights are there, the rest for logits and activations; on a CPU a
quarter of the host's, for much else lives there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtrain.base.gpus import free_memory
from dtrain.data.rows.rows import deal
from dtrain.inference.request import Request
from dtrain.models.common.config import LINEAR, ModelConfig
from dtrain.models.common.decoder import CausalLM

# What reading a token of a prompt costs beside drawing one: it is read among many in one product, and once per group.
_READING = 0.25
# How far above the mean the largest share may be before groups are cut for the sake of evenness.
_SLACK = 1.1


@dataclass(frozen=True)
class Budget:
    """Limits of one engine. rows: decoded together; tokens: positions of keys and values held; prefill: prompt tokens
    read in one forward, enough for full-sized products, little beside the activations of training."""

    rows: int
    tokens: int
    prefill: int


def choose_budget(model: CausalLM, device: torch.device, ranks: int = 1, tp: int = 1) -> Budget:
    """Return the budget of one of at most `ranks` engines that share a host, with its part of the heads under `tp`.

    What layers of linear attention keep of rows and their prompts takes half of the memory at most.
    """
    config = model.config
    dtype, free = next(model.parameters()).dtype, free_memory(device, ranks)
    per_position = position_bytes(config, dtype, tp)
    rows, prefill = (128, 2048) if device.type == "cpu" else (512, 16384)
    if config.linear is not None:
        wide = torch.promote_types(dtype, torch.float32).itemsize
        window = (config.linear.width - 1) * (2 * config.linear.keys + config.linear.values) * dtype.itemsize
        state = config.layer_types.count(LINEAR) * (config.linear.state * wide + window) // tp
        rows = max(1, min(rows, free // 2 // (2 * state)))
        free -= rows * 2 * state
    return Budget(rows, max(1, free // max(per_position, 1)), prefill)


def position_bytes(config: ModelConfig, dtype: torch.dtype, tp: int = 1) -> int:
    """Return the bytes of a position of keys and values: in every layer that keeps keys, though those with a window
    keep fewer positions, and in the parameters' dtype."""
    widths = [
        max(1, (heads := config.heads_of(kind)).count // tp) * heads.size
        for index, kind in enumerate(config.layer_types)
        if kind != LINEAR and config.key_sources[index] == index
    ]
    return 2 * sum(widths) * dtype.itemsize


def share_out(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Return the indices of `requests` for each of `ranks` ranks, ascending; the same on every rank that asks.

    The work of a request is taken from its max_new_tokens, for nobody knows where it will stop. What is dealt are whole
    groups of equal prompts, or their halves, quarters and so on until the shares are even.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt), []).append(index)
    largest = max(map(len, groups.values()), default=1)
    best: tuple[float, list[list[int]]] | None = None
    parts = 1
    while True:
        pieces = [piece for members in groups.values() for piece in _cut(members, parts)]
        costs = [_work(requests, piece) for piece in pieces]
        dealt = deal(costs, ranks)
        load = max(sum(costs[piece] for piece in share) for share in dealt)
        if best is None or load < best[0]:
            best = load, [sorted(index for piece in share for index in pieces[piece]) for share in dealt]
        mean = sum(_work(requests, piece) for piece in groups.values()) / ranks
        if best[0] <= _SLACK * mean or parts >= largest:
            return best[1]
        parts *= 2


def _work(requests: Sequence[Request], piece: list[int]) -> float:
    drawing = sum(requests[index].sampling.max_new_tokens for index in piece)
    return drawing + _READING * len(requests[piece[0]].prompt)


def _cut(members: list[int], parts: int) -> list[list[int]]:
    size = -(-len(members) // parts)
    return [members[start : start + size] for start in range(0, len(members), size)]
