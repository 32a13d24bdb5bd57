"""Activation checkpointing: what a layer computes again in the backward instead of keeping."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._composable import checkpoint

from dtrain.parallel.tensor import ParallelModel

if TYPE_CHECKING:
    from dtrain.memory.selective_checkpointing import TileComputing


def checkpoint_activations(
    model: ParallelModel,
    kind: str,
    tiles: "TileComputing | None" = None,
    layers: Iterable[nn.Module] | None = None,
    **options: Any,
) -> None:
    """Recompute activations in the backward: of whole layers (full), of their MLPs (mlp), or of all but what
    `selective` keeps; "none" changes nothing. Module names stay as they are. No collective here; those inside what is
    computed again run again, but for kept ones. tiles: of layers that compute their MLPs in tiles, and so again anyhow.
    layers: None: all of the model's. options: of torch's `checkpoint`."""
    if kind == "selective":
        from dtrain.memory.selective_checkpointing import contexts_of

        options["context_fn"] = contexts_of(tiles)
    for layer in (*model.model.layers, *model.model.vision_layers) if layers is None else layers:
        if kind in ("full", "selective"):
            checkpoint(layer, **options)
        elif kind == "mlp":
            if tiles is not None and not getattr(layer, "is_sparse", True):  # a tower's layers are in no tiles
                continue
            checkpoint(next(child for name, child in layer.named_children() if name.endswith("mlp")), **options)
