"""Moments in host memory, on the pretend card: the numbers of moments on the card, saved and resumed."""

import pytest

from dtrain import check
from tests.optimizers.stepping import recipe_of
from tests.pretend.runs import runtime_of
from tests.pretend.test_sft import assert_close, on_card
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe

OFFLOAD = "parallel.optimizer_offload=true"
MESHES = {"one": (1, ()), "fsdp": (2, ()), "tp": (2, ("parallel.tp=2",))}


@pytest.mark.parametrize(("mesh", "state"), [("one", "float32"), ("fsdp", "float32"), ("tp", "int8")])
def test_the_numbers_are_those_of_moments_on_the_card(tmp_path, mesh, state):
    size, keys = MESHES[mesh]
    dtype = "float64" if state == "float32" else "float32"
    shape = ["train.steps=4", f"train.dtype={dtype}", f"optimizer.state={state}", *keys]
    expected, held = on_card(recipe_of(tmp_path, *shape, "run.name=card"), size)
    rows, felt = on_card(recipe_of(tmp_path, *shape, OFFLOAD, "run.name=host"), size)
    assert_close(rows, expected, 1e-12 if state == "float32" else 1e-6)
    assert felt.count("copy", within="optimizers/offload.py") and not felt.count("pageable", within="optimizers/")
    assert felt.count("sync", within="optimizers/") == 4  # one a step
    assert felt.peak < held.peak


def placed(rank, recipe):
    from dtrain.parallel.mesh import init_one_process_group
    from tests.optimizers.stepping import give_gradients, policy_on

    init_one_process_group("cuda")
    policy = policy_on(recipe, rank, 1, runtime_of(rank, 1).device)
    give_gradients(policy, 0)
    policy.optimizer.step()
    policy.prepare_for_training()
    state = [value for of in policy.optimizer.state.values() for value in of.values()]
    return [(value.device.type, value.is_pinned() or value.dim() == 0) for value in state]


def test_the_state_lies_in_pinned_memory_and_stays_there(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.dtype=float32", OFFLOAD)
    assert set(run_pretend(placed, 1, recipe)[0]) == {("cpu", True)}


def test_it_resumes_with_and_without(tmp_path):
    shape = ["train.dtype=float64", "checkpoint.every=2"]
    expected, _ = on_card(tiny_recipe(tmp_path, *shape, "train.steps=4", name="whole"))
    on_card(tiny_recipe(tmp_path, *shape, "train.steps=2", OFFLOAD))
    rows, _ = on_card(tiny_recipe(tmp_path, *shape, "train.steps=4"))
    assert_close(rows, expected, 1e-12)


def test_both_offloads_are_refused_and_so_are_other_optimizers(tmp_path):
    both = check.check(tiny_recipe(tmp_path, OFFLOAD, "parallel.cpu_offload=true"), 1)
    assert any("set one of them to false" in problem for problem in both)
    (problem,) = check.check(tiny_recipe(tmp_path, OFFLOAD, "optimizer.name=sgd"), 1)
    assert "for adamw and adam" in problem and "parallel.optimizer_offload=false" in problem
