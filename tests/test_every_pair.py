"""One recipe, any mesh, the same numbers: every pair of options meets in a run that is held to one process.

Loss and gradient norm of every step, relative: float64 to 1e-9, as the weights after the last; float32 to 1e-5 in loss
and 1e-4 in the norm. An axis is an option of a run. tests/covering.py makes the cases, the same on every day.
"""

import pytest

from tests.covering import covering
from tests.test_trainer import run, trajectory, weights
from tests.tiny import FAMILIES, tiny_recipe

pytestmark = pytest.mark.turns(1)  # all of them, every day
STEPS = 4

# Options that decide numbers: the one process has them too.
MODEL = {
    "family": {name: [] for name in FAMILIES},
    "head": {"tied": [], "untied": []},
    "rows": {
        "packed": ["data.packing=true"],
        "padded": ["data.packing=false"],
        "a length that no share divides": ["data.packing=true", "data.max_length=29"],
    },
    "trained": {
        "all": [],
        "LoRA": ["lora={rank: 8}"],
        "DoRA with dropout": ["lora={rank: 5, dora: true, rslora: true, dropout: 0.2, exclude: [k_proj]}"],
        "embedding and norms beside LoRA": ["lora={rank: 2, modules_to_save: [embed_tokens, norm], target: [o_proj]}"],
        "norms and queries": ["train.train_only=['*norm*','*q_proj*']"],
    },
    "loss": {"likelihood": [], "DFT": ["sft.loss=dft"], "smoothing": ["sft.label_smoothing=0.2"]},
    "optimizer": {"adamw": [], "muon": ["optimizer.name=muon"], "sgd": ["optimizer.name=sgd"]},
    "dtype": {"float64": ["train.dtype=float64"], "float32": ["train.dtype=float32"]},
}
# Options that change no number: the one process has none of them.
MESH = {
    "dp": {"1": [], "2": [], "3": [], "replicated 2": ["parallel.dp_replicate=2"]},
    "tp": {
        "1": [],
        "2": ["parallel.tp=2", "parallel.sequence_parallel=false"],
        "2 sp": ["parallel.tp=2"],
        "4": ["parallel.tp=4", "parallel.sequence_parallel=false"],
        "4 sp": ["parallel.tp=4"],
    },
    "cp": {
        "1": [],
        "2": ["parallel.cp=2"],
        "2 ring": ["parallel.cp=2", "parallel.cp_rotate=ring"],
        "3": ["parallel.cp=3"],
        "4 ring": ["parallel.cp=4", "parallel.cp_rotate=ring"],
    },
    "accumulation": {"1": [], "2": [], "2, reduced each": ["parallel.reduce_each=true"]},
    "checkpointing": {
        name: [f"train.activation_checkpointing={name}"] for name in ("none", "full", "selective", "mlp")
    },
    "reshard": {name: [f"parallel.reshard_after_forward={name}"] for name in ("default", "true", "false")},
}
AXES = MODEL | MESH


def size(case, axis):
    digits = [part for part in case.get(axis, "1").split() if part.isdigit()]
    return int(digits[0])


def ranks_of(case):
    return size(case, "dp") * size(case, "tp") * size(case, "cp")


def can_run(case):
    return ranks_of(case) <= 8


def recipe_of(root, name, case, axes, *more):
    options = [option for axis, values in axes.items() for option in values[case[axis]]]
    shape = [f"train.steps={STEPS}", f"checkpoint.every={STEPS}", "train.global_batch=12"]
    return tiny_recipe(root, *shape, *options, *more, family=case["family"], tied=case["head"] == "tied", name=name)


CASES = covering({name: [*values] for name, values in AXES.items()}, allows=can_run)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_the_run_of_one_process(tmp_path, case):
    alone = run(recipe_of(tmp_path, "one", case, MODEL, "train.micro_batch=12"))
    dp, accumulation = size(case, "dp"), 2 if case["accumulation"] != "1" else 1
    micro = f"train.micro_batch={12 // (dp * accumulation)}"
    on_mesh = run(recipe_of(tmp_path, "many", case, AXES, micro), ranks_of(case))
    loss, norm = {"float64": (1e-9, 1e-9), "float32": (1e-5, 1e-4)}[case["dtype"]]
    expected = trajectory(alone)
    assert len(expected) == STEPS and all(row[1] > 0 for row in expected)
    assert len({row[0] for row in expected}) == STEPS, "the loss stands still"
    for step, (mine, right) in enumerate(zip(trajectory(on_mesh), expected, strict=True), 1):
        assert mine[0] == pytest.approx(right[0], rel=loss), f"loss of step {step}"
        assert mine[1] == pytest.approx(right[1], rel=norm), f"norm of step {step}"
        assert mine[2:4] == right[2:4], f"rate and tokens of step {step}"
        assert mine[4] == pytest.approx(right[4], abs=0 if case["dtype"] == "float64" else 0.02)
    held, whole = weights(on_mesh, STEPS), weights(alone, STEPS)
    assert set(held) == set(whole)
    for name in whole:
        if case["dtype"] == "float64" and name.startswith("model.") and whole[name].any():
            error = (held[name] - whole[name]).abs().max() / whole[name].abs().max()
            assert error <= 1e-9, f"{name}: {error:.1e}"
