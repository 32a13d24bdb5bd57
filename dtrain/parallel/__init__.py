"""Meshes, placements, FSDP and gradients: how one model lies on many ranks. README.md explains the meshes.

Names are imported when they are used: `dtrain.parallel.fits` is read where no torch is.

    mesh                     the device mesh and the process groups; a rank's facts about itself
    fits                     which tp sizes a model allows
    tensor, apply            tensor parallel: styles, a plan of them applied
    experts                  where experts lie, and how tokens reach them
    fsdp, placement          FSDP2; which slice a rank holds; the norm of a gradient in such slices
    collectives              collectives with derivatives
    context                  context parallel: layout, batches, contexts

The functions by which users put a model on their meshes are in `policy.parallelize`. Their names are here because
NeMo-RL's users import them from this package.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from dtrain.base.exports import late_names

if TYPE_CHECKING:
    from dtrain.parallel.placement import clip_grad_by_total_norm_, get_grad_norm
    from dtrain.policy.parallelize import (
        PARALLIZE_FUNCTIONS,
        RotaryEmbedParallel,
        _parallelize_gemma3,
        _parallelize_llama,
        _parallelize_model,
        _parallelize_qwen,
        to_local_if_dtensor,
    )
else:  # a type checker would accept any name from __getattr__
    __getattr__ = late_names(
        __name__,
        {
            "dtrain.policy.parallelize": "PARALLIZE_FUNCTIONS RotaryEmbedParallel _parallelize_gemma3 "
            "_parallelize_llama _parallelize_model _parallelize_qwen to_local_if_dtensor",
            "placement": "clip_grad_by_total_norm_ get_grad_norm",
        },
    )

__all__ = [
    "PARALLIZE_FUNCTIONS",
    "RotaryEmbedParallel",
    "_parallelize_gemma3",
    "_parallelize_llama",
    "_parallelize_model",
    "_parallelize_qwen",
    "clip_grad_by_total_norm_",
    "get_grad_norm",
    "to_local_if_dtensor",
]
