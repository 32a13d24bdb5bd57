"""Weights out of a policy: full tensors under Hugging Face's names to whoever generates with them, a bucket at a time.

Three ways: the tensors themselves (`full_tensors`), a broadcast over a process group of its own (`init_collective`,
`broadcast_weights_for_collective`; the receiving side is `WeightReceiver`), or handles of shared memory on one host
(`prepare_weights_for_ipc`, `get_weights_ipc_handles`).
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor

from dtrain.checkpoint.training_state import model_tensors
from dtrain.parallel.fsdp import give_weights_back

Info = dict[str, tuple[torch.Size, torch.dtype]]
BUCKET_BYTES = 1 << 28  # of one message; a tensor beyond it is a bucket of its own


class WeightsOut:
    """The part of `Policy` that gives its weights away. Every rank calls each function: the shards are gathered."""

    model: nn.Module
    rank: int
    device: torch.device

    def prepare_refit_info(self, dtype: torch.dtype | None = None) -> Info:
        """Name → (shape, dtype) of what will be sent, in its order, tied weights once; `dtype`: None for that of
        computation. No collective."""
        dtype = dtype or self.precision.compute
        return {name: (tensor.shape, dtype) for name, tensor in model_tensors(self.model).items()}

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None = None, names: Sequence[str] | None = None) -> Iterator:
        """(name, full tensor) of each weight, one in memory at a time, on this rank's device; in order of
        `prepare_refit_info`, or of `names`. An all-gather per sharded weight."""
        give_weights_back(self.model)
        dtype = dtype or self.precision.compute
        tensors = model_tensors(self.model)
        for name in tensors if names is None else names:
            cast = tensors[name].detach().to(dtype)
            full = cast.full_tensor() if isinstance(cast, DTensor) else cast
            yield name, full.to(self.device)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Meet `world_size` − 1 receivers at ip:port, where this run's rank 0 listens; its other ranks return at once.

        Waits until all are there, at most five minutes. gloo where the device is a CPU, else nccl.
        """
        self._receivers = None
        if self.rank == 0:
            self._receivers = _group(ip, port, 0, world_size, self.device)

    def broadcast_weights_for_collective(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Send every weight to the receivers, in buckets of about `bucket_bytes`, which they must be told.

        Collective over the run, whose shards are gathered; one broadcast per bucket. RuntimeError before
        `init_collective`.
        """
        if self.rank == 0 and getattr(self, "_receivers", None) is None:
            raise RuntimeError("broadcast_weights_for_collective needs init_collective first")
        for names in buckets(self.prepare_refit_info(dtype), bucket_bytes):
            full = [tensor for _, tensor in self.full_tensors(dtype, names)]
            if self.rank == 0:
                flat = torch.cat([_bytes(tensor) for tensor in full])
                self._receivers.broadcast(flat, 0).wait()

    def prepare_weights_for_ipc(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> list[list[str]]:
        """The buckets of names to ask `get_weights_ipc_handles` for, one after the other. No collective."""
        self._ipc_dtype = dtype or self.precision.compute
        return buckets(self.prepare_refit_info(self._ipc_dtype), bucket_bytes)

    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, tuple]:
        """Name → (function, arguments) that rebuild the full tensor in another process of this host: CUDA IPC on a GPU,
        shared memory on a CPU. Send them by `multiprocessing.reduction.ForkingPickler`.

        The tensors live until the next call; the receiver copies what it keeps. Collective.
        """
        self._shared = dict(self.full_tensors(self._ipc_dtype, keys))
        return {name: reduce_tensor(tensor) for name, tensor in self._shared.items()}


class WeightReceiver:
    """The other end of `init_collective`, in another process: rank 1 to world_size − 1 of the group."""

    def __init__(self, ip: str, port: int, rank: int, world_size: int, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._group = _group(ip, port, rank, world_size, self.device)

    def receive(self, info: Info, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what `info` (the sender's `prepare_refit_info`) lists. One broadcast per bucket, whose
        tensors share one memory: copy what is kept."""
        for names in buckets(info, bucket_bytes):
            sizes = [_size(*info[name]) for name in names]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self._group.broadcast(flat, 0).wait()
            for name, piece in zip(names, flat.split(sizes), strict=True):
                shape, dtype = info[name]
                is_aligned = piece.storage_offset() % dtype.itemsize == 0  # else no view of it is of that dtype
                yield name, (piece if is_aligned else piece.clone()).view(dtype).view(shape)


def buckets(info: Mapping[str, tuple[torch.Size, torch.dtype]], most: int) -> list[list[str]]:
    """The names in their order, cut so that each part has at most `most` bytes or one tensor."""
    found: list[list[str]] = []
    room = 0
    for name, (shape, dtype) in info.items():
        size = _size(shape, dtype)
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= size
    return found


def _size(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _group(ip: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    """A process group beside the run's own, which torch.distributed's functions do not know."""
    wait = timedelta(minutes=5)
    store = dist.PrefixStore("weights", dist.TCPStore(ip, port, world_size, is_master=rank == 0, timeout=wait))
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, world_size)
    return dist.ProcessGroupGloo(store, rank, world_size, wait)
