"""Waits of the host for the card in a step of training: one, for the norm and the step's sums."""

from collections import Counter

import pytest

from tests.pretend.test_methods import distill, dpo, grpo
from tests.pretend.test_sft import MESHES, on_card
from tests.pretend.worlds import ROOT
from tests.tiny import tiny_recipe, write_model

SHORT, LONG = 3, 5  # steps of two runs: what differs is the steps' own


def sft(root, *keys, name):
    return tiny_recipe(root, *keys, family="gemma3", name=name)


def waits_of_a_step(make, root, keys, size):
    """{(what, where): waits of one step} of rank 0."""
    felt = []
    for steps in (SHORT, LONG):
        recipe = make(root, *keys, f"train.steps={steps}", name=f"of-{steps}")
        felt.append(on_card(recipe, size)[1].entries["sync"])
    few, many = felt
    per_step = {key: (count - few.get(key, 0)) / (LONG - SHORT) for key, count in many.items()}
    return {key: count for key, count in per_step.items() if count}


NORM, SCORES = "dtrain/optim/update.py", "dtrain/policy/policy.py"


def assert_one(waits, of_scores=0):
    by_file = Counter()
    for (_, where), count in waits.items():
        by_file[where.split(":")[0]] += count
    assert by_file == Counter({NORM: 1, SCORES: of_scores}), waits


def test_a_step_of_sft_waits_once(tmp_path):
    assert_one(waits_of_a_step(sft, tmp_path, ("train.dtype=float16", "data.packing=false"), 1))


@pytest.mark.parametrize("mesh", ["ring", "hsdp"])
def test_a_step_of_every_mesh_waits_once(tmp_path, mesh):
    size, keys = MESHES[mesh]
    assert_one(waits_of_a_step(sft, tmp_path, ("train.dtype=bfloat16", *keys), size))


LAYERS = 2
SPARSE = {"moe_intermediate_size": 16, "hidden_size": 32, "num_hidden_layers": LAYERS, "mlp_only_layers": []}


def mixture(root, *keys, name):
    if not (path := root / "sparse").exists():
        write_model(path, "qwen3-moe", **SPARSE)  # rows of 16 bytes, as grouped products take them
    return tiny_recipe(root, f"model.path={path}", "train.dtype=bfloat16", *keys, name=name)


def is_grouped_product(where):
    """Of the stand-in, which reads the offsets on the host; a card's does not."""
    path, line = where.split(":")
    return "grouped_mm" in (ROOT / path).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_step_of_a_mixture_waits_once(tmp_path, packing):
    waits = waits_of_a_step(mixture, tmp_path, (f"data.packing={packing}",), 1)
    assert_one({key: count for key, count in waits.items() if not is_grouped_product(key[1])})


def test_a_step_of_a_mixture_over_ranks_waits_once_a_layer_for_what_it_sends(tmp_path):
    keys = "parallel.ep=2", "train.micro_batch=2", "train.global_batch=4"
    waits = waits_of_a_step(mixture, tmp_path, keys, 2)
    waits = {key: count for key, count in waits.items() if not is_grouped_product(key[1])}
    assert sum(waits.pop(key) for key in list(waits) if "experts.py" in key[1]) == LAYERS
    assert_one(waits)


@pytest.mark.parametrize("method", [dpo, distill])
def test_a_step_of_other_methods_waits_once(tmp_path, method):
    """DPO's besides for each of two micro-batches of the reference's pass, whose log-probabilities go to the host."""
    waits = waits_of_a_step(method, tmp_path, ("train.dtype=bfloat16",), 1)
    print(waits)
    assert_one(waits, 2 if method is dpo else 0)


def test_a_step_of_grpo_waits_once_and_for_its_rollout(tmp_path):
    """And once for each micro-batch whose log-probabilities go to the host, here two for a rollout of two steps."""
    waits = waits_of_a_step(grpo, tmp_path, ("train.dtype=bfloat16",), 1)
    print(waits)
    drawing = {key: waits.pop(key) for key in list(waits) if "/inference/" in key[1] or "/rl/" in key[1]}
    assert_one(waits, 1.0)
    assert sum(drawing.values()) <= 11.5  # three a rollout for the memory that a graph reads
