"""How evenly the ranks of a mesh hold a model."""

from collections.abc import Iterable
from itertools import product
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtrain.parallel.placement import chunk_bounds


def min_shard_elements(parameters: Iterable[Tensor]) -> int:
    """Elements of `parameters`, each of shape [...], on the rank that holds fewest. No collective.

    Chunks fall off towards the last rank of a dimension, so it is last in some of them; rank 0 holds most.
    """
    parameters = list(parameters)
    ndim = max((p.device_mesh.ndim for p in parameters if isinstance(p, DTensor)), default=0)
    corners = product((False, True), repeat=ndim)
    return min(sum(_elements(parameter, corner) for parameter in parameters) for corner in corners)


def _elements(parameter: Tensor, last: tuple[bool, ...]) -> int:
    """Of the rank that is last in the dimensions of the mesh where `last`, first in the others; cut in the order of
    `placement.local_slices`."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    sizes = list(parameter.shape)
    cuts = [(one, dim) for dim, one in enumerate(parameter.placements) if isinstance(one, Shard | _StridedShard)]
    for placement, dim in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):
        ranks = parameter.device_mesh.size(dim)
        start, end = chunk_bounds(sizes[placement.dim], ranks, ranks - 1 if last[dim] else 0)
        sizes[placement.dim] = end - start
    return prod(sizes)
