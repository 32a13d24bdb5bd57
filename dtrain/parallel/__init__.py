"""Meshes, placements, FSDP and gradients: how one model lies on many ranks. README.md explains the meshes.

Names are imported when they are used: `dtrain.parallel.fits` is read where no torch is.

    runtime, mesh            a rank's place; the device mesh
    fits                     which tp sizes a model allows
    tensor, apply            tensor parallel: styles, a plan of them applied
    experts                  where experts lie, and how tokens reach them
    fsdp, placement          FSDP2; which slice a rank holds; the norm of a gradient in such slices
    masters                  trained parameters in host memory, their rounded copies on the device
    collectives              collectives with derivatives
    context                  context parallel: layout, batches, contexts
    checkpointing, selective  activations computed again; which results of operations are kept
    activation_offload       activations in host memory
    parallelize              models onto meshes, for users
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "PARALLIZE_FUNCTIONS": "parallelize",
    "RotaryEmbedParallel": "parallelize",
    "_parallelize_gemma3": "parallelize",
    "_parallelize_llama": "parallelize",
    "_parallelize_model": "parallelize",
    "_parallelize_qwen": "parallelize",
    "clip_grad_by_total_norm_": "placement",
    "get_grad_norm": "placement",
    "to_local_if_dtensor": "parallelize",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
