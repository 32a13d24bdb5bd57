"""What a step keeps and computes of a vision tower: nothing for a backward that stops before it, FLOPs as torch counts
them."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dtrain import models
from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import add_adapters
from dtrain.base.errors import UserError
from dtrain.memory.activation_checkpointing import checkpoint_activations
from dtrain.models.building import adaptable_shapes
from dtrain.models.common.config import VISION_MODULES
from dtrain.models.common.flops import flops_per_token
from dtrain.models.read_config import parse_config
from dtrain.models.registry import FAMILIES, load_class
from dtrain.models.vision.common import flops_per_patch
from dtrain.policy.build import select_trained_parameters
from dtrain.training.setup import adapter
from tests.models.test_vision_models import CASES
from tests.problem_lines import lines, preflight
from tests.tiny import tiny_recipe


def built(name, recipe, device="cpu"):
    """The model of a case with what `recipe` trains, not filled."""
    config = parse_config(CASES[name].config().to_dict() | ARCHITECTURES[name], vision=True)
    model = models.build(config, device="meta")
    select_trained_parameters(model, recipe, torch.float32)
    if device != "meta":
        model.to_empty(device=device)
        model.tie_weights()
        models.init_weights(model, 0)
    return model


ARCHITECTURES = {
    "qwen2.5-vl": {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
    "qwen3-vl": {"architectures": ["Qwen3VLForConditionalGeneration"]},
    "qwen3.5": {"architectures": ["Qwen3_5ForConditionalGeneration"]},
    "gemma3": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "gemma4": {"architectures": ["Gemma4ForConditionalGeneration"]},
}
GRIDS = {"gemma3": [(1, 6, 6)]}


def pixels_of(tower, grids):
    return torch.rand(sum(height * width for _, height, width in grids), tower.config.values_per_patch)


class Kept:
    """A tensor that is kept for the backward, and the module in whose forward it was saved."""

    def __init__(self, tensor, module):
        self.tensor, self.module = tensor, module


def saved_by_module(tower, pixels, grids):
    """The features, and the names of the modules in whose forward something was saved that is still kept after it."""
    stack, kept, handles = [], weakref.WeakSet(), []

    def leave(*_):
        stack.pop()

    for name, module in tower.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave))

    def pack(tensor):
        holder = Kept(tensor, stack[-1])
        kept.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        features = tower(pixels, grids)
    for handle in handles:
        handle.remove()
    gc.collect()
    return features, {holder.module for holder in kept}


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "gemma4"])
def test_a_frozen_tower_has_no_graph_and_keeps_nothing(tmp_path, name, kind):
    model = built(name, tiny_recipe(tmp_path))
    checkpoint_activations(model, kind)
    (tower,), grids = model.model.vision, GRIDS.get(name, [(1, 4, 2), (1, 2, 6)])
    features, modules = saved_by_module(tower, pixels_of(tower, grids), grids)
    assert not modules
    assert bool(features.deepstack) == (name == "qwen3-vl")
    assert not any(tensor.requires_grad for tensor in (features.tokens, *features.deepstack.values()))
    assert not any(parameter.requires_grad for parameter in tower.parameters())
    assert all(parameter.requires_grad for parameter in model.model.layers.parameters())


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3", "gemma4"])
def test_before_a_projector_nothing_is_kept(tmp_path, name, kind):
    model = built(name, tiny_recipe(tmp_path, "train.vision=projector"))
    checkpoint_activations(model, kind)
    (tower,), grids = model.model.vision, GRIDS.get(name, [(1, 4, 2), (1, 2, 6)])
    features, modules = saved_by_module(tower, pixels_of(tower, grids), grids)
    parts = {pattern.removesuffix(".*") for pattern in tower.projector_patterns}
    around = {"visual"} if name == "qwen2.5-vl" else set()  # where tokens are put in the order of the images again
    assert modules and all(path in around or any(path.startswith(part) for part in parts) for path in modules)
    sum(tensor.sum() for tensor in (features.tokens, *features.deepstack.values())).backward()
    trained = {path for path, parameter in tower.named_parameters() if parameter.grad is not None}
    assert trained == {path for path, _ in tower.named_parameters() if any(path.startswith(part) for part in parts)}


@pytest.mark.parametrize("vision", ["frozen", "projector", "all"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_are_those_that_torch_counts(tmp_path, name, vision):
    model = built(name, tiny_recipe(tmp_path, f"train.vision={vision}"))
    (tower,), grids = model.model.vision, [(1, 6, 6)] if name == "gemma3" else [(1, 8, 8)]
    pixels = pixels_of(tower, grids)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        features = tower(pixels, grids)
        if vision != "frozen":
            sum(tensor.sum() for tensor in (features.tokens, *features.deepstack.values())).backward()
    assert flops_per_patch(tower, len(pixels)) * len(pixels) == counter.get_total_flops()


def test_text_tokens_cost_what_they_cost_without_a_tower(tmp_path):
    recipe = tiny_recipe(tmp_path)
    for name in ARCHITECTURES:
        config = parse_config(CASES[name].config().to_dict() | ARCHITECTURES[name])
        text = models.build(config, device="meta")
        for vision in ("frozen", "all"):
            recipe.train.vision = vision
            assert flops_per_token(built(name, recipe, "meta"), 50) == flops_per_token(text, 50)


def test_names_of_vision_are_those_of_the_towers():
    towers = {load_class(name).vision_tower for name, family in FAMILIES.items() if family.text_tower}
    parts = {prefix.rstrip(".") for tower in towers - {None} for prefix in tower.file_prefixes}
    assert parts == {*VISION_MODULES}


CHOICES = {
    "frozen": ([], set()),
    "projector": (["train.vision=projector"], {"visual.merger", "visual.deepstack_merger_list"}),
    "all": (["train.vision=all"], {"visual"}),
    "by name": (
        ["train.vision=all", "train.train_only=[model.visual.*]", "train.freeze=['*.blocks.*','*embed*']"],
        {"visual.merger", "visual.deepstack_merger_list"},
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_trained_of_a_tower(tmp_path, choice):
    overrides, parts = CHOICES[choice]
    model = built("qwen3-vl", tiny_recipe(tmp_path, *overrides), "meta")
    for name, parameter in model.named_parameters():
        is_text = not name.startswith("model.visual.")
        expected = choice != "by name" if is_text else any(name.startswith(f"model.{part}.") for part in parts)
        assert parameter.requires_grad == expected, name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["train.train_only=[model.visual.*]"],
            "matches only parameters that train.vision=frozen freezes. Set train.v",
        ),
        (["train.vision=projector", "train.train_only=['*.blocks.*']"], "Set train.vision=all"),
        (["lora={target: [q_proj, qkv], dropout: 0.1}"], "model.visual.blocks.0.attn.qkv of the vision tower"),
    ],
)
def test_choices_that_do_not_fit_the_tower_are_refused(tmp_path, overrides, words):
    with pytest.raises(UserError, match=words):
        built("qwen3-vl", tiny_recipe(tmp_path, *overrides), "meta")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.vision=all"], "no vision tower that dtrain trains. Set train.vision=frozen"),
        (["train.vision=projector", "lora={}"], "Set train.vision=frozen. lora.target"),
    ],
)
def test_a_recipe_without_a_tower_to_train_is_refused_before_work(tmp_path, overrides, words):
    assert any(words in problem for problem in preflight(tiny_recipe(tmp_path, *overrides), 1))


def test_a_recipe_is_checked_against_the_tower_s_layers(tmp_path):
    config = parse_config(CASES["qwen3-vl"].config().to_dict() | ARCHITECTURES["qwen3-vl"], vision=True)
    text = replace(config, vision=None)

    def problems(section, model=config):
        source = SimpleNamespace(config=text, vision_config=config, config_with_tower=config)
        recipe = tiny_recipe(tmp_path, f"lora={section}")
        return lines(adapter.check_models(SimpleNamespace(recipe=recipe, readable_config=model, source=source)))

    assert not problems("{rank: 4, target: [q_proj, qkv, linear_fc1], modules_to_save: [visual.merger]}")
    assert not problems("{rank: 4, dropout: 0.1}")
    (dropout,) = problems("{rank: 4, target: .*qkv, dropout: 0.1}")
    assert "model.visual.blocks.0.attn.qkv of the vision tower" in dropout and "set lora.dropout=0" in dropout
    assert not problems("{rank: 4, target: .*qkv, dropout: 0.1}", text)
    (unknown,) = problems("{rank: 4, modules_to_save: [visual.merge]}")
    assert "visual.merge matches no module" in unknown


def test_adapters_reach_what_is_named():
    config = parse_config(CASES["gemma3"].config().to_dict() | ARCHITECTURES["gemma3"], vision=True)
    names = adaptable_shapes(config)
    everywhere = AdapterConfig(rank=2, target=("q_proj",)).select_layers(names)
    assert {name.split(".")[1] for name in everywhere} == {"layers", "vision_tower"}
    assert all(name.startswith("model.layers.") for name in AdapterConfig(rank=2).select_layers(names))
    tower_only = AdapterConfig(rank=2, target=r".*vision_tower.*\.(fc1|out_proj)").select_layers(names)
    assert tower_only and all("vision_tower" in name for name in tower_only)
    model = models.build(config, device="meta")
    add_adapters(model, AdapterConfig(rank=2, target=("q_proj",)))
    adapted = {name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith("lora_A")}
    assert adapted == everywhere.keys()
