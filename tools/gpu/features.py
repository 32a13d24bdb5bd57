"""Parts on what runs can do: adapters, offloading, exports, GRPO, the same bits, weights sent to another process."""

import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.recipe.schema import Recipe
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model
from tools.gpu.parity import EXACT, THREE, compared
from tools.gpu.ranks import Run
from tools.gpu.runs import WRONG, Options, rows_of, train_rank

FEATURES = {
    "lora": ("lora={rank: 4}",),
    "lora on nf4": ("lora={rank: 4}", "lora.quantize=nf4", "model.init=pretrained", "train.dtype=float32"),
    "optimizer on the host": ("parallel.optimizer_offload=true",),
    "activations on the host": ("train.activation_offload=true", "train.activation_checkpointing=full"),
    "tiles": ("train.tile=all",),
    "export": ("checkpoint.export=final",),
}
ROUNDING = (1e-4, 1e-3)  # of the loss and of the norm in float32
SAME_WEIGHTS = 1e-9  # relative to the largest weight of a tensor
MISMATCH = 0.01  # KL of the policy that draws and the one that trains, in bfloat16
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def features(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Three steps in float64 on one GPU, and on two, against the CPU."""
    path = save_weights(write_model(root / "wide", "qwen3", hidden_size=64, intermediate_size=128))
    for name, keys in FEATURES.items():
        file_name = name.replace(" ", "-")
        keys = (*THREE, f"model.path={path}", *keys)
        of_cpu = tiny_recipe(root, *keys, name=f"cpu-{file_name}")
        run(train_rank, 1, of_cpu, "cpu")
        for size in options.sizes(1 if options.small else 2):
            recipe = tiny_recipe(root, *keys, name=f"{file_name}-{size}")
            run(train_rank, size, recipe)
            bounds = ROUNDING if "train.dtype=float32" in keys else EXACT
            yield compared(f"{name} on {size}", rows_of(recipe), rows_of(of_cpu), bounds)
            if name == "export":
                off = _weights_off(recipe, of_cpu)
                yield f"{'ok' if off <= SAME_WEIGHTS else WRONG}  exported weights on {size}: off by {off:.1e}"


def _weights_off(recipe: Recipe, of_cpu: Recipe) -> float:
    from safetensors.torch import load_file

    mine, expected = (load_file(each.run.directory / "export" / "model.safetensors") for each in (recipe, of_cpu))
    if mine.keys() != expected.keys():
        return float("inf")
    return max(float((mine[name] - other).abs().max() / other.abs().max()) for name, other in expected.items())


def grpo(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Steps of GRPO with the native engine: in float64 against the CPU, in bfloat16 the policies' mismatch."""
    of_cpu = tiny_grpo(root, *THREE, name="grpo-cpu")
    run(train_rank, 1, of_cpu, "cpu")
    for size in options.sizes(2):
        mesh = ("parallel.tp=2",) if size == 2 else ()
        recipe = tiny_grpo(root, *THREE, *mesh, name=f"grpo-{size}")
        run(train_rank, size, recipe)
        yield compared(f"GRPO on {size}", rows_of(recipe), rows_of(of_cpu), EXACT)
        recipe = tiny_grpo(root, *THREE, *mesh, "train.dtype=bfloat16", name=f"grpo-half-{size}")
        run(train_rank, size, recipe)
        mismatch = max(row["mismatch_kl"] for row in rows_of(recipe))
        yield f"{'ok' if mismatch <= MISMATCH else WRONG}  GRPO on {size} in bfloat16: mismatch_kl {mismatch:.1e}"


def same_bits(options: Options, run: Run, root: Path) -> Iterator[str]:
    """Two runs, and one that is killed and resumed, in bfloat16 under `run.deterministic`: rows equal bit for bit."""
    steps, every = (12, 4) if options.small else (40, 10)
    keys = f"train.steps={steps}", f"checkpoint.every={every}", "train.dtype=bfloat16", "run.deterministic=true"
    for size in options.sizes(options.world):
        recipes = {name: tiny_recipe(root, *keys, name=f"{name}-{size}") for name in ("first", "second", "killed")}
        for name in ("first", "second"):
            run(train_rank, size, recipes[name], environ=CUBLAS)
        try:
            run(killed_rank, size, recipes["killed"], every + 1, environ=CUBLAS)
        except (RuntimeError, AssertionError):  # a rank died, as it should
            steps_before = len(rows_of(recipes["killed"]))
            run(train_rank, size, recipes["killed"], environ=CUBLAS)
            is_killed = every < steps_before < steps
        else:
            is_killed = False
        if not is_killed:
            yield f"{WRONG}  on {size}: the run that was to be killed between steps {every} and {steps} was not"
        first = _numbers(recipes["first"])
        for name, words in (
            ("second", "two runs"),
            ("killed", "a run that was killed and resumed, and one that was not"),
        ):
            is_same = _numbers(recipes[name]) == first
            yield f"{'ok' if is_same else WRONG}  on {size}: {words}: {'the same bits' if is_same else 'other bits'}"


def _numbers(recipe: Recipe) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(recipe)]


def killed_rank(rank: int, size: int, recipe: Recipe, step: int) -> None:
    """Train until the row of `step` is written; rank 0 is then killed."""

    def watch() -> None:
        metrics = recipe.run.directory / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        threading.Thread(target=watch, daemon=True).start()
    train_rank(rank, size, recipe)


def streaming(options: Options, run: Run, root: Path) -> Iterator[str]:
    """The weights of a policy on one GPU, sent over nccl to a process that has another."""
    if options.world < 2:
        yield "--  one GPU: nobody to send to"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe = tiny_recipe(root, "train.dtype=float32", name="streaming")
    sent, received = run(stream_rank, 2, recipe, port, str(root / "infos"), grouped=False)
    is_same = sent == received and len(sent) > 0
    yield f"{'ok' if is_same else WRONG}  {len(received)} of {len(sent)} tensors {'arrived' if is_same else 'differ'}"


def stream_rank(rank: int, size: int, recipe: Recipe, port: int, store: str) -> dict[str, str]:
    """Return the digests of the weights that rank 0 sends and rank 1 receives."""
    import json

    import torch
    import torch.distributed as dist

    from dtrain.policy import WeightReceiver
    from tools.gpu.runs import opened

    infos = dist.FileStore(store, 2)
    if rank == 1:
        info = {name: (torch.Size(shape), torch.bfloat16) for name, shape in json.loads(infos.get("info")).items()}
        receiver = WeightReceiver("127.0.0.1", port, 1, 2, device=torch.device("cuda", rank))
        return _digests(receiver.receive(info, 5000))
    policy, *_ = opened(0, 1, recipe)
    info = policy.weights.prepare_refit_info(torch.bfloat16)
    infos.set("info", json.dumps({name: list(shape) for name, (shape, _) in info.items()}))
    policy.weights.init_collective("127.0.0.1", port, 2)
    policy.weights.broadcast_weights_for_collective(torch.bfloat16, 5000)
    return _digests(policy.weights.full_tensors(torch.bfloat16))


def _digests(named: Any) -> dict[str, str]:
    import torch

    return {
        name: hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in named
    }
