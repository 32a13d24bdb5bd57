"""Full weights of a policy under Hugging Face's names, sent to an engine in buckets.

An adapter is merged into the weights. There are three ways to send them: the tensors themselves (`full_tensors`), a
broadcast over a process group of its own (`init_collective`, `broadcast_weights_for_collective`; `WeightReceiver` is
the receiving end), or handles of shared memory on one host (`prepare_weights_for_ipc`, `get_weights_ipc_handles`).

In a broadcast, the sender is rank 0 of a process group of its own, the receivers are the others. A bucket is one
message: the bytes of its tensors, one after the other, in the order of their names (SGLang's `flattened_bucket`). The
group meets as the one that SGLang's `init_weights_update_group` joins: a TCP store at the sender's address, keys below
the group's name.

`weight_memory` counts the bytes of a rank's weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

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
BUCKET_BYTES = 1 << 28  # of one message; a tensor beyond it is a bucket of its own
WEIGHT_GROUP = "weights"
MEETING_TIMEOUT = timedelta(minutes=5)


class WeightSender:
    """Sender of the weights of `model`, which every rank has on its `device`; dtype: where none is asked for. Every
    rank calls each function: the shards are gathered."""

    def __init__(self, model: CausalLM, sharding: Sharding, rank: int, device: torch.device, dtype: torch.dtype):
        self._model, self._sharding = model, sharding
        self._rank, self._device, self._dtype = rank, device, dtype
        self._ipc_dtype: torch.dtype | None = None  # after `prepare_weights_for_ipc`
        self.close()

    def close(self) -> None:
        """Leave the receivers of `init_collective` and let go of shared weights."""
        self._receivers: Any = None  # their process group, on rank 0, after `init_collective`
        self._shared: dict[str, Tensor] = {}

    def prepare_refit_info(self, dtype: torch.dtype | None = None) -> WeightInfo:
        """Return name → (shape, dtype) of the tensors that will be sent, in order, tied weights once; what must keep
        its precision is sent in float32 at least. No collective."""
        from dtrain.checkpoint.huggingface.merged import full_weights, widen_exact  # training needs none of it

        dtype = dtype or self._dtype
        return {
            name: (weight.shape, widen_exact(dtype, weight.exact)) for name, weight in full_weights(self._model).items()
        }

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None = None, names: Sequence[str] | None = None) -> Iterator:
        """Yield (name, full tensor) of each weight, one in memory at a time, on this rank's device; in order of
        `prepare_refit_info`, or of `names`. An all-gather per sharded weight, and of an adapter's parts."""
        from dtrain.checkpoint.huggingface.merged import full_weights, widen_exact

        self._sharding.reshard()
        dtype = dtype or self._dtype
        weights = full_weights(self._model)
        for name in weights if names is None else names:
            yield name, weights[name].read(widen_exact(dtype, weights[name].exact)).to(self._device)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Connect to `world_size` − 1 receivers at ip:port, where rank 0 listens; other ranks return at once.

        Waits until all are there, at most five minutes. gloo where the device is a CPU, else nccl.
        """
        self._receivers = None
        if self._rank == 0:
            self._receivers = join_weight_group(ip, port, 0, world_size, self._device)

    def broadcast_weights_for_collective(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Send every weight to the receivers, in buckets of about `bucket_bytes`, a number that they must know.

        Collective over the run, whose shards are gathered; one broadcast per bucket. RuntimeError before
        `init_collective`.
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
        """Return the buckets of names to ask `get_weights_ipc_handles` for, one after the other. No collective."""
        self._ipc_dtype = dtype or self._dtype
        return split_into_buckets(self.prepare_refit_info(self._ipc_dtype), bucket_bytes)

    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, tuple]:
        """Return name → (function, arguments) that rebuild the full tensor in another process of this host: CUDA IPC on
        a GPU, shared memory on a CPU. Send them by `multiprocessing.reduction.ForkingPickler`.

        The tensors live until the next call; the receiver copies what it keeps. Collective. RuntimeError before
        `prepare_weights_for_ipc`.
        """
        if self._ipc_dtype is None:
            raise RuntimeError("get_weights_ipc_handles needs prepare_weights_for_ipc first")
        self._shared = dict(self.full_tensors(self._ipc_dtype, keys))
        return {name: reduce_tensor(tensor) for name, tensor in self._shared.items()}


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
        name: str = WEIGHT_GROUP,
        wait: timedelta = MEETING_TIMEOUT,
    ):
        self.device = torch.device(device)
        self._group = join_weight_group(ip, port, rank, world_size, self.device, name=name, wait=wait)

    def receive(self, info: WeightInfo, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor [..]) for all of `info` (the sender's `prepare_refit_info`), in its shape. One broadcast
        per bucket, whose tensors share one memory: copy what is kept."""
        for names in split_into_buckets(info, bucket_bytes):
            yield from self.receive_bucket({name: info[name] for name in names})

    def receive_bucket(self, info: WeightInfo) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor [..] in its shape) of one message that holds all of `info`: one broadcast, [bytes] uint8.
        Raises RuntimeError where the sender is gone."""
        sizes = [num_bytes(*info[name]) for name in info]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat, 0).wait()
        for (name, (shape, dtype)), piece in zip(info.items(), flat.split(sizes), strict=True):
            is_aligned = piece.storage_offset() % dtype.itemsize == 0  # else no view of it is of that dtype
            yield name, (piece if is_aligned else piece.clone()).view(dtype).view(shape)


def join_weight_group(
    ip: str,
    port: int,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    name: str = WEIGHT_GROUP,
    wait: timedelta = MEETING_TIMEOUT,
) -> Any:
    """Return a process group beside the run's own, unknown to torch.distributed's functions: gloo on a CPU, else nccl.

    Rank 0 listens at ip:port, and gloo at each end's address on the way there. Waits until all are there, at most
    `wait`, which bounds each message too. The keys are those of torch's `_new_process_group_helper` on a store prefixed
    by `name`, so that SGLang's end finds this one. Raises UserError where rank 0 cannot listen there.
    """
    own = choose_listen_address(ip, port)
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


def split_into_buckets(info: Mapping[str, tuple[torch.Size, torch.dtype]], most: int) -> list[list[str]]:
    """Return the names in their order, cut so that each part has at most `most` bytes or one tensor."""
    parts: list[list[str]] = []
    free = 0
    for name, (shape, dtype) in info.items():
        size = num_bytes(shape, dtype)
        if not parts or size > free:
            parts.append([])
            free = most
        parts[-1].append(name)
        free -= size
    return parts


def flatten_bucket(tensors: Sequence[Tensor]) -> Tensor:
    """Return one message, [bytes] uint8, of a bucket's tensors."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


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
