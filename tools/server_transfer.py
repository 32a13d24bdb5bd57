"""Checks of weights to vLLM by its weight transfer, on a machine without a GPU: all but NCCL itself."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
from gloo_transfer import GROUP
from real_servers import free_port
from server_checks import Report, Trainer, engine_of, requests_of

from dtrain.inference.request import Request, SamplingParams
from dtrain.policy.weights import join_weight_group
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.http_client import RetryableError
from dtrain.rl.remote.publish import DirectoryPublisher, TransferPublisher


class GlooRoot:
    """Rank 0 of a gloo group that `gloo_transfer` joins in a server."""

    def __init__(self, world_size: int, device: torch.device, wait: timedelta):
        self._port, self._arguments = free_port(), (0, world_size, device)

    @staticmethod
    def refusal(device: torch.device) -> None:
        return None

    def join(self) -> None:
        self._group = join_weight_group("127.0.0.1", self._port, *self._arguments, name=GROUP)
        self._group.allreduce(torch.zeros(1)).wait()

    def unique_id(self) -> bytes:
        return f"127.0.0.1:{self._port}".encode().ljust(128, b"\0")

    def broadcast(self, tensor: torch.Tensor, root: int):
        return self._group.broadcast(tensor, root)

    def abort(self) -> None:
        pass


class GlooPublisher(TransferPublisher):
    root = GlooRoot


def plugin(root: Path) -> Path:
    """Return a directory for a server's PYTHONPATH with `gloo_transfer` as a plugin of vLLM."""
    directory = root / "plugin"
    information = directory / "gloo_transfer-0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("gloo_transfer.py"), directory)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-transfer\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo_transfer = gloo_transfer:register\n")
    return directory


def check_transfer(report: Report, root: Path, model: Path, server) -> None:
    """Versions by the transfer `gloo` and by directory while completions are under way, and one to a server that a
    trainer left in the middle of an update."""
    trainer, engine, device = Trainer(root, model), engine_of(server), torch.device("cpu")
    publisher = GlooPublisher(engine, device=device, dtype=torch.float32, bucket_bytes=1 << 14)
    files = DirectoryPublisher(root / "shared", model, engine)
    sampling = SamplingParams(12)
    cached = [token % 60 + 2 for token in range(160)]  # longer than a block of the server's keys
    requests = [*requests_of(sampling), *(Request(cached, sampling, 5, 9, sample) for sample in range(3))]
    for version, way in enumerate(("transfer", "transfer", "directory"), 1):
        trainer.change(version)
        _, old = trainer.gap(requests, engine.generate(requests))  # whose keys are now in the server's cache
        is_published = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            drawing = thread.submit(lengths_until, is_published, engine)
            if way == "transfer":
                publisher.publish(trainer.policy.weights, version)
            else:
                files.publish(trainer.policy.model, version)
            drawn = engine.generate(requests)
            is_published.set()
            lengths = drawing.result()
        new, _ = trainer.gap(requests, drawn)
        report.apart(f"{way} {version}", "server of the old weights and trainer of the new, in the mean", old)
        report.near(f"{way} {version}", "the same when they were sent", new)
        held = engine.servers[0].client.request("/weight_info", None, 60.0)["weight_version"]
        report.holds(f"{way} {version}", "the server tells the version", held == str(version), held)
        report.holds(f"{way} {version}", "completions under way go on", lengths == {230}, str(lengths))
    publisher.close()
    again = GlooPublisher(engine, device=device, dtype=torch.float32)
    engine.servers[0].client.request("/start_weight_update", {}, 60.0)  # as a run that was killed leaves it
    trainer.change(4)
    again.publish(trainer.policy.weights, 4)
    new, _ = trainer.gap(requests, engine.generate(requests))
    report.near("transfer 4", "after an update that was left open, in a new group", new)
    again.close()


def lengths_until(event: threading.Event, engine: HttpEngine) -> set[int]:
    """Return the lengths of completions of 230 tokens, drawn until `event`.

    They are few, so that one step reads them anew after an update: on a CPU vLLM 0.32 ends where it reads a request
    with a seed in parts ("CPU Generator does not use offset").
    """
    lengths: set[int] = set()
    while not event.is_set():
        completions = engine.generate(requests_of(SamplingParams(230), prompts=2, samples=2))
        lengths |= {len(completion.ids) for completion in completions}
    return lengths


def check_own(report: Report, server, bare) -> None:
    """server: with vLLM's own transfer `nccl`, which joins no group here; bare: with none."""
    device = torch.device("cpu")

    def publisher_of(some) -> TransferPublisher:
        return GlooPublisher(engine_of(some), device=device)

    publisher = publisher_of(server)
    report.holds("transfer", "vLLM's own `nccl` takes the fields of the transfer", publisher.engine is not None)
    init = {"nccl_unique_id_b64": "AAAA", "rank_offset": 1, "world_size": 2, "packed": True}
    body = {"init_info": {**init, "packed_buffer_size_bytes": 1 << 28}}
    try:
        refused = str(publisher.engine.servers[0].client.request("/init_weight_transfer_engine", body, 60.0))
    except RetryableError as error:
        refused = str(error)
    report.tells("transfer", "an id of 3 bytes", refused, "must decode to 128 bytes")
    report.refused("transfer", "a server without it", lambda: publisher_of(bare), "--weight-transfer-config")
    nccl = lambda: TransferPublisher(engine_of(server), device=device)  # noqa: E731
    report.refused("transfer", "a trainer without a GPU", nccl, "NCCL is for CUDA")
