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
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.parallel.selective import AS_WRITTEN, selective
from dtrain.policy.config import PolicyConfig

NAME = "train.compile=true (false says so from the start): a part of the layers"


def compile_model(model: CausalLM, recipe: PolicyConfig, device: torch.device) -> None:
    """Compile the parts of the layers of `model`, or let it say why not. No collective."""
    model.uncompiled = obstacle(recipe) or compiler_obstacle(device.type)
    if model.uncompiled is None:
        compile_layers(model, is_selective_inside(recipe), computes_again(recipe))


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


def obstacle(recipe: PolicyConfig) -> str | None:
    """Return why layers are better not compiled, on whatever machine, in words; None where nothing is in the way."""
    if recipe.train.activation_checkpointing == "mlp":
        return "train.activation_checkpointing=mlp computes half of what is compiled again; set selective or full"
    if recipe.run.deterministic:
        return "run.deterministic=true: the compiler chooses the order of sums by the first sizes that it sees"
    if recipe.lora is not None and recipe.lora.dropout:
        return f"lora.dropout={recipe.lora.dropout} is drawn for each layer, which would be a graph of its own"
    return None


def is_selective_inside(recipe: PolicyConfig) -> bool:
    """Return whether the compiled parts of layers are to keep and compute again by themselves what selective
    checkpointing says. What goes to the host is what a whole layer keeps."""
    train = recipe.train
    return bool(train.compile and train.activation_checkpointing == "selective" and not train.activation_offload)


def computes_again(recipe: PolicyConfig) -> bool:
    """Return whether a checkpoint around each layer computes its compiled parts again."""
    return recipe.train.activation_checkpointing in ("full", "selective") and not is_selective_inside(recipe)


def checkpointed_outside(model: CausalLM, recipe: PolicyConfig) -> list[nn.Module] | None:
    """Return the modules of `model` that are checkpointed as they are: beside compiled parts that do it themselves a
    tower's layers and linear attention, which are not compiled. None: all layers."""
    if model.uncompiled is not None or not is_selective_inside(recipe):
        return None
    mixers = [layer.mixer for layer in cast(list[Layer], list(model.model.layers))]
    return [*model.model.vision_layers, *(mixer for mixer in mixers if not isinstance(mixer, Attention))]
