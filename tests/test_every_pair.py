"""One recipe, any mesh, the same numbers: every pair of options meets in a run that is held to one process.

The usual tests run each option twice. The pairs are among the extended ones (tests/extended.txt).

Loss and gradient norm of every step, relative: float64 to 1e-9, as the weights after the last; float32 to 1e-5 in loss
and 1e-4 in the norm. An axis is an option of a run. tests/covering.py makes the cases. A world of ranks runs up to six
of them.
"""

from functools import partial

import pytest

from dtrain.memory import activation_offload, tiles
from tests.covering import covering, each_value, worlds
from tests.running import assert_each, assert_same_rows, assert_same_weights, run_all, trajectory, weights
from tests.tiny import FAMILIES, tiny_recipe

STEPS = 2

# Families of the same parts as others of the array; tests/parallel/test_parallelize.py and test_tensor.py have each.
ALIKE = ("qwen2", "smollm3", "granite", "granite4", "ministral3", "mixtral", "qwen3.5-moe", "gemma4-moe")
# Options that decide numbers: the one process has them too.
MODEL = {
    "family": {name: [] for name in FAMILIES if name not in ALIKE},
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
        "norms and queries": ["train.train_only=['*norm*','*.q_*']"],
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
        "4 sp": ["parallel.tp=4"],
    },
    "cp": {
        "1": [],
        "2": ["parallel.cp=2"],
        "3 ring": ["parallel.cp=3", "parallel.cp_rotate=ring"],
    },
    "accumulation": {"1": [], "2": [], "2, reduced each": ["parallel.reduce_each=true"]},
    "checkpointing": {
        name: [f"train.activation_checkpointing={name}"] for name in ("none", "full", "selective", "mlp")
    },
    "host": {"keeps nothing": [], "keeps activations": ["train.activation_offload=true"]},
    "tile": {name: [f"train.tile={name}"] for name in ("none", "mlp", "all")},
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
    shape += ["scheduler.warmup_steps=0", "optimizer.lr=5e-3"]
    return tiny_recipe(root, *shape, *options, *more, family=case["family"], tied=case["head"] == "tied", name=name)


def cost_of(case):
    return 2 + ranks_of(case)


CASES = covering({name: [*values] for name, values in AXES.items()}, allows=can_run, cost=cost_of, seed=8)
EACH_OPTION = each_value(CASES, cost_of)
EACH_OPTION += each_value([case for case in CASES if case not in EACH_OPTION], cost_of)
OTHERS = [case for case in CASES if case not in EACH_OPTION]


@pytest.fixture(autouse=True)
def tiles_of_few_tokens(monkeypatch):
    """Several for a tiny row, and storages of it that move."""
    monkeypatch.setattr(tiles, "TILE_TOKENS", 48)
    monkeypatch.setattr(activation_offload, "MIN_OFFLOAD_BYTES", 1024)


@pytest.mark.trap(
    "adapters get no gradient under activation checkpointing",
    "huggingface/peft #1142",
    "nothing is trained",
    "the trajectory without checkpointing",
)
@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in worlds(EACH_OPTION, ranks_of)])
def test_runs_on_meshes_are_those_of_one_process(tmp_path, cases):
    run_and_compare(tmp_path, cases)


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in worlds(OTHERS, ranks_of)])
def test_pairs_of_options_on_meshes_are_those_of_one_process(tmp_path, cases):
    run_and_compare(tmp_path, cases)


def run_and_compare(tmp_path, cases):
    alone = [recipe_of(tmp_path, f"{i} alone", case, MODEL, "train.micro_batch=12") for i, case in enumerate(cases)]
    on_mesh = []
    for i, case in enumerate(cases):
        accumulation = 1 if case["accumulation"] == "1" else 2
        micro_batch = f"train.micro_batch={12 // (size(case, 'dp') * accumulation)}"
        on_mesh.append(recipe_of(tmp_path, f"{i} on a mesh", case, AXES, micro_batch))
    run_all(alone)
    run_all(on_mesh, ranks_of(cases[0]))
    assert_each(
        [
            (str(case), partial(same, *runs, case))
            for runs, case in zip(zip(on_mesh, alone, strict=True), cases, strict=True)
        ]
    )


def same(recipe, reference, case):
    is_double = case["dtype"] == "float64"
    loss, norm = (1e-9, 1e-9) if is_double else (1e-5, 1e-4)
    accuracies = [[row[4] for row in trajectory(side)] for side in (recipe, reference)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0 if is_double else 0.02)
    rows, expected = ([row[:4] for row in trajectory(side)] for side in (recipe, reference))
    assert len(expected) == STEPS
    assert_same_rows(rows, expected, loss, norm, recipe.run.name)
    tensors, right = weights(recipe), weights(reference)
    if is_double:
        assert_same_weights(tensors, right, 1e-9)
    assert set(tensors) == set(right)
