"""Compiled parts of layers: what lies before attention and after it, each one graph for rows of all lengths.

A region is handed tensors alone, so nothing of a micro-batch (its mask, its packing) is compiled in, and attention,
FSDP's hooks and activation checkpointing stay outside: it compiles alike under every kernel and mesh.
"""

from typing import cast

import torch

from dtrain.base.compiled import Compiled
from dtrain.base.compiled import obstacle as obstacle_on
from dtrain.models.common.decoder import CausalLM, Layer

NAME = "train.compile=true (false says so from the start): a part of the layers"


def compile_layers(model: CausalLM) -> None:
    """Give every layer of `model` its regions. No collective; nothing is compiled before the first forward."""
    for layer in cast(list[Layer], model.model.layers):
        layer.regions = Compiled(layer.before, NAME, 2), Compiled(layer.after, NAME, 2)


def obstacle_of(model: CausalLM) -> str | None:
    """Return why layers of `model` are better not compiled, whatever the machine, in words; None where nothing is in
    the way."""
    dropout = 0.0 if model.adapters is None else model.adapters.dropout
    if dropout:
        return f"lora.dropout={dropout} is drawn for each layer, which would be a graph of its own"
    if model.config.experts is not None:
        return "a mixture of experts sorts its tokens by numbers that the host reads"
    return None


def obstacle(model: CausalLM, device: torch.device) -> str | None:
    """Return why layers of `model` are better not compiled for `device` on this machine, in words; None where nothing
    is in the way."""
    return obstacle_of(model) or obstacle_on(device.type)
