"""Mixtures of experts against their definition in float64: routing, idle experts, padding, ties, the balance loss."""

import math

import pytest
import torch
import transformers

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.models.common.config import ExpertsConfig, RouterSettings
from dtrain.models.common.flops import flops_per_token
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.models.common.moe import SparseMLP, connect_routing, select_top_k, sort_by_expert
from dtrain.models.common.routing import BalanceLoss, MicroBatchRouting, RoutingTotals, load_metrics
from dtrain.parallel.size_checks import check_model_mesh
from tests.models.oracle import VARIANTS, grads, make, packed_rows, save
from tests.problem_lines import lines, preflight
from tests.tiny import tiny_grpo, tiny_recipe

SIZES = ExpertsConfig(
    num_experts=6, top_k=2, intermediate_size=5, router=RouterSettings(is_normalized=True), layers=(0,)
)


BALANCE = BalanceLoss(torch.tensor(0.7, dtype=torch.float64))


def totals_of(routing):
    totals = RoutingTotals()
    totals.add(routing.record)
    return totals


@pytest.fixture
def mlp():
    """A sparse MLP in float64, random."""
    config = models.parse_config(VARIANTS["qwen3-moe"]().to_dict())
    mlp = SparseMLP(config, SIZES).double()
    connect_routing(mlp, SIZES.num_experts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return mlp


def hidden_states(rows=2, tokens=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, 48, generator=generator, dtype=torch.float64, requires_grad=True)


def dense(mlp, x, kept=None):
    """Every expert on every token, those that the router has not chosen weighed with 0: [B, S, D], and the shares.
    kept: those that it has, [B, S, E]."""
    shares = (x @ mlp.gate.weight.T).softmax(-1)
    kept = shares >= shares.topk(2, -1).values[..., -1:] if kept is None else kept
    weights = torch.where(kept, shares, 0)
    weights = weights / weights.sum(-1, keepdim=True)
    experts = mlp.experts
    inner = torch.nn.functional.silu(torch.einsum("bsd,efd->bsef", x, experts.gate_proj.weight))
    inner = inner * torch.einsum("bsd,efd->bsef", x, experts.up_proj.weight)
    return torch.einsum("bsef,edf,bse->bsd", inner, experts.down_proj.weight, weights), shares, kept


def gradients(mlp, *more):
    found = [one.grad.clone() for one in (*mlp.parameters(), *more)]
    mlp.zero_grad()
    for one in more:
        one.grad = None
    return found


def assert_close(ours, theirs, tolerance=1e-12):
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine - expected).abs().max() <= tolerance * expected.abs().max()


def test_values_and_gradients_are_those_of_all_experts_on_all_tokens(mlp):
    x = hidden_states()
    weights = torch.randn_like(x)
    out = mlp(x)
    out.backward(weights)
    ours = gradients(mlp, x)
    expected = dense(mlp, x)[0]
    expected.backward(weights)
    assert_close([out, *ours], [expected, *gradients(mlp, x)])


@pytest.mark.trap(
    "an expert without a token takes no part in the backward",
    "pytorch/pytorch #126616",
    "the other ranks wait for ever",
    "its gradient is zeros",
)
def test_an_expert_without_a_token_has_a_gradient_of_zeros(mlp):
    with torch.no_grad():
        mlp.gate.weight[:, 0] = torch.tensor([9.0, 9, 9, -99, 9, 9])
    x = hidden_states().detach()
    x[..., 0] = 1
    routing = MicroBatchRouting()
    mlp(x, None, routing).sum().backward()
    counts = totals_of(routing).counts
    assert counts[0, 3] == 0 and counts.sum() == 2 * 14
    stacks = [one.grad for one in mlp.experts.parameters()]
    assert all((grad[3] == 0).all() and (grad[counts[0] > 0] != 0).any() for grad in stacks)
    mlp.zero_grad()
    mlp(x[:, :0]).sum().backward()  # no token at all
    assert all((one.grad == 0).all() for one in mlp.parameters())


def test_ties_go_to_the_lower_expert(mlp):
    with torch.no_grad():
        mlp.gate.weight.zero_()
    chosen, weights, _ = mlp.gate(hidden_states().detach().flatten(0, 1))
    assert (chosen == torch.tensor([0, 1])).all() and (weights == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_likeliest_of_equal_shares_are_the_lower_experts(dtype):
    shares = torch.rand(200, 16, generator=torch.Generator().manual_seed(0)).mul(4).floor() / 4
    shares[:50] *= 1e-42  # below the least normal number
    for top in (1, 5, 16):
        order = [sorted(range(16), key=lambda expert, row=row: (-row[expert], expert))[:top] for row in shares.tolist()]
        assert select_top_k(shares.to(dtype), top).tolist() == [sorted(experts) for experts in order]


def test_places_are_the_same_where_the_host_knows_how_many_there_are():
    chosen = torch.randint(6, (20, 2), generator=torch.Generator().manual_seed(0))
    real = torch.arange(20).view(2, 10) % 10 < 7
    for known, found in zip(sort_by_expert(chosen, 6, real, 14), sort_by_expert(chosen, 6, real), strict=True):
        assert torch.equal(known, found)


@pytest.mark.trap(
    "padding routed to experts",
    "NVIDIA/Megatron-LM PR#2121",
    "loads and capacities are those of padding",
    "padding goes to no expert",
)
def test_padding_is_not_routed_and_touches_nothing(mlp):
    x = hidden_states()
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, 5:] = real[1, 6:] = False
    routing = MicroBatchRouting()
    out = mlp(x, real, routing)
    out.backward(torch.ones_like(x))
    padded = gradients(mlp, x)
    counts = totals_of(routing).counts
    assert counts.sum() == 2 * 11 and (out[~real] == 0).all()
    rows = torch.cat([mlp(x[:1, :5]).sum((1, 2)), mlp(x[1:, :6]).sum((1, 2))])
    rows.sum().backward()
    assert_close(padded, gradients(mlp, x))


@pytest.mark.trap(
    "padding counted in the balance loss",
    "huggingface/transformers #28505",
    "experts are balanced for padding",
    "documents alone count",
)
@pytest.mark.parametrize("tokens_of_padding", [0, 3])
def test_the_balance_loss_is_each_documents_own(mlp, tokens_of_padding):
    x = hidden_states(rows=2, tokens=7)
    owners = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2]])
    owners[1, 7 - tokens_of_padding :] = -1
    routing = MicroBatchRouting(owners, 3, balance=BALANCE)
    mlp(x, owners >= 0, routing).sum().backward()
    ours = gradients(mlp, x)
    loss = routing.record.balance_loss()

    out, shares, kept = dense(mlp, x)
    expected = 0.0
    for document in range(3):
        mine = owners == document
        fractions = kept[mine].double().mean(0) / 2
        expected = expected + 0.7 * 6 * (fractions * shares[mine].mean(0)).sum()
    (out[owners >= 0].sum() + expected).backward()
    assert abs(loss - expected) < 1e-12
    assert_close(ours, gradients(mlp, x))


def distinct(*shape, experts, top, seed=5):
    """Random experts of each token, [.., top], in any order."""
    draw = torch.rand(*shape, experts, generator=torch.Generator().manual_seed(seed))
    return draw.argsort(-1)[..., :top].to(torch.int16)


@pytest.mark.trap(
    "engine and trainer choose other experts",
    "NVIDIA/Megatron-LM PR#7562",
    "ratios of another model",
    "experts of the rollout can be replayed, and what differs is counted",
)
def test_replayed_experts_are_weighed_by_the_router_and_balanced_as_they_are(mlp):
    """Some tokens' own decide: those without experts, and padding."""
    x, owners = hidden_states(), torch.tensor([[0] * 7, [1] * 5 + [-1] * 2])
    given = distinct(2, 7, 1, experts=6, top=2)
    given[0, 3:5] = given[1, 4:] = -1
    routing = MicroBatchRouting(owners, 2, replayed_experts=given, balance=BALANCE)
    out = mlp(x, owners >= 0, routing)
    out.sum().backward()
    ours = gradients(mlp, x)
    loss, own = routing.record.balance_loss(), dense(mlp, x)[2]
    is_given = given[:, :, 0, :1] >= 0
    kept = torch.zeros_like(own).scatter(2, given[:, :, 0].long().clamp(min=0), True)
    others = (kept & ~own & is_given).sum()
    kept = torch.where(is_given, kept, own)
    assert 0 < others and totals_of(routing).replays.tolist() == [others, 2 * is_given.sum()]
    assert mlp.routing.metrics(totals_of(routing).flat())["router_replay_differs"] == int(others) / int(
        2 * is_given.sum()
    )

    expected, shares, _ = dense(mlp, x, kept)
    balance = 0.0
    for document in range(2):
        mine = owners == document
        balance = balance + 0.7 * 6 * (kept[mine].double().mean(0) / 2 * shares[mine].mean(0)).sum()
    (expected[owners >= 0].sum() + balance).backward()
    assert abs(loss - balance) < 1e-12
    assert_close([out[owners >= 0], *ours], [expected[owners >= 0], *gradients(mlp, x)])


def test_its_own_choice_replayed_changes_no_bit(mlp):
    x = hidden_states()
    out = mlp(x)
    out.sum().backward()
    expected = [out, *gradients(mlp, x)]
    given = mlp.gate(x.detach().flatten(0, 1))[0].view(2, 7, 1, 2).flip(-1).to(torch.int16)
    routing = MicroBatchRouting(replayed_experts=given)
    out = mlp(x, None, routing)
    out.sum().backward()
    assert all(torch.equal(*pair) for pair in zip([out, *gradients(mlp, x)], expected, strict=True))
    assert totals_of(routing).replays.tolist() == [0, 28]


@pytest.mark.parametrize(
    "variant", ["qwen3-moe-mixed", "mixtral", "qwen3.5-moe", "gpt-oss", "gemma4-moe", "deepseek-v3"]
)
def test_other_experts_are_those_of_transformers_where_it_takes_them(variant, tmp_path, monkeypatch):
    theirs = make(variant)
    ours = models.from_pretrained(save(theirs, tmp_path))
    sizes = ours.config.experts
    ids = torch.randint(0, theirs.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    given = distinct(2, 9, len(sizes.layers), experts=sizes.num_experts, top=sizes.top_k)
    layers, largest = iter(given.flatten(0, 1).unbind(1)), torch.topk

    def forced(values, *arguments, **options):
        if values.shape[-1] != sizes.num_experts:  # groups of experts
            return largest(values, *arguments, **options)
        chosen = next(layers).long()
        return values.gather(-1, chosen), chosen

    monkeypatch.setattr(torch, "topk", forced)
    expected = theirs(ids).logits
    monkeypatch.undo()
    assert next(layers, None) is None
    logits = ours.logits(ours.model(ids, MicroBatchContext(routing=MicroBatchRouting(replayed_experts=given))))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(weights)
    logits.backward(weights)
    found, wanted = ({"logits": out} | grads(model) for out, model in ((logits, ours), (expected, theirs)))
    for name, one in wanted.items():
        assert (found[name] - one).abs().max() <= 5e-5 * one.abs().max(), name


def test_loads_say_how_uneven_the_experts_are():
    counts = torch.tensor([[4.0, 0.0], [2.0, 2.0]])[..., None]
    assert {name: value.tolist() for name, value in load_metrics(counts).items()} == {
        "moe_load": [1.5],
        "moe_idle": [0.25],
    }


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen3-moe", "mlp.experts.7.up_proj.weight"),
        ("qwen3-moe-mixed", "mlp.experts.7.up_proj.weight"),
        ("mixtral", "block_sparse_moe.experts.5.w3.weight"),
        ("qwen3.5-moe", "mlp.experts.gate_up_proj"),
        ("gemma4-moe", "experts.gate_up_proj"),
        ("gpt-oss", "mlp.experts.gate_up_proj_bias"),
        ("deepseek-v3", "mlp.experts.7.up_proj.weight"),
    ],
)
@torch.no_grad()
def test_files_have_their_own_names_of_experts_and_transformers_reads_them(variant, name, tmp_path):
    source = save(make(variant), tmp_path / "source")
    ours = models.from_pretrained(source)
    for parameter in ours.parameters():
        parameter.mul_(1.01)
    write_directory(ours, tmp_path / "out", source, max_shard_bytes=20_000)
    first = ours.config.experts.layers[0]
    assert f'"model.layers.{first}.{name}"' in (tmp_path / "out/model.safetensors.index.json").read_text()
    again = models.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], one) for name, one in ours.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids, positions, owners = packed_rows([[20, 9]], padding=[3])
    expected = theirs(ids[:, :20]).logits
    assert (ours(ids, positions, owners)[:, :20] - expected).abs().max() < 2e-5 * expected.abs().max()


def test_flops_count_the_experts_that_a_token_goes_to():
    config = models.parse_config(VARIANTS["qwen3-moe"]().to_dict())
    model = models.build(config, device="meta")
    every = sum(one.numel() for name, one in model.named_parameters() if "embed_tokens" not in name)
    stacks = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    layers, width = config.num_hidden_layers, config.num_attention_heads * 16
    expected = 6 * (every - stacks + stacks * 3 / 8) + 12 * width * layers * 100
    assert math.isclose(flops_per_token(model, 100), expected)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers ['1']: must be a list of layers' numbers"),
        ("qwen3-moe", {"output_router_logits": True}, "output_router_logits True: moe.balance adds a balance loss"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 6}, "4 and num_experts 6 are two names of one number"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1: noise on what is routed"),
        ("qwen3.5-moe", {"num_experts": 0}, "num_experts 0: the dense models are"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "norm_topk_prob false: in this architecture"),
        ("gemma4-moe", {"top_k_experts": 9}, "top_k_experts 9 of 8 experts"),
        ("gemma4-moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(variant, changes, message):
    with pytest.raises(UserError) as error:
        models.parse_config({**VARIANTS[variant]().to_dict(), **changes})
    assert message in str(error.value)


def test_an_adapter_saves_no_experts(tmp_path):
    recipe = tiny_recipe(tmp_path, "lora={modules_to_save: [experts.gate_up_proj]}", family="qwen3-moe")
    (problem,) = preflight(recipe, 1)
    assert "matches 2 stacks of experts, the first model.layers.0.mlp.experts.gate_up_proj" in problem


def test_experts_that_do_not_divide_are_refused_with_what_would(tmp_path):
    config = models.parse_config(VARIANTS["qwen3-moe"]().to_dict())
    assert lines(check_model_mesh(config, 1, 3)) == [
        "parallel.ep=3 does not divide the model's 8 experts. Use 1, 2, 4 or 8."
    ]
    assert check_model_mesh(config, 1, 4) == []
    dense_one = models.parse_config(VARIANTS["qwen3"]().to_dict())
    assert lines(check_model_mesh(dense_one, 1, 2)) == ["parallel.ep=2: this model has no experts. Leave it out."]
    found = preflight(tiny_recipe(tmp_path, "moe.balance=0.1"), 1)
    assert found == ["moe.balance=0.1 is for mixtures of experts, and this model has no experts. Leave it out."]
    options = ["grpo.router_replay=true", "grpo.engine=http", "grpo.server.urls=[http://a:1]"]
    found = preflight(tiny_grpo(tmp_path, *options), 1)
    assert found == ["grpo.router_replay=true: this model has no experts. Leave it out."]


def test_a_torch_without_meshes_for_single_parameters_is_told(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, "parallel.ep=2", "train.micro_batch=1", family="qwen3-moe")
    monkeypatch.setattr("dtrain.training.setup.mesh.version", lambda _: "2.12.0")
    assert preflight(recipe, 2) == []
    monkeypatch.setattr("dtrain.training.setup.mesh.version", lambda _: "2.11.0+cpu")
    assert preflight(recipe, 2) == [
        "parallel.ep=2 needs torch 2.12 or newer, and this is 2.11.0+cpu. Install a newer torch."
    ]
