"""Moments and masters in host memory, on the pretend card: the numbers of those on the card, saved and resumed."""

from pathlib import Path

import pytest
import torch

from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.parallel.placement import local_tensor
from tests.optimizers.stepping import pageable_copies_in_steps, recipe_of, waits_in_steps
from tests.pretend.runs import runtime_of
from tests.pretend.test_sft import assert_close, on_card
from tests.pretend.worlds import run_pretend
from tests.tiny import check, tiny_recipe

OFFLOAD = "parallel.optimizer_offload=true"
MESHES = {
    "one": (1, ()),
    "fsdp": (2, ()),
    "tp": (2, ("parallel.tp=2",)),
    "hsdp": (2, ("parallel.dp_replicate=2",)),
    "uneven": (3, ("train.global_batch=6", "train.micro_batch=1")),  # shards that FSDP fills up, and empty ones
}
# Both runs step by dtrain's own code, whose bits do not depend on where masters and moments lie.
ROUNDED = ("train.steps=4", "train.dtype=bfloat16", "optimizer.state=bfloat16")


@pytest.mark.parametrize(("mesh", "state"), [("fsdp", "float32"), ("tp", "int8")])
def test_the_numbers_are_those_of_moments_on_the_card(tmp_path, mesh, state):
    size, keys = MESHES[mesh]
    dtype = "float64" if state == "float32" else "float32"
    shape = ["train.steps=4", f"train.dtype={dtype}", f"optimizer.state={state}", *keys]
    expected, held = on_card(recipe_of(tmp_path, *shape, "run.name=card"), size)
    rows, felt = on_card(recipe_of(tmp_path, *shape, OFFLOAD, "run.name=host"), size)
    assert_close(rows, expected, 1e-12 if state == "float32" else 1e-6)
    assert felt.count("copy", within="memory/optimizer_offload.py") and not pageable_copies_in_steps(felt)
    assert waits_in_steps(felt) == 4  # one a step
    assert felt.peak < held.peak


@pytest.mark.parametrize(("mesh", "each"), [("one", True), ("tp", False), ("hsdp", True), ("uneven", True)])
def test_masters_on_the_host_have_the_bits_of_those_on_the_card(tmp_path, mesh, each):
    size, keys = MESHES[mesh]
    shape = [*ROUNDED, *keys, f"parallel.reduce_each={str(each).lower()}"]
    expected, held = on_card(recipe_of(tmp_path, *shape, "run.name=card"), size)
    rows, felt = on_card(recipe_of(tmp_path, *shape, OFFLOAD, "run.name=host"), size)
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(row["loss"], row["grad_norm"]) for row in expected]
    assert waits_in_steps(felt) == 4  # one a step
    assert not pageable_copies_in_steps(felt)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_are_saved_in_float32_and_resume_on_another_mesh(tmp_path, dtype):
    shape = [*ROUNDED, f"train.dtype={dtype}", "checkpoint.every=2"]
    expected, _ = on_card(recipe_of(tmp_path, *shape, "run.name=whole"), 2)
    recipe = recipe_of(tmp_path, *shape, "train.steps=2", OFFLOAD)
    on_card(recipe, 2)
    store = CheckpointStore(Path(recipe.run.dir) / recipe.run.name / "checkpoints")
    assert {dtype for name, (_, dtype) in store.tensor_specs(2).items() if name.startswith("model.")} == {torch.float32}
    on_card(recipe_of(tmp_path, *shape, "train.steps=3", OFFLOAD), 2)
    rows, _ = on_card(recipe_of(tmp_path, *shape, "parallel.tp=2"), 2)
    assert [row["loss"] for row in rows][:3] == [row["loss"] for row in expected][:3]
    assert abs(rows[3]["loss"] / expected[3]["loss"] - 1) < 2e-3  # other kernels of bfloat16


def given(recipe, rank, size):
    """Return the weights that a policy gives out before and after a step, with another's in place, and off the card."""
    from dtrain.base.batch import collate
    from dtrain.training import build_method
    from dtrain.training.full_rows import full_rows
    from tests.optimizers.stepping import give_gradients, policy_on

    policy = policy_on(recipe, rank, size, runtime_of(rank, size).device)
    rows = full_rows(build_method(recipe), 1)
    batch, given = collate(rows, list(rows[0])), {}
    given["begun"] = policy.logprobs(batch)
    policy.init_reference_model()
    give_gradients(policy, 0)
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    given["stepped"] = policy.logprobs(batch)
    with policy.use_reference_model():
        given["referred"] = policy.logprobs(batch)
    given["again"] = policy.logprobs(batch)
    policy.reference.update_towards_policy(0.5)
    with policy.use_reference_model():
        given["followed"] = policy.logprobs(batch)
    policy.offloader.offload_after_refit()
    policy.offloader.prepare_for_training()
    given["moved"] = policy.logprobs(batch)
    for dtype in (None, torch.float32):
        given |= {f"{name} in {dtype}": tensor.cpu() for name, tensor in policy.weights.full_tensors(dtype)}
    return given | {name: local_tensor(tensor).cpu() for name, tensor in policy.checkpoint.return_state_dict().items()}


def differing(rank, recipe, on_host, size):
    from dtrain.parallel.mesh import init_one_process_group

    if size == 1:
        init_one_process_group("cuda")
    one, other = given(recipe, rank, size), given(on_host, rank, size)
    same = [("begun", "referred"), ("stepped", "again"), ("stepped", "moved")]
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    wrong += [f"{a}, {b}" for a, b in same if not torch.equal(other[a], other[b])]
    return wrong + ["no step"] * torch.equal(other["begun"], other["stepped"])


@pytest.mark.parametrize("mesh", ["one", "tp"])
def test_who_reads_or_trades_weights_sees_the_masters(tmp_path, mesh):
    size, keys = MESHES[mesh]
    shape = [*ROUNDED, "data.max_length=16", *keys]
    recipes = recipe_of(tmp_path, *shape), recipe_of(tmp_path, *shape, OFFLOAD)
    assert run_pretend(differing, size, *recipes, size) == [[]] * size


def placed(rank, recipe):
    from dtrain.parallel.mesh import init_one_process_group
    from tests.optimizers.stepping import give_gradients, policy_on

    init_one_process_group("cuda")
    policy = policy_on(recipe, rank, 1, runtime_of(rank, 1).device)
    give_gradients(policy, 0)
    policy.optimizer.step()
    policy.offloader.prepare_for_training()
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
    both = check(tiny_recipe(tmp_path, OFFLOAD, "parallel.cpu_offload=true"), 1)
    assert any("Set one of them to false" in problem for problem in both)
    (problem,) = check(tiny_recipe(tmp_path, OFFLOAD, "optimizer.name=sgd"), 1)
    assert "needs optimizer.name=adamw or adam" in problem and "parallel.optimizer_offload=false" in problem
