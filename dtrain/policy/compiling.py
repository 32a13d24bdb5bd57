"""Compiling of a policy's layers as its recipe says: what is in the way, and what checkpointing is left outside."""

from typing import cast

import torch
from torch import nn

from dtrain.base.compiled import obstacle as compiler_obstacle
from dtrain.models.common import compiled
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.policy.config import PolicyConfig


def compile_model(model: CausalLM, recipe: PolicyConfig, device: torch.device) -> None:
    """Compile the parts of the layers of `model`, or let it say why not. No collective."""
    model.uncompiled = obstacle(recipe) or compiler_obstacle(device.type)
    if model.uncompiled is None:
        compiled.compile_layers(model, is_selective_inside(recipe), computes_again(recipe))


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
