"""Weights out of a policy: full tensors under Hugging Face's names to whoever generates with them, a bucket at a time.
An adapter is merged into what is sent.

Three ways: the tensors themselves (`full_tensors`), a broadcast over a process group of its own (`init_collective`,
`broadcast_weights_for_collective`; `weight_buckets` has the receiving side), or handles of shared memory on one host
(`prepare_weights_for_ipc`, `get_weights_ipc_handles`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.fsdp import Sharding
from dtrain.policy.weight_buckets import BUCKET_BYTES, Info, buckets, flatten, weight_group


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

    def prepare_refit_info(self, dtype: torch.dtype | None = None) -> Info:
        """Return name → (shape, dtype) of the tensors that will be sent, in order, tied weights once; what must keep
        its precision is sent in float32 at least. No collective."""
        from dtrain.checkpoint.huggingface.merged import whole_weights, wider  # training needs none of it

        dtype = dtype or self._dtype
        return {name: (weight.shape, wider(dtype, weight.exact)) for name, weight in whole_weights(self._model).items()}

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None = None, names: Sequence[str] | None = None) -> Iterator:
        """Yield (name, full tensor) of each weight, one in memory at a time, on this rank's device; in order of
        `prepare_refit_info`, or of `names`. An all-gather per sharded weight, and of an adapter's parts."""
        from dtrain.checkpoint.huggingface.merged import whole_weights, wider

        self._sharding.reshard()
        dtype = dtype or self._dtype
        weights = whole_weights(self._model)
        for name in weights if names is None else names:
            yield name, weights[name].read(wider(dtype, weights[name].exact)).to(self._device)

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Connect to `world_size` − 1 receivers at ip:port, where rank 0 listens; other ranks return at once.

        Waits until all are there, at most five minutes. gloo where the device is a CPU, else nccl.
        """
        self._receivers = None
        if self._rank == 0:
            self._receivers = weight_group(ip, port, 0, world_size, self._device)

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
        for names in buckets(self.prepare_refit_info(dtype), bucket_bytes):
            full = [tensor for _, tensor in self.full_tensors(dtype, names)]
            if receivers is not None:
                receivers.broadcast(flatten(full), 0).wait()

    def prepare_weights_for_ipc(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> list[list[str]]:
        """Return the buckets of names to ask `get_weights_ipc_handles` for, one after the other. No collective."""
        self._ipc_dtype = dtype or self._dtype
        return buckets(self.prepare_refit_info(self._ipc_dtype), bucket_bytes)

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
