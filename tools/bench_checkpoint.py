#!/usr/bin/env python3
"""What a checkpoint costs, as JSON: the stall of a save, its time, a load's, bytes, beside torch.save and the disk.

    .venv/bin/python tools/bench_checkpoint.py                         58 million parameters with AdamW, one process
    .venv/bin/python tools/bench_checkpoint.py --ranks 2 --directory /data/scratch
    .venv/bin/python tools/bench_checkpoint.py --hidden 4096 --layers 16 --device cuda

The model is a Llama with random weights, sharded by FSDP over --ranks; model and AdamW's moments are saved, in float32.
Medians of --rounds; bytes per second count the bytes of the whole checkpoint.

    stall       how long training waits for a save in the background: the copy to host memory
    background  from the call until that save is published, nothing else running
    save        a save that is waited for, synced to disk
    load        with every checksum verified; the files come from the page cache where they fit into it
    torch_save  rank 0 writes its own shard of the same tensors with torch.save, unsynced and synced
    torch_load  and reads it again, without checksums
    disk        zeros written in blocks of 4 MiB and synced, as much as a rank's shard
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtrain import models
from dtrain.checkpoint.dcp.background import Saver
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.training_state import allocate_state, training_tensors
from dtrain.models.read_config import parse_config
from dtrain.parallel.fsdp import mixed_precision, shard_model
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.parallel.placement import local_tensor


def seconds(act) -> float:
    """How long `act` takes on all ranks together."""
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - began


def build(arguments, device: torch.device, world_size: int) -> dict[str, torch.Tensor]:
    """The tensors of a training run: a sharded Llama and its AdamW state."""
    heads = max(1, arguments.hidden // 64)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.hidden * 8 // 3,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": arguments.vocab,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    model = models.build(parse_config(config), device="meta")
    mesh = build_mesh(Runtime(device=device), dp_shard=world_size)
    shard_model(model, mesh.fsdp, mixed_precision(torch.float32, torch.float32))
    model.to_empty(device=device)
    models.init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    allocate_state(optimizer)
    return training_tensors(model, optimizer)


def write_zeros(path: Path, count: int) -> None:
    block = bytes(1 << 22)
    with path.open("wb") as file:
        for start in range(0, count, len(block)):
            file.write(block[: count - start])
        file.flush()
        os.fsync(file.fileno())


def torch_save(tensors: dict, path: Path, sync: bool) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def measure(rank: int, arguments, scratch: str) -> None:
    """One rank of the benchmark; rank 0 prints."""
    torch.set_num_threads(1)
    world_size, cuda = arguments.ranks, arguments.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{scratch}/store", world_size)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    tensors = build(arguments, device, world_size)
    directory = Path(scratch)
    times: dict[str, list[float]] = {name: [] for name in ("stall", "background", "save", "load")}
    plain = {name: [] for name in ("torch_save", "torch_save_synced", "torch_load", "disk")}
    shard = {name: local_tensor(tensor).detach() for name, tensor in tensors.items()}
    shard_bytes = sum(tensor.nbytes for tensor in shard.values())
    step = total = 0
    for _ in range(arguments.rounds):
        with Saver(directory / "checkpoints", Retention(1), device, background=True) as saver:
            for _ in range(2):  # the second has the pinned memory of the first
                step += 1
                began = time.perf_counter()
                stall = seconds(lambda saver=saver, step=step: saver.save(step, tensors, {"step": step}))
                saver.finish()
                dist.barrier()
                background = time.perf_counter() - began
            times["stall"].append(stall)
            times["background"].append(background)
            step += 1
            times["save"].append(
                seconds(lambda saver=saver, step=step: saver.save(step, tensors, {"step": step}, wait=True))
            )
            times["load"].append(seconds(lambda saver=saver, step=step: saver.store.load(step, tensors)))
            total = sum(path.stat().st_size for path in saver.store.path(step).iterdir())
        dist.barrier()
        if rank == 0:
            file = directory / "plain"
            for name, act in {
                "torch_save": lambda file=file: torch_save(shard, file, False),
                "torch_save_synced": lambda file=file: torch_save(shard, file, True),
                "torch_load": lambda file=file: torch.load(file, weights_only=True),
                "disk": lambda file=file: write_zeros(file, shard_bytes),
            }.items():
                began = time.perf_counter()
                act()
                plain[name].append(time.perf_counter() - began)
            file.unlink()
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in {**times, **plain}.items()}
        report = {
            "ranks": world_size,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "tensors": len(tensors),
            "bytes": total,
            "shard_bytes": shard_bytes,
            "seconds": {name: round(value, 4) for name, value in medians.items()},
            "mib_per_second": {
                name: round((shard_bytes if name in plain else total) / 2**20 / value, 1)
                for name, value in medians.items()
            },
            "stall_share_of_save": round(medians["stall"] / medians["save"], 4),
        }
        print(json.dumps(report, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--directory", type=Path, help="where to write, and leave nothing (default: the system's)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=10000)
    arguments = parser.parse_args()
    scratch = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=arguments.directory)
    try:
        mp.spawn(measure, (arguments, scratch), nprocs=arguments.ranks)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
