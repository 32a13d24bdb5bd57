"""A batch under context parallel: cut to the head-tail layout, and put together again."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import STREAMS
from dtrain.parallel.context.layout import gather_sequence, mesh_rank, shard_sequence


def cut_streams(batch: Mapping[str, Tensor], cp_mesh: DeviceMesh, beside: Collection[str] = ()) -> dict[str, Tensor]:
    """This cp rank's part of a batch, as new tensors: every stream [B, S, ..], but those of `beside`, as `shard_tokens`
    cuts it, with its pad value of `batch.STREAMS`, else 0. No collective."""
    pads = {name: STREAMS[name].pad if name in STREAMS else 0 for name in batch}
    return {
        name: stream if name in beside else shard_tokens(stream, cp_mesh, pads[name]) for name, stream in batch.items()
    }


def shard_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, pad: float | None = 0, dim: int = 1) -> Tensor:
    """This cp rank's part of a per-token tensor [.., S, ..] of the caller's (advantages, old log-probabilities), as the
    batch's streams are cut: padded with `pad` on the right to a multiple of 2·cp, head-tail. No collective."""
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    dim %= tensor.dim()
    padded = pad_right(tensor, 2 * cp_mesh.size(), pad, dim)
    return shard_sequence(padded, mesh_rank(cp_mesh), cp_mesh.size(), dim)


def gather_tokens(tensor: Tensor, cp_mesh: DeviceMesh | None, length: int, dim: int = 1) -> Tensor:
    """`shard_tokens` undone: [.., length, ..] in the caller's order on every cp rank, without the padding.

    One all-gather; backward, the ranks' gradients are summed (reduce-scatter): each rank owns a loss of its own.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    return gather_sequence(tensor, cp_mesh.get_group(), dim).narrow(dim, 0, length)


def pad_right(tensor: Tensor, multiple: int, pad: float | int | bool | None, dim: int) -> Tensor:
    """[.., S, ..] padded along `dim` to a multiple; pad None: the values go on counting."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    if pad is not None:
        return torch.cat([tensor, tensor.new_full(shape, pad)], dim)
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    steps = torch.arange(1, missing + 1, device=tensor.device, dtype=tensor.dtype)
    return torch.cat([tensor, last + steps.view([-1 if axis == dim else 1 for axis in range(tensor.dim())])], dim)
