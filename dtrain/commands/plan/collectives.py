"""The collectives of a step: over which dimension of the mesh, of which kind, and of how many bytes.

The bytes of a collective are those of the whole message: what an all-gather gives out, what a reduce-scatter or an
all-to-all takes in, the tensor of an all-reduce, what is sent to the next rank of a ring.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

from dtrain.parallel.mesh import Mesh

_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}
_SILENT = {"recv_", "wait_tensor", "_wrap_tensor_autograd"}


class Collective(NamedTuple):
    """Kind of collective. dimension: of the mesh, "all" for numbers that all ranks share; ranks: of its group; on_host:
    between the hosts' memories."""

    dimension: str
    kind: str
    ranks: int
    on_host: bool


class CollectiveReader:
    """Reads collectives from the operations that torch dispatches. Where several dimensions of `mesh` are the same
    ranks, the kind of a collective says which one it is of: FSDP's are in place, those of cp give a new tensor. tp has
    ranks of its own, if it has several."""

    def __init__(self, mesh: Mesh):
        self._tp = mesh.tp.get_group().group_name if mesh.tp.size() > 1 else None
        self._ep = mesh.ep.get_group().group_name if mesh.ep is not None else None
        self._replicate = mesh.fsdp["dp_replicate"].get_group().group_name if mesh.fsdp.ndim == 2 else None

    def read(self, func: torch._ops.OpOverload, args: tuple, out: Any, in_pass: bool) -> tuple[Collective, int] | None:
        """Return the collective that `func` is, and its bytes; None if it is none. in_pass: inside a pass through the
        model."""
        name = func._schema.name.split("::")[1]
        if func.namespace not in ("c10d", "_c10d_functional") or name in _SILENT:
            return None
        kind = _KINDS.get(name, name)
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
        if name == "all_gather_into_tensor":
            tensors = [out]
        elif kind == "all-gather":  # in place: what it gives out, then what it takes in
            tensors = tensors[:-1]
        elif name in ("_reduce_scatter_base_", "alltoall_base_"):
            tensors = tensors[1:]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        group = _group(args)
        dimension = self._dimension(group.group_name, func.namespace == "c10d", kind, in_pass)
        return Collective(dimension, kind, group.size(), not any(tensor.is_meta for tensor in tensors)), size

    def _dimension(self, group: str, in_place: bool, kind: str, in_pass: bool) -> str:
        if group == self._tp:
            return "tp"
        if group == self._ep and kind == "all-to-all":
            return "ep"
        if not in_place or kind == "send":
            return "cp"
        if in_pass and kind in ("all-gather", "reduce-scatter"):
            return "fsdp"
        return "dp_replicate" if in_pass and kind == "all-reduce" and group == self._replicate else "all"


def _group(args: tuple) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # the operation's other object: which reduction it is
                return dist.ProcessGroup.unbox(argument)
    name = next(argument for argument in reversed(args) if isinstance(argument, str))
    return dist.distributed_c10d._resolve_process_group(GroupName(name))
