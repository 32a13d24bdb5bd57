"""Adapters of experts: PEFT's numbers, one process's on every mesh, and what a recipe may ask of them."""

import itertools

import pytest
import torch

pytest.importorskip("peft")

from dtrain import models
from dtrain.adapters.config import AdapterConfig
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.file_rows import adapter_in_file
from dtrain.models.building import adaptable_shapes
from dtrain.models.common.micro_batch import NO_ADAPTERS
from dtrain.models.common.moe import sort_by_expert
from dtrain.parallel.experts import collect_token_rows, repeat_token_rows
from dtrain.rl.remote.engine import adapter_refusal
from tests.adapters.by_peft import IDS, SHAPES, load_adapter, load_base, logits, save_adapter, save_base
from tests.problem_lines import preflight
from tests.running import assert_parity, assert_same, assert_same_rows, run, run_all, trajectory, weights
from tests.test_experts import MESHES, recipe_of
from tests.tiny import save_weights, tiny_recipe, write_model

SECTION = "lora={rank: 4, alpha: 12, target: [all-linear, experts], rank_pattern: {down_proj: 3}}"
ROUTED = SECTION.replace("experts]", "experts, gate.weight]")


@pytest.mark.slow
def test_values_and_gradients_are_those_of_peft_s_matrices(tmp_path):
    """The router is left out: transformers routes in float32. One expert has no token."""
    base = save_base(tmp_path / "base", "qwen3-moe", torch.float64)
    theirs = save_adapter(base, tmp_path / "adapter", torch.float64, **SHAPES["experts"]).double()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = models.from_pretrained(tmp_path / "adapter", torch.float64).model.layers[0].mlp.experts
    theirs = theirs.base_model.model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    x, out = torch.randn(2, 9, theirs.get_base_layer().hidden_dim, generator=generator, dtype=torch.float64)
    shares = torch.rand(9, 2, generator=generator, dtype=torch.float64)
    first = torch.randint(1, ours.count - 1, (9,), generator=generator)
    chosen = torch.stack([first, torch.full_like(first, ours.count - 1)], 1)  # none goes to expert 0
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()

    order, counts = sort_by_expert(chosen, ours.count, None)
    own = collect_token_rows(ours(repeat_token_rows(mine, order, 2), counts), order, 9, 2)
    pairs = [(torch.bmm(shares[:, None], own)[:, 0], theirs(other, chosen, shares))]
    for result in pairs[0]:
        result.backward(out)
    pairs.append((mine.grad, other.grad))
    up, down = theirs.base_layer, theirs
    gate_b, up_b = (adapter_in_file("lora_B", one.lora_B.grad) for one in (ours.gate_proj, ours.up_proj))
    pairs.append((torch.cat([gate_b, up_b]), up.lora_B["default"].weight.grad))
    pairs.append((adapter_in_file("lora_A", ours.up_proj.lora_A.grad), up.lora_A["default"].weight.grad))
    for name in ("lora_A", "lora_B"):
        grad = getattr(ours.down_proj, name).grad
        pairs.append((adapter_in_file(name, grad), getattr(down, name)["default"].weight.grad))
        assert (grad[0] == 0).all()
    assert all((a - b).abs().max() <= 1e-12 * b.abs().max() for a, b in pairs)
    assert ours.gate_proj.weight.requires_grad  # frozen by who trains


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    return root, run(recipe_of(root, "one", 1, [ROUTED], "true"))


def test_meshes_train_as_one_process(one_process):
    root, one = one_process
    recipes = []
    for mesh in ("dp2 ep2 tp2 not sp", "dp_replicate2 dp2 ep2"):
        ranks, _, options = MESHES[mesh]
        recipes.append(recipe_of(root, mesh, ranks, [*options, ROUTED], "true"))
    for recipe in run_all(recipes, 4):
        assert_parity(recipe, trajectory(one), weights(one))


def test_another_family_trains_as_one_process(tmp_path):
    save_weights(write_model(tmp_path / "mixtral-untied", "mixtral", tied=False))
    more = [SECTION, "model.init=pretrained"]
    one = run(recipe_of(tmp_path, "one", 1, more, "true", "mixtral"))
    mesh = [*more, "parallel.ep=2"]
    assert_same(run(recipe_of(tmp_path, "mesh", 2, mesh, "true", "mixtral"), 2), one, rtol=1e-9)


def test_a_routers_dropout_is_the_same_where_its_tokens_are_cut(tmp_path):
    section, steps = "lora={rank: 4, dropout: 0.3, target: [router.proj]}", "train.steps=3"
    one = run(recipe_of(tmp_path, "one", 1, [section, steps], "false", "gemma4-moe"))
    mesh = ["parallel.tp=2", "parallel.cp=2", section, steps]
    assert_same(run(recipe_of(tmp_path, "four", 4, mesh, "false", "gemma4-moe"), 4), one, rtol=1e-9)
    plain = run(recipe_of(tmp_path, "plain", 1, [section.replace("0.3", "0"), steps], "false", "gemma4-moe"))
    assert trajectory(plain)[-1][0] != pytest.approx(trajectory(one)[-1][0], rel=1e-6)


def test_a_run_goes_on_with_another_ep_and_its_adapter_is_merged_as_peft_has_it(tmp_path):
    base = save_weights(write_model(tmp_path / "qwen3-moe-untied", "qwen3-moe", tied=False))
    section = SECTION.replace("all-linear", "q_proj")  # PEFT takes gate_proj of a layer without experts for theirs
    more = [section, "model.init=pretrained", "moe.balance=0", "optimizer.lr=0.03"]
    one = run(recipe_of(tmp_path, "one", 1, more, "true"))
    step = one.run.directory / "checkpoints/step-1"
    more += ["parallel.ep=2", f"checkpoint.resume={step}", "checkpoint.export=final"]
    four = run(recipe_of(tmp_path, "four", 4, [*more, "parallel.tp=2"], "true"), 4)
    assert_same_rows(trajectory(four), trajectory(one)[1:], 1e-9, 1e-9, "four")
    adapter = four.run.directory / "export"
    export(four.run.directory, tmp_path / "merged", form="merged")
    theirs, ours = logits(load_adapter(base, adapter)), models.from_pretrained(adapter)
    assert (theirs - logits(load_base(base))).abs().max() > 0.1
    assert (theirs - ours(IDS)).abs().max() < 5e-5
    assert (theirs - logits(load_base(tmp_path / "merged"))).abs().max() < 5e-5
    assert torch.equal(ours(IDS, adapters=NO_ADAPTERS), models.from_pretrained(base)(IDS))
    with pytest.raises(UserError, match="--folded: .*experts"):
        export(adapter, tmp_path / "folded", form="folded")
    again = run(recipe_of(tmp_path, "again", 2, [f"lora.path={adapter}", *more[1:5]], "true"), 2)
    assert trajectory(again)[0][0] < trajectory(one)[0][0]


REFUSED = {
    "target: [experts.gate_proj]": "experts.gate_proj matches no matrices .* experts.gate_up_proj or experts.down_proj",
    "target: experts": r"A text is a regular expression .* Set lora.target=\[experts\]",
    "target: [experts], dropout: 0.1": "Set lora.dropout=0",
    "target: [experts], dora: true": "Set lora.dora=false",
    "target: [q_proj, experts], exclude: .*": "only lora.target decides which experts",
    "target: [experts], rank: 11": "an adapter of rank 11 is larger than down_proj",
}


@pytest.mark.trap(
    "adapters of experts silently left out",
    "unslothai/unsloth PR#11014",
    "two thirds of each expert stay frozen",
    "what gets no adapter is refused",
)
@pytest.mark.parametrize("section", REFUSED)
def test_what_experts_have_no_adapter_of_is_refused(section, tmp_path):
    rank = "" if "rank" in section else "rank: 4, "
    found = preflight(tiny_recipe(tmp_path, f"lora={{{rank}{section}}}", family="qwen3-moe"), 1)
    assert len(found) == 1
    with pytest.raises(AssertionError, match=REFUSED[section]):
        raise AssertionError(found[0])


def test_a_gate_of_one_output_takes_any_rank(tmp_path):
    assert preflight(tiny_recipe(tmp_path, "lora={rank: 4}", family="qwen3.5-moe"), 1) == []


def test_servers_get_merged_weights():
    assert "no server is known to accept adapters of experts" in adapter_refusal(
        None, AdapterConfig(parameters=("experts",))
    )


def test_a_target_s_entries_mean_stacks_where_they_name_experts(tmp_path):
    names = list(adaptable_shapes(models.read_config(write_model(tmp_path, "qwen3-moe"))))
    kinds = {"experts.gate_up_proj": 2, "experts.down_proj": 2}
    targets = {"all-linear": [], "experts": [*kinds], "mlp.experts.down_proj": ["experts.down_proj"], "down_proj": []}
    for target, expected in targets.items():
        found = AdapterConfig.from_values({"target": [target, "q_proj"]}).select_layers(names)
        stacks = [name for name in found if ".experts." in name]
        assert stacks == [name for name in names if any(name.endswith(one) for one in expected)]
    both = AdapterConfig.from_values({"target": ["all-linear", "2.mlp.experts"]}).select_layers(names)
    routers = {f"model.layers.{number}.mlp.gate" for number in (0, 2)}
    assert set(names) - set(both) == {f"model.layers.0.mlp.{kind}" for kind in kinds} | routers
    assert routers == set(AdapterConfig.from_values({"target": ["gate.weight"]}).select_layers(names))
    assert list(itertools.islice(both, 1)) == ["model.layers.0.self_attn.q_proj"]
