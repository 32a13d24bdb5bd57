"""Activation checkpointing: parts of a model are computed again in the backward, and their activations are not stored.

`train.activation_checkpointing` chooses the parts: "full" recomputes each layer from its input, "mlp" only its MLP, and
"selective" a layer without its matrix products and attention (`selective_checkpointing`).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._composable import checkpoint

from dtrain.models.common.decoder import Layer
from dtrain.parallel.tensor import ParallelModel

if TYPE_CHECKING:
    from dtrain.memory.selective_checkpointing import TileComputing


def checkpoint_activations(
    model: ParallelModel,
    kind: str,
    tiles: "TileComputing | None" = None,
    layers: Iterable[nn.Module] | None = None,
    determinism_check: str = "default",
) -> None:
    """Recompute the activations of a model's layers in the backward. Names of modules and parameters do not change.

    Args:
        model: The model.
        kind: "full", "selective", "mlp", or "none", which changes nothing.
        tiles: State of the layers' tiles, if `memory.tiles` computes their MLPs. Tiles are recomputed anyway, so "mlp"
            leaves these layers out.
        layers: Layers to checkpoint. None: all layers of the decoder and of the vision tower.
        determinism_check: Argument of torch's `checkpoint`: how recomputed activations are compared with the stored.

    Collectives:
        None here. In each backward, the collectives of the recomputed parts run again, except for those whose results
        selective checkpointing stores.
    """
    options: dict[str, Any] = {"determinism_check": determinism_check}
    if kind == "selective":
        from dtrain.memory.selective_checkpointing import contexts_of  # optional

        options["context_fn"] = contexts_of(tiles)
    if layers is None:
        layers = [*model.model.layers, *model.model.vision_layers]
    for layer in layers:
        if kind in ("full", "selective"):
            checkpoint(layer, **options)
        elif kind == "mlp" and not _computes_mlp_in_tiles(layer, tiles):
            checkpoint(_mlp_of(layer), **options)


def _computes_mlp_in_tiles(layer: nn.Module, tiles: "TileComputing | None") -> bool:
    """Check whether `memory.tiles` computes the MLP of a layer: it tiles neither experts nor a vision tower."""
    return tiles is not None and isinstance(layer, Layer) and not layer.is_sparse


def _mlp_of(layer: nn.Module) -> nn.Module:
    """Return the child of a layer whose name ends in "mlp"."""
    return next(child for name, child in layer.named_children() if name.endswith("mlp"))
