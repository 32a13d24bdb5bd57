"""Weights and moments of fewer bits: torch's AdamW where nothing is rounded, the same bits on every mesh, unbiased."""

import pytest
import torch
from torch import nn

from dtrain.base.errors import UserError
from dtrain.memory.low_bit_adam import BLOCK_SIZE, Int8Moment, LowBitAdam, moment_kind, read_moment, write_moment
from dtrain.memory.optimizer_offload import RING_BUFFERS
from dtrain.optim.local_shard import LocalShard, round_bfloat16
from dtrain.policy.optimizer import build_optimizer
from dtrain.policy.options import choose_precision
from dtrain.recipe import schema
from tests.optimizers.stepping import assert_same_bits, bits_of, recipe_of, step_on
from tests.tiny import check, tiny_recipe

FEW = {
    "int8": ["optimizer.state=int8"],
    "bfloat16": ["optimizer.state=bfloat16"],
    "int8, bfloat16 masters": ["optimizer.state=int8", "train.masters=bfloat16"],
    "bfloat16 masters": ["train.masters=bfloat16"],
}
MESHES = {
    "dp_replicate2": (2, ["parallel.dp_replicate=2"]),
    "tp3": (3, ["parallel.tp=3"]),
    "dp3 tp2": (6, ["parallel.tp=2"]),
    "dp2 cp2": (4, ["parallel.cp=2"]),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(directory, what one process holds after three steps, what it holds after five)."""
    root, done = tmp_path_factory.mktemp("alone"), {}

    def of(case):
        if case not in done:
            recipe = recipe_of(root, *FEW[case])
            name = case.replace(" ", "")
            three = step_on(recipe, 1, root / f"{name}-3")
            done[case] = three, step_on(recipe, 1, root / f"{name}-5", 3, 5, root / f"{name}-3")
        return root, *done[case]

    return of


CASES = [
    ("dp_replicate2", "bfloat16"),
    ("tp3", "int8"),
    ("dp2 cp2", "bfloat16 masters"),
    ("dp3 tp2", "int8, bfloat16 masters"),
]


@pytest.mark.parametrize(("mesh", "case"), CASES)
def test_every_mesh_has_the_bits_of_one_process_and_goes_on_from_another(tmp_path, alone, mesh, case):
    root, three, five = alone(case)
    ranks, options = MESHES[mesh]
    recipe = recipe_of(root, *FEW[case], *options, "train.global_batch=12", "train.micro_batch=1")
    found = step_on(recipe, ranks, tmp_path / "3")
    assert_same_bits(found, three)
    assert_same_bits(step_on(recipe, ranks, tmp_path / "5", 3, 5, root / f"{case.replace(' ', '')}-3"), five)
    kept = {name: tensor for name, tensor in found.items() if "exp_avg" in name}
    assert any("down_proj" in name and tensor.dtype != torch.float32 for name, tensor in kept.items()) == (
        case != "bfloat16 masters"
    )
    assert all(tensor.dtype == torch.float32 for name, tensor in kept.items() if "embed" in name or "norm" in name)


STACKS = {  # tensor parallel cuts the rows of each expert's first matrices, and the columns of its last
    "dp3 tp2": (6, ["parallel.tp=2"]),
    "dp2 tp2, experts shared": (4, ["parallel.tp=2", "parallel.ep=2"]),
}


@pytest.mark.parametrize(("mesh", "case"), [("dp3 tp2", "muon"), ("dp2 tp2, experts shared", "int8, bfloat16 masters")])
def test_stacks_of_experts_have_the_bits_of_one_process(tmp_path, mesh, case):
    section = ["optimizer.name=muon", "optimizer.lr=1e-2"] if case == "muon" else FEW[case]
    alone = recipe_of(tmp_path, *section, family="qwen3-moe", moe_intermediate_size=301)
    expected = step_on(alone, 1, tmp_path / "one")
    ranks, options = STACKS[mesh]
    shared = ["train.global_batch=12", "train.micro_batch=1"]
    recipe = recipe_of(tmp_path, *section, *options, *shared, family="qwen3-moe", moe_intermediate_size=301)
    assert_same_bits(step_on(recipe, ranks, tmp_path / "many"), expected)
    assert_same_bits(
        step_on(recipe, ranks, tmp_path / "more", 3, 4, tmp_path / "one"),
        step_on(alone, 1, tmp_path / "again", 3, 4, tmp_path / "many"),
    )
    assert any(".experts." in name and tensor.dim() == 3 for name, tensor in expected.items())


def sample(dtype=torch.float64):
    torch.manual_seed(0)
    return {"w": nn.Parameter(0.1 * torch.randn(40, 600, dtype=dtype)), "b": nn.Parameter(torch.randn(7, dtype=dtype))}


def low_bit(named, **settings):
    names = {one: name for name, one in named.items()}
    group = {"params": list(named.values())}
    return LowBitAdam(
        [group], names=names, seed=0, **{"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1} | settings
    )


def move(named, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(step + 1)
        for one in named.values():
            one.grad = (torch.randn(one.shape, dtype=torch.float64) * 0.01 + 0.05 * one.detach()).to(one.dtype)
        optimizer.step()
    return named


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_the_formulas_are_torchs(name):
    mine, torchs = sample(), sample()
    move(mine, low_bit(mine, state="float32", decoupled=name == "AdamW"), 20)
    cls = getattr(torch.optim, name)
    move(torchs, cls(torchs.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False), 20)
    for key, one in mine.items():
        torch.testing.assert_close(one, torchs[key], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("state", "dtype"), [("bfloat16", torch.bfloat16), ("int8", torch.float32)])
def test_rounding_at_random_stays_close_to_float32(state, dtype):
    start, exact = sample(), sample()
    few = {name: nn.Parameter(one.detach().to(dtype)) for name, one in sample().items()}
    move(exact, low_bit(exact, state="float32"), 50)
    move(few, low_bit(few, state=state), 50)
    moved = exact["w"] - start["w"]
    error = few["w"].double() - exact["w"]
    assert error.norm() < 0.03 * moved.norm()
    assert abs(error.mean()) < 1e-3 * moved.abs().mean()


@pytest.mark.trap(
    "updates of weights in bfloat16 are rounded away",
    "pytorch/ao PR#1124",
    "nothing is learnt at a small rate",
    "rounding at random, with the right mean",
)
def test_rounding_to_bfloat16_has_the_right_mean_and_leaves_what_fits():
    value = torch.full((2**16,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to 1 + 2^-7
    rounded = round_bfloat16(value, torch.arange(2**16)).double()
    assert rounded.mean().item() == 1.0 + 2.0**-10 and set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    fits = torch.randn(1000).bfloat16()
    assert torch.equal(round_bfloat16(fits.float(), torch.full((1000,), 0xFFFF)), fits)


def test_what_is_not_finite_stays_so():
    words = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    for bits in (0, 0xFFFF):
        rounded = round_bfloat16(words.view(torch.float32), torch.full((5,), bits))
        assert rounded[:3].isnan().all() and rounded[3:].tolist() == [float("inf"), -float("inf")]


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_a_block_that_overflowed_goes_on(moment):
    shard = LocalShard(1, BLOCK_SIZE, 0, 0, 1, BLOCK_SIZE)
    stored, bits = Int8Moment(shard, moment), bits_of(shard, slice(0, 1))
    values = torch.ones(1, BLOCK_SIZE)
    values[0, 3] = float("inf")
    state = stored.allocate(values, torch.float32)
    write_moment(state, moment, values, bits)
    values = read_moment(state, moment)
    assert values.isfinite().all() and values[0, 3] == torch.finfo(torch.float32).max
    write_moment(state, moment, torch.ones(1, BLOCK_SIZE), bits)
    assert (read_moment(state, moment) == 1).all()


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_int8_has_the_right_mean_down_to_small_parts_of_a_block(moment):
    sizes = torch.logspace(0, -12, BLOCK_SIZE)
    signs = 1 if moment == "exp_avg_sq" else torch.where(torch.arange(BLOCK_SIZE) % 2 == 0, 1, -1)
    values = (sizes * signs).expand(4096, BLOCK_SIZE).contiguous()
    shard = LocalShard(4096, BLOCK_SIZE, 0, 0, 4096, BLOCK_SIZE)
    stored = Int8Moment(shard, moment)
    state = stored.allocate(values, torch.float32)
    rows = slice(0, 4096)
    write_moment(state, moment, values, bits_of(shard, rows))
    found = read_moment(state, moment).double()
    above = 2e-5 if moment == "exp_avg" else 3e-9
    spread = found.std(0) / 64  # of the mean of 4096
    seen = sizes > above
    assert ((found.mean(0) - values[0]).abs() < 5 * spread + 2.5e-3 * sizes)[seen].all()
    assert (found[:, 0] == values[:, 0]).all()
    if moment == "exp_avg_sq":
        assert (found > 0).all()  # a quotient by it stays finite
    write_moment(state, moment, torch.zeros_like(values), bits_of(shard, rows))
    assert (read_moment(state, moment) == 0).all()


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 64), "int8"),
        ("model.layers.0.mlp.up_proj.weight", (63, 65), "float32"),
        ("model.embed_tokens.weight", (1000, 64), "float32"),
        ("lm_head.weight", (1000, 64), "int8"),
        ("model.norm.weight", (8192,), "float32"),
    ],
)
def test_what_stays_float32_is_decided_by_the_whole_tensor(name, size, kind):
    assert moment_kind(name, torch.Size(size), "int8") == kind


def test_a_large_parameter_is_stepped_in_slices_with_the_same_bits():
    whole, slices = sample(torch.bfloat16), sample(torch.bfloat16)
    move(whole, low_bit(whole, state="int8"), 3)
    move(slices, low_bit(slices, state="int8", slice_elements=1300), 3)
    assert all(torch.equal(slices[name], one) for name, one in whole.items())


def test_slices_of_a_narrow_matrix_are_no_larger_for_its_blocks():
    def narrow():
        torch.manual_seed(0)
        return {"w": nn.Parameter(torch.randn(300, 16))}

    whole, slices = narrow(), narrow()
    move(whole, low_bit(whole, state="int8"), 3)
    optimizer = low_bit(slices, state="int8", slice_elements=10 * BLOCK_SIZE)
    move(slices, optimizer, 3)
    assert torch.equal(slices["w"], whole["w"])
    # 10 rows at a time, each of which fills one block: codes [10, 16] and scales [10] take 256 bytes each, per moment.
    assert optimizer.step_buffer_bytes() == RING_BUFFERS * 2 * (256 + 256)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.state=int8", "optimizer.name=sgd"], "optimizer.state=int8 needs optimizer.name=adamw or adam"),
        (
            ["train.masters=bfloat16", "optimizer.name=torch.optim.RAdam"],
            "train.masters=bfloat16 needs optimizer.name=adamw or adam or muon",
        ),
        (["optimizer.kwargs={lr: abc}", "optimizer.state=int8"], "optimizer.kwargs.lr=abc must be a finite number"),
        (["optimizer.kwargs={lr: .nan}", "optimizer.state=int8"], "optimizer.kwargs.lr=nan must be a finite number"),
        (["optimizer.kwargs={eps: x}", "parallel.optimizer_offload=true"], "optimizer.kwargs.eps=x must be a finite"),
        (["optimizer.kwargs={betas: [0.9]}", "train.masters=bfloat16"], "optimizer.kwargs.betas=[0.9] must be two"),
        (["optimizer.kwargs={betas: [0.9, 1.0]}", "optimizer.state=int8"], "must be two numbers from 0 up to 1"),
        (
            ["optimizer.kwargs={weight_decay: true}", "optimizer.state=int8"],
            "weight_decay=true must be a finite number",
        ),
        (
            ["optimizer.kwargs={state: float32}", "optimizer.state=int8"],
            "kwargs.state does not go with optimizer.state=int8",
        ),
        (["optimizer.kwargs={names: {}}", "optimizer.state=bfloat16"], "optimizer.kwargs.names does not go with"),
        (
            ["optimizer.kwargs={decoupled: false}", "train.masters=bfloat16"],
            "does not go with train.masters=bfloat16,",
        ),
        (["optimizer.kwargs={seed: 3}", "parallel.optimizer_offload=true"], "set parallel.optimizer_offload=false"),
        (["optimizer.kwargs={amsgrad: true}", "optimizer.state=int8"], "optimizer.kwargs.amsgrad does not go with"),
        (["train.masters=bfloat16", "train.dtype=float32"], "train.dtype=float32 would gain nothing"),
        (["optimizer.state=bfloat16", "train.dtype=float64"], "train.dtype=float64 is for exact numbers"),
        (["train.masters=bfloat16", "parallel.cpu_offload=true"], "parallel.cpu_offload=true steps on the host"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, overrides, message):
    recipe = tiny_recipe(tmp_path, "train.dtype=auto", *overrides)
    (problem,) = check(recipe, 1)
    assert message in problem and ("set" in problem.lower() or "must be" in problem)


def test_what_kwargs_may_say_wins(tmp_path):
    said = {"lr": 1, "betas": [0.5, 0], "eps": 0.0, "weight_decay": 0.3}
    section = schema.Optimizer(state="int8", kwargs=said)
    recipe = tiny_recipe(tmp_path, "optimizer.state=int8", "train.dtype=auto")
    recipe.optimizer.kwargs = said
    assert check(recipe, 1) == []
    (group,) = build_optimizer(section, [("w", nn.Parameter(torch.ones(64, 64)))]).param_groups
    assert {key: group[key] for key in said} == said | {"betas": (0.5, 0)}


def test_an_optimizer_that_cannot_is_named():
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"optimizer\.name=sgd keeps weights and state in float32"):
        build_optimizer(schema.Optimizer(name="sgd"), [("w", weight)])
    with pytest.raises(UserError, match=r"refuses its settings.*amsgrad"):
        build_optimizer(schema.Optimizer(state="int8", kwargs={"amsgrad": True}), [("w", weight)])


def test_masters_in_bfloat16_compute_in_it_and_reduce_in_float32():
    precision = choose_precision("auto", "cpu", "bfloat16")
    assert (precision.master, precision.compute, precision.reduce) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert precision.is_mixed and "train.masters" in precision.reason
    assert not choose_precision("auto", "cpu").is_mixed
