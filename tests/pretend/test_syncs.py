"""Waits of the host for the card in a step of training: one, for the norm and the step's sums."""

from collections import Counter

import pytest

from tests.pretend.test_methods import distill, dpo, grpo
from tests.pretend.test_sft import MESHES, on_card
from tests.tiny import tiny_recipe

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


@pytest.mark.parametrize("method", [dpo, distill])
def test_a_step_of_other_methods_waits_once(tmp_path, method):
    """DPO's besides for each of two micro-batches of the reference's pass, whose log-probabilities go to the host."""
    waits = waits_of_a_step(method, tmp_path, ("train.dtype=bfloat16",), 1)
    print(waits)
    assert_one(waits, 2 if method is dpo else 0)


def test_a_step_of_grpo_waits_once_and_for_its_rollout(tmp_path):
    """And once for each micro-batch whose log-probabilities go to the host, here three for a rollout of two steps."""
    waits = waits_of_a_step(grpo, tmp_path, ("train.dtype=bfloat16",), 1)
    print(waits)
    drawing = {key: waits.pop(key) for key in list(waits) if "/inference/" in key[1] or "/rl/" in key[1]}
    assert_one(waits, 1.5)
    assert sum(drawing.values()) <= 11.5  # three a rollout for the memory that a graph reads
