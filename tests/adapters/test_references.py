"""References of runs with an adapter: the model without it, a copy of what is trained, another model."""

import pytest
import torch

from dtrain import models
from dtrain.adapters.config import AdapterConfig, is_adapter
from dtrain.adapters.lora import adapted_layers, build_with_adapters, init_adapters, remove_adapters
from dtrain.models.common.linear import Linear
from dtrain.models.common.micro_batch import NO_ADAPTERS
from dtrain.models.read_config import parse_config
from dtrain.parallel.fsdp import Sharding
from dtrain.policy.build import select_trained_parameters
from dtrain.policy.reference import Reference
from tests.methods.test_dpo_runs import recipe_of as dpo_recipe
from tests.models.test_vision_models import CASES, images_of, token_rows
from tests.models.vision.test_training import ARCHITECTURES
from tests.problem_lines import preflight
from tests.running import assert_parity, metrics, run, trajectory, weights
from tests.tiny import FAMILIES, tiny_recipe, write_model


def adapted(tmp_path, section):
    """A model in float64 whose adapter does something."""
    recipe = tiny_recipe(tmp_path, f"lora={section}")
    model = models.build(models.read_config(write_model(tmp_path / "model")), dtype=torch.float64, device="meta")
    select_trained_parameters(model, recipe, torch.float64)
    model.to_empty(device="cpu")
    model.tie_weights()
    models.init_weights(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(1 + torch.rand(parameter.shape, dtype=torch.float64))
    return model


@pytest.mark.parametrize("section", ["{rank: 3}", "{rank: 2, dora: true, modules_to_save: [norm]}"])
def test_without_its_adapters_a_model_is_itself(tmp_path, section):
    model, ids = adapted(tmp_path, section), torch.arange(12).view(2, 6)
    plain = models.build(model.config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(model.get_parameter(name))
    with_adapters = model(ids)
    assert torch.equal(model(ids, adapters=NO_ADAPTERS), plain(ids))
    assert torch.equal(model(ids), with_adapters) and not torch.allclose(with_adapters, plain(ids), rtol=1e-3)
    assert len(adapted_layers(model)) == 14


def with_all_adapters(config):
    """A model in float64 with an adapter on each layer that may have one, and the same model without adapters."""
    every = AdapterConfig(rank=2, target=".*", parameters=("experts", "gate.weight"))
    model = build_with_adapters(config, every, torch.float64).eval()
    models.init_weights(model, 0)
    assert all(layer.wrapper is not None for layer in model.modules() if isinstance(layer, Linear))
    plain = models.build(config, torch.float64).eval()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)})
    return model, plain


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_no_adapter_of_a_family_takes_part_in_a_forward_without(tmp_path, family):
    model, plain = with_all_adapters(models.read_config(write_model(tmp_path, family)))
    ids = torch.arange(2, 14).view(2, 6)
    assert torch.equal(model(ids, adapters=NO_ADAPTERS), plain(ids))
    assert not torch.allclose(model(ids), plain(ids), rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_adapter_of_a_vision_tower_takes_part_in_a_forward_without(name):
    case = CASES[name]
    config = parse_config(case.config().to_dict() | ARCHITECTURES[name], vision=True)
    model, plain = with_all_adapters(config)
    ids, grids = token_rows(case), [grid for some in case.grids for grid in some]
    pixels = torch.rand(sum(height * width for _, height, width in grids), config.vision.values_per_patch).double()
    images = images_of(case, ids, pixels, config)
    assert torch.equal(model(ids, images=images, adapters=NO_ADAPTERS), plain(ids, images=images))
    (tower,), (own,) = model.model.vision, plain.model.vision
    features, expected = tower(pixels, grids, NO_ADAPTERS), own(pixels, grids)
    assert torch.equal(features.tokens, expected.tokens)
    assert not torch.allclose(tower(pixels, grids).tokens, expected.tokens, rtol=1e-3)


def test_layers_that_files_join_share_a_until_the_adapters_are_removed(tmp_path):
    model = build_with_adapters(models.read_config(write_model(tmp_path, "phi3")), AdapterConfig(rank=2))
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.lora_A is attention.q_proj.lora_A and attention.v_proj.lora_A is attention.q_proj.lora_A
    remove_adapters(model)
    model.tie_weights()
    assert not any(is_adapter(name) for name, _ in model.named_parameters())


def test_a_reference_without_adapters_copies_only_what_is_trained_whole(tmp_path):
    model, ids = adapted(tmp_path, "{rank: 2, modules_to_save: [norm]}"), torch.arange(12).view(2, 6)
    expected = model(ids, adapters=NO_ADAPTERS)
    reference = Reference(model, Sharding(model), copy_frozen=False, with_adapters=False)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in reference.tensors} <= {
        "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"
    }  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    trained = model(ids)
    with reference.swapped_in():
        assert torch.equal(model(ids, adapters=NO_ADAPTERS), expected)
    assert torch.equal(model(ids), trained)


def test_dpo_s_reference_is_the_model_without_a_new_adapter(tmp_path):
    """Policy and reference are one at the start, and the reference stays."""
    case = ["scheduler.warmup_steps=0", "checkpoint.every=3", "train.steps=3"]
    lora = "lora={rank: 4, modules_to_save: [embed_tokens]}"
    start = run(dpo_recipe(tmp_path, *case, lora, name="start"))
    base = run(dpo_recipe(tmp_path, *case, lora, "dpo.reference=base", name="base"))
    first, last = metrics(start)[0], metrics(start)[-1]
    assert abs(first["rewards_margin"]) < 1e-12 < abs(last["rewards_margin"])
    assert_parity(base, trajectory(start), weights(start))
    many = run(dpo_recipe(tmp_path, *case, lora, "parallel.tp=2", name="many"), 2)
    assert_parity(many, trajectory(start), weights(start))


@pytest.mark.trap(
    "the reference of a trained adapter is the model without it",
    "huggingface/trl #1340",
    "a large KL from the first step on",
    "a copy of the adapter as it was loaded",
)
def test_an_adapter_that_was_trained_before_is_its_own_reference(tmp_path):
    """start: a copy of the adapter as it was loaded; base: the model without."""
    case = ["scheduler.warmup_steps=0", "checkpoint.every=2", "train.steps=2", "lora={rank: 4}"]
    before = run(tiny_recipe(tmp_path, *case, "optimizer.lr=5e-2", name="before"))
    went = [f"checkpoint.init_from={before.run.directory}"]
    start = run(dpo_recipe(tmp_path, *case, *went, name="start"))
    base = run(dpo_recipe(tmp_path, *case, *went, "dpo.reference=base", name="base"))
    assert abs(metrics(start)[0]["rewards_margin"]) < 1e-12
    assert abs(metrics(base)[0]["rewards_chosen"]) > 1e-6
    longer = [*case, *went, "train.steps=4"]
    whole = run(dpo_recipe(tmp_path, *longer, name="whole"))
    step = whole.run.directory / "checkpoints/step-2"
    cut = run(dpo_recipe(tmp_path, *longer, f"checkpoint.resume={step}", name="cut"), 2)
    assert [row["loss"] for row in metrics(cut)] == pytest.approx([r["loss"] for r in metrics(whole)][2:], rel=1e-9)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["dpo.reference=base"], "dpo.reference=base"),
        (["lora={rank: 2}", "dpo.sync_every=2"], "dpo.sync_every=2"),
        (["lora={}", "lora.path=a", "checkpoint.init_from=b"], "lora.path=a and checkpoint.init_from=b"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path, more, words):
    problems = preflight(dpo_recipe(tmp_path, *more), 1)
    assert any(words in problem and ". Set" in problem for problem in problems)


def test_a_new_dora_adapter_changes_nothing_in_half_precision(tmp_path):
    """The ratio of magnitude and norm is 1 where both are rounded alike."""
    recipe, ids = tiny_recipe(tmp_path, "lora={rank: 2, dora: true}"), torch.arange(12).view(2, 6)
    model = models.build(models.read_config(write_model(tmp_path / "model")), dtype=torch.float32, device="meta")
    select_trained_parameters(model, recipe, torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    models.init_weights(model, 0)
    init_adapters(model, 0)
    with torch.no_grad():
        layer = model.model.layers[0].self_attn.q_proj
        layer.weight[3], layer.lora_magnitude[3] = 0, 0  # a row of zeros has no direction
    model.to(torch.bfloat16)  # as FSDP gathers it
    with_adapters = model(ids)
    assert torch.equal(model(ids, adapters=NO_ADAPTERS), with_adapters) and with_adapters.isfinite().all()
