"""Training on pretend cards under deterministic algorithms: no operation that has none, and the CPU's numbers."""

import os

import pytest

from dtrain.base.torch_functions import deterministic_algorithms
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.test_methods import grpo
from tests.pretend.test_sft import EXACT, STEPS, assert_close, on_cpu
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe


def train_deterministic(rank, recipe, size):
    with deterministic_algorithms(os.environ):
        train_on_card(rank, recipe, size)


def linear_attention(root, *keys, name):
    return tiny_recipe(root, STEPS, "data.packing=false", *keys, family="qwen3.5", name=name)


def experts(root, *keys, name):
    return tiny_recipe(root, STEPS, *keys, family="qwen3-moe", name=name)


def sampled(root, *keys, name):
    return grpo(root, "grpo.sampling.top_p=0.9", *keys, name=name)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("make", "size"), [(linear_attention, 1), (experts, 2), (sampled, 1)])
def test_float64_is_the_cpus(tmp_path, make, size):
    expected = on_cpu(make(tmp_path, name="cpu"))
    recipe = make(tmp_path, "run.deterministic=true", name="card")
    run_pretend(train_deterministic, size, recipe, size)
    assert_close(rows_of(recipe), expected, EXACT)
