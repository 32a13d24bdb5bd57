"""Muon over whole matrices: torch's formulas in float64, torch's own class, and the same bits on a mesh."""

import pytest
import torch
from torch import nn

from dtrain.base.errors import UserError
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.step import plan_step
from dtrain.optim.muon import is_matrix
from dtrain.policy.optimizer import build_optimizer
from dtrain.recipe import schema
from tests.optimizers.stepping import assert_same_bits, give_gradients, policy_on, recipe_of, step_on
from tests.optimizers.test_low_bits import MESHES
from tests.running import run, weights
from tests.tiny import check, tiny_recipe
from tests.world import run_world

MUON = ["optimizer.name=muon", "optimizer.adam_lr=1e-3", "train.dtype=float32"]


def sample():
    torch.manual_seed(0)
    shapes = {"up": (60, 24), "down": (24, 60), "embed_tokens": (50, 24), "lm_head": (50, 24), "norm": (24,)}
    return {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}


def move(named, optimizers, steps=6):
    for step in range(steps):
        torch.manual_seed(step + 1)
        for one in named.values():
            one.grad = torch.randn_like(one) + 0.1 * one.detach()
        for optimizer in optimizers:
            optimizer.step()
    return {name: one.detach() for name, one in named.items()}


def dense(matrix, buffer, gradient, lr, decay, momentum, nesterov, steps, scale):
    """One step by the formulas of torch.optim.Muon's documentation, in float64."""
    buffer.copy_(momentum * buffer + (1 - momentum) * gradient)
    x = (1 - momentum) * gradient + momentum * buffer if nesterov else buffer
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    rows, columns = matrix.shape
    factor = 0.2 * max(rows, columns) ** 0.5 if scale == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    return matrix * (1 - lr * decay) - lr * factor * x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_matrices_by_the_formulas_and_the_rest_by_adamw(nesterov, scale):
    section = schema.Optimizer(
        name="muon",
        lr=0.02,
        adam_lr=0.003,
        weight_decay=0.1,
        kwargs={"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": scale},
    )
    named = sample()
    found = move(named, [build_optimizer(section, named.items())])
    expected = {name: one.detach().clone() for name, one in sample().items()}
    for name in ("up", "down"):
        buffer = torch.zeros_like(expected[name])
        start = sample()
        for step in range(6):
            torch.manual_seed(step + 1)
            start[name].data = expected[name]
            drawn = {key: torch.randn_like(one) for key, one in start.items()}[name]
            gradient = drawn + 0.1 * expected[name]
            expected[name] = dense(expected[name], buffer, gradient, 0.02, 0.1, 0.9, nesterov, 4, scale)
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    rest = sample()
    adam = torch.optim.AdamW(
        [
            {"params": [rest["embed_tokens"], rest["lm_head"]], "weight_decay": 0.1},
            {"params": [rest["norm"]], "weight_decay": 0.0},
        ],
        lr=0.003,
        betas=(0.9, 0.95),
        foreach=False,
    )
    wanted = move(rest, [adam])
    for name in ("embed_tokens", "lm_head", "norm"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-13)


def test_embeddings_and_vectors_in_bfloat16_have_the_bits_of_adamw():
    """bfloat16 weights are rounded at random, by the same bits under both optimizers."""
    shapes = {"embed_tokens": (50, 24), "norm": (24,)}
    found = []
    for section in (schema.Optimizer(name="muon", adam_lr=1e-3), schema.Optimizer(name="adamw", lr=1e-3)):
        torch.manual_seed(0)
        named = {name: nn.Parameter(torch.randn(shape).bfloat16()) for name, shape in shapes.items()}
        found.append(move(named, [build_optimizer(section, named.items(), seed=3)]))
    for name, weights_of_muon in found[0].items():
        assert torch.equal(weights_of_muon, found[1][name]), name


def test_torchs_own_class_takes_these_steps_in_bfloat16():
    section = schema.Optimizer(name="muon", lr=0.02, weight_decay=0.1)
    mine, torchs = ({name: one for name, one in sample().items() if name in ("up", "down")} for _ in range(2))
    start = {name: one.detach().clone() for name, one in mine.items()}
    found = move(mine, [build_optimizer(section, mine.items())])
    wanted = move(
        torchs, [torch.optim.Muon(torchs.values(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
    )
    for name, one in found.items():
        moved = wanted[name] - start[name]
        assert (one - wanted[name]).norm() < 0.02 * moved.norm()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("muon")
    recipe = recipe_of(root, *MUON)
    three = step_on(recipe, 1, root / "3")
    return root, three, step_on(recipe, 1, root / "5", 3, 5, root / "3")


def test_a_mesh_has_the_bits_of_one_process_and_goes_on_from_it(tmp_path, alone):
    root, three, five = alone
    ranks, options = MESHES["dp3 tp2"]
    recipe = recipe_of(root, *MUON, *options, "train.global_batch=12", "train.micro_batch=1")
    assert_same_bits(step_on(recipe, ranks, tmp_path / "3"), three)
    assert_same_bits(step_on(recipe, ranks, tmp_path / "5", 3, 5, root / "3"), five)
    assert any("momentum_buffer" in name for name in three)
    assert not any("momentum_buffer" in name and ("embed" in name or "norm" in name) for name in three)


def test_bfloat16_masters_go_with_it(tmp_path):
    shape = ["optimizer.name=muon", "train.masters=bfloat16", "train.dtype=auto", "checkpoint.every=1"]
    recipe = run(tiny_recipe(tmp_path, *shape, "train.steps=2", "scheduler.warmup_steps=0"))
    before, after = (weights(recipe, step)["model.model.layers.0.mlp.up_proj.weight"] for step in (1, 2))
    assert after.dtype == torch.bfloat16 and not torch.equal(after, before)


def held(rank, recipe, world_size):
    policy = policy_on(recipe, rank, world_size)
    give_gradients(policy, 0)
    policy.optimizer.step()
    return policy.updater.device_state_bytes()


def test_a_plan_counts_one_moment_of_matrices(tmp_path):
    recipe = recipe_of(tmp_path, *MUON, "parallel.tp=2", "train.global_batch=12", "train.micro_batch=1")
    step = plan_step(resolve_plan(recipe, 6, "cpu"))
    assert step.optimizer_state == run_world(held, 6, recipe, 6)[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.kwargs={momentum: 1.5}"], "optimizer.kwargs.momentum=1.5 must be a number from 0 up to 1"),
        (["optimizer.kwargs={ns_steps: 0}"], "must be a whole number from 1 to 99"),
        (["optimizer.kwargs={adjust_lr_fn: mine}"], "must be match_rms_adamw or original"),
        (["optimizer.kwargs={momentum: .nan}"], "optimizer.kwargs.momentum=nan must be a number from 0 up to 1"),
        (["optimizer.kwargs={ns_steps: true}"], "must be a whole number from 1 to 99"),
        (["optimizer.kwargs={ns_coefficients: [1, x, 2]}"], "must be three numbers"),
        (["optimizer.kwargs={beta: 0.9}"], "optimizer.kwargs.beta is not one of muon's"),
        (["optimizer.adam_lr=-1"], "optimizer.adam_lr=-1.0 must be a finite number"),
        (["optimizer.state=int8"], "optimizer.state=int8 needs optimizer.name=adamw or adam"),
        (["optimizer.name=adamw", "optimizer.adam_lr=1e-3"], "optimizer.adam_lr is for optimizer.name=muon"),
    ],
)
def test_mistakes_are_named_before_work(tmp_path, overrides, message):
    recipe = tiny_recipe(tmp_path, "optimizer.name=muon", "train.dtype=float32", *overrides)
    (problem,) = check(recipe, 1)
    assert message in problem


def test_the_class_names_its_own():
    with pytest.raises(UserError, match=r"optimizer\.name=muon refuses its settings.*adjust_lr_fn"):
        build_optimizer(schema.Optimizer(name="muon", kwargs={"adjust_lr_fn": "mine"}), sample().items())
    assert is_matrix("model.layers.0.mlp.up_proj.weight", torch.ones(2, 2))
