"""A training run of a rank on its card, with what the card felt of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtrain.parallel.mesh import Runtime
from dtrain.recipe.schema import Recipe
from dtrain.training.trainer import train_checked
from tests.pretend import cuda, journal


@dataclass(frozen=True)
class Felt:
    """Journal of one rank: {(what, where): how often} by kind, and the most bytes that it held."""

    entries: dict[str, dict[tuple[str, str], int]]
    peak: int

    def count(self, kind: str, *, within: str = "", without: str = "\0") -> int:
        entries = {f"{what} {where}": count for (what, where), count in self.entries.get(kind, {}).items()}
        return sum(count for place, count in entries.items() if within in place and without not in place)


def runtime_of(rank: int, size: int) -> Runtime:
    return Runtime(rank=rank, local_rank=rank, world_size=size, device=torch.device("cuda", rank))


def train_on_card(rank: int, recipe: Recipe, size: int) -> Felt:
    """`train_checked` on this rank of `size`. Raises what it raises."""
    journal.clear()
    cuda.library().reset_peak()
    train_checked(recipe, runtime_of(rank, size))
    return felt()


def felt() -> Felt:
    kinds = ("sync", "pageable", "copy", "nccl", "kernel")
    return Felt({kind: journal.entries(kind) for kind in kinds}, cuda.library().peak())


def rows_of(recipe: Recipe) -> list[dict[str, Any]]:
    """The training rows of the run's metrics."""
    path = Path(recipe.run.dir) / recipe.run.name / "metrics.jsonl"
    return [row for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]
