"""Publisher of whole weights to vLLM by its weight transfer: calls over HTTP, the bytes over NCCL.

vLLM's docs/training/weight_transfer/nccl.md: an update is /start_weight_update, /update_weights once for each message,
and /finish_weight_update with the version. A message is vLLM's packed one: the bytes of the tensors that the call
names, one after the other, no more than packed_buffer_size_bytes or one tensor, so that a call is one broadcast.
"""

import base64
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.policy.weight_buckets import Info
from dtrain.rl.remote.http import ServerClient
from dtrain.rl.remote.publish import StreamPublisher, attempt, described, first_error, in_thread

START = """start vLLM 0.30 or later with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'"""
PROBE = {"rank_offset": 1, "world_size": 2}  # of `init_info`, without a way to meet
FIX = "or set grpo.server.weights=directory"
ID_KEY = "0"  # of a group's first communicator
ID_WAIT = timedelta(minutes=1)
MOST_RANKS = 128  # of one id: beyond them torch meets by several
MEETING_HINT = (
    "trainer and servers need GPUs of their own that NCCL reaches, and one release of NCCL (a server takes the library "
    "that VLLM_NCCL_SO_PATH names)"
)


class NcclRoot:
    """Rank 0 of a group of `world_size` on `device`, whose other ranks get its id by hand and read no store of torch's.
    wait: bounds each message; nothing bounds `join` but its ranks.

    As in vLLM's example of a trainer without vLLM (examples/rl/rlhf_http_nccl_no_vllm.py): torch's own group, on a
    store that nobody else sees, where it leaves the id. Torch does not promise the key of the id, and never changed it.
    """

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


class TransferPublisher(StreamPublisher):
    """Publisher that broadcasts weights to vLLM servers over NCCL, a bucket in memory at a time.

    root: this end of the group. Servers are paused from before the first message to after the last; what they were
    decoding is read anew then. Where an update breaks off they stay paused, since a part of their weights is new: the
    next whole update resumes them. All servers are one group, so that one that hangs keeps the others.

    Raises UserError for a server that takes no such transfer, and on a machine without NCCL.
    """

    way = "transfer"
    root: type[NcclRoot] = NcclRoot

    def close(self) -> None:
        for server in self._members:
            attempt(self._ask, server, "/shutdown_weight_transfer_engine", {})
        if self._group is not None:
            self._group.abort()
        self._group, self._members = None, []

    def _check(self) -> None:
        super()._check()
        refusal = self.root.refusal(self.device)
        if refusal is not None:
            raise UserError(f"grpo.server.weights=broadcast to vLLM is by NCCL: {refusal}; {FIX}")
        for server in self.engine.servers:
            self._world_size(server)
            # An incomplete description, which is refused before anything is done, tells what the server knows.
            refused = attempt(self._ask, server, "/init_weight_transfer_engine", {"init_info": PROBE})
            if "nccl_unique_id_b64" not in str(refused):
                raise UserError(f"{refused or server.client.url}: it takes no weights over NCCL: {START}, {FIX}")

    def _world_size(self, server: ServerClient) -> int:
        try:
            return int(self._ask(server, "/get_world_size")["world_size"])
        except (UserError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{error}: it does not tell its number of GPUs: {START}, {FIX}") from error

    def _meet(self, info: Info) -> None:
        super()._meet(info)
        problems = [attempt(self._start, server) for server in self._members]
        problem = next((problem for problem in problems if problem is not None), None)
        if problem is not None:
            raise UserError(f"{problem}; the servers stay paused until they get a whole version")

    def _start(self, server: ServerClient) -> None:
        if attempt(self._ask, server, "/start_weight_update", {}) is not None:
            attempt(self._ask, server, "/finish_weight_update", {})  # an update that an earlier run left open
            self._ask(server, "/start_weight_update", {})

    def _form(self, servers: list[ServerClient], info: Info) -> None:
        sizes = [self._world_size(server) for server in servers]
        world_size = 1 + sum(sizes)
        if world_size > MOST_RANKS:
            raise UserError(f"the servers have {sum(sizes)} GPUs, and one group takes {MOST_RANKS - 1}: {FIX[3:]}")
        fields: dict[str, Any] = {
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
        }
        # Calls over HTTP give up first: torch ends the whole process where a message of NCCL takes longer.
        root = self.root(world_size, self.device, timedelta(seconds=2 * self.engine.timeout))
        self._abandoned.append(root)  # until it is met: letting go of one would wait for `join`
        joined = in_thread(root.join)
        try:
            fields["nccl_unique_id_b64"] = base64.b64encode(root.unique_id()).decode()
            posts = []
            for index, server in enumerate(servers):
                body = {"init_info": {**fields, "rank_offset": 1 + sum(sizes[:index])}}
                posts.append(in_thread(self._ask, server, "/init_weight_transfer_engine", body))
            first_error([*posts, joined], self._patience)
        except (UserError, RuntimeError) as error:
            raise UserError(f"the servers' GPUs did not meet this one over NCCL: {error}; {MEETING_HINT}") from error
        self._abandoned.remove(root)
        self._group, self._members = root, servers

    def _bucket_post(self, info: Info, names: list[str], version: int | None) -> tuple[str, dict[str, Any]]:
        fields = described(info, names)
        fields["dtype_names"] = fields.pop("dtypes")
        return "/update_weights", {"update_info": fields}

    def _abandon(self, sent: Any, message: Tensor) -> None:
        self._group.abort()
        self._group = None

    def _finish(self, version: int, problem: Exception | None) -> Exception | None:
        if problem is not None:
            return problem
        return next(filter(None, [self._end(server, version) for server in self._members]), None)

    def _end(self, server: ServerClient, version: int) -> Exception | None:
        """Have a server that got all of a version go on with it; return the first error."""
        finish = ("/finish_weight_update", {"weight_version": str(version)})
        for post in [finish, *server.dialect.forget, *server.dialect.resume]:
            if (problem := attempt(self._ask, server, *post)) is not None:
                return problem
        return None

    def _go_on(self) -> None:
        for server in self._members:
            if server.behind is None:  # others hold a part of a version
                for post in server.dialect.resume:
                    attempt(self._ask, server, *post)
