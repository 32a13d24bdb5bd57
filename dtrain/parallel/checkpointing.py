"""Activation checkpointing: what a layer computes again in the backward instead of keeping."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # makes torch.ops.torch_attn
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
    policy = partial(_keep, KEPT, tiles or TileComputing())
    for layer in (*model.model.layers, *model.model.vision_layers) if layers is None else layers:
        if kind == "full":
            checkpoint(layer, **options)
        elif kind == "mlp":
            if tiles is not None and not getattr(layer, "is_sparse", True):  # a tower's layers are in no tiles
                continue
            checkpoint(next(child for name, child in layer.named_children() if name.endswith("mlp")), **options)
        else:
            checkpoint(layer, context_fn=partial(create_selective_checkpoint_contexts, policy), **options)


def selective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with selective checkpointing inside, which the partitioner of torch.compile goes by: it keeps
    what the backward needs of the results of products and collectives, and no more."""
    # torch warns of operations in place; layers have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def checkpointed(*tensors: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False, context_fn=_INSIDE)

    return checkpointed


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
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)
# Kept too where the compiler leaves out the products that they add up. As written, both would be more than is kept
# without checkpointing.
COLLECTIVES = frozenset(
    {
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
    }
)


def _keep(kept: frozenset, tiles: TileComputing, context, operation, *args, **kwargs) -> CheckpointPolicy:
    is_kept = operation in kept and not tiles.now
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


# One object, for graphs know what it is. What is kept of a tile is let go of at the tile's end.
_INSIDE = partial(create_selective_checkpoint_contexts, partial(_keep, KEPT | COLLECTIVES, TileComputing()))
