"""The collectives of a step: over which dimension of the mesh, of which kind, how many and how many bytes.

The bytes of a collective are those of the whole message: what an all-gather gives out, what a reduce-scatter or an
all-to-all takes in, the tensor of an all-reduce, what is sent to the next rank of a ring.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

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
    "send": "send",
}
_SILENT = {"recv_", "wait_tensor", "_wrap_tensor_autograd"}


class Sent(NamedTuple):
    """One collective. dimension: of the mesh, "all" for numbers that all ranks share; ranks: of its group; on_host:
    between the hosts' memories."""

    dimension: str
    kind: str
    ranks: int
    size: int
    on_host: bool


class Groups:
    """The process groups of a mesh. Where several dimensions of it are the same ranks, the kind of a collective says
    which one it is of: FSDP's are in place, those of cp give a new tensor. tp has ranks of its own, if it has several.
    """

    def __init__(self, mesh: Mesh):
        self._tp = mesh.tp.get_group().group_name if mesh.tp.size() > 1 else None
        self._replicate = mesh.fsdp["dp_replicate"].get_group().group_name if mesh.fsdp.ndim == 2 else None

    def dimension(self, name: str, func: torch._ops.OpOverload, kind: str, in_pass: bool) -> str:
        if name == self._tp:
            return "tp"
        if func.namespace == "c10d" and kind in ("all-gather", "reduce-scatter") and in_pass:
            return "fsdp"
        if func.namespace == "c10d" and kind == "all-reduce":
            return "dp_replicate" if in_pass and name == self._replicate else "all"
        if func.namespace == "c10d" and kind != "send":
            return "all"
        return "cp"


def collective(func: torch._ops.OpOverload, args: tuple, out: Any, groups: Groups, in_pass: bool) -> Sent | None:
    """What operation `func` sent; None where it is no collective. in_pass: inside a pass through the model."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.split("::")[1]
    if name in _SILENT:
        return None
    kind = _KINDS.get(name, name)
    tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, Tensor)]
    if func.namespace == "_c10d_functional" and kind == "all-gather":
        tensors = [out]
    elif name in ("_reduce_scatter_base_", "alltoall_base_"):
        tensors = tensors[1:]
    elif name in ("_allgather_base_", "allgather_"):
        tensors = tensors[:1] if name == "_allgather_base_" else tensors[:-1]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    group = _group_name(args)
    on_host = not any(tensor.is_meta for tensor in tensors)
    return Sent(groups.dimension(group, func, kind, in_pass), kind, _group_size(group), size, on_host)


def _group_name(args: tuple) -> str:
    for one in args:
        if isinstance(one, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(one).group_name
            except RuntimeError:  # the operation's other object: which reduction it is
                continue
    return next(one for one in reversed(args) if isinstance(one, str))


def _group_size(name: str) -> int:
    return torch.distributed.distributed_c10d._resolve_process_group(name).size()
