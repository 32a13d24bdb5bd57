"""Every shipped recipe: it loads, fits its model's published shape on its mesh, and its header says how to use it."""

import copy
import json
import re
import shlex
from functools import cache
from shutil import copytree

import pytest

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.recipe import models
from dtrain.training import load_recipe, recipe_keys
from tests.models.published import CONFIGS
from tests.problem_lines import preflight
from tests.tiny import VOCAB, write_model

LLAMA_3_1_8B = {
    **CONFIGS["llama-3.2-1b"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
}
QWEN_2_5_7B = {
    **CONFIGS["qwen2.5-0.5b"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    **CONFIGS["qwen3-0.6b"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}

# Short name of recipe/models.toml → (config.json, parameters in millions that dtrain trains: the model cards' counts).
MODELS = {
    "llama3.2-1b": (CONFIGS["llama-3.2-1b"], 1235.8),
    "llama3.1-8b": (LLAMA_3_1_8B, 8030.3),
    "qwen2.5-0.5b": (CONFIGS["qwen2.5-0.5b"], 494.0),
    "qwen2.5-7b": (QWEN_2_5_7B, 7615.6),
    "qwen3-0.6b": (CONFIGS["qwen3-0.6b"], 596.0),
    "qwen3-8b": (QWEN3_8B, 8190.7),
    "gemma3-1b": (CONFIGS["gemma3-1b"], 999.9),
    "gemma3-4b": (CONFIGS["gemma3-4b"], 3880.3),
    "olmo3-7b": (CONFIGS["olmo3-7b"], 7298.0),
    "smollm3-3b": (CONFIGS["smollm3-3b"], 3075.1),
    "granite4-3b": (CONFIGS["granite4-micro"], 3402.8),
    "ministral3-3b": (CONFIGS["ministral3-3b"], 3429.0),
    "qwen3-vl-4b": (CONFIGS["qwen3-vl-4b"], 4022.5),
    "phi4-mini": (CONFIGS["phi4-mini"], 3836.0),
    "gemma4-e2b": (CONFIGS["gemma4-e2b"], 4628.6),  # 5.1 billion with the towers of images and sound
    "gemma4-e4b": (CONFIGS["gemma4-e4b"], 7463.0),
    "gemma4-31b": (CONFIGS["gemma4-31b"], 30697.3),
    "qwen3-30b-a3b": (CONFIGS["qwen3-30b-a3b"], 30532.1),
    "qwen3.6-35b-a3b": (CONFIGS["qwen3.6-35b-a3b"], 34660.6),
    "gpt-oss-20b": (CONFIGS["gpt-oss-20b"], 20914.8),
    "gemma4-26b-a4b": (CONFIGS["gemma4-26b-a4b"], 25233.1),
    "qwen3.5-0.8b": (CONFIGS["qwen3.5-0.8b"], 752.4),
    "qwen3.6-27b": (CONFIGS["qwen3.6-27b"], 26895.9),
}
WITH_IMAGES = ("qwen3-vl-4b", "qwen3.5-0.8b", "gemma4-e4b")
NAMES = [name for name, _ in config.list_shipped_recipes()]
FOR_ALL = ("sft", "lora-sft")
OTHERS = ("qlora-sft", "dpo", "lora-dpo", "kto", "grpo", "lora-grpo", "reward")
THOROUGHLY = ("llama3.2-1b", "qwen3-8b", "gemma3-1b")
GENERAL = [*FOR_ALL, *OTHERS, "distill"]
PAIR = '{"prompt": "w3", "chosen": "w4", "rejected": "w5"}'


@pytest.fixture
def files(tmp_path):
    """A model directory without weights and a data file for each method, to fill a recipe's paths with."""
    directory = write_model(tmp_path / "model")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rows = dict.fromkeys(("sft", "distill"), '{"text": "w3 w4"}')
    rows |= {"dpo": PAIR, "reward": PAIR, "grpo": '{"question": "w3", "answer": "w4"}'}
    rows |= {"kto": '{"prompt": "w3", "completion": "w4", "label": true}'}
    for method, row in rows.items():
        (tmp_path / f"{method}.jsonl").write_text(row + "\n")
    return directory, tmp_path


shipped = cache(load_recipe)  # nobody changes what it returns


def problems(name, files, world_size=None, shape=None, *overrides):
    directory, rows = files
    if shape is not None:
        (directory / "config.json").write_text(json.dumps(shape))
    path = rows / f"{shipped(name).method}.jsonl"
    recipe = load_recipe(name, [*overrides, f"model.path={directory}", f"data.train.path={path}"])
    return preflight(recipe, recipe.launch.num_processes if world_size is None else world_size)


def test_the_recipes_that_are_promised_ship():
    quickstarts = {"quickstart", *(f"quickstart-{kind}" for kind in ("lora", "dpo", "grpo", "distill", "images"))}
    assert {*NAMES} == {*GENERAL, *quickstarts} and len(NAMES) <= 16
    assert [*models.MODELS] != [] and {*models.MODELS} == {*MODELS}


def test_the_name_of_a_models_former_recipe_is_answered_with_the_command_in_its_place():
    names = {f"{model}-{recipe}": (model, recipe) for model in MODELS for recipe in GENERAL}
    names |= {f"{model}-images-{recipe}": (model, recipe) for model in MODELS for recipe in ("sft", "lora-sft")}
    for name, (model, recipe) in names.items():
        with pytest.raises(UserError) as raised:
            config.find_recipe(name)
        start = f"there is no recipe {name} any more: `dtrain run {recipe} model.path={models.MODELS[model]}"
        assert str(raised.value).startswith(start) and str(raised.value).endswith("`"), name
    with pytest.raises(UserError, match="there is no recipe qwen3-8b-sft any more"):
        config.find_recipe("recipes/qwen3-8b-sft.yaml")
    for name in ("qwen3-8b", "qwen3-8b-lora", "qwen3-9b-sft", "qwen3-8b-quickstart", "-sft"):
        with pytest.raises(UserError, match=f"there is no recipe {name}: neither"):
            config.find_recipe(name)


def test_the_command_of_a_former_recipe_has_the_keys_that_the_recipe_had():
    command = models.former_recipe_command("qwen3.6-35b-a3b-sft", GENERAL)
    assert command.split()[:4] == ["dtrain", "run", "sft", "model.path=Qwen/Qwen3.6-35B-A3B"]
    assert {"optimizer.lr=5e-6", "optimizer.state=bfloat16", "parallel.ep=8"} < {*command.split()}
    (name, *overrides) = shlex.split(models.former_recipe_command("qwen3-0.6b-grpo", GENERAL))[2:]
    grpo = load_recipe(name, overrides).grpo
    assert grpo.system_prompt == "Reason step by step, and put your final answer within \\boxed{}."
    assert (grpo.loss, list(grpo.clip), grpo.prompts_per_step) == ("dapo", [0.2, 0.28], 64)
    images = models.former_recipe_command("qwen3-vl-4b-images-lora-sft", GENERAL).split()
    assert "data.image_max_pixels=1003520" in images and "train.vision=projector" not in images
    rates = {name: models.model_overrides(name, "lora-dpo")[1:] for name in ("qwen3-0.6b", "qwen3-8b")}
    assert rates == {"qwen3-0.6b": ["optimizer.lr=1e-5"], "qwen3-8b": []}


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_general_recipe_fits_a_models_shape_on_one_process_and_eight(model, files):
    shape = MODELS[model][0]
    recipes = [*FOR_ALL, *(OTHERS if model in THOROUGHLY else ())]
    recipes += [f"images-{name}" for name in FOR_ALL] if model in WITH_IMAGES else []
    for name in recipes:
        for world_size in (1, 8):
            keys = [*models.model_overrides(model, name), *(["parallel.ep=1"] if world_size == 1 else [])]
            assert problems(name.removeprefix("images-"), files, world_size, shape, *keys) == [], name


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_models_shape_has_its_published_size(name):
    from dtrain.models import build, parse_config

    shape, millions = MODELS[name]
    model = build(parse_config(copy.deepcopy(shape)), device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("model", THOROUGHLY)
@pytest.mark.slow
def test_a_shape_that_does_not_belong_is_seen(model, files):
    shape, _ = MODELS[model]
    smaller = copy.deepcopy(shape)
    smaller.get("text_config", smaller).update(vocab_size=VOCAB - 1, pad_token_id=None)
    found = problems("sft", files, None, smaller)
    assert any("the tokenizer's highest id" in problem for problem in found), found
    assert any("train.global_batch" in one for one in problems("sft", files, 3, shape, "train.global_batch=16"))


def test_the_generic_recipe_asks_for_what_it_cannot_know(files):
    recipe = load_recipe("sft")
    found = "\n".join(preflight(recipe, 1))
    assert "model.path is missing" in found and "data.train.path is missing" in found
    assert problems("sft", files) == []
    assert problems("sft", files, 8) == []
    assert problems("dpo", files, 8) == problems("grpo", files, 8) == []


def test_the_distillation_recipe_asks_for_its_teacher(files):
    found = "\n".join(preflight(load_recipe("distill"), 1))
    assert "model.path is missing" in found and "distill.teacher is missing" in found
    for world_size in (1, 8):
        assert problems("distill", files, world_size, None, f"distill.teacher={files[0]}") == []


def test_the_quickstart_recipe_fits_what_its_tool_writes(tmp_path, monkeypatch):
    from tests.test_tools import run_tool

    run_tool("make_arithmetic.py", tmp_path / "build" / "arithmetic")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart")
    assert preflight(recipe, recipe.launch.num_processes) == []
    (tmp_path / "build" / "arithmetic" / "pairs.jsonl").write_text(PAIR)
    (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-300").mkdir(parents=True)
    assert recipe.checkpoint.keep_every == 300  # which the second quickstart starts from
    teacher = copytree(tmp_path / "build" / "arithmetic" / "model", tmp_path / "runs" / "quickstart" / "export")
    (teacher / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("quickstart-dpo", "quickstart-grpo", "quickstart-distill"):
        following = load_recipe(name)
        assert preflight(following, following.launch.num_processes) == []


def test_the_recipe_of_images_fits_what_its_tool_writes(tmp_path, monkeypatch):
    from tests.test_tools import FEW_PICTURES, run_tool

    run_tool("make_shapes.py", tmp_path / "build" / "shapes", *FEW_PICTURES)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart-images")
    assert preflight(recipe, recipe.launch.num_processes) == []


@pytest.mark.parametrize("name", NAMES)
def test_headers_say_what_how_and_what_to_override(name):
    header = [line for line in config.find_recipe(name).read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert header[0].endswith(".") and len(header[0]) <= 120
    for part in ("What it does:", "Run it:", "Override:"):
        assert part in text
    commands = re.findall(rf"dtrain run {re.escape(name)}\b", text)
    assert commands, "the header shows the command with the recipe's own name"
    known = set(recipe_keys())
    sections = "model|data|train|lora|optimizer|launch|run|scheduler|checkpoint|dpo|grpo|distill|reward"
    for key in re.findall(rf"\b((?:{sections})(?:\.\w+)+)", text):
        if not key.endswith((".jsonl", ".py")):
            assert key in known, key


@pytest.mark.parametrize(
    "name",
    [*NAMES],
)
@pytest.mark.slow
def test_a_recipe_written_out_and_loaded_again_is_the_same(tmp_path, name):
    written = config.to_yaml(shipped(name))
    (tmp_path / f"{name}.yaml").write_text(written)
    assert config.diff_recipes(written, load_recipe(tmp_path / f"{name}.yaml")) == []
