"""Qwen3.5 in files and on meshes: what an export carries, what keeps its precision, and the ways of training."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import Stopped
from dtrain.checkpoint.huggingface.write import write_directory
from tests.models import oracle
from tests.running import interrupt, metrics, run, trajectory, weights
from tests.tiny import save_weights, tiny_dpo, tiny_grpo, tiny_recipe, write_model

IDS = torch.arange(80).view(2, 40)


KINDS = {
    "qwen3.5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
}


@pytest.fixture(params=KINDS)
def multimodal(tmp_path, request):
    """A model with a vision tower and a head for several tokens, and its directory."""
    vision = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        patch_size=4,
        out_hidden_size=48,
        num_position_embeddings=16,
        temporal_patch_size=1,
    )
    tokens = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    text = oracle.VARIANTS[request.param]().to_dict()
    config_class, model_class = KINDS[request.param]
    torch.manual_seed(0)
    model = oracle.randomise(model_class(config_class(text_config=text, vision_config=vision, **tokens)))
    source = oracle.save(model, tmp_path / "source")
    file = source / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.randn(4, 4)}, file, metadata={"format": "pt"})
    return model, source


@torch.no_grad()
def test_an_export_carries_the_vision_tower_and_the_head_for_several_tokens(multimodal, tmp_path):
    theirs, source = multimodal
    ours = models.from_pretrained(source)
    expected = theirs(input_ids=IDS).logits
    assert ((ours(IDS) - expected).abs().max() / expected.abs().max()) < 1e-4
    write_directory(ours, tmp_path / "out", source)
    # transformers saves experts one by one, the published files have them as stacks.
    before, after = (
        {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if ".mlp.experts." not in name}
        for path in (source, tmp_path / "out")
    )
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert torch.equal(again(input_ids=IDS).logits, expected)


@torch.no_grad()
def test_without_the_tower_s_weights_the_text_model_is_written(multimodal, tmp_path):
    theirs, source = multimodal
    ours = models.from_pretrained(source)
    (source / "model.safetensors").unlink()
    write_directory(ours, tmp_path / "out", source)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == type(theirs).__name__.replace("ConditionalGeneration", "CausalLM")
    assert torch.equal(again(IDS).logits, theirs(input_ids=IDS).logits)


def test_the_decay_keeps_its_precision(tmp_path):
    source = oracle.save(oracle.make("qwen3.5"), tmp_path / "source")
    model = models.from_pretrained(source, torch.bfloat16)
    write_directory(model, tmp_path / "out", source, torch.bfloat16)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    exact = {name for name, tensor in after.items() if tensor.dtype == torch.float32}
    assert exact == {name for name in before if name.endswith(("A_log", "dt_bias"))}
    assert all(torch.equal(before[name], after[name]) for name in exact)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def sft(root, name, *overrides):
    shape = ["train.global_batch=12", "train.steps=3", "scheduler.warmup_steps=0"]
    return tiny_recipe(root, *shape, *overrides, family="qwen3.5", name=name)


def test_an_adapter_of_linear_attention_changes_no_number_on_a_mesh(tmp_path):
    """tests/test_every_pair.py has the ways of training that every family has."""
    option = "lora={rank: 3, target: [in_proj_qkv, out_proj]}"
    alone = run(sft(tmp_path, "one", "train.micro_batch=12", "checkpoint.every=3", option))
    mesh = "train.micro_batch=6", "parallel.cp=2"
    together = run(sft(tmp_path, "many", "checkpoint.every=3", option, *mesh), 2)
    assert_same_run(together, alone)


def assert_same_run(recipe, reference):
    for mine, right in zip(trajectory(recipe), trajectory(reference), strict=True):
        assert mine[0] == pytest.approx(right[0], rel=1e-9) and mine[1] == pytest.approx(right[1], rel=1e-9)
    mine, right = weights(recipe, 3), weights(reference, 3)
    assert mine.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-10)


def test_preferences_on_a_mesh(tmp_path):
    one = run(tiny_dpo(tmp_path, "train.micro_batch=4", family="qwen3.5", name="one"))
    many = run(tiny_dpo(tmp_path, "train.micro_batch=2", "parallel.cp=2", family="qwen3.5", name="many"), 2)
    for mine, right in zip(trajectory(many), trajectory(one), strict=True):
        assert mine[:2] == pytest.approx(right[:2], rel=1e-9)


def test_rollouts_draw_the_same_tokens_on_a_mesh(tmp_path):
    shape = ["train.steps=2", "scheduler.warmup_steps=0", "train.micro_batch=4"]
    one = run(tiny_grpo(tmp_path, *shape, family="qwen3.5", name="one"))
    many = run(tiny_grpo(tmp_path, *shape, "parallel.tp=2", family="qwen3.5", name="many"), 2)
    for mine, right in zip(metrics(many), metrics(one), strict=True):
        assert mine["loss"] == pytest.approx(right["loss"], rel=1e-8, abs=1e-12)
        assert mine["reward_mean"] == right["reward_mean"]


@pytest.mark.parametrize("again", ["none", "selective"])
def test_half_precision_follows_float32_and_computes_the_decay_in_it(tmp_path, again):
    save_weights(write_model(tmp_path / "model", "qwen3.5"))
    start = ["model.init=pretrained", f"model.path={tmp_path / 'model'}", "checkpoint.every=1", "train.steps=1"]
    start += ["train.micro_batch=6"]
    one = run(sft(tmp_path, "one", *start, "train.dtype=float32"))
    keys = ["train.dtype=bfloat16", f"train.activation_checkpointing={again}"]
    two = run(sft(tmp_path, "two", *start, *keys), 2)
    (mine,), (right,) = trajectory(two), trajectory(one)
    assert mine[0] == pytest.approx(right[0], rel=2e-3) and mine[1] == pytest.approx(right[1], rel=2e-2)
    held = weights(two, 1)
    assert {str(held[name].dtype) for name in held if "A_log" in name} == {"torch.float32"}


def test_a_run_goes_on_where_it_stopped_on_another_mesh(tmp_path):
    shape = ["train.micro_batch=6", "checkpoint.every=2"]
    whole = run(sft(tmp_path, "whole", *shape, "parallel.tp=2"), 2)
    parts = sft(tmp_path, "parts", *shape, "parallel.tp=2")
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(parts, 2, 2)
    found = run(sft(tmp_path, "parts", *shape, "parallel.cp=2"), 2)
    for mine, right in zip(trajectory(found), trajectory(whole), strict=True):
        assert mine[:2] == pytest.approx(right[:2], rel=1e-9)
