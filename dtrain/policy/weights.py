"""Full weights of a policy under Hugging Face's names, sent to an inference engine in buckets.

Adapters are merged into the weights. There are three ways to send them:

    full_tensors                          the tensors themselves, one after the other, to code in this process
    init_collective, broadcast_...        a broadcast to engines on any host; `WeightReceiver` is the receiving end
    prepare_weights_for_ipc, get_...      handles of shared memory, to an engine on the same host

In a broadcast, rank 0 of the run is rank 0 of a process group of its own, and the receivers are the other ranks:

    run: ranks 0..3 --all-gather--> run's rank 0 = sender, rank 0 --broadcast--> engine A, rank 1
                                                                             --> engine B, rank 2

A bucket is one message: the bytes of its tensors one after the other, in the order of their names (SGLang's
`flattened_bucket`). The group is built like the one that SGLang's `init_weights_update_group` joins: a TCP store at the
sender's address, with keys below the group's name.

`weight_memory` counts the bytes of a rank's weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from math import prod
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor

from dtrain.base.addresses import choose_listen_address, listen
from dtrain.base.errors import UserError
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.fsdp import Sharding, get_device_parameter, get_host_masters
from dtrain.parallel.placement import bytes_of, local_bounds

WeightInfo = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of the tensors that are sent, by name and in order."""

BUCKET_BYTES = 1 << 28  # size of one message; a larger tensor is a bucket of its own
WEIGHT_GROUP = "weights"
MEETING_TIMEOUT = timedelta(minutes=5)


class WeightGroup(Protocol):
    """A process group of `join_weight_group`: torch's `ProcessGroupGloo` or `ProcessGroupNCCL`.

    torch's stubs leave out the collectives of these classes.
    """

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Broadcast a tensor in place."""


class WeightSender:
    """Sends the full weights of a model.

    Every rank calls each method that has collectives, because shards are gathered.

    Args:
        model: The model, sharded over its mesh.
        sharding: Sharding of `model`.
        rank: This rank in the run. Rank 0 sends.
        device: Device on which full tensors are put together.
        dtype: Dtype of the tensors if a method's argument `dtype` is None.
    """

    def __init__(self, model: CausalLM, sharding: Sharding, rank: int, device: torch.device, dtype: torch.dtype):
        self._model, self._sharding = model, sharding
        self._rank, self._device, self._dtype = rank, device, dtype
        self._receivers: WeightGroup | None = None  # on rank 0, after `init_collective`
        self._ipc_dtype: torch.dtype | None = None  # after `prepare_weights_for_ipc`
        self._shared: dict[str, Tensor] = {}  # the tensors of the handles that were returned last

    def close(self) -> None:
        """Leave the process group of `init_collective`, and free shared weights."""
        self._receivers = None
        self._shared = {}

    def prepare_refit_info(self, dtype: torch.dtype | None = None) -> WeightInfo:
        """Return shape and dtype of the tensors that will be sent, by name and in order. No collective.

        Tied weights appear once. Weights that need full precision, such as a router's bias, are at least float32.

        Args:
            dtype: Dtype of the tensors. None: that of computation.
        """
        from dtrain.checkpoint.huggingface.merged import full_weights, widen_exact  # training needs none of it

        dtype = dtype or self._dtype
        info: WeightInfo = {}
        for name, weight in full_weights(self._model).items():
            info[name] = weight.shape, widen_exact(dtype, weight.exact)
        return info

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None = None, names: Sequence[str] | None = None) -> Iterator:
        """Yield the name and the full tensor of each weight on this rank's device, one in memory at a time.

        Args:
            dtype: Dtype of the tensors. None: that of computation.
            names: Weights to yield, in this order. None yields all, in the order of `prepare_refit_info`.

        Collectives:
            One all-gather per sharded weight and per sharded tensor of an adapter. Every rank reads to the end.
        """
        from dtrain.checkpoint.huggingface.merged import full_weights, widen_exact

        self._sharding.reshard()
        dtype = dtype or self._dtype
        weights = full_weights(self._model)
        for name in weights if names is None else names:
            yield name, weights[name].read(widen_exact(dtype, weights[name].exact)).to(self._device)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Connect rank 0 to the receivers of `broadcast_weights_for_collective`. Other ranks return at once.

        Waits until all receivers are connected, at most `MEETING_TIMEOUT`. The backend is nccl on CUDA, otherwise gloo.

        Args:
            ip: Address at which rank 0 listens.
            port: Port at which rank 0 listens.
            world_size: Number of receivers plus one.
        """
        self._receivers = None
        if self._rank == 0:
            self._receivers = join_weight_group(ip, port, 0, world_size, self._device)

    def broadcast_weights_for_collective(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Send every weight to the receivers.

        Args:
            dtype: Dtype of the tensors. None: that of computation.
            bucket_bytes: Size of a bucket. The receivers must use the same number.

        Raises:
            RuntimeError: Before `init_collective`.

        Collectives:
            One all-gather per sharded weight over the run. One broadcast per bucket to the receivers.
        """
        receivers = self._receivers
        if self._rank == 0 and receivers is None:
            raise RuntimeError("broadcast_weights_for_collective needs init_collective first")
        for names in split_into_buckets(self.prepare_refit_info(dtype), bucket_bytes):
            full = [tensor for _, tensor in self.full_tensors(dtype, names)]
            if receivers is not None:
                receivers.broadcast(flatten_bucket(full), 0).wait()

    def prepare_weights_for_ipc(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> list[list[str]]:
        """Return the names of each bucket, for successive calls of `get_weights_ipc_handles`. No collective."""
        self._ipc_dtype = dtype or self._dtype
        return split_into_buckets(self.prepare_refit_info(self._ipc_dtype), bucket_bytes)

    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, tuple]:
        """Return handles by which another process of this host can open full tensors.

        The handles use CUDA IPC on a GPU and shared memory on a CPU. `multiprocessing.reduction.ForkingPickler` can
        send them. The tensors are valid only until the next call, so the receiver has to copy them.

        Args:
            keys: Names of the weights, usually one bucket of `prepare_weights_for_ipc`.

        Returns:
            By name, a function and the arguments with which it returns the tensor.

        Raises:
            RuntimeError: Before `prepare_weights_for_ipc`.

        Collectives:
            One all-gather per sharded weight.
        """
        if self._ipc_dtype is None:
            raise RuntimeError("get_weights_ipc_handles needs prepare_weights_for_ipc first")
        self._shared = dict(self.full_tensors(self._ipc_dtype, keys))
        return {name: reduce_tensor(tensor) for name, tensor in self._shared.items()}


class WeightReceiver:
    """Receiving end of `WeightSender.init_collective`, in another process.

    Args:
        ip: The sender's address.
        port: The sender's port.
        rank: This receiver's rank in the group, from 1 to `world_size` - 1.
        world_size: Number of receivers plus one.
        device: Device of the tensors.
        name: Name of the group.
        wait: Longest time to wait for all ranks, and for each message.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        *,
        name: str = WEIGHT_GROUP,
        wait: timedelta = MEETING_TIMEOUT,
    ):
        self.device = torch.device(device)
        self._group = join_weight_group(ip, port, rank, world_size, self.device, name=name, wait=wait)

    def receive(self, info: WeightInfo, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Receive all weights of one `broadcast_weights_for_collective`.

        Args:
            info: The sender's `prepare_refit_info`.
            bucket_bytes: The sender's size of a bucket.

        Yields:
            Name and tensor of each weight. The tensors of a bucket share one buffer.

        Collectives:
            One broadcast per bucket.
        """
        for names in split_into_buckets(info, bucket_bytes):
            yield from self.receive_bucket({name: info[name] for name in names})

    def receive_bucket(self, info: WeightInfo) -> Iterator[tuple[str, Tensor]]:
        """Receive one message that contains all tensors of `info`.

        Yields:
            Name and tensor of each weight. The tensors share one buffer.

        Raises:
            RuntimeError: If the sender is gone.

        Collectives:
            One broadcast.
        """
        sizes = [num_bytes(shape, dtype) for shape, dtype in info.values()]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat, 0).wait()
        for (name, (shape, dtype)), content in zip(info.items(), flat.split(sizes), strict=True):
            # A view in another dtype must begin at a multiple of that dtype's size.
            is_aligned = content.storage_offset() % dtype.itemsize == 0
            if not is_aligned:
                content = content.clone()
            yield name, content.view(dtype).view(shape)


def join_weight_group(
    ip: str,
    port: int,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    name: str = WEIGHT_GROUP,
    wait: timedelta = MEETING_TIMEOUT,
) -> WeightGroup:
    """Build a process group that is independent of the run's own, and unknown to torch.distributed's functions.

    Rank 0 listens at ip:port. gloo also listens, on each rank, at this host's own address in that network. The prefixes
    of the store's keys are those that torch's `_new_process_group_helper` adds to a store with the prefix `name`.
    SGLang builds its group with that function, so both groups find each other's keys.

    Args:
        ip: Address at which rank 0 listens.
        port: Port at which rank 0 listens.
        rank: This process's rank in the group.
        world_size: Number of ranks.
        device: The backend is nccl for CUDA, otherwise gloo.
        name: Name of the group.
        wait: Longest time to wait for all ranks, and for each message.

    Raises:
        UserError: If rank 0 cannot listen there.
    """
    own_address = choose_listen_address(ip, port)
    try:
        listener = listen(own_address, port) if rank == 0 else None
    except OSError as error:
        raise UserError(f"cannot wait for the receivers of weights at {ip}:{port}: {error.strerror}") from error
    store: dist.Store
    if listener is not None:
        # By itself, the store would listen at all addresses of this host. This socket listens at only one address.
        store = dist.TCPStore(ip, port, world_size, timeout=wait, is_master=True, master_listen_fd=listener.detach())
    else:
        store = dist.TCPStore(ip, port, world_size, timeout=wait, is_master=False)
    for prefix in (name, f"{name}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return cast(WeightGroup, dist.ProcessGroupNCCL(store, rank, world_size, options))
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]  # torch's stub calls it Options
    options._timeout = wait
    options._devices = [gloo.create_device(hostname=own_address) if own_address else gloo.create_default_device()]
    return cast(WeightGroup, dist.ProcessGroupGloo(store, rank, world_size, options))


def split_into_buckets(info: Mapping[str, tuple[torch.Size, torch.dtype]], max_bytes: int) -> list[list[str]]:
    """Split names into buckets of at most `max_bytes`, in their order. A larger tensor is a bucket of its own.

    Example:
        >>> info = {name: (torch.Size([size]), torch.uint8) for name, size in (("a", 4), ("b", 4), ("c", 9), ("d", 1))}
        >>> split_into_buckets(info, max_bytes=8)
        [['a', 'b'], ['c'], ['d']]
    """
    buckets: list[list[str]] = []
    free = 0
    for name, (shape, dtype) in info.items():
        size = num_bytes(shape, dtype)
        if not buckets or size > free:
            buckets.append([])
            free = max_bytes
        buckets[-1].append(name)
        free -= size
    return buckets


def flatten_bucket(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of a bucket's tensors to one message, uint8 [bytes]."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return torch.Size(shape).numel() * dtype.itemsize


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a rank's weights, in bytes.

    Attributes:
        on_device: The weights on the device. For weights in host memory, these are their rounded copies.
        on_host: The float32 weights in host memory.
        total_bytes: Bytes on the device.
        trained_bytes: Bytes of trained weights.
        layer_table_bytes: Bytes of Gemma's embedding table for every layer; 0 if there is none.
        tower_bytes: Bytes of the vision tower; 0 if there is none.
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
    copies = [get_device_parameter(parameter) for parameter in parameters]
    trained = [get_device_parameter(parameter) for parameter in parameters if parameter.requires_grad]
    table = getattr(model.model, "embed_tokens_per_layer", None)
    tower = [weight for tower in model.model.vision for weight in tower.parameters()]
    return WeightMemory(
        on_device=copies,
        on_host=get_host_masters(model),
        total_bytes=bytes_of(copies),
        trained_bytes=bytes_of(trained),
        layer_table_bytes=0 if table is None else bytes_of([get_device_parameter(table.weight)]),
        tower_bytes=bytes_of(map(get_device_parameter, tower)),
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
        return prod(end - start for start, end in bounds) * get_device_parameter(parameter).element_size()

    corners = product((False, True), repeat=ndim)
    return min(sum(shard_bytes(parameter, corner) for parameter in parameters) for corner in corners)
