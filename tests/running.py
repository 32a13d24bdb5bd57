"""Runs of recipes in tests: one process or a world of ranks, one recipe or many, and comparisons of what they leave.

A world of ranks costs about as much as the run in it: `run_all` runs recipes of one size in one world.
"""

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.parallel.mesh import Runtime, init_one_process_group
from dtrain.recipe.schema import Recipe
from dtrain.training.metrics import Recorder
from dtrain.training.trainer import Trainer, train_checked
from tests.cases import run_cases
from tests.world import run_world

Row = tuple[float, ...]  # of a step: loss, gradient norm, rate, tokens, and of SFT the token accuracy

# name: (ranks, overrides). Every run accumulates over two micro-batches, the one process that it is held to over none.
MESHES = {
    "dp3": (3, []),
    "cp2 gather": (2, ["parallel.cp=2"]),
    "cp2 ring": (2, ["parallel.cp=2", "parallel.cp_rotate=ring"]),
    "dp2 tp2": (4, ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    "tp2+sp cp2": (4, ["parallel.tp=2", "parallel.cp=2"]),
    "tp2+sp cp2 ring": (4, ["parallel.tp=2", "parallel.cp=2", "parallel.cp_rotate=ring"]),
    "cp4 ring": (4, ["parallel.cp=4", "parallel.cp_rotate=ring"]),
}


def overrides_of(ranks: int, options: Sequence[str], dtype: str) -> list[str]:
    """Return the overrides of a mesh of MESHES, with global_batch = micro_batch × 2 × dp = 12."""
    sizes = dict(option.removeprefix("parallel.").split("=") for option in options)
    dp = ranks // int(sizes.get("tp", 1)) // int(sizes.get("cp", 1))
    return [*options, f"train.micro_batch={12 // (2 * dp)}", f"train.dtype={dtype}"]


def run_directory(recipe: Recipe) -> Path:
    return Path(recipe.run.dir) / recipe.run.name


def metrics(recipe: Recipe) -> list[dict]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_directory(recipe) / "metrics.jsonl").read_text().splitlines()]


def trajectory(recipe: Recipe) -> list[Row]:
    """Return of each step its loss, gradient norm, rate and tokens, and of SFT how many labels were likeliest."""
    names = ("loss", "grad_norm", "lr", "tokens", "token_accuracy")
    rows = []
    for row in metrics(recipe):
        if "loss" in row:
            # Which tokens of a prompt are shared depends on the mesh.
            row = row | {"tokens": row["tokens"] + row.get("shared_tokens", 0)}
            rows.append(tuple(row[name] for name in names if name in row))
    return rows


def weights(recipe: Recipe, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's save of `step`, or of its last."""
    store = CheckpointStore(run_directory(recipe) / "checkpoints")
    step = max(store.steps()) if step is None else step
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in store.tensor_specs(step).items()}
    store.load(step, tensors)
    return tensors


def on_rank(rank: int, recipe: Recipe, world_size: int) -> None:
    train_checked(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size))


def run(recipe: Recipe, world_size: int = 1, timeout: float | None = None) -> Recipe:
    """Run a recipe, refused ones too (as nf4 in float64 is)."""
    return run_all([recipe], world_size, timeout)[0]


def run_all(recipes: Sequence[Recipe], world_size: int = 1, timeout: float | None = None) -> Sequence[Recipe]:
    """Run recipes one after the other in one world of ranks; timeout: seconds, a minute and one more a recipe."""
    if world_size == 1:
        for recipe in recipes:
            train_checked(recipe, Runtime())
    else:
        cases = {f"{number}, {recipe.run.name}": (recipe, world_size) for number, recipe in enumerate(recipes)}
        run_cases(on_rank, world_size, cases, timeout or 60.0 + 60.0 * len(recipes))
    return recipes


def distance(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def assert_same(recipe: Recipe, reference: Recipe, rtol: float) -> None:
    """Assert that two runs agree in the loss of every step to `rtol`, in the norm to ten times as much (float32)."""
    norm = 10 * rtol if rtol > 1e-9 else rtol
    assert_same_rows(trajectory(recipe), trajectory(reference), rtol, norm, recipe.run.name)


def assert_same_rows(rows: Sequence[Row], expected: Sequence[Row], loss: float, norm: float, name: str) -> None:
    """Assert that a trajectory is the expected one, and that the expected one is of a model that learns.

    Two runs whose gradients are zero agree whatever is wrong (NVIDIA-NeMo/Automodel #3701).
    """
    assert len(rows) == len(expected) > 0, name
    assert any(row[1] > 0 for row in expected), f"{name}: no gradient"
    assert len(expected) == 1 or len({row[0] for row in expected}) > 1, f"{name}: the loss stands still"
    for step, (row, right) in enumerate(zip(rows, expected, strict=True), 1):
        where = f"{name}, step {step}"
        assert row[2:] == right[2:], f"{where}: rate, tokens and token accuracy"
        assert abs(row[0] - right[0]) <= loss * abs(right[0]), f"{where}: loss {row[0]} for {right[0]}"
        assert abs(row[1] - right[1]) <= norm * abs(right[1]), f"{where}: gradient norm {row[1]} for {right[1]}"


def assert_same_weights(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> None:
    """Assert that the weights of a save are the expected ones."""
    assert set(tensors) == set(expected)
    for name, right in expected.items():
        if name.startswith("model.") and not torch.equal(tensors[name], right):  # zeros that are frozen stay zeros
            error = ((tensors[name] - right).abs().max() / right.abs().max()).item()
            assert error <= rtol, f"{name}: {error:.1e}"


def assert_parity(recipe, expected, expected_weights, loss=1e-9, norm=1e-9, weight=1e-9) -> None:
    """Assert that a run has the rows `expected` and the weights `expected_weights`."""
    assert_same_rows(trajectory(recipe), expected, loss, norm, recipe.run.name)
    assert_same_weights(weights(recipe), expected_weights, weight)


def assert_each(cases: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Call each check of a world of many runs, and fail with all that failed."""
    failures = []
    for name, check in cases:
        try:
            check()
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    if failures:
        pytest.fail("\n".join(failures))


def interrupt(recipe: Recipe, world_size: int, step: int) -> None:
    """Run a recipe whose last rank is sent SIGTERM just before it logs `step`."""
    if world_size == 1:
        return stopped_at(0, recipe, 1, step)
    run_world(stopped_at, world_size, recipe, world_size, step)


def stopped_at(rank, recipe, world_size, step):
    """A run whose last rank is sent a signal just before it logs `step`."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)

    class Interrupted(Recorder):
        def train_row(self, at, **fields):
            super().train_row(at, **fields)
            if at == step and rank == world_size - 1:
                runtime.stop.request(signal.SIGTERM)

    original = Trainer.__init__

    class Watched(Trainer):
        def __init__(self, *args):
            original(self, *args)
            self.metrics.__class__ = Interrupted

    with ExitStack() as stack:
        if world_size == 1:
            init_one_process_group("cpu")
            stack.callback(torch.distributed.destroy_process_group)
        trainer = Watched.open(recipe, runtime, stack)
        trainer.loop(trainer.resume())
