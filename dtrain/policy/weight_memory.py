"""Memory of a rank's weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.fsdp import masters_of, on_device
from dtrain.parallel.placement import bytes_of, local_bounds


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a rank's weights, in bytes.

    Attributes:
        on_device: The weights on the device. Of weights in host memory, their rounded copies.
        on_host: The float32 weights in host memory.
        total_bytes: Bytes on the device.
        trained_bytes: Those of trained weights.
        layer_table_bytes: Those of the table of embeddings for each layer; 0 without.
        tower_bytes: Those of the vision tower; 0 without.
        smallest_rank_bytes: Bytes on the device of the rank that has the fewest.
    """

    on_device: Sequence[Tensor]
    on_host: Sequence[Tensor]
    total_bytes: int
    trained_bytes: int
    layer_table_bytes: int
    tower_bytes: int
    smallest_rank_bytes: int


def weight_memory(model: CausalLM) -> WeightMemory:
    """Return the memory of this rank's weights of a model on its mesh. No collective."""
    parameters = list(model.parameters())
    copies = [on_device(parameter) for parameter in parameters]
    trained = [on_device(parameter) for parameter in parameters if parameter.requires_grad]
    table = getattr(model.model, "embed_tokens_per_layer", None)
    tower = [weight for tower in model.model.vision for weight in tower.parameters()]
    return WeightMemory(
        on_device=copies,
        on_host=masters_of(model),
        total_bytes=bytes_of(copies),
        trained_bytes=bytes_of(trained),
        layer_table_bytes=0 if table is None else bytes_of([on_device(table.weight)]),
        tower_bytes=bytes_of(map(on_device, tower)),
        smallest_rank_bytes=_smallest_rank_bytes(parameters),
    )


def _smallest_rank_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of `parameters` on the device of the rank that has the fewest.

    Shards become smaller towards the last rank of a dimension, so that rank is the last in some of the dimensions. For
    example, 5 rows over 4 ranks are 2, 2, 1 and 0 rows.
    """
    ndim = max((each.device_mesh.ndim for each in parameters if isinstance(each, DTensor)), default=0)

    def shard_bytes(parameter: Tensor, is_last: tuple[bool, ...]) -> int:
        bounds = local_bounds(parameter, lambda mesh, dim: mesh.size(dim) - 1 if is_last[dim] else 0)
        return prod(end - start for start, end in bounds) * on_device(parameter).element_size()

    corners = product((False, True), repeat=ndim)
    return min(sum(shard_bytes(parameter, corner) for parameter in parameters) for corner in corners)
