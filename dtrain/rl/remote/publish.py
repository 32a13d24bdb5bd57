"""Publishers: they send new weights to the servers of an `HttpEngine`.

    DirectoryPublisher    full weights, as files in a directory that trainer and servers share
    AdapterPublisher      an adapter, as files in such a directory
    StreamPublisher       full weights, broadcast to SGLang and `dtrain serve` over a process group
    TransferPublisher     full weights, broadcast to vLLM over NCCL

All ranks publish together, because gathering a sharded weight is a collective. Only rank 0 has the engine; the others
pass None. If something fails on rank 0, all ranks raise a UserError after they have gathered every weight, so none
waits in a collective for ever.

In a shared directory, `step-N` is complete once it contains its marker, a file that is written last, as in prime-rl
(`STABLE`). prime-rl's marker is empty. dtrain's marker contains a random text, which differs if the same step is
written again. Readers ignore directories without a marker.

vLLM's weight transfer (its docs/training/weight_transfer/nccl.md) consists of calls over HTTP and bytes over NCCL. An
update is /start_weight_update, /update_weights for each message, and /finish_weight_update with the version. A message
is one broadcast: the bytes of the tensors that the call names, one after another, at most packed_buffer_size_bytes or
one tensor.
"""

import base64
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.adapters.config import AdapterConfig, is_adapter
from dtrain.adapters.lora import adapted_layers
from dtrain.base.addresses import listen, local_address_towards
from dtrain.base.errors import UserError
from dtrain.base.files import atomic_write_text
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.merged import fold_scale, gather_full_tensor
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.checkpoint.peft.files import write_adapter
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.fsdp import Sharding
from dtrain.policy.weights import (
    BUCKET_BYTES,
    MEETING_TIMEOUT,
    WeightInfo,
    WeightSender,
    flatten_bucket,
    join_weight_group,
    split_into_buckets,
)
from dtrain.rl.remote.dialects import AdapterVersion, Dialect, Post
from dtrain.rl.remote.http import HttpEngine, ServerClient
from dtrain.rl.remote.http_client import ClientError, RetryableError, with_advice

MARKER = "STABLE"
_STEP_NAME = re.compile(r"step-(\d+)")

QUICK_SECONDS = 10.0  # for a call that a server answers at once

HOW_TO_START_VLLM = (
    """Start vLLM 0.30 or later with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'"""
)
PROBE_GROUP = {"rank_offset": 1, "world_size": 2}  # an incomplete `init_info`, without the id of the group
USE_DIRECTORY = "set grpo.server.weights=directory"
ID_KEY = "0"  # the key of a group's id in torch's store
ID_WAIT = timedelta(minutes=1)
MAX_RANKS_PER_ID = 128  # torch uses several ids for larger groups
MEETING_HINT = (
    "Trainer and servers need different GPUs that NCCL can connect, and the same release of NCCL. A server uses the "
    "library in VLLM_NCCL_SO_PATH"
)


class Publisher:
    """Base of the publishers.

    Args:
        engine: The servers. None on ranks other than 0.
        dtype: Dtype of the published weights. None: the model's.
    """

    def __init__(self, engine: HttpEngine | None, dtype: torch.dtype | None):
        self._engine = engine
        self.dtype = dtype
        self.ranks = Ranks()

    @property
    def engine(self) -> HttpEngine:
        if self._engine is None:
            raise ValueError("this publisher was built without an engine, which rank 0 needs")
        return self._engine

    def _announce(self, directory: Path, version: int, update: Callable[[], None]) -> None:
        """On rank 0, mark step-N as complete, have the servers load it, and delete old steps.

        The step and the newest one before it are kept.

        Args:
            directory: The directory step-N.
            version: N.
            update: Has the servers load the directory.

        Collectives:
            One broadcast from rank 0.
        """

        def announce() -> None:
            write_marker(directory)
            update()
            prune_steps(directory.parent, version, keep=2)

        self.ranks.run_on_first(announce)


class DirectoryPublisher(Publisher):
    """Writes full weights to `shared`/step-N and has the servers read them.

    Args:
        shared: A directory that trainer and servers see under the same path.
        source: The directory that the model came from, for `write_directory`.
        engine: The servers. None on ranks other than 0.
        dtype: Dtype of the published weights. None: the model's.
    """

    def __init__(self, shared: Path, source: Path, engine: HttpEngine | None, *, dtype: torch.dtype | None = None):
        super().__init__(engine, dtype)
        self.shared, self.source = Path(shared).absolute(), source

    def publish(self, model: nn.Module, version: int) -> None:
        """Write `model` and have the servers read it.

        Raises:
            UserError: If the directory cannot be written, or no server took it.

        Collectives:
            One all-gather for each sharded tensor, and one broadcast.
        """
        directory = step_directory(self.shared, version)
        write_directory(model, directory, self.source, self.dtype, replace=True, ranks=self.ranks)
        self._announce(directory, version, lambda: self.engine.update_from_directory(directory, version))


class StreamPublisher(Publisher):
    """Broadcasts weights to `dtrain serve` and SGLang over a process group, one bucket in memory at a time.

    The routes and the group are SGLang's. The group is formed at the first `publish`, and again if a server has gone or
    come back since. It meets at a free port of this machine's address on the way to the first server.

    Args:
        engine: The servers. None on ranks other than 0.
        device: Device of the tensors. The group is NCCL on CUDA, else gloo. The servers' devices must be of the same
            kind.
        dtype: Dtype of the published weights. None: the model's.
        bucket_bytes: Size of a bucket.

    Attributes:
        broadcast_kind: The kind of servers, as in `dialects.Vllm.broadcast_kind`.

    Raises:
        UserError: If a server is of another kind.

    Collectives:
        The constructor issues one broadcast from rank 0.
    """

    broadcast_kind = "broadcast"

    def __init__(
        self,
        engine: HttpEngine | None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        super().__init__(engine, dtype)
        self.device, self.bucket_bytes = torch.device(device), bucket_bytes
        self._group: Any = None
        self._members: list[ServerClient] = []
        self._meetings = 0
        # Groups with a message that nobody will receive. They are kept, because deleting such a group would wait for
        # the message.
        self._abandoned: list[Any] = []
        self.ranks.run_on_first(self._check)

    def publish(self, source: WeightSender, version: int) -> None:
        """Broadcast the weights of `source` to the servers.

        Args:
            source: Gathers the weights.
            version: Version of the weights.

        Raises:
            UserError: If no server can take part, or one fails during the update. Such a server samples nothing until
                it has received a complete version.

        Collectives:
            The all-gathers of `source.full_tensors`, and two broadcasts from rank 0.
        """
        info = source.prepare_refit_info(self.dtype)
        # Tensors of the widest dtypes come first, so that each begins at a multiple of its item size. Servers view a
        # bucket's bytes as tensors, which needs this alignment.
        info = dict(sorted(info.items(), key=lambda item: -item[1][1].itemsize))
        self.ranks.run_on_first(lambda: self._meet(info))
        buckets = split_into_buckets(info, self.bucket_bytes)
        problem: Exception | None = None
        for names in buckets:
            full = [tensor for _, tensor in source.full_tensors(self.dtype, names)]
            if self.ranks.is_first and problem is None:
                is_last = names is buckets[-1]
                problem = catch_error(self._send, info, names, full, version if is_last else None)
            del full  # before the next bucket is gathered
        self.ranks.run_on_first(lambda: self._conclude(version, problem))

    def close(self) -> None:
        """Leave the group. Only rank 0 is in one."""
        for server in self._members:
            catch_error(self._call, server, "/destroy_weights_update_group", {"group_name": self._name})
        self._group, self._members = None, []

    def _check(self) -> None:
        """Raise UserError if a server does not support this kind of broadcast."""
        for server in self.engine.servers:
            if server.dialect.broadcast_kind != self.broadcast_kind:
                raise UserError(
                    f"{server.client.url} is a {server.dialect.name} server, which cannot join the process group of "
                    f"the other servers. Use servers of one kind, or {USE_DIRECTORY}"
                )

    @property
    def _name(self) -> str:
        return f"weights-{self._meetings}"

    def _meet(self, info: WeightInfo) -> None:
        """Form a group with the servers that are up, unless it exists, and pause them. Raises UserError."""
        alive = [server for server in self.engine.servers if self._is_alive(server)]
        if not alive:
            urls = ", ".join(server.client.url for server in self.engine.servers)
            raise UserError(f"no server answers, so the weights cannot be sent: {urls}. Start the servers again")
        if self._group is None or alive != self._members:
            self.close()
            self._form(alive, info)
        problem = self._post_to_members(lambda dialect: dialect.pause)
        if problem is not None:
            self._resume_after_failed_pause()
            raise UserError(str(problem))

    @property
    def _max_wait(self) -> float:
        """Seconds after which a call to a server, or forming a group, must have ended."""
        return max(2 * MEETING_TIMEOUT.total_seconds(), 2 * self.engine.timeout)

    def _resume_after_failed_pause(self) -> None:
        """Resume the members, because another member could not be paused."""
        self._post_to_members(lambda dialect: dialect.resume)

    def _post_to_members(self, posts: Callable[[Dialect], Sequence[Post]]) -> Exception | None:
        """Send posts to every member, even if others fail. Return the first error."""
        first_problem: Exception | None = None
        for server in self._members:
            for path, body in posts(server.dialect):
                problem = catch_error(self._call, server, path, body)
                if first_problem is None:
                    first_problem = problem
        return first_problem

    def _form(self, servers: list[ServerClient], info: WeightInfo) -> None:
        """Form a group of rank 0 and all GPUs of `servers`. Raises UserError."""
        sizes = []  # processes of each server
        for server in servers:
            if server.dialect.name == "dtrain":
                self._call(server, "/check_weights", describe_tensors(info, list(info)))
                sizes.append(1)
            else:
                sizes.append(self._tp_size(server))
        world_size = 1 + sum(sizes)
        self._meetings += 1
        address = local_address_towards(servers[0].client.host, 9) or socket.gethostname()
        with listen(address, 0) as probe:  # finds a free port
            port = probe.getsockname()[1]
        meeting = {
            "master_address": address,
            "master_port": port,
            "world_size": world_size,
            "group_name": self._name,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
        }
        posts = []
        for index, server in enumerate(servers):
            body = {**meeting, "rank_offset": 1 + sum(sizes[:index])}
            posts.append(run_in_thread(self._call, server, "/init_weights_update_group", body))
        joined = run_in_thread(partial(join_weight_group, address, port, 0, world_size, self.device, name=self._name))
        try:
            raise_first_error([*posts, joined], self._max_wait)
        except RuntimeError as error:  # torch raises it if ranks are missing
            raise UserError(f"the servers did not join the process group at {address}:{port}: {error}") from error
        self._group, self._members = joined.result(), servers

    def _tp_size(self, server: ServerClient) -> int:
        """Return the tensor-parallel size of an SGLang server. Raises UserError."""
        answer = self._call(server, "/get_server_info")
        try:
            return int(answer.get("tp_size", 1))
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{server.client.url}/get_server_info does not report tp_size: {error}") from error

    def _send(self, info: WeightInfo, names: list[str], full: list[Tensor], version: int | None) -> None:
        """Announce a bucket to the members over HTTP, and broadcast its tensors.

        Args:
            info: Shape and dtype of all weights by name.
            names: Names of the bucket's tensors.
            full: The tensors.
            version: Version of the weights for the last bucket of an update, otherwise None.

        Raises:
            UserError: If a server refuses the bucket or does not answer.

        Collectives:
            One broadcast over the group of rank 0 and the servers.
        """
        post = self._bucket_post(info, names, version)
        posts = [run_in_thread(self._call, server, *post) for server in self._members]
        message = flatten_bucket(full)
        sent = self._group.broadcast(message, 0)
        try:
            raise_first_error(posts, self._max_wait)
        except UserError:
            self._abandon(sent, message)
            raise
        sent.wait()

    def _bucket_post(self, info: WeightInfo, names: list[str], version: int | None) -> Post:
        """Return the call that makes a server receive a bucket. Arguments as in `_send`."""
        body = {**describe_tensors(info, names), "group_name": self._name, "load_format": "flattened_bucket"}
        if version is not None:
            body["weight_version"] = str(version)
        return "/update_weights_from_distributed", body

    def _abandon(self, sent: Any, message: Tensor) -> None:
        """Stop using the group, after a broadcast that not all servers have received."""
        self._abandoned.append((self._group, sent, message))
        self._group = None

    def _conclude(self, version: int, problem: Exception | None) -> None:
        """Resume the servers and record which of them have the version. Raises UserError if the update failed."""
        finish_problem = self._finish(version, problem)
        problem = problem or finish_problem
        for server in self.engine.servers:
            if problem is not None:
                server.record_update(version, str(problem))
            elif server not in self._members:
                server.record_update(version, "the server did not answer when the update began")
            else:
                server.record_update(version, None)
        if problem is not None:
            raise UserError(f"version {version} of the weights did not reach the servers: {problem}")

    def _finish(self, version: int, problem: Exception | None) -> Exception | None:
        """Resume the members after the last bucket. Return the first error."""
        return self._post_to_members(lambda dialect: dialect.resume)

    def _call(self, server: ServerClient, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a call, without retries: a broadcast cannot be repeated either. Raises UserError."""
        try:
            answer = server.client.request(path, body, QUICK_SECONDS if body is None else self.engine.timeout)
        except (RetryableError, ClientError) as error:
            raise UserError(f"{server.client.url}{path}: {error}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UserError(f"{server.client.url}{path}: {answer.get('message')}")
        return answer

    def _is_alive(self, server: ServerClient) -> bool:
        try:
            server.client.request("/v1/models", None, QUICK_SECONDS)
        except (RetryableError, ClientError) as error:
            self.engine.print_line(f"{server.client.url} does not receive this version of the weights: {error}")
            return False
        return True


class NcclRoot:
    """Rank 0 of an NCCL group whose other ranks do not use torch's store, but get the group's id over HTTP.

    As in vLLM's example of a trainer without vLLM (examples/rl/rlhf_http_nccl_no_vllm.py), this is torch's own group on
    a private store. The id is read from that store. torch does not document its key, but has never changed it.

    Args:
        world_size: Size of the group.
        device: Device of the tensors.
        wait: Time limit of each message. `join` has none.
    """

    def __init__(self, world_size: int, device: torch.device, wait: timedelta):
        self._store = dist.HashStore()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        self._group: Any = dist.ProcessGroupNCCL(self._store, 0, world_size, options)
        self._sum = torch.zeros(1, device=device)

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        """Return why `device` cannot have such a group. None if it can."""
        if device.type != "cuda":
            return f"the run's device is {device.type}"
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        return None

    def join(self) -> None:
        """Wait until all ranks have joined. As vLLM's ranks do, this all-reduces one float32."""
        self._group.allreduce(self._sum).wait()

    def unique_id(self) -> bytes:
        """Return the id that the other ranks need, 128 bytes. `join` must be waiting in another thread."""
        self._store.wait([ID_KEY], ID_WAIT)
        return bytes(self._store.get(ID_KEY))

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        return self._group.broadcast(tensor, root)

    def abort(self) -> None:
        """Leave the group without the others, also during a message."""
        self._group.abort()


class TransferPublisher(StreamPublisher):
    """Broadcasts weights to vLLM servers over NCCL, one bucket in memory at a time.

    Servers are paused from before the first bucket until after the last. Then they compute the keys and values of
    completions in progress again. If an update fails, they stay paused, because some of their weights are new, and the
    next complete update resumes them. All servers are one group, so a server that hangs stops the others.

    Attributes:
        root: The class of this end of the group.

    Raises:
        UserError: If a server does not support the transfer, or this machine has no NCCL.
    """

    broadcast_kind = "transfer"
    root: type[NcclRoot] = NcclRoot

    def close(self) -> None:
        for server in self._members:
            catch_error(self._call, server, "/shutdown_weight_transfer_engine", {})
        if self._group is not None:
            self._group.abort()
        self._group, self._members = None, []

    def _check(self) -> None:
        super()._check()
        refusal = self.root.refusal(self.device)
        if refusal is not None:
            raise UserError(
                f"grpo.server.weights=broadcast needs NCCL for vLLM servers, but {refusal}. "
                "Set grpo.server.weights=directory"
            )
        for server in self.engine.servers:
            self._world_size(server)
            # An incomplete description is refused before anything happens. The refusal shows what the server supports.
            refused = catch_error(self._call, server, "/init_weight_transfer_engine", {"init_info": PROBE_GROUP})
            if "nccl_unique_id_b64" not in str(refused):
                problem = refused or f"{server.client.url} does not receive weights over NCCL"
                raise UserError(with_advice(problem, f"{HOW_TO_START_VLLM}, or {USE_DIRECTORY}"))

    def _world_size(self, server: ServerClient) -> int:
        """Return the number of GPUs of a server. Raises UserError."""
        advice = f"{HOW_TO_START_VLLM}, or {USE_DIRECTORY}"
        try:
            answer = self._call(server, "/get_world_size")
        except UserError as error:
            raise UserError(with_advice(error, advice)) from error
        try:
            return int(answer["world_size"])
        except (LookupError, TypeError, ValueError) as error:
            problem = f"{server.client.url}/get_world_size does not report world_size: {error}"
            raise UserError(with_advice(problem, advice)) from error

    def _meet(self, info: WeightInfo) -> None:
        super()._meet(info)
        # All servers start, even if one fails: those of a failed update stay paused together.
        problems = [catch_error(self._start, server) for server in self._members]
        for problem in problems:
            if problem is not None:
                advice = "The servers stay paused until they receive a complete version"
                raise UserError(with_advice(problem, advice))

    def _start(self, server: ServerClient) -> None:
        """Start an update of a server. Raises UserError."""
        if catch_error(self._call, server, "/start_weight_update", {}) is not None:
            catch_error(self._call, server, "/finish_weight_update", {})  # left open by an earlier run
            self._call(server, "/start_weight_update", {})

    def _form(self, servers: list[ServerClient], info: WeightInfo) -> None:
        sizes = [self._world_size(server) for server in servers]
        world_size = 1 + sum(sizes)
        if world_size > MAX_RANKS_PER_ID:
            raise UserError(
                f"the servers have {sum(sizes)} GPUs, but grpo.server.weights=broadcast reaches at most "
                f"{MAX_RANKS_PER_ID - 1}. Set grpo.server.weights=directory"
            )
        fields: dict[str, Any] = {
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
        }
        # Calls over HTTP must time out first: torch ends the whole process if an NCCL message does.
        root = self.root(world_size, self.device, timedelta(seconds=2 * self.engine.timeout))
        self._abandoned.append(root)  # deleting a group that has not met would wait for `join`
        joined = run_in_thread(root.join)
        try:
            fields["nccl_unique_id_b64"] = base64.b64encode(root.unique_id()).decode()
            posts = []
            for index, server in enumerate(servers):
                body = {"init_info": {**fields, "rank_offset": 1 + sum(sizes[:index])}}
                posts.append(run_in_thread(self._call, server, "/init_weight_transfer_engine", body))
            raise_first_error([*posts, joined], self._max_wait)
        except (UserError, RuntimeError) as error:
            problem = f"the servers' GPUs did not join this GPU's NCCL group: {error}"
            raise UserError(with_advice(problem, MEETING_HINT)) from error
        self._abandoned.remove(root)
        self._group, self._members = root, servers

    def _bucket_post(self, info: WeightInfo, names: list[str], version: int | None) -> tuple[str, dict[str, Any]]:
        fields = describe_tensors(info, names)
        fields["dtype_names"] = fields.pop("dtypes")
        return "/update_weights", {"update_info": fields}

    def _abandon(self, sent: Any, message: Tensor) -> None:
        self._group.abort()
        self._group = None

    def _finish(self, version: int, problem: Exception | None) -> Exception | None:
        if problem is not None:
            return problem
        for server in self._members:
            problem = self._end(server, version)
            if problem is not None:
                return problem
        return None

    def _end(self, server: ServerClient, version: int) -> Exception | None:
        """Finish the update of a server that has received all buckets, and resume it. Return the first error."""
        finish = ("/finish_weight_update", {"weight_version": str(version)})
        for post in [finish, *server.dialect.clear_caches, *server.dialect.resume]:
            problem = catch_error(self._call, server, *post)
            if problem is not None:
                return problem
        return None

    def _resume_after_failed_pause(self) -> None:
        for server in self._members:
            if server.update_problem is None:  # the others have a part of a version, and must not sample
                for post in server.dialect.resume:
                    catch_error(self._call, server, *post)


class AdapterPublisher(Publisher):
    """Writes an adapter to `shared`/step-N and has the servers load it.

    Two directories step-N are kept. A server can still sample with these two versions.

    Args:
        shared: A directory that trainer and servers see under the same path.
        base: Directory of the model that the adapter belongs to.
        config: Config of the adapter.
        engine: The servers. None on ranks other than 0.
    """

    def __init__(self, shared: Path, base: Path, config: AdapterConfig, engine: HttpEngine | None):
        super().__init__(engine, None)
        self.shared, self.base, self.config = Path(shared).absolute(), base, config
        self._run = secrets.token_hex(4)  # servers keep names and their caches from run to run

    def publish(self, model: CausalLM, version: int) -> None:
        """Write the adapter of `model` and have the servers load it.

        Raises:
            UserError: If the directory cannot be written, or no server took it.

        Collectives:
            One all-gather for each sharded tensor of the adapter, and one broadcast.
        """
        config, tensors = adapter_for_servers(model, self.config)
        directory = step_directory(self.shared, version)
        write_adapter(directory, tensors, config, model.config, str(self.base), replace=True, ranks=self.ranks)
        adapter = AdapterVersion(directory, version, f"{self._run}-{directory.name}", config.rank)
        self._announce(directory, version, lambda: self.engine.update_adapter(adapter))


@torch.no_grad()
def adapter_for_servers(model: CausalLM, config: AdapterConfig) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Return the adapter of `model` in a form that servers can read.

    vLLM and SGLang read one rank and one scale alpha / rank for all layers. If ranks or scales differ between layers,
    or the scale is rsLoRA's, all A and B are padded with zeros to the largest rank, and the scale is multiplied into B.

    Args:
        model: The model with the adapter.
        config: Config of the adapter.

    Returns:
        The config, and the tensors by parameter name: A [r, in] and B [out, r]. They are sharded as in the model, or
        full if they were changed.

    Collectives:
        One all-gather for each sharded tensor, if the tensors are changed.
    """
    Sharding(model).reshard()
    tensors = {name: tensor for name, tensor in model_tensors(model).items() if is_adapter(name)}
    has_one_scale = not (config.rslora or config.rank_pattern or config.alpha_pattern)
    if has_one_scale or config.dora:
        return config, tensors
    layers, tensors = adapted_layers(model), {name: gather_full_tensor(tensor) for name, tensor in tensors.items()}
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A"))
    for name, tensor in tensors.items():
        adapter = layers[name.rpartition(".")[0]].wrapper
        assert adapter is not None
        tensors[name] = fold_scale(name, tensor, rank, adapter.scale)
    plain = replace(config, rank=rank, alpha=float(rank), rslora=False, rank_pattern={}, alpha_pattern={})
    return plain, tensors


def step_directory(shared: Path, version: int) -> Path:
    return shared / f"step-{version}"


def write_marker(directory: Path) -> None:
    """Mark `directory` as complete. The marker is synced to disk."""
    atomic_write_text(directory / MARKER, secrets.token_hex(8))


def read_marker(directory: Path) -> str:
    """Return the text of a directory's marker, which differs if the directory is written again.

    Raises:
        OSError: If the directory has been deleted.
    """
    marker = directory / MARKER
    stat = marker.stat()
    return marker.read_text(errors="replace") or f"{stat.st_ino} {stat.st_mtime_ns}"  # prime-rl's marker is empty


def is_complete_step(directory: Path) -> bool:
    return (directory / MARKER).is_file()


def step_number(directory: Path) -> int | None:
    """Return N for a directory named step-N, and None for other names.

    Example:
        >>> step_number(Path("weights/step-12")), step_number(Path("weights/step-12.tmp"))
        (12, None)
    """
    match = _STEP_NAME.fullmatch(directory.name)
    return int(match[1]) if match else None


def newest_complete_step(shared: Path) -> tuple[int, Path] | None:
    """Return the largest N of a complete step-N, and its directory. None if there is none yet."""
    return max(_complete_steps(shared).items(), default=None)


def prune_steps(shared: Path, current: int, keep: int) -> None:
    """Delete all complete step-N except `current` and the newest before it, `keep` in all.

    For example, with steps 2, 4, 6 and 8, `current=6` and `keep=2`, the steps 4 and 6 are kept. Steps after `current`
    exist if the run was resumed from an earlier step. A step's marker is deleted first, so that nobody reads half of a
    directory.
    """
    complete = _complete_steps(shared)
    kept = sorted(version for version in complete if version <= current)[-keep:]
    for version in complete.keys() - kept:
        (complete[version] / MARKER).unlink(missing_ok=True)
        shutil.rmtree(complete[version], ignore_errors=True)


def _complete_steps(shared: Path) -> dict[int, Path]:
    """Return the complete step-N in a directory by N."""
    steps = {}
    for path in shared.glob("step-*"):
        version = step_number(path)
        if version is not None and is_complete_step(path):
            steps[version] = path
    return steps


def describe_tensors(info: WeightInfo, names: list[str]) -> dict[str, Any]:
    """Return the fields of a call that describe tensors, as SGLang names them."""
    return {
        "names": names,
        "dtypes": [str(info[name][1]).removeprefix("torch.") for name in names],
        "shapes": [list(info[name][0]) for name in names],
    }


def catch_error(act: Callable[..., Any], *arguments: Any) -> Exception | None:
    """Call `act` and return its error if a server or the network caused it. None without an error."""
    try:
        act(*arguments)
    except (UserError, RuntimeError) as error:  # torch raises RuntimeError if a rank has gone
        return error
    return None


def run_in_thread(act: Callable[..., Any], *arguments: Any) -> Future:
    """Run `act` in a daemon thread, which does not keep the process alive, and return the future of its result."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(act(*arguments))
        except (UserError, RuntimeError) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="publish", daemon=True).start()
    return future


def raise_first_error(futures: list[Future], seconds: float) -> None:
    """Wait until all futures are done, or one fails.

    Raises:
        Exception: The first error of a future.
        UserError: After `seconds`.
    """
    done, pending = wait(futures, seconds, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise UserError(f"the servers did not answer within {seconds:.0f} s")
