"""Gemma 4 in files and on meshes: what an export carries, what a config may say, and the ways of training."""

import copy
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.models.common.config import FULL, SLIDING
from dtrain.models.common.flops import flops_per_token
from dtrain.parallel.size_checks import check_model_mesh
from tests.models import oracle
from tests.problem_lines import lines
from tests.running import metrics, run, trajectory, weights
from tests.tiny import save_weights, tiny_dpo, tiny_grpo, tiny_recipe, write_model

IDS = torch.arange(80).view(2, 40)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}


@pytest.fixture(params=["gemma4", "gemma4-moe"])
def multimodal(tmp_path, request):
    """A model with a vision and an audio tower, whose files hold keys of layers that share others', and its
    directory."""
    text = {**oracle.VARIANTS[request.param]().to_dict(), "pad_token_id": 0}
    config = transformers.Gemma4Config(text_config=text, vision_config=VISION, audio_config=AUDIO)
    torch.manual_seed(0)
    model = oracle.randomise(transformers.Gemma4ForConditionalGeneration(config))
    source = oracle.save(model, tmp_path / "source")
    file = source / "model.safetensors"
    sharing = "model.language_model.layers.5.self_attn"
    of_keys = ("k_proj", "k_norm") if text["num_kv_shared_layers"] else ()
    unread = {f"{sharing}.{name}.weight": torch.randn(4, 4) for name in of_keys}
    save_file(load_file(file) | unread, file, metadata={"format": "pt"})
    return model, source


@torch.no_grad()
def test_an_export_carries_the_towers(multimodal, tmp_path):
    theirs, source = multimodal
    ours = models.from_pretrained(source)
    expected = theirs(input_ids=IDS).logits
    assert ((ours(IDS) - expected).abs().max() / expected.abs().max()) < 1e-4  # as `TIMES` of test_families has it
    write_directory(ours, tmp_path / "out", source)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert {name.split(".")[1] for name in before} == {
        "language_model", "vision_tower", "audio_tower", "embed_vision", "embed_audio"
    }  # fmt: skip
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert torch.equal(again(input_ids=IDS).logits, expected)


@torch.no_grad()
def test_without_the_towers_weights_the_text_model_is_written(multimodal, tmp_path):
    theirs, source = multimodal
    ours = models.from_pretrained(source)
    (source / "model.safetensors").unlink()
    write_directory(ours, tmp_path / "out", source)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == "Gemma4ForCausalLM"
    assert torch.equal(again(IDS).logits, theirs(input_ids=IDS).logits)


@pytest.mark.parametrize("variant", ["gemma4", "gemma4-31b"])
def test_packed_documents_are_as_if_alone_to_the_last_bits(variant):
    """Keys that layers share, windows and the table of each layer's own rows, in float64."""
    packed = models.build(models.parse_config(oracle.VARIANTS[variant]().to_dict()), torch.float64)
    models.init_weights(packed, 0)
    alone = copy.deepcopy(packed)
    ids, positions, owners = oracle.packed_rows([[20, 1, 13], [27, 6]], padding=[3, 4])
    weights = torch.randn(*ids.shape, oracle.VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits = packed(ids, positions, owners)
    (logits * weights)[owners >= 0].sum().backward()
    for row, owner in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        mine = owners[row] == owner
        expected = alone(ids[row, mine][None])[0]
        assert (logits[row, mine] - expected).abs().max() < 1e-12 * expected.abs().max()
        (expected * weights[row, mine]).sum().backward()
    for (name, one), other in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() <= 1e-12 * other.grad.abs().max(), name


def published(**changes):
    """31B's config.json in the words of its files, its sizes smaller."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size": 128,
        "use_bidirectional_attention": "vision",
        **changes,
    }


def test_sizes_by_the_kind_of_layer():
    config = models.parse_config(published())
    assert config.kv_heads == {SLIDING: 4, FULL: 2}
    assert (
        config.kv_heads_of(FULL).head_dim == 32
        and config.kv_heads_of(FULL).is_tied
        and not config.kv_heads_of(SLIDING).is_tied
    )
    written = transformers.Gemma4TextConfig(**published()).to_dict()
    assert "per_layer_config" in written
    assert models.parse_config({**written, "architectures": ["Gemma4ForCausalLM"]}) == config
    untied = models.parse_config(published(attention_k_eq_v=False))
    assert untied.kv_heads == {SLIDING: 4, FULL: 4}
    shared = models.parse_config(published(num_kv_shared_layers=4, num_hidden_layers=12, use_double_wide_mlp=True))
    assert shared.kv_sources == (*range(8), 7, 7, 7, 5)
    assert shared.mlp_size(7) * 2 == shared.mlp_size(8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_moe_block": True}, "moe_intermediate_size is missing"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all': only causal"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 of 6: no layer before these has keys of full_attention"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}, "per_layer_input 100 is less than"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "must give head_dim and num_key_value_heads"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "alike in layers of a type"),
        ({"num_global_key_value_heads": 3}, "not a multiple of the 3 KV heads of full_attention"),
        (
            {"rope_parameters": {FULL: {"rope_type": "default"}, SLIDING: {"partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor 0.5: only whole heads",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "must be nested under full_attention and sliding_attention"),
        ({"router_jitter": 1}, "router_jitter 1: not a field that dtrain knows"),
    ],
)
def test_what_changes_the_maths_is_used_or_refused(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        models.parse_config(published(**changes))


def test_tensor_parallel_fits_each_kind_of_layer():
    config = models.parse_config(published(num_attention_heads=12, num_global_key_value_heads=3))
    assert lines(check_model_mesh(config, 3)) == [
        "parallel.tp=3 and its sliding_attention layers' 4 KV heads: neither divides the other. Use 1 or 12."
    ]
    assert len(check_model_mesh(config, 6)) == 1 and check_model_mesh(config, 12) == []


def test_flops_count_products_and_the_heads_of_each_layer():
    config = models.parse_config(json.loads(oracle.make("gemma4").config.to_json_string()))
    model = models.build(config, device="meta")
    counted = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens_per_layer" not in name)
    assert config.num_parameters == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    # three layers see 9 keys with heads of 16, three see all 100 with heads of 24; 4 heads
    assert flops_per_token(model, 100) == 6 * counted + 12 * 4 * 3 * (16 * 9 + 24 * 100)


def sft(root, name, *overrides):
    shape = ["train.global_batch=12", "train.steps=3", "scheduler.warmup_steps=0"]
    return tiny_recipe(root, *shape, *overrides, family="gemma4", name=name)


def test_a_frozen_table_changes_no_number_on_a_mesh(tmp_path):
    """tests/test_every_pair.py has the ways of training that every family has."""
    option = "train.freeze=[model.embed_tokens_per_layer.*]"
    alone = run(sft(tmp_path, "one", "train.micro_batch=12", "checkpoint.every=3", option))
    mesh = "train.micro_batch=6", "parallel.tp=2"
    together = run(sft(tmp_path, "many", "checkpoint.every=3", option, *mesh), 2)
    assert_same_run(together, alone)


def assert_same_run(recipe, reference):
    for mine, right in zip(trajectory(recipe), trajectory(reference), strict=True):
        assert mine[0] == pytest.approx(right[0], rel=1e-9) and mine[1] == pytest.approx(right[1], rel=1e-9)
    mine, right = weights(recipe, 3), weights(reference, 3)
    assert mine.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["full", "selective", "mlp"])
def test_what_is_computed_again_has_the_same_bits(tmp_path, kind):
    shape = ["train.micro_batch=6", "train.steps=2", "train.dtype=float32", "checkpoint.every=2"]
    one, two = (
        run(sft(tmp_path, "one", *shape)),
        run(sft(tmp_path, "two", *shape, f"train.activation_checkpointing={kind}")),
    )
    assert trajectory(two) == trajectory(one)
    mine, right = weights(two, 2), weights(one, 2)
    assert all(torch.equal(mine[name], tensor) for name, tensor in right.items())


def test_preferences_on_a_mesh(tmp_path):
    one = run(tiny_dpo(tmp_path, "train.micro_batch=4", family="gemma4", name="one"))
    many = run(tiny_dpo(tmp_path, "train.micro_batch=2", "parallel.cp=2", family="gemma4", name="many"), 2)
    for mine, right in zip(trajectory(many), trajectory(one), strict=True):
        assert mine[:2] == pytest.approx(right[:2], rel=1e-9)


def test_rollouts_draw_the_same_tokens_on_a_mesh(tmp_path):
    shape = ["train.steps=2", "scheduler.warmup_steps=0", "train.micro_batch=4"]
    one = run(tiny_grpo(tmp_path, *shape, family="gemma4", name="one"))
    many = run(tiny_grpo(tmp_path, *shape, "parallel.tp=2", family="gemma4", name="many"), 2)
    for mine, right in zip(metrics(many), metrics(one), strict=True):
        assert mine["loss"] == pytest.approx(right["loss"], rel=1e-8, abs=1e-12)
        assert mine["reward_mean"] == right["reward_mean"]


def test_half_precision_follows_float32(tmp_path):
    save_weights(write_model(tmp_path / "model", "gemma4"))
    start = ["model.init=pretrained", f"model.path={tmp_path / 'model'}", "checkpoint.every=1", "train.steps=1"]
    start += ["train.micro_batch=6"]
    one = run(sft(tmp_path, "one", *start, "train.dtype=float32"))
    two = run(sft(tmp_path, "two", *start, "train.dtype=bfloat16"), 2)
    (mine,), (right,) = trajectory(two), trajectory(one)
    assert mine[0] == pytest.approx(right[0], rel=2e-3) and mine[1] == pytest.approx(right[1], rel=5e-2)
