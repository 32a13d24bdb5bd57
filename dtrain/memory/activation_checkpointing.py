"""Activation checkpointing: parts of a model are computed again in the backward, and their activations are not stored.

`train.activation_checkpointing` chooses the parts: "full" recomputes each layer from its input, "mlp" only its MLP, and
"selective" a layer without its matrix products and attention (`selective_checkpointing`).
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed._composable import checkpoint

from dtrain.models.common.decoder import Layer
from dtrain.parallel.tensor import ParallelModel


def checkpoint_activations(
    model: ParallelModel,
    kind: str,
    is_tiled: bool = False,
    layers: Iterable[nn.Module] | None = None,
    determinism_check: str = "default",
) -> None:
    """Recompute the activations of a model's layers in the backward. Names of modules and parameters do not change.

    Args:
        model: The model.
        kind: "full", "selective", "mlp", or "none", which changes nothing.
        is_tiled: Whether `memory.tiles` computes the layers' MLPs. Tiles are recomputed anyway, so "mlp" leaves these
            layers out.
        layers: Layers to checkpoint. None: all layers of the decoder and of the vision tower.
        determinism_check: Argument of torch's `checkpoint`: how recomputed activations are compared with the stored.

    Collectives:
        None here. In each backward, the collectives of the recomputed parts run again, except for those whose results
        selective checkpointing stores.
    """
    options: dict[str, Any] = {"determinism_check": determinism_check}
    if kind == "selective":
        from dtrain.memory.selective_checkpointing import AS_WRITTEN  # optional

        options["context_fn"] = AS_WRITTEN
    if layers is None:
        layers = [*model.model.layers, *model.model.vision_layers]
    for layer in layers:
        if kind in ("full", "selective"):
            checkpoint(layer, **options)
        elif kind == "mlp" and not (is_tiled and _may_have_tiles(layer)):
            checkpoint(_mlp_of(layer), **options)


def _may_have_tiles(layer: nn.Module) -> bool:
    """Check whether `memory.tiles` can compute the MLP of a layer: it tiles neither experts nor a vision tower."""
    return isinstance(layer, Layer) and not layer.is_sparse


def _mlp_of(layer: nn.Module) -> nn.Module:
    """Return the child of a layer whose name ends in "mlp"."""
    return next(child for name, child in layer.named_children() if name.endswith("mlp"))
