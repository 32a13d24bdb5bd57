"""Weights to vLLM by its weight transfer: the calls, their fields, the bytes; what is refused, and what breaks off."""

import base64
import queue
import threading
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtrain.base.errors import UserError
from dtrain.rl.remote import engine as engine_module
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import NcclRoot, StreamPublisher, TransferPublisher
from tests.policy.test_weights import policy_of
from tests.problem_lines import method_problems
from tests.remote.fakes import FakeVllm, Refusal
from tests.running import run
from tests.tiny import tiny_grpo, tiny_recipe
from tests.world import run_world

CPU = torch.device("cpu")
ID = bytes(range(128))
CACHES = ["/reset_prefix_cache?reset_running_requests=true", "/reset_encoder_cache"]
SECONDS = 20


class Group:
    """An NCCL group in this process. ranks: the messages to each, by its rank."""

    def __init__(self, world_size):
        self.inboxes = {rank: queue.Queue() for rank in range(1, world_size)}
        self.meeting = threading.Barrier(world_size)
        self.aborted = False

    def arrive(self):
        with suppress(threading.BrokenBarrierError):
            self.meeting.wait(SECONDS)


class MemoryRoot:
    """Rank 0 of such a group. groups: all that were made, in order."""

    groups: list[Group]

    def __init__(self, world_size, device, wait):
        assert device == CPU and wait.total_seconds() == 2 * SECONDS
        self.group = Group(world_size)
        self.groups.append(self.group)

    @staticmethod
    def refusal(device):
        return None

    def join(self):
        self.group.arrive()

    def unique_id(self):
        return ID

    def broadcast(self, tensor, root):
        assert root == 0 and tensor.dtype == torch.uint8 and tensor.dim() == 1
        for inbox in self.group.inboxes.values():
            inbox.put(tensor.clone())
        return SimpleNamespace(wait=lambda: True)

    def abort(self):
        self.group.aborted = True


class TransferVllm(FakeVllm):
    """vLLM 0.32 with its weight transfer, of `size` workers: what its routes check, and its packed messages.

    held: each worker's tensors. broken: the path of a call that fails, and which one of its kind.
    """

    knows_id = configured = develops = True

    def __init__(self, root, size):
        super().__init__()
        self.root, self.size, self.ranks, self.is_open, self.is_paused = root, size, [], False, False
        self.held = [{} for _ in range(size)]
        self.broken = None
        self.messages = 0

    def get(self, path):
        if path == "/get_world_size":
            return {"world_size": self.size} if self.develops else None
        return super().get(path)

    def other(self, path, body):
        route = path.split("?")[0].removeprefix("/")
        if self.broken is not None and route == self.broken[0]:
            self.broken = (route, self.broken[1] - 1)
            if not self.broken[1]:
                raise Refusal(500, f"Call to collective_rpc method failed: the worker's {route}")
        if hasattr(self, route) and route in ROUTES:
            return getattr(self, route)(**body) or {"message": "done"}
        return {"success": True} if path in CACHES else None

    def pause(self):
        self.is_paused = True

    def resume(self):
        assert not self.is_open, "a model of which a part is not there decodes"
        self.is_paused = False

    def init_weight_transfer_engine(self, init_info):
        if not self.configured:
            raise Refusal(500, "Weight transfer not configured. Please set weight_transfer_config")
        if not self.knows_id:
            raise Refusal(500, "__init__() missing 2 required positional arguments: 'master_address', 'master_port'")
        assert init_info.keys() <= FIELDS
        if "nccl_unique_id_b64" not in init_info:
            raise Refusal(500, "need nccl_unique_id_b64, or both master_address and master_port")
        assert base64.b64decode(init_info["nccl_unique_id_b64"], validate=True) == ID and init_info["packed"]
        group, first = self.root.groups[-1], init_info["rank_offset"]
        self.ranks = list(range(first, first + self.size))
        assert init_info["world_size"] == 1 + len(group.inboxes)
        self.most, self.inboxes = init_info["packed_buffer_size_bytes"], [group.inboxes[rank] for rank in self.ranks]
        others = [threading.Thread(target=group.arrive) for _ in self.ranks[1:]]
        for worker in others:
            worker.start()
        group.arrive()

    def start_weight_update(self):
        if self.is_open:
            raise Refusal(500, "start_weight_update called while a weight update is already active.")
        assert self.is_paused
        self.is_open = True

    def update_weights(self, update_info):
        assert update_info.keys() == {"names", "dtype_names", "shapes"} and self.is_open
        entries = list(zip(*(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True))
        while entries:  # as its consumer does: a message ends with the tensor that fills it beyond the most
            message, size = [], 0
            while entries and size <= self.most:
                name, dtype, shape = entries.pop(0)
                message.append((name, getattr(torch, dtype), shape))
                size += torch.Size(shape).numel() * message[-1][1].itemsize
            self.messages += 1
            for inbox, held in zip(self.inboxes, self.held, strict=True):
                self.unpack(inbox.get(timeout=SECONDS), message, held)

    def unpack(self, flat, message, held):
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in message]
        assert flat.numel() == sum(sizes)
        for (name, dtype, shape), piece in zip(message, flat.split(sizes), strict=True):
            held[name] = piece.view(dtype).view(shape)  # raises where a tensor lies askew

    def finish_weight_update(self, weight_version=None):
        if not self.is_open:
            raise Refusal(500, "finish_weight_update called without a matching start_weight_update.")
        self.is_open, self.weight_version = False, weight_version

    def shutdown_weight_transfer_engine(self):
        self.inboxes = []


FIELDS = {
    "nccl_unique_id_b64", "rank_offset", "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers",
}  # fmt: skip
ROUTES = {
    "pause", "resume", "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    "shutdown_weight_transfer_engine",
}  # fmt: skip


@pytest.fixture
def root():
    return type("Root", (MemoryRoot,), {"groups": []})


@pytest.fixture
def servers(root):
    both = [TransferVllm(root, 2) for _ in range(2)]
    yield both
    for server in both:
        server.close()


def paths_of(server):
    return [path for path, _ in server.calls]


class Source:
    """Weights of mixed dtypes: of an odd number of bfloat16 before a float32, and one that is larger than a bucket."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"a": [3, 5], "b": [7], "c": [40, 50], "d": [4, 4], "e": [1]}
        self.tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        self.tensors["b"] = self.tensors["b"].float()

    def prepare_refit_info(self, dtype):
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def full_tensors(self, dtype, names):
        return ((name, self.tensors[name]) for name in names)


def publisher_by(root):
    return type("Publisher", (TransferPublisher,), {"root": root})


def publisher_of(servers, root, **settings):
    engine = HttpEngine([server.url for server in servers], timeout=SECONDS)
    return publisher_by(root)(engine, device=CPU, **settings)


def equal(held, expected):
    return held.keys() == expected.keys() and all(
        held[name].dtype == expected[name].dtype and torch.equal(held[name], expected[name]) for name in expected
    )


def test_two_servers_of_two_workers_have_the_bits(servers, root):
    publisher = publisher_of(servers, root, bucket_bytes=64)
    for version in (3, 4):
        source = Source(version)
        for server in servers:
            server.calls.clear()
        publisher.publish(source, version)
        for server in servers:
            assert all(equal(held, source.tensors) for held in server.held)
            assert server.weight_version == str(version) and not server.is_paused
            # b (28 bytes) and a (30); c, which is larger than a bucket; d (32) and e (2).
            init = ["/init_weight_transfer_engine"] if version == 3 else []
            expected = ["/pause?mode=keep&clear_cache=false", "/start_weight_update", *["/update_weights"] * 3]
            assert paths_of(server) == [*init, *expected, "/finish_weight_update", *CACHES, "/resume"]
        assert [state.version for state in publisher.engine.servers] == [version] * 2
    assert [server.ranks for server in servers] == [[1, 2], [3, 4]] and len(root.groups) == 1
    first = next(body for path, body in servers[0].calls if path == "/update_weights")
    info = {"names": ["b", "a"], "dtype_names": ["float32", "bfloat16"], "shapes": [[7], [3, 5]]}
    assert first == {"update_info": info} and servers[0].messages == 6
    publisher.close()
    assert root.groups[0].aborted and paths_of(servers[0])[-1] == "/shutdown_weight_transfer_engine"


def publish_merged(rank, recipe):
    """Rank 0 has the server too; what it then holds, and what the weights are."""
    policy = policy_of(rank, recipe, 2)
    root, engine = type("Root", (MemoryRoot,), {"groups": []}), None
    if rank == 0:
        server = TransferVllm(root, 1)
        engine = HttpEngine([server.url], timeout=SECONDS)
    publisher = publisher_by(root)(engine, device=CPU, dtype=torch.bfloat16, bucket_bytes=5000)
    publisher.publish(policy.weights, 1)
    full = dict(policy.weights.full_tensors(torch.bfloat16))
    return rank == 0 and (equal(server.held[0], full), server.messages, [*full])


@pytest.mark.processes
def test_a_sharded_model_arrives_merged(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.dtype=float32", "train.global_batch=4", "lora={rank: 4}")
    is_equal, messages, names = run_world(publish_merged, 2, recipe)[0]
    assert is_equal and messages > 3 and not any("lora" in name for name in names)


@pytest.mark.parametrize("route, nth", [("update_weights", 2), ("finish_weight_update", 1)])
def test_an_update_that_breaks_off_keeps_the_servers_paused(servers, root, route, nth):
    publisher = publisher_of(servers, root, bucket_bytes=64)
    servers[1].broken = (route, nth)
    with pytest.raises(UserError, match=f"version 1 of the weights did not reach the servers: .*the worker's {route}"):
        publisher.publish(Source(1), 1)
    assert servers[1].is_paused and all(state.update_problem for state in publisher.engine.servers)
    assert servers[0].is_paused or route == "finish_weight_update"
    assert root.groups[0].aborted == (route == "update_weights")
    publisher.publish(Source(2), 2)
    for server in servers:
        assert all(equal(held, Source(2).tensors) for held in server.held)
        assert not server.is_paused and server.weight_version == "2"
    assert len(root.groups) == (2 if route == "update_weights" else 1)


def test_an_update_that_another_run_left_open_is_closed_first(servers, root):
    servers[0].is_open = True
    publisher_of(servers, root).publish(Source(1), 1)
    start = ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
    assert paths_of(servers[0])[3:6] == start and "/finish_weight_update" not in paths_of(servers[1])[3:5]
    assert equal(servers[0].held[1], Source(1).tensors)


def test_the_group_is_of_those_that_are_there(servers, root):
    publisher = publisher_of(servers, root)
    publisher.publish(Source(1), 1)
    servers[0].close()
    publisher.engine.servers[0].client.hang_up()
    publisher.publish(Source(2), 2)
    assert root.groups[0].aborted and len(root.groups[1].inboxes) == 2 and servers[1].ranks == [1, 2]
    assert [state.update_problem for state in publisher.engine.servers] == [
        "the server did not answer when the update began",
        None,
    ]


def test_a_server_that_does_not_begin_is_named(servers, root):
    publisher = publisher_of(servers, root)
    servers[1].start_weight_update = lambda: (_ for _ in ()).throw(Refusal(500, "no room"))
    with pytest.raises(UserError, match=f"{servers[1].url}/start_weight_update: 500: no room. The servers stay paused"):
        publisher.publish(Source(1), 1)


def test_servers_that_do_not_meet_are_told_why(servers, root):
    publisher = publisher_of(servers, root)
    servers[1].broken = ("init_weight_transfer_engine", 1)
    with pytest.raises(
        UserError, match="did not join this GPU's NCCL group: .*engine. Trainer and servers need different GPUs"
    ):
        publisher.publish(Source(1), 1)
    root.groups[0].meeting.abort()
    assert not any(server.is_paused for server in servers)  # nothing was begun


@pytest.mark.parametrize(
    "change, message",
    [
        ({"knows_id": False}, "positional arguments.*Start vLLM 0.30 or later"),
        ({"configured": False}, "not configured.*--weight-transfer-config"),
        ({"develops": False}, "/get_world_size: 404: .*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_without_the_transfer_is_refused_at_the_start(servers, root, change, message):
    for key, value in change.items():
        setattr(servers[1], key, value)
    with pytest.raises(UserError, match=f"{message}.*grpo.server.weights=directory"):
        publisher_of(servers, root)
    assert not any(path.startswith(("/pause", "/start")) for path in paths_of(servers[1]))


def test_groups_of_more_ranks_than_one_id_holds_are_refused(servers, root):
    servers[1].size = 126
    with pytest.raises(
        UserError, match="the servers have 128 GPUs, but grpo.server.weights=broadcast reaches at most 127"
    ):
        publisher_of(servers, root).publish(Source(1), 1)


def test_a_machine_without_nccl_is_refused_before_a_server_is_asked(servers):
    engine = HttpEngine([servers[0].url])
    with pytest.raises(UserError, match="the run's device is cpu. Set grpo.server.weights=directory"):
        TransferPublisher(engine, device=CPU)
    if not dist.is_nccl_available():
        with pytest.raises(UserError, match="this torch was built without NCCL"):
            TransferPublisher(engine, device="cuda")
    assert not servers[0].calls


def test_servers_of_two_kinds_join_no_group(servers, root, sglang):
    with pytest.raises(UserError, match="is a sglang server, which cannot join the process group of the other servers"):
        publisher_of([servers[0], sglang], root)


def test_a_server_that_does_not_report_its_ranks_is_named(sglang):
    usual = sglang.get
    sglang.get = lambda path: ["tp_size"] if path == "/get_server_info" else usual(path)
    with pytest.raises(UserError, match=f"{sglang.url}/get_server_info does not report tp_size"):
        StreamPublisher(HttpEngine([sglang.url])).publish(Source(1), 1)


def test_broadcast_to_vllm_is_its_transfer(servers, sglang):
    say = lambda line: None  # noqa: E731
    for fakes, way in ((servers, "transfer"), ([sglang], "broadcast")):
        engine = HttpEngine([fake.url for fake in fakes])
        assert engine_module.choose_weight_transport("broadcast", None, engine, say) == way
        assert engine_module.STREAMS[way].broadcast_kind == way


def test_the_recipe_refuses_a_cpu(tmp_path):
    settings = ("grpo.engine=http", "grpo.server={urls: ['http://localhost:8000'], weights: broadcast, kind: vllm}")
    problems = {
        device: method_problems(tiny_grpo(tmp_path, *settings, f"launch.device={device}")) for device in ("cpu", "cuda")
    }
    assert any("grpo.server.weights=directory" in problem for problem in problems["cpu"])
    assert not any("NCCL" in problem for problem in problems["cuda"])


def run_of(tmp_path, server, *overrides):
    settings = (f"grpo.server={{urls: [{server.url}], weights: broadcast, timeout: {SECONDS}}}", *overrides)
    return tiny_grpo(tmp_path, "grpo.engine=http", "train.steps=4", "grpo.max_mismatch=null", *settings)


def test_a_run_ends_on_a_machine_without_nccl_before_it_draws(tmp_path, servers):
    with pytest.raises(UserError, match="the run's device is cpu"):
        run(run_of(tmp_path, servers[0], "launch.device=auto"))
    assert servers[0].completions not in paths_of(servers[0])


def test_a_run_sends_each_version_before_it_draws_with_it(tmp_path, servers, root, monkeypatch):
    monkeypatch.setitem(engine_module.STREAMS, "transfer", publisher_by(root))
    server = servers[0]
    run(run_of(tmp_path, server))
    paths = [path for path in paths_of(server) if path in ("/finish_weight_update", server.completions)]
    first = paths.index(server.completions)
    assert first == 1 and paths.index("/finish_weight_update", first) > first
    assert [body for path, body in server.calls if path == "/finish_weight_update"] == [
        {"weight_version": "0"}, {"weight_version": "2"}
    ]  # fmt: skip
    assert "model.layers.1.mlp.down_proj.weight" in server.held[1]
    assert root.groups[0].aborted  # left at the end


class TorchGroup:
    """What torch's ProcessGroupNCCL does with its store, and waits for in its first sum."""

    class Options:
        pass

    def __init__(self, store, rank, size, options):
        assert (rank, size, options._timeout) == (0, 5, timedelta(seconds=7))
        self.store, self.peers, self.sent = store, threading.Event(), []

    def allreduce(self, tensor):
        self.sent.append(tensor)
        self.store.set("0", ID)
        assert self.peers.wait(SECONDS)
        return SimpleNamespace(wait=lambda: True)

    def broadcast(self, tensor, root):
        self.sent.append((tensor, root))

    def abort(self):
        self.sent.append("abort")


def test_the_id_is_read_while_the_root_waits_for_the_others(monkeypatch):
    """The first of the group is the sum of one float32 that vLLM's ends begin with."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchGroup, raising=False)
    end = NcclRoot(5, CPU, timedelta(seconds=7))
    joining = threading.Thread(target=end.join)
    joining.start()
    assert end.unique_id() == ID and joining.is_alive()
    end._group.peers.set()
    joining.join(SECONDS)
    end.broadcast("message", 0)
    end.abort()
    first, *rest = end._group.sent
    assert first.dtype == torch.float32 and first.shape == (1,) and rest == [("message", 0), "abort"]
