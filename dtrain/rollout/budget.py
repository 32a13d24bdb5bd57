"""How many sequences an engine decodes together, and how much memory their keys and values may take.

Rows: decoding reads every weight once per step, whatever the rows, until the products are bound by arithmetic. A CPU is
there at a few dozen rows, and more of them only push keys and values out of its caches; a GPU at some hundreds.
Memory: on a GPU four fifths of what is free once the weights are there, the rest for logits and activations; on a CPU a
quarter of the host's, for much else lives there.
"""

import os
from dataclasses import dataclass

import torch

from dtrain.models.layers import CausalLM


@dataclass(frozen=True)
class Budget:
    """rows: decoded together; tokens: positions of keys and values held; prefill: prompt tokens read in one forward,
    enough for full-sized products, little beside the activations of training."""

    rows: int
    tokens: int
    prefill: int


def choose_budget(model: CausalLM, device: torch.device, ranks: int = 1, tp: int = 1) -> Budget:
    """The budget of one of at most `ranks` engines that share a host, with its part of the heads under `tp`.

    A position is counted in every layer, though those with a window keep less, and in the parameters' dtype.
    """
    config = model.config
    dtype = next(model.parameters()).dtype
    heads = max(1, config.num_key_value_heads // tp)
    per_position = 2 * config.num_hidden_layers * heads * config.head_dim * dtype.itemsize
    tokens = max(1, free_memory(device, ranks) // per_position)
    return Budget(128, tokens, prefill=2048) if device.type == "cpu" else Budget(512, tokens, prefill=16384)


def free_memory(device: torch.device, ranks: int = 1) -> int:
    """Bytes that keys and values may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + reserved) * 4 // 5
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // ranks
