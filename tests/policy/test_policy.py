"""A policy by itself: several optimizer steps in one batch, ranks without rows, evaluation, float16's scale."""

import pytest
import torch

from dtrain.base.batch import collate
from dtrain.base.errors import UserError
from dtrain.methods.sft import SftMethod
from dtrain.models.read_config import read_config
from dtrain.optim.update import LossScale, Schedule, Updater
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import DTensorPolicyWorker, Policy
from dtrain.policy.options import choose_precision
from dtrain.recipe import derive_sizes
from dtrain.training import load_recipe
from tests.stepping import bare_worker, train_step
from tests.tiny import VOCAB, tiny_recipe
from tests.world import run_world


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(2, 12, (1,), generator=generator))
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        made.append(
            {
                "input_ids": ids[:-1],
                "labels": ids[1:],
                "position_ids": torch.arange(length),
                "seq_ids": torch.zeros(length, dtype=torch.int64),
            }
        )
    return made


def policy_of(recipe, rank=0, world_size=1, kind=Policy):
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard)
    return kind(recipe, read_config(recipe.model.path), mesh, runtime)


def weights_of(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def steps_in_one_call(rank, recipe):
    policy = policy_of(recipe, kind=bare_worker)
    policy.init_optimizer(4)
    made = rows(10)
    whole = policy.train(collate(made), SftMethod(load_recipe({})).loss, gbs=4)
    one_by_one = policy_of(recipe)
    one_by_one.init_optimizer(4)
    losses = [
        train_step(one_by_one, collate(made[start : start + 4]), SftMethod(load_recipe({})).loss).loss
        for start in (0, 4, 8)
    ]
    assert whole["global_loss"].shape == (3,)
    # Widths differ with the longest row of the batch, and with them nothing but rounding.
    assert whole["global_loss"].tolist() == pytest.approx(losses, rel=1e-12, abs=0)
    for name, value in weights_of(policy).items():
        torch.testing.assert_close(value, weights_of(one_by_one)[name], rtol=0, atol=1e-12)


def test_a_batch_of_several_steps_is_those_steps_and_nothing_is_dropped(tmp_path):
    run_world(steps_in_one_call, 1, tiny_recipe(tmp_path, "train.global_batch=4"))


def uneven_ranks(rank, recipe, counts):
    world_size = len(counts)
    policy = policy_of(recipe, rank, world_size)
    policy.init_optimizer(4)
    made = rows(sum(counts))
    start = sum(counts[:rank])
    result = train_step(policy, collate(made[start : start + counts[rank]]), SftMethod(load_recipe({})).loss)
    return result.loss, result.grad_norm, result.result.counts


@pytest.mark.trap(
    "tests with equal rows on all ranks do not see a missing average",
    "NVIDIA/Megatron-LM PR#7566",
    "gradients of one rank alone",
    "ranks with other rows, and with none, have the numbers of one process",
)
def test_ranks_may_have_any_number_of_rows_and_none(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.global_batch=12")
    expected = run_world(uneven_ranks, 1, recipe, [7])[0]
    for counts in ([7, 0], [0, 7], [5, 0, 2]):
        for losses, norm, tokens in run_world(uneven_ranks, len(counts), recipe, counts):
            assert tokens == expected[2]
            assert losses == pytest.approx(expected[0], rel=1e-12)
            assert norm == pytest.approx(expected[1], rel=1e-12)


def uneven_steps(rank, recipe, counts):
    policy = policy_of(recipe, rank, len(counts), bare_worker)
    policy.init_optimizer(4)
    made = rows(sum(counts))
    start = sum(counts[:rank])
    mine = collate(made[start : start + counts[rank]])
    return policy.train(mine, SftMethod(load_recipe({})).loss, gbs=len(counts))["global_loss"].tolist()


def test_a_rank_whose_rows_end_before_the_last_step_takes_part(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.global_batch=4")
    first, second = run_world(uneven_steps, 2, recipe, [3, 1])
    assert first == second and len(first) == 3


def evaluation(rank, recipe):
    policy = policy_of(recipe, rank, 2)
    made = rows(5)
    with pytest.raises(RuntimeError, match="init_optimizer"):
        train_step(policy, collate(made[rank::2]), SftMethod(load_recipe({})).loss)
    before = weights_of(policy)
    result = policy.evaluate(collate(made[rank::2]), SftMethod(load_recipe({})).loss)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    for name, value in weights_of(policy).items():
        assert torch.equal(value.to_local(), before[name].to_local())
    return result.loss


def test_evaluation_needs_no_optimizer_and_changes_nothing(tmp_path):
    recipe = tiny_recipe(tmp_path)
    losses = run_world(evaluation, 2, recipe)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(run_world(uneven_ranks, 1, recipe, [5])[0][0], rel=1e-12)


def nothing_trained(rank, recipe):
    policy = policy_of(recipe)
    policy.init_optimizer(2)
    batch = collate(rows(2))
    batch["labels"].fill_(-100)
    result = train_step(policy, batch, SftMethod(load_recipe({})).loss)
    assert result.loss == 0.0 and result.grad_norm == 0.0


def test_a_step_without_a_trained_token_has_loss_zero(tmp_path):
    run_world(nothing_trained, 1, tiny_recipe(tmp_path))


def poisoned(rank, recipe, skip):
    policy = policy_of(recipe)
    policy.init_optimizer(4)
    with torch.no_grad():
        next(policy.model.parameters()).fill_(float("inf"))
    before = weights_of(policy)
    for _ in range(skip):
        assert not torch.isfinite(
            torch.tensor(train_step(policy, collate(rows(2)), SftMethod(load_recipe({})).loss).grad_norm)
        )
    with pytest.raises(UserError, match="model.embed_tokens.weight"):
        train_step(policy, collate(rows(2)), SftMethod(load_recipe({})).loss)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(policy).items())
    assert not policy.optimizer.state


@pytest.mark.parametrize("skip", [0, 2])
def test_a_norm_that_is_not_finite_names_the_parameters_and_touches_nothing(tmp_path, skip):
    run_world(poisoned, 1, tiny_recipe(tmp_path, f"train.skip_nonfinite={skip}"), skip)


def test_loss_scale_halves_and_doubles():
    scale = LossScale(scale=8.0, growth_interval=2)
    scale.update(finite=False)
    assert scale.scale == 4.0
    scale.update(finite=True)
    scale.update(finite=True)
    assert scale.scale == 8.0
    copy = LossScale()
    copy.load_state_dict(scale.state_dict())
    assert copy.state_dict() == scale.state_dict()


def test_an_update_takes_the_loss_scale_off_and_passes_over_what_is_not_finite():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    constant = Schedule(optimizer, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    updater = Updater(model, optimizer, constant, max_grad_norm=1.0, skip_nonfinite=0, loss_scale=LossScale(8.0))
    for gradient, norm, scale in (([24.0, 32.0], 5.0, 8.0), ([24.0, torch.inf], torch.inf, 4.0)):
        model.weight.grad = torch.tensor([gradient])
        sums = torch.tensor([1.0, 2.0], dtype=torch.float64)
        seen, on_host = updater.update(sums)
        assert seen == norm and updater.loss_scale.scale == scale and torch.equal(on_host, sums)
        torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.6, -0.8]]))


def test_precision_of_each_dtype():
    for name, device, compute, master in (
        ("auto", "cpu", torch.float32, torch.float32),
        ("auto", "cuda", torch.bfloat16, torch.float32),
        ("float16", "cpu", torch.float16, torch.float32),
        ("float64", "cuda", torch.float64, torch.float64),
    ):
        precision = choose_precision(name, device)
        assert (precision.compute, precision.master, precision.reduce) == (compute, master, master)


# Of the methods of a policy's parts, those that the worker has unchanged. NeMo-RL's shapes of the others are in
# test_worker.py.
KNOWN = {
    "checkpoint": "save_checkpoint load_checkpoint return_state_dict",
    "offloader": "prepare_for_lp_inference offload_before_refit offload_after_refit move_to_cpu move_to_device "
    "move_optimizer_to_device move_to_cuda move_buffer_to_device",
    "weights": "prepare_refit_info broadcast_weights_for_collective",
    "monitor": "reset_peak_memory_stats start_gpu_profiling stop_gpu_profiling",
}


def strange_names(rank, recipe):
    policy = policy_of(recipe, kind=bare_worker)
    names = [(part, name) for part, of_part in KNOWN.items() for name in of_part.split()]
    return [name for part, name in names if getattr(policy, name) != getattr(getattr(policy, part), name)]


def test_names_known_to_users_are_the_parts_own_methods(tmp_path):
    assert run_world(strange_names, 1, tiny_recipe(tmp_path)) == [[]]
    assert "host" in DTensorPolicyWorker.offload_before_refit.__doc__
