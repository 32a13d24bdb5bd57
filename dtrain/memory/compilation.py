"""Compilation of the two parts of a layer around attention, each as one graph for rows of all lengths.

A compiled part (`layer.regions`) takes only tensors. The mask and the packing of a micro-batch are not compiled in, and
attention and FSDP's hooks stay outside. So the parts compile in the same way with every attention kernel and on every
mesh:

    before attention:   norm, q, k and v projections, rotary embedding       compiled
    attention                                                                as written
    after attention:    output projection, residual, norm, MLP, residual     compiled

Full checkpointing is applied around the layer and recomputes its compiled parts. Selective checkpointing is applied
inside the parts, so that the compiler decides what to store. The result of attention is stored by attention itself.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from dtrain.base.compiled import CompiledFunction, missing_compiler_reason as compiler_obstacle
from dtrain.memory.activation_checkpointing import UNCOMPILED_CONTEXTS, checkpoint_selectively
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.recipe.schema import Train

NAME = "train.compile=true (false says so from the start): a part of the layers"
"""Name of a compiled part in the warning that it could not be compiled."""

NUM_VARYING_SIZES = 2
"""Number of leading dimensions, rows and tokens, whose sizes may differ from call to call of a graph."""


def compile_model(
    model: CausalLM,
    train: Train,
    device: torch.device,
    *,
    is_deterministic: bool,
    lora_dropout: float,
    compile_part: Callable[..., Callable[..., Any]] | None = None,
    determinism_check: str = "default",
) -> None:
    """Compile the parts of the layers of `model`, or set `model.uncompiled_reason` to the reason why they are not.

    Args:
        model: The model, after its attention kernel was set.
        train: The recipe's section `train`.
        device: Device of the run.
        is_deterministic: The recipe's `run.deterministic`.
        lora_dropout: Dropout of the adapters. 0 without adapters.
        compile_part: See `compile_layers`. If it is given, `device` need not have a compiler.
        determinism_check: See `compile_layers`.
    """
    model.uncompiled_reason = model.compile_obstacle
    if model.uncompiled_reason is None:
        model.uncompiled_reason = obstacle(train, is_deterministic=is_deterministic, lora_dropout=lora_dropout)
    if model.uncompiled_reason is None and compile_part is None:
        model.uncompiled_reason = compiler_obstacle(device.type)
    if model.uncompiled_reason is None:
        compile_layers(
            model,
            is_selective=checkpoints_inside_parts(train),
            computes_again=recomputes_layers(train),
            compile_part=compile_part or _compiled,
            determinism_check=determinism_check,
        )


def _compiled(part: Callable[..., Any], is_selective: bool = False) -> CompiledFunction:
    """Return a part of a layer that is compiled when it is first called.

    Args:
        part: The part.
        is_selective: Whether it has selective checkpointing inside.
    """
    return CompiledFunction(checkpoint_selectively(part) if is_selective else part, NAME, NUM_VARYING_SIZES)


def compile_layers(
    model: CausalLM,
    is_selective: bool = False,
    computes_again: bool = False,
    compile_part: Callable[..., Callable[..., Any]] = _compiled,
    determinism_check: str = "default",
) -> None:
    """Set the compiled parts of every layer. Nothing is compiled before the first forward. No collective.

    The part after attention of a mixture of experts runs as written, because its sizes depend on values.

    Args:
        model: The model.
        is_selective: Whether the parts have selective checkpointing inside.
        computes_again: Whether a checkpoint around each layer recomputes its parts. If not, keys are no longer
            projected before queries (`models.common.keys_first`): between two compiled parts for the projections, a
            layer would store one more tensor [B, S, D].
        compile_part: Compiles a part, called with the part and `is_selective`.
        determinism_check: Argument of torch's `checkpoint`, for parts that run as written.
    """
    # torch warns about in-place operations inside a checkpoint. Layers have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for layer in cast(list[Layer], model.model.layers):
        before: Callable[..., Any] = compile_part(layer.before_attention, is_selective)
        after: Callable[..., Any]
        if not layer.is_sparse:
            after = compile_part(layer.after_attention, is_selective)
        elif is_selective:
            after = checkpoint_selectively(
                layer.after_attention, UNCOMPILED_CONTEXTS, determinism_check=determinism_check
            )
        else:
            after = layer.after_attention
        layer.regions = before, after
        if layer.keys_first is not None:
            layer.keys_first = layer.keys_first.compile_with(compile_part) if computes_again else None


def obstacle(train: Train, *, is_deterministic: bool, lora_dropout: float) -> str | None:
    """Return the reason why the recipe's settings prevent compilation on every machine, or None.

    Args:
        train: The recipe's section `train`.
        is_deterministic: The recipe's `run.deterministic`.
        lora_dropout: Dropout of the adapters. 0 without adapters.
    """
    if train.activation_checkpointing == "mlp":
        return "train.activation_checkpointing=mlp computes half of what is compiled again; set selective or full"
    if is_deterministic:
        return "run.deterministic=true: the compiler chooses the order of sums by the first sizes that it sees"
    if lora_dropout:
        return f"lora.dropout={lora_dropout} differs from layer to layer, so every layer would need a graph of its own"
    return None


def checkpoints_inside_parts(train: Train) -> bool:
    """Check whether selective checkpointing is applied inside the compiled parts of a layer, not around the layer.

    With `activation_offload` it is applied around the layer, because the offloader moves the tensors that a layer
    saves.
    """
    return bool(train.compile and train.activation_checkpointing == "selective" and not train.activation_offload)


def recomputes_layers(train: Train) -> bool:
    """Check whether a checkpoint around each layer recomputes its compiled parts in the backward."""
    return train.activation_checkpointing in ("full", "selective") and not checkpoints_inside_parts(train)


def modules_to_checkpoint(model: CausalLM, train: Train) -> list[nn.Module] | None:
    """Return the modules of `model` that activation checkpointing wraps. None means all layers.

    If checkpointing is applied inside the compiled parts, only modules that are not compiled remain: the layers of a
    vision tower and linear attention.
    """
    if model.uncompiled_reason is not None or not checkpoints_inside_parts(train):
        return None
    modules: list[nn.Module] = [*model.model.vision_layers]
    for layer in cast(list[Layer], list(model.model.layers)):
        if not isinstance(layer.mixer, Attention):
            modules.append(layer.mixer)
    return modules
