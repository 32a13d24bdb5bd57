"""Runs with moments and masters in few bits: resume, export, methods, adapters, gradients, what a plan counts."""

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.step import plan_step
from dtrain.optim.local_shard import LocalShard, random_16_bits, random_bits
from dtrain.parallel.mesh import Runtime
from dtrain.parallel.placement import local_tensor
from dtrain.training.trainer import train
from tests.optimizers.stepping import bits_of, give_gradients, policy_on, recipe_of
from tests.optimizers.test_low_bits import FEW, MESHES
from tests.running import run, trajectory, weights
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model, write_pairs, write_rows
from tests.world import run_world


def on_rank(rank, recipe, world_size):
    train(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size))


WHOLE = ["optimizer.state=int8", "train.masters=bfloat16", "train.dtype=auto", "checkpoint.every=5"]


def test_a_run_resumes_on_another_mesh_and_exports(tmp_path):
    recipe = run(recipe_of(tmp_path, *WHOLE, "checkpoint.export=final", tied=False))
    again = recipe_of(tmp_path, *WHOLE, "run.name=again", "train.steps=5", tied=False)
    run(again)
    two = recipe_of(tmp_path, *WHOLE, "run.name=again", "checkpoint.allow_changes=[train]", tied=False)
    run_world(on_rank, 2, two, 2)
    for mine, whole in zip(trajectory(two), trajectory(recipe), strict=True):
        assert abs(mine[0] - whole[0]) < 0.02 * whole[0]
    held = weights(recipe)
    assert held["model.lm_head.weight"].dtype == torch.bfloat16
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "runs" / "run" / "export" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, held[f"model.{name}"]), name


def test_a_resume_with_other_moments_or_masters_is_refused_by_name(tmp_path):
    run(recipe_of(tmp_path, *WHOLE, "train.steps=5"))
    for allowed in ("[]", "[optimizer,train]"):  # which would not help
        allowed = f"checkpoint.allow_changes={allowed}"
        with pytest.raises(UserError, match=r"set optimizer\.state=int8 back.*checkpoint\.init_from") as caught:
            run(recipe_of(tmp_path, "train.masters=bfloat16", "checkpoint.every=5", allowed))
        assert "allow_changes" not in str(caught.value)
        with pytest.raises(UserError, match=r"set train\.masters=bfloat16 back"):
            run(recipe_of(tmp_path, "optimizer.state=int8", "checkpoint.every=5", allowed))
    with pytest.raises(
        UserError, match=r"set train\.masters=bfloat16 and.*int8 back.*\n.*allow_changes=\[optimizer\.lr\]"
    ):
        run(recipe_of(tmp_path, "optimizer.lr=2e-4", "checkpoint.every=5"))
    # Starting from weights is no resume.
    start = f"checkpoint.init_from={tmp_path / 'runs' / 'run'}"
    other = run(recipe_of(tmp_path, "optimizer.state=int8", "checkpoint.every=5", "run.name=other", start))
    assert len(trajectory(other)) == 10


FEW_BITS = ["optimizer.state=int8", "train.masters=bfloat16", "train.dtype=auto", "train.steps=3"]


@pytest.mark.parametrize("case", ["dpo", "grpo", "distill", "lora", "qlora"])
def test_every_method_and_adapters_train_weights_in_bfloat16(tmp_path, case):
    more = ["checkpoint.every=3", "checkpoint.export=final"]
    if case == "grpo":
        recipe = tiny_grpo(tmp_path, *FEW_BITS, *more, "grpo.beta=0.1")
    elif case == "dpo":
        pairs = write_pairs(tmp_path / "pairs.jsonl")
        recipe = tiny_recipe(tmp_path, *FEW_BITS, *more, "method=dpo", f"data.train.path={pairs}")
    elif case == "distill":
        teacher = save_weights(write_model(tmp_path / "teacher"), seed=1)
        recipe = tiny_recipe(tmp_path, *FEW_BITS, *more, "method=distill", f"distill.teacher={teacher}")
    else:
        quantize = "nf4" if case == "qlora" else "none"
        wide = save_weights(write_model(tmp_path / "wide", hidden_size=64, intermediate_size=128))
        lora = [f"model.path={wide}", "model.init=pretrained", "lora.rank=4", f"lora.quantize={quantize}"]
        recipe = tiny_recipe(tmp_path, *FEW_BITS, *more, *lora)
    run(recipe)
    assert all(row[0] == row[0] and row[1] > 0 for row in trajectory(recipe))
    held = {name: one for name, one in weights(recipe, 3).items() if name.startswith("model.") and "lora_B" in name}
    held = held or {"": weights(recipe, 3)["model.model.layers.0.mlp.up_proj.weight"]}
    assert all(one.dtype == torch.bfloat16 and one.any() for one in held.values())
    exported = tmp_path / "runs" / "run" / "export"
    assert list(exported.glob("*.safetensors"))


def test_the_loss_is_that_of_float32_moments(tmp_path):
    """60 steps that learn a few rows by heart; the tensors are large enough for int8."""
    write_rows(tmp_path / "rows.jsonl", count=12)
    shape = ["train.steps=60", "train.micro_batch=8", "optimizer.lr=3e-3", "data.packing=false"]
    exact = trajectory(run(recipe_of(tmp_path, *shape, "run.name=float32", "train.dtype=float32")))
    assert exact[-1][0] < 0.5 * exact[0][0]
    for state in ("int8", "bfloat16"):
        few = trajectory(run(recipe_of(tmp_path, *shape, f"run.name={state}", f"optimizer.state={state}")))
        means = [sum(row[0] for row in rows[-10:]) for rows in (few, exact)]
        assert abs(means[0] - means[1]) < 0.02 * means[1], state


def held_bytes(rank, recipe, world_size):
    policy = policy_on(recipe, rank, world_size)
    give_gradients(policy, 0)
    policy.optimizer.step()
    return policy.updater.device_state_bytes(), sum(local_tensor(one).nbytes for one in policy.model.parameters())


def test_a_plan_counts_states_scales_and_masters(tmp_path):
    ranks, options = MESHES["dp3 tp2"]
    few = FEW["int8, bfloat16 masters"]
    recipe = recipe_of(tmp_path, *few, *options, "train.global_batch=12", "train.micro_batch=1", tied=False)
    step = plan_step(resolve_plan(recipe, ranks, "cpu"))
    assert (step.optimizer_state, step.parameters) == run_world(held_bytes, ranks, recipe, ranks)[0]


def summed(rank, recipe, world_size, count):
    """The mean of gradients that FSDP reduces one after the other: `count` times a constant that bfloat16 holds."""
    policy = policy_on(recipe, rank, world_size)
    weight = dict(policy.model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    for index in range(count):
        policy.gradient_sums.begin(0, index, index == count - 1)
        weight.grad = torch.full_like(weight, 2.0**-10)
        policy.gradient_sums._add_gradient(weight)
    policy.gradient_sums.finish()
    assert weight.grad.dtype == torch.bfloat16
    return local_tensor(weight.grad).double().mean().item()


def test_gradients_in_bfloat16_add_up_however_many_they_are(tmp_path):
    recipe = recipe_of(tmp_path, "train.masters=bfloat16", "parallel.reduce_each=true")
    for mean in run_world(summed, 2, recipe, 2, 1000):
        assert abs(mean - 1000 * 2.0**-10) < 0.005  # to the nearest, a sum would stop at 0.5


def test_reduced_after_each_micro_batch_a_run_is_as_one_that_is_reduced_once(tmp_path):
    shape = [
        "train.masters=bfloat16",
        "train.dtype=auto",
        "train.steps=3",
        "train.global_batch=4",
        "train.micro_batch=1",
    ]
    once = trajectory(run(recipe_of(tmp_path, *shape, "run.name=once"), 2))
    each = trajectory(run(recipe_of(tmp_path, *shape, "parallel.reduce_each=true", "run.name=each"), 2))
    for mine, other in zip(each, once, strict=True):
        assert abs(mine[0] - other[0]) < 2e-3 * other[0] and abs(mine[1] - other[1]) < 2e-2 * other[1]
    assert each != once


def test_a_part_of_a_parameter_has_the_bits_of_the_whole():
    full, part = LocalShard(10, 37, 0, 0, 10, 37), LocalShard(10, 37, 3, 13, 4, 20)
    stack = LocalShard(10, 37, 1, 13, 4, 20, matrix_rows=5, local_matrix_rows=2)  # rows 1, 2, 6 and 7
    for generate in (random_bits, random_16_bits):
        bits = bits_of(full, slice(0, 10), generate)
        assert torch.equal(bits[4:7, 13:33], bits_of(part, slice(1, 4), generate)) and bits.unique().numel() > 360
        assert torch.equal(bits[[2, 6, 7], 13:33], bits_of(stack, slice(1, 4), generate))
