"""Activation checkpointing: what a layer computes again in the backward instead of keeping."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # makes torch.ops.torch_attn
from torch import nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dtrain.parallel.collectives import PARTS
from dtrain.parallel.tensor import ParallelModel


@dataclass
class TileComputing:
    """State of a model's tiles (`models.common.tiles`). now: whether one is being computed; nothing of it is kept."""

    now: bool = False


def checkpoint_activations(
    model: ParallelModel,
    kind: str,
    tiles: TileComputing | None = None,
    layers: Iterable[nn.Module] | None = None,
    **options: Any,
) -> None:
    """Recompute activations in the backward: of whole layers (full), of their MLPs (mlp), or of all but the results of
    matrix products, attention, reduce-scatters and all-to-alls (selective); "none" changes nothing. Module names stay
    as they are. No collective here; the others inside what is computed again run again. tiles: of layers that compute
    their MLPs in tiles, and so again anyhow. layers: None: all of the model's. options: of torch's `checkpoint`."""
    if kind == "none":
        return
    policy = partial(keep, KEPT, tiles or TileComputing())
    for layer in (*model.model.layers, *model.model.vision_layers) if layers is None else layers:
        if kind == "full":
            checkpoint(layer, **options)
        elif kind == "mlp":
            if tiles is not None and not getattr(layer, "is_sparse", True):  # a tower's layers are in no tiles
                continue
            checkpoint(next(child for name, child in layer.named_children() if name.endswith("mlp")), **options)
        else:
            checkpoint(layer, context_fn=partial(create_selective_checkpoint_contexts, policy), **options)


KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        *PARTS,
    }
)


def keep(kept: frozenset, tiles: TileComputing, context, operation, *args, **kwargs) -> CheckpointPolicy:
    """Return what becomes of an operation's result, as torch's selective checkpointing asks: one of those `kept` stays,
    but for a tile's."""
    is_kept = operation in kept and not tiles.now
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
