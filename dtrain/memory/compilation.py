"""Compiled parts of layers: what lies before attention and after it, each one graph for rows of all lengths; and what
of a recipe is in the way.

A region is handed tensors alone, so nothing of a micro-batch (its mask, its packing) is compiled in, and attention and
FSDP's hooks stay outside: it compiles alike under every kernel and mesh. So does full checkpointing, which computes a
whole layer again; selective checkpointing is compiled in, and what attention gives is kept by attention.
"""

import logging
from typing import cast

import torch
from torch import nn

from dtrain.base.compiled import Compiled
from dtrain.base.compiled import obstacle as compiler_obstacle
from dtrain.memory.selective_checkpointing import AS_WRITTEN, selective
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.recipe.schema import Train

NAME = "train.compile=true (false says so from the start): a part of the layers"


def compile_model(
    model: CausalLM, train: Train, device: torch.device, *, is_deterministic: bool, lora_dropout: float
) -> None:
    """Compile the parts of the layers of `model`, or set `model.uncompiled` to the reason why they are not.

    Args:
        model: The model, after its attention kernel was set.
        train: The recipe's section `train`.
        device: Device of the run.
        is_deterministic: The recipe's `run.deterministic`.
        lora_dropout: Dropout of the adapters. 0 without adapters.
    """
    recipe_obstacle = obstacle(train, is_deterministic=is_deterministic, lora_dropout=lora_dropout)
    model.uncompiled = recipe_obstacle or compiler_obstacle(device.type)
    if model.uncompiled is None:
        compile_layers(model, is_selective_inside(train), computes_again(train))


def compile_layers(model: CausalLM, is_selective: bool = False, computes_again: bool = False) -> None:
    """Give every layer of `model` its regions, with selective checkpointing inside them or without; a mixture of
    experts, whose sizes follow from values, is not compiled. No collective; nothing is compiled before the first
    forward. computes_again: whether a checkpoint around each layer does; only then keys are projected first, for
    between two compiled parts a layer would keep one tensor [B, S, D] more."""
    # torch warns of operations in place; layers have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for layer in cast(list[Layer], model.model.layers):
        before = Compiled(selective(layer.before) if is_selective else layer.before, NAME, 2)
        if layer.is_sparse:
            after = selective(layer.after, AS_WRITTEN) if is_selective else layer.after
        else:
            after = Compiled(selective(layer.after) if is_selective else layer.after, NAME, 2)
        layer.regions = before, after
        if (keys_first := layer.keys_first) is not None:
            layer.keys_first = keys_first.compiled_by(lambda part: Compiled(part, NAME, 2)) if computes_again else None


def obstacle(train: Train, *, is_deterministic: bool, lora_dropout: float) -> str | None:
    """Explain the setting that prevents compilation on every machine. None without one. Arguments: `compile_model`."""
    if train.activation_checkpointing == "mlp":
        return "train.activation_checkpointing=mlp computes half of what is compiled again; set selective or full"
    if is_deterministic:
        return "run.deterministic=true: the compiler chooses the order of sums by the first sizes that it sees"
    if lora_dropout:
        return f"lora.dropout={lora_dropout} differs from layer to layer, so every layer would need a graph of its own"
    return None


def is_selective_inside(train: Train) -> bool:
    """Check for selective checkpointing inside the compiled parts of a layer, instead of around the layer.

    With `activation_offload` it is applied around the layer, because the offloader moves what the layer saves.
    """
    return bool(train.compile and train.activation_checkpointing == "selective" and not train.activation_offload)


def computes_again(train: Train) -> bool:
    """Check for a checkpoint around each layer, which recomputes its compiled parts in the backward."""
    return train.activation_checkpointing in ("full", "selective") and not is_selective_inside(train)


def checkpointed_outside(model: CausalLM, train: Train) -> list[nn.Module] | None:
    """Return the modules of `model` that activation checkpointing wraps. None means all layers.

    If checkpointing is applied inside the compiled parts, only modules that are not compiled remain: the layers of a
    vision tower and linear attention.
    """
    if model.uncompiled is not None or not is_selective_inside(train):
        return None
    mixers = [layer.mixer for layer in cast(list[Layer], list(model.model.layers))]
    return [*model.model.vision_layers, *(mixer for mixer in mixers if not isinstance(mixer, Attention))]
