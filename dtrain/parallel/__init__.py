"""How one model is distributed over many ranks: meshes, tensor parallel, FSDP, experts, context parallel, gradients.

README.md explains the dimensions of the mesh.

mesh                     the device mesh, process groups, and `Runtime`, which has a rank's own number and device
size_checks              the tp and ep sizes that a model allows
tensor, apply            tensor-parallel styles; application of a plan, which is a table of them
experts                  expert parallel: distribution of experts, and exchange of tokens
fsdp                     FSDP2: units, gathering, gradient reduction
placement                the slice of a parameter that a rank stores; gradient norm and clipping
collectives              differentiable collectives
context                  context parallel: layout of sequences, batches, contexts
parallelize              NeMo-RL's functions, for models on a user's own meshes
"""

from dtrain.parallel.parallelize import (
    PARALLIZE_FUNCTIONS,
    RotaryEmbedParallel,
    _parallelize_gemma3 as _parallelize_gemma3,
    _parallelize_llama as _parallelize_llama,
    _parallelize_model as _parallelize_model,
    _parallelize_qwen as _parallelize_qwen,
    to_local_if_dtensor,
)
from dtrain.parallel.placement import clip_grad_by_total_norm_, get_grad_norm

__all__ = [
    "PARALLIZE_FUNCTIONS",
    "RotaryEmbedParallel",
    "clip_grad_by_total_norm_",
    "get_grad_norm",
    "to_local_if_dtensor",
]
