"""Weights on their way to an engine: how they are cut into buckets, and the receiving end of a broadcast.

The sender is rank 0 of a process group of its own, the receivers are the others. A bucket is one message: the bytes of
its tensors, one after the other, in the order of their names (SGLang's `flattened_bucket`). The group meets as the one
that SGLang's `init_weights_update_group` joins: a TCP store at the sender's address, keys below the group's name.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.addresses import address_to_listen_at, listen
from dtrain.base.errors import UserError

Info = dict[str, tuple[torch.Size, torch.dtype]]
BUCKET_BYTES = 1 << 28  # of one message; a tensor beyond it is a bucket of its own
GROUP = "weights"
MEETING = timedelta(minutes=5)


class WeightReceiver:
    """Receiving end of `Policy.init_collective`, in another process: rank 1 to world_size - 1 of the group."""

    def __init__(
        self,
        ip: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        *,
        name: str = GROUP,
        wait: timedelta = MEETING,
    ):
        self.device = torch.device(device)
        self._group = weight_group(ip, port, rank, world_size, self.device, name=name, wait=wait)

    def receive(self, info: Info, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor [..]) for all of `info` (the sender's `prepare_refit_info`), in its shape. One broadcast
        per bucket, whose tensors share one memory: copy what is kept."""
        for names in buckets(info, bucket_bytes):
            yield from self.receive_bucket({name: info[name] for name in names})

    def receive_bucket(self, info: Info) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor [..] in its shape) of one message that holds all of `info`: one broadcast, [bytes] uint8.
        Raises RuntimeError where the sender is gone."""
        sizes = [nbytes(*info[name]) for name in info]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat, 0).wait()
        for (name, (shape, dtype)), piece in zip(info.items(), flat.split(sizes), strict=True):
            is_aligned = piece.storage_offset() % dtype.itemsize == 0  # else no view of it is of that dtype
            yield name, (piece if is_aligned else piece.clone()).view(dtype).view(shape)


def buckets(info: Mapping[str, tuple[torch.Size, torch.dtype]], most: int) -> list[list[str]]:
    """Return the names in their order, cut so that each part has at most `most` bytes or one tensor."""
    parts: list[list[str]] = []
    free = 0
    for name, (shape, dtype) in info.items():
        size = nbytes(shape, dtype)
        if not parts or size > free:
            parts.append([])
            free = most
        parts[-1].append(name)
        free -= size
    return parts


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return one message, [bytes] uint8, of a bucket's tensors."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def weight_group(
    ip: str,
    port: int,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    name: str = GROUP,
    wait: timedelta = MEETING,
) -> Any:
    """Return a process group beside the run's own, unknown to torch.distributed's functions: gloo on a CPU, else nccl.

    Rank 0 listens at ip:port, and gloo at each end's address on the way there. Waits until all are there, at most
    `wait`, which bounds each message too. The keys are those of torch's `_new_process_group_helper` on a store prefixed
    by `name`, so that SGLang's end finds this one. Raises UserError where rank 0 cannot listen there.
    """
    own = address_to_listen_at(ip, port)
    try:
        listener = listen(own, port) if rank == 0 else None
    except OSError as error:
        raise UserError(f"{ip}:{port}, where the receivers of weights are waited for: {error.strerror}") from error
    taken = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {"is_master": False}
    store: dist.Store = dist.TCPStore(ip, port, world_size, timeout=wait, **taken)
    for prefix in (name, f"{name}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]  # torch's stub calls it Options
    options._timeout = wait
    options._devices = [gloo.create_device(hostname=own) if own else gloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, world_size, options)
