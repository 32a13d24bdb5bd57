"""Rank 0 of an NCCL group whose other ranks get the group's id by hand, over HTTP say, and read no store of torch's.

As in vLLM's example of a trainer without vLLM (examples/rl/rlhf_http_nccl_no_vllm.py): torch's own group, on a store
that nobody else sees, where it leaves the id. Torch does not promise the key of the id, and never changed it.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ID_KEY = "0"  # of a group's first communicator
ID_WAIT = timedelta(minutes=1)
MOST_RANKS = 128  # of one id: beyond them torch meets by several


class NcclRoot:
    """Rank 0 of a group of `world_size` on `device`. wait: bounds each message; nothing bounds `join` but its ranks."""

    def __init__(self, world_size: int, device: torch.device, wait: timedelta):
        self._store = dist.HashStore()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        self._group: Any = dist.ProcessGroupNCCL(self._store, 0, world_size, options)
        self._sum = torch.zeros(1, device=device)

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        """Return why there is no such group on `device`; None where there is."""
        if device.type != "cuda":
            return f"the run's device is {device.type}, and NCCL is for CUDA"
        return None if dist.is_nccl_available() else "this torch was built without NCCL"

    def join(self) -> None:
        """Wait until all ranks are there. The others begin with the sum of one float32, as vLLM's do."""
        self._group.allreduce(self._sum).wait()

    def unique_id(self) -> bytes:
        """Return the id that the other ranks need, 128 bytes, while `join` waits in another thread."""
        self._store.wait([ID_KEY], ID_WAIT)
        return bytes(self._store.get(ID_KEY))

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        return self._group.broadcast(tensor, root)

    def abort(self) -> None:
        """Leave, without the others, whatever is under way."""
        self._group.abort()
