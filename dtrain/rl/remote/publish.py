"""Publishers of new weights to the servers of an `HttpEngine`.

Full weights or an adapter travel through a shared directory, and full weights also by a broadcast. All publishers are
collective over the run's ranks; only rank 0 has the engine, the others pass None. An error on rank 0 is a UserError on
every rank, after all of them have gathered every weight: none is left in a collective.

In a shared directory `step-N` is complete once its marker is there. The marker is a file, written last, as in prime-rl
(`STABLE`). prime-rl leaves it empty; ours contains a mark that differs when the weights are written again. A reader
skips directories without a marker.

Full weights reach vLLM by its weight transfer: calls over HTTP, the bytes over NCCL. vLLM's
docs/training/weight_transfer/nccl.md: an update is /start_weight_update, /update_weights once for each message, and
/finish_weight_update with the version. A message is vLLM's packed one: the bytes of the tensors that the call names,
one after the other, no more than packed_buffer_size_bytes or one tensor, so that a call is one broadcast.
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
from dtrain.rl.remote.http_client import ClientError, RetryableError

MARKER = "STABLE"
_STEP_NAME = re.compile(r"step-(\d+)")

QUICK_SECONDS = 10.0  # for a question that costs a server nothing

HOW_TO_START_VLLM = (
    """start vLLM 0.30 or later with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'"""
)
PROBE_GROUP = {"rank_offset": 1, "world_size": 2}  # of `init_info`, without a way to meet
OTHER_WAY = "or set grpo.server.weights=directory"
ID_KEY = "0"  # of a group's first communicator
ID_WAIT = timedelta(minutes=1)
MOST_RANKS_PER_ID = 128  # of one id: beyond them torch meets by several
MEETING_HINT = (
    "trainer and servers need GPUs of their own that NCCL reaches, and one release of NCCL (a server takes the library "
    "that VLLM_NCCL_SO_PATH names)"
)


class Publisher:
    """Base of the publishers. engine: on rank 0, None elsewhere. dtype: of what is published (None: the model's)."""

    def __init__(self, engine: HttpEngine | None, dtype: torch.dtype | None):
        self._engine, self.dtype, self.ranks = engine, dtype, Ranks()

    @property
    def engine(self) -> HttpEngine:
        if self._engine is None:
            raise ValueError("rank 0 talks to the servers, and was given none")
        return self._engine

    def _announce(self, directory: Path, version: int, update: Callable[[], None]) -> None:
        """Mark a written step-N as whole, have the servers load it by `update`, and keep two. One broadcast."""

        def announce() -> None:
            write_marker(directory)
            update()
            prune_steps(directory.parent, version, keep=2)

        self.ranks.run_on_first(announce)


class DirectoryPublisher(Publisher):
    """Publisher that writes `shared`/step-N, marked when it is whole, and has the servers read it.

    shared: a directory that trainer and servers see under the same path. source: as of `write_directory`, the directory
    that the model came from.
    """

    def __init__(self, shared: Path, source: Path, engine: HttpEngine | None, *, dtype: torch.dtype | None = None):
        super().__init__(engine, dtype)
        self.shared, self.source = Path(shared).absolute(), source

    def publish(self, model: nn.Module, version: int) -> None:
        """Write `model` and have the servers read it. Collective; one all-gather per sharded tensor, as
        `write_directory`. Raises UserError where the directory cannot be written or no server took it."""
        directory = step_directory(self.shared, version)
        write_directory(model, directory, self.source, self.dtype, replace=True, ranks=self.ranks)
        self._announce(directory, version, lambda: self.engine.update_from_directory(directory, version))


class StreamPublisher(Publisher):
    """Publisher that broadcasts weights to the servers over its own process group, a bucket in memory at a time.

    device: where the tensors are; the group is nccl on CUDA, else gloo, and the servers' must be of the same kind. It
    meets at a free port of this machine's address on the way to the first server. For `dtrain serve`, and SGLang, whose
    routes and group these are; `TransferPublisher` is for vLLM.

    The group meets at the first `publish`, and anew where a server has gone or come back since. Building one is
    collective. Raises UserError for a server that takes no stream.
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
        self._abandoned: list[Any] = []  # groups with a message that nobody takes: collecting one waits for it
        self.ranks.run_on_first(self._check)

    def publish(self, source: WeightSender, version: int) -> None:
        """Broadcast the weights of `source` to the servers. Collective; the all-gathers of `source.full_tensors`.
        Raises UserError where no server can take part, or one breaks off under way; such a server decodes nothing until
        it got a whole version."""
        info = source.prepare_refit_info(self.dtype)
        # The widest dtypes first, so that each tensor lies at a multiple of its width, where servers view it.
        info = dict(sorted(info.items(), key=lambda item: -item[1][1].itemsize))
        self.ranks.run_on_first(lambda: self._meet(info))
        parts = split_into_buckets(info, self.bucket_bytes)
        problem: Exception | None = None
        for names in parts:
            full = [tensor for _, tensor in source.full_tensors(self.dtype, names)]
            if self.ranks.is_first and problem is None:
                last = version if names is parts[-1] else None
                problem = catch_error(self._send, info, names, full, last)
            del full
        self.ranks.run_on_first(lambda: self._conclude(version, problem))

    def close(self) -> None:
        """Leave the group. No collective."""
        for server in self._members:
            catch_error(self._ask, server, "/destroy_weights_update_group", {"group_name": self._name})
        self._group, self._members = None, []

    def _check(self) -> None:
        for server in self.engine.servers:
            if server.dialect.broadcast_kind != self.broadcast_kind:
                raise UserError(
                    f"{server.client.url} is a {server.dialect.name} server, which joins no group of the others' kind; "
                    "give servers of one kind, or publish by a shared directory (grpo.server.weights=directory)"
                )

    @property
    def _name(self) -> str:
        return f"weights-{self._meetings}"

    def _meet(self, info: WeightInfo) -> None:
        alive = [server for server in self.engine.servers if self._is_alive(server)]
        if not alive:
            urls = ", ".join(server.client.url for server in self.engine.servers)
            raise UserError(f"no server is there to take weights: {urls}")
        if self._group is None or alive != self._members:
            self.close()
            self._form(alive, info)
        problem = self._tell_members(lambda dialect: dialect.pause)
        if problem is not None:
            self._go_on()
            raise UserError(str(problem))

    @property
    def _patience(self) -> float:
        """Return the seconds in which a call to a server, and a meeting, have ended."""
        return max(2 * MEETING_TIMEOUT.total_seconds(), 2 * self.engine.timeout)

    def _go_on(self) -> None:
        """Have the members go on after a pause that others did not make."""
        self._tell_members(lambda dialect: dialect.resume)

    def _tell_members(self, posts: Callable[[Dialect], Sequence[Post]]) -> Exception | None:
        """Post to every member, whatever others answer, and return the first error."""
        calls = [(server, *post) for server in self._members for post in posts(server.dialect)]
        problems = [catch_error(self._ask, *call) for call in calls]
        return next((problem for problem in problems if problem is not None), None)

    def _form(self, servers: list[ServerClient], info: WeightInfo) -> None:
        sizes = []
        for server in servers:
            if server.dialect.name == "dtrain":
                self._ask(server, "/check_weights", describe_tensors(info, list(info)))
                sizes.append(1)
            else:
                sizes.append(int(self._ask(server, "/get_server_info").get("tp_size", 1)))
        self._meetings += 1
        address = local_address_towards(servers[0].client.host, 9) or socket.gethostname()
        with listen(address, 0) as probe:  # a free port
            port = probe.getsockname()[1]
        meeting = {
            "master_address": address,
            "master_port": port,
            "world_size": 1 + sum(sizes),
            "group_name": self._name,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
        }
        posts = []
        for index, server in enumerate(servers):
            body = {**meeting, "rank_offset": 1 + sum(sizes[:index])}
            posts.append(run_in_thread(self._ask, server, "/init_weights_update_group", body))
        size = 1 + sum(sizes)
        joined = run_in_thread(partial(join_weight_group, address, port, 0, size, self.device, name=self._name))
        try:
            raise_first_error([*posts, joined], self._patience)
        except RuntimeError as error:  # torch's word for peers that do not come
            raise UserError(f"the servers did not meet at {address}:{port}: {error}") from error
        self._group, self._members = joined.result(), servers

    def _send(self, info: WeightInfo, names: list[str], full: list[Tensor], version: int | None) -> None:
        post = self._bucket_post(info, names, version)
        posts = [run_in_thread(self._ask, server, *post) for server in self._members]
        message = flatten_bucket(full)
        sent = self._group.broadcast(message, 0)
        try:
            raise_first_error(posts, self._patience)
        except UserError:
            self._abandon(sent, message)
            raise
        sent.wait()

    def _bucket_post(self, info: WeightInfo, names: list[str], version: int | None) -> Post:
        """Return the call that has a server take the message of these tensors. version: with the last one."""
        body = {**describe_tensors(info, names), "group_name": self._name, "load_format": "flattened_bucket"}
        if version is not None:
            body["weight_version"] = str(version)
        return "/update_weights_from_distributed", body

    def _abandon(self, sent: Any, message: Tensor) -> None:
        self._abandoned.append((self._group, sent, message))
        self._group = None

    def _conclude(self, version: int, problem: Exception | None) -> None:
        finished = self._finish(version, problem)
        problem = problem or finished
        for server in self.engine.servers:
            was_there = server in self._members
            server.record_update(version, None if was_there and problem is None else str(problem or "it was not there"))
        if problem is not None:
            raise UserError(f"version {version} of the weights did not reach the servers: {problem}")

    def _finish(self, version: int, problem: Exception | None) -> Exception | None:
        """Have the members go on after their last message; return the first error."""
        return self._tell_members(lambda dialect: dialect.resume)

    def _ask(self, server: ServerClient, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a call without a second try: a broadcast has none either. Raises UserError."""
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
            self.engine.say(f"{server.client.url} takes no part in this update: {error}")
            return False
        return True


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

    broadcast_kind = "transfer"
    root: type[NcclRoot] = NcclRoot

    def close(self) -> None:
        for server in self._members:
            catch_error(self._ask, server, "/shutdown_weight_transfer_engine", {})
        if self._group is not None:
            self._group.abort()
        self._group, self._members = None, []

    def _check(self) -> None:
        super()._check()
        refusal = self.root.refusal(self.device)
        if refusal is not None:
            raise UserError(f"grpo.server.weights=broadcast to vLLM is by NCCL: {refusal}; {OTHER_WAY}")
        for server in self.engine.servers:
            self._world_size(server)
            # An incomplete description, which is refused before anything is done, tells what the server knows.
            refused = catch_error(self._ask, server, "/init_weight_transfer_engine", {"init_info": PROBE_GROUP})
            if "nccl_unique_id_b64" not in str(refused):
                raise UserError(
                    f"{refused or server.client.url}: it takes no weights over NCCL: {HOW_TO_START_VLLM}, {OTHER_WAY}"
                )

    def _world_size(self, server: ServerClient) -> int:
        try:
            return int(self._ask(server, "/get_world_size")["world_size"])
        except (UserError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{error}: it does not tell its number of GPUs: {HOW_TO_START_VLLM}, {OTHER_WAY}"
            ) from error

    def _meet(self, info: WeightInfo) -> None:
        super()._meet(info)
        problems = [catch_error(self._start, server) for server in self._members]
        problem = next((problem for problem in problems if problem is not None), None)
        if problem is not None:
            raise UserError(f"{problem}; the servers stay paused until they get a whole version")

    def _start(self, server: ServerClient) -> None:
        if catch_error(self._ask, server, "/start_weight_update", {}) is not None:
            catch_error(self._ask, server, "/finish_weight_update", {})  # an update that an earlier run left open
            self._ask(server, "/start_weight_update", {})

    def _form(self, servers: list[ServerClient], info: WeightInfo) -> None:
        sizes = [self._world_size(server) for server in servers]
        world_size = 1 + sum(sizes)
        if world_size > MOST_RANKS_PER_ID:
            raise UserError(
                f"the servers have {sum(sizes)} GPUs, and one group takes {MOST_RANKS_PER_ID - 1}: {OTHER_WAY[3:]}"
            )
        fields: dict[str, Any] = {
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
        }
        # Calls over HTTP give up first: torch ends the whole process where a message of NCCL takes longer.
        root = self.root(world_size, self.device, timedelta(seconds=2 * self.engine.timeout))
        self._abandoned.append(root)  # until it is met: letting go of one would wait for `join`
        joined = run_in_thread(root.join)
        try:
            fields["nccl_unique_id_b64"] = base64.b64encode(root.unique_id()).decode()
            posts = []
            for index, server in enumerate(servers):
                body = {"init_info": {**fields, "rank_offset": 1 + sum(sizes[:index])}}
                posts.append(run_in_thread(self._ask, server, "/init_weight_transfer_engine", body))
            raise_first_error([*posts, joined], self._patience)
        except (UserError, RuntimeError) as error:
            raise UserError(f"the servers' GPUs did not meet this one over NCCL: {error}; {MEETING_HINT}") from error
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
        return next(filter(None, [self._end(server, version) for server in self._members]), None)

    def _end(self, server: ServerClient, version: int) -> Exception | None:
        """Have a server that got all of a version go on with it; return the first error."""
        finish = ("/finish_weight_update", {"weight_version": str(version)})
        for post in [finish, *server.dialect.clear_caches, *server.dialect.resume]:
            if (problem := catch_error(self._ask, server, *post)) is not None:
                return problem
        return None

    def _go_on(self) -> None:
        for server in self._members:
            if server.update_problem is None:  # others hold a part of a version
                for post in server.dialect.resume:
                    catch_error(self._ask, server, *post)


class AdapterPublisher(Publisher):
    """Publisher that writes the adapter to `shared`/step-N, marked when it is whole, and has the servers load it.

    shared: a directory that trainer and servers see under the same path. base: the directory of the model that the
    adapter is of. Two step-N stay: those that a server may still draw with are among them.
    """

    def __init__(self, shared: Path, base: Path, config: AdapterConfig, engine: HttpEngine | None):
        super().__init__(engine, None)
        self.shared, self.base, self.config = Path(shared).absolute(), base, config
        self._run = secrets.token_hex(4)  # servers keep names, and what they know by them, from run to run

    def publish(self, model: CausalLM, version: int) -> None:
        """Write the adapter of `model` and have the servers load it. Collective; one all-gather per sharded tensor of
        the adapter. Raises UserError where the directory cannot be written or no server took it."""
        config, tensors = adapter_for_servers(model, self.config)
        directory = step_directory(self.shared, version)
        write_adapter(directory, tensors, config, model.config, str(self.base), replace=True, ranks=self.ranks)
        adapter = AdapterVersion(directory, version, f"{self._run}-{directory.name}", config.rank)
        self._announce(directory, version, lambda: self.engine.update_adapter(adapter))


@torch.no_grad()
def adapter_for_servers(model: CausalLM, config: AdapterConfig) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Return the adapter of `model` as servers read it: tensors by parameter name, A [r, in], B [out, r], as they lie.

    Where ranks or scales differ between layers, or the scale is rsLoRA's: every A and B filled up with zeros to one
    rank, the scale in B, all of them whole. Collective: one all-gather then per sharded tensor.
    """
    Sharding(model).reshard()
    tensors = {name: tensor for name, tensor in model_tensors(model).items() if is_adapter(name)}
    is_plain = not (config.rslora or config.rank_pattern or config.alpha_pattern)
    if is_plain or config.dora:
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
    """Mark `directory` as whole, with everything written. Synced to disk."""
    atomic_write_text(directory / MARKER, secrets.token_hex(8))


def read_marker(directory: Path) -> str:
    """Return the mark that tells these weights from others in a directory of this name. Raises OSError where it has
    been deleted."""
    marker = directory / MARKER
    stat = marker.stat()
    return marker.read_text(errors="replace") or f"{stat.st_ino} {stat.st_mtime_ns}"  # of a writer that is not ours


def is_complete_step(directory: Path) -> bool:
    return (directory / MARKER).is_file()


def step_number(directory: Path) -> int | None:
    """Return N of a directory named step-N; None for other names."""
    match = _STEP_NAME.fullmatch(directory.name)
    return int(match[1]) if match else None


def newest_complete_step(shared: Path) -> tuple[int, Path] | None:
    """Return the highest N of a whole `step-N`, and its directory; None where there is none yet."""
    return max(_whole_steps(shared).items(), default=None)


def prune_steps(shared: Path, current: int, keep: int) -> None:
    """Delete the whole `step-N` but `current` and the newest before it, `keep` in all. Those after it come from a run
    that was resumed from an earlier step. Markers go first: a reader never takes half of one."""
    whole = _whole_steps(shared)
    kept = sorted(version for version in whole if version <= current)[-keep:]
    for version in whole.keys() - kept:
        (whole[version] / MARKER).unlink(missing_ok=True)
        shutil.rmtree(whole[version], ignore_errors=True)


def _whole_steps(shared: Path) -> dict[int, Path]:
    paths = [path for path in shared.glob("step-*") if is_complete_step(path)]
    return {version: path for path in paths if (version := step_number(path)) is not None}


def describe_tensors(info: WeightInfo, names: list[str]) -> dict[str, Any]:
    return {
        "names": names,
        "dtypes": [str(info[name][1]).removeprefix("torch.") for name in names],
        "shapes": [list(info[name][0]) for name in names],
    }


def catch_error(act: Callable[..., Any], *arguments: Any) -> Exception | None:
    """Return why `act` failed, for reasons that lie with a server or the network; else None."""
    try:
        act(*arguments)
    except (UserError, RuntimeError) as error:  # RuntimeError: torch's word for a peer that is gone
        return error
    return None


def run_in_thread(act: Callable[..., Any], *arguments: Any) -> Future:
    """Run `act` in a thread that nobody has to wait for; return its future outcome."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(act(*arguments))
        except (UserError, RuntimeError) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="publish", daemon=True).start()
    return future


def raise_first_error(futures: list[Future], seconds: float) -> None:
    """Wait for all, or raise the first error as it comes; a UserError after `seconds`."""
    done, pending = wait(futures, seconds, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise UserError(f"the servers did not answer within {seconds:.0f} s")
