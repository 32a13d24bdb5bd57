"""Compiled parts of layers: what lies before attention and after it, each one graph for rows of all lengths.

A region is handed tensors alone, so nothing of a micro-batch (its mask, its packing) is compiled in, and attention and
FSDP's hooks stay outside: it compiles alike under every kernel and mesh. So does full checkpointing, which computes a
whole layer again; selective checkpointing is compiled in, and what attention gives is kept by attention.
"""

import logging
from typing import cast

from dtrain.base.compiled import Compiled
from dtrain.models.common.decoder import CausalLM, Layer
from dtrain.parallel.selective import AS_WRITTEN, selective

NAME = "train.compile=true (false says so from the start): a part of the layers"


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
