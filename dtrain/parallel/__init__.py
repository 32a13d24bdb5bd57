"""Meshes, placements, FSDP and gradients: how one model lies on many ranks. README.md explains the meshes.

mesh                     the device mesh and the process groups; a rank's facts about itself
fits                     which tp sizes a model allows
tensor, apply            tensor parallel: styles, a plan of them applied
experts                  where experts lie, and how tokens reach them
fsdp, placement          FSDP2; which slice a rank holds; the norm of a gradient in such slices
collectives              collectives with derivatives
context                  context parallel: layout, batches, contexts
parallelize              models on a user's own meshes, under NeMo-RL's names
"""

from dtrain.parallel.parallelize import (
    PARALLIZE_FUNCTIONS,
    RotaryEmbedParallel,
    _parallelize_gemma3,
    _parallelize_llama,
    _parallelize_model,
    _parallelize_qwen,
    to_local_if_dtensor,
)
from dtrain.parallel.placement import clip_grad_by_total_norm_, get_grad_norm

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
