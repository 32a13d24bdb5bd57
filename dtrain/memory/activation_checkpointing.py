"""Activation checkpointing: parts of a model are recomputed in the backward, and their activations are not stored.

`train.activation_checkpointing` chooses the parts:

    full        each layer is recomputed from its input
    mlp         the MLP of each layer is recomputed from its input
    selective   each layer is recomputed, except for its expensive operations, whose results are stored

The expensive operations are matrix products, attention and reduce-scatters. All-to-alls of tokens are sent again,
because their results are as large as everything else that a mixture of experts stores. In a tile (`memory.tiles`)
everything is recomputed.

"selective" has two forms. Layers that run as written use `UNCOMPILED_CONTEXTS`, which stores the results of the
operations in `STORED`. Functions that torch.compile compiles use `checkpoint_selectively` with the table
`STORED_COMPILED`. The compiler's partitioner then stores only those results in the table that the backward needs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtrain.models.common.decoder import Layer
from dtrain.parallel.collectives import REDUCE_SCATTER_OPS, REPLICATED_RESULT_OPS
from dtrain.parallel.tensor import ParallelModel

Contexts = Callable[[], tuple[Any, Any]]
"""Function that returns the contexts of the forward and of the recomputation, as torch's `checkpoint` accepts it."""

STORED = frozenset(
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
        *REDUCE_SCATTER_OPS,
    }
)
"""Operations whose results are stored, in layers that run as written."""

STORED_COMPILED = STORED | REPLICATED_RESULT_OPS
"""Operations whose results may be stored in compiled parts.

Results of all-gathers and all-reduces are among them, because the compiler does not store the products that they add
up. In layers that run as written both would be stored, which takes more memory than no checkpointing at all.
"""

# Whether the running call computes a tile. torch calls a policy with an operation and its arguments only, so the flag
# cannot be passed down. Like torch's grad mode it belongs to the running call of a thread, and to no model or layer.
_is_in_tile = ContextVar("is_in_tile", default=False)


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
        options["context_fn"] = UNCOMPILED_CONTEXTS
    if layers is None:
        layers = [*model.model.layers, *model.model.vision_layers]
    for layer in layers:
        if kind in ("full", "selective"):
            checkpoint_module(layer, **options)
        elif kind == "mlp" and not (is_tiled and _may_have_tiles(layer)):
            checkpoint_module(_mlp_of(layer), **options)


def _may_have_tiles(layer: nn.Module) -> bool:
    """Check whether `memory.tiles` can compute the MLP of a layer. It tiles neither experts nor a vision tower."""
    return isinstance(layer, Layer) and not layer.is_sparse


def _mlp_of(layer: nn.Module) -> nn.Module:
    """Return the child of a layer whose name ends in "mlp"."""
    for name, child in layer.named_children():
        if name.endswith("mlp"):
            return child
    raise ValueError(f"{type(layer).__name__} has no MLP")


@contextmanager
def storing_nothing() -> Iterator[None]:
    """Context in which checkpointed layers store no results, because a tile is computed that is recomputed anyway."""
    token = _is_in_tile.set(True)
    try:
        yield
    finally:
        _is_in_tile.reset(token)


def _policy(stored: frozenset, context, operation, *args, **kwargs) -> CheckpointPolicy:
    """Return whether the result of an operation is stored. Policy for `create_selective_checkpoint_contexts`."""
    return CheckpointPolicy.MUST_SAVE if operation in stored else CheckpointPolicy.PREFER_RECOMPUTE


def _policy_outside_tiles(stored: frozenset, context, operation, *args, **kwargs) -> CheckpointPolicy:
    """Return the decision of `_policy`, but store no results inside a tile."""
    if _is_in_tile.get():
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _policy(stored, context, operation, *args, **kwargs)


# One object each, because torch.compile guards on the identity of the object.
# The compiler calls the policy when it traces a part and not in each forward, so COMPILED must not depend on the call.
COMPILED_CONTEXTS: Contexts = partial(create_selective_checkpoint_contexts, partial(_policy, STORED_COMPILED))
"""Contexts of compiled parts, inside tiles or not."""
UNCOMPILED_CONTEXTS: Contexts = partial(create_selective_checkpoint_contexts, partial(_policy_outside_tiles, STORED))
"""Contexts of layers, or parts of layers, that run as written and may contain tiles: the argument `context_fn` of
torch's `checkpoint`."""


def checkpoint_selectively(
    function: Callable[..., Any], contexts: Contexts = COMPILED_CONTEXTS, **options: Any
) -> Callable[..., Any]:
    """Return `function` with selective checkpointing inside, to be compiled.

    The partitioner of torch.compile stores what the backward needs of the results that may be stored, and nothing else.

    Args:
        function: A part of a layer.
        contexts: `COMPILED_CONTEXTS`, or `UNCOMPILED_CONTEXTS` if the function is not compiled after all.
        **options: Further arguments of torch's `checkpoint`.
    """

    def checkpointed(*inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, **options)

    return checkpointed
