"""Recipes that need no download: models from scratch and random rows; and what a rank does with one."""

import json
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain import recipe as config
from dtrain.recipe.schema import Recipe
from tests.tiny import tiny_recipe, write_model

WRONG = "WRONG"  # a part's line that begins so is a finding


@dataclass(frozen=True)
class Options:
    """world: GPUs. small: tiny models."""

    world: int
    out: Path
    compiled: bool = True
    small: bool = False

    def sizes(self, most: int) -> list[int]:
        """Return numbers of ranks to run on: one, and all GPUs up to `most`; of small models the last alone."""
        largest = min(self.world, most)
        return [largest] if self.small or largest == 1 else [1, largest]


# Shapes of Qwen3-0.6B and of four layers of Llama 3.1 8B.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
    }),
    "8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    }),
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 1003}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def shape_recipe(root: Path, shape: str, length: int, small: bool, *overrides: str, name: str) -> Recipe:
    """SFT of a shape of SHAPES from scratch over packed random documents, a row of `length` tokens a micro-batch."""
    family, sizes = SHAPES[shape]
    sizes = {**sizes, **SMALL} if small else sizes
    model = root / f"shape-{shape}"
    if not model.exists():
        write_model(model, family, tied=shape == "0.6B", **sizes)
    rows = root / f"rows-{length}.jsonl"
    if not rows.exists():
        draw = random.Random(0)
        with rows.open("w") as file:
            for _ in range(40):
                ids = [draw.randrange(60) for _ in range(draw.randint(length // 8, length))]
                file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    keys = f"model.path={model}", f"data.train.path={rows}", f"data.max_length={length}", "data.packing=true"
    keys += "train.dtype=bfloat16", "train.micro_batch=1", "optimizer.lr=1e-4", "scheduler.warmup_steps=0"
    return tiny_recipe(root, *keys, *overrides, name=name)


def train_rank(rank: int, size: int, recipe: Recipe, device: str = "cuda") -> None:
    """Train as a rank of `dtrain run` does, under deterministic algorithms where the recipe wants them."""
    import torch

    from dtrain.base.torch_functions import deterministic_algorithms
    from dtrain.parallel.mesh import Runtime
    from dtrain.training.trainer import train

    there = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    with ExitStack() as stack:
        if recipe.run.deterministic:
            stack.enter_context(deterministic_algorithms(os.environ))
        train(recipe, Runtime(rank=rank, local_rank=rank, world_size=size, device=there))


def rows_of(recipe: Recipe) -> list[dict[str, Any]]:
    """The training rows of the run's metrics."""
    lines = (recipe.run.directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def opened(rank: int, size: int, recipe: Recipe) -> tuple[Any, Any, Callable[[], None]]:
    """Return the policy of a recipe on this rank, its method, and a function that takes a step of full rows."""
    import torch

    from dtrain.base.batch import collate
    from dtrain.models.read_config import read_config
    from dtrain.parallel.mesh import Runtime, build_mesh, init_one_process_group
    from dtrain.policy import Policy
    from dtrain.training import build_method
    from dtrain.training.full_rows import full_rows

    if size == 1:
        init_one_process_group("cuda")
    runtime = Runtime(rank=rank, local_rank=rank, world_size=size, device=torch.device("cuda", rank))
    sizes = config.derive_sizes(recipe, size)
    mesh = build_mesh(runtime, dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    policy = Policy(recipe, read_config(recipe.model.directory), mesh, runtime)
    policy.init_optimizer(10)
    method = build_method(recipe)

    def step() -> None:
        rows = full_rows(method, sizes.accumulation)
        batch, loss = method.prepare(policy, collate(rows, list(rows[0])))
        policy.forward_backward(batch, loss, method.micro_rows)
        policy.optimizer_step()

    return policy, method, step


def proof_rank(
    rank: int, size: int, exchange: str | None, head_dim: int, value_dim: int, window: int | None
) -> str | None:
    """Return why variable-length attention is not to be used here; None where it proves right."""
    import torch

    from dtrain.attention.segments import Flash
    from dtrain.attention.varlen import check_varlen

    device = torch.device("cuda", rank)
    return check_varlen(
        Flash(), heads=8, key_heads=2, head_dim=head_dim, value_dim=value_dim, window=window, dtype=torch.bfloat16,
        device=device, exchange=exchange,
    )  # fmt: skip
