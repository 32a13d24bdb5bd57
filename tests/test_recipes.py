"""Every shipped recipe: it loads, fits its model's published shape on its mesh, and its header says how to use it."""

import copy
import json
import re
from functools import cache
from shutil import copytree

import pytest

from dtrain import recipe as config
from dtrain.methods import load_recipe, recipe_keys
from dtrain.run.preflight import preflight
from tests.models.published import CONFIGS
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

# Recipe → (config.json, parameters in millions that dtrain trains: the model cards' counts).
MODELS = {
    "llama3.2-1b-sft": (CONFIGS["llama-3.2-1b"], 1235.8),
    "llama3.1-8b-sft": (LLAMA_3_1_8B, 8030.3),
    "qwen2.5-0.5b-sft": (CONFIGS["qwen2.5-0.5b"], 494.0),
    "qwen2.5-7b-sft": (QWEN_2_5_7B, 7615.6),
    "qwen3-0.6b-sft": (CONFIGS["qwen3-0.6b"], 596.0),
    "qwen3-8b-sft": (QWEN3_8B, 8190.7),
    "gemma3-1b-sft": (CONFIGS["gemma3-1b"], 999.9),
    "gemma3-4b-sft": (CONFIGS["gemma3-4b"], 3880.3),
}
# Of other families, for sft alone.
RELATIVES = {
    "olmo3-7b-sft": (CONFIGS["olmo3-7b"], 7298.0),
    "smollm3-3b-sft": (CONFIGS["smollm3-3b"], 3075.1),
    "granite4-3b-sft": (CONFIGS["granite4-micro"], 3402.8),
    "ministral3-3b-sft": (CONFIGS["ministral3-3b"], 3429.0),
    "qwen3-vl-4b-sft": (CONFIGS["qwen3-vl-4b"], 4022.5),
    "phi4-mini-sft": (CONFIGS["phi4-mini"], 3836.0),
    "gemma4-e2b-sft": (CONFIGS["gemma4-e2b"], 4628.6),  # 5.1 billion with the towers of images and sound
    "gemma4-e4b-sft": (CONFIGS["gemma4-e4b"], 7463.0),
    "gemma4-31b-sft": (CONFIGS["gemma4-31b"], 30697.3),
    "qwen3-30b-a3b-sft": (CONFIGS["qwen3-30b-a3b"], 30532.1),
    "qwen3.6-35b-a3b-sft": (CONFIGS["qwen3.6-35b-a3b"], 34660.6),
    "gpt-oss-20b-sft": (CONFIGS["gpt-oss-20b"], 20914.8),
    "gemma4-26b-a4b-sft": (CONFIGS["gemma4-26b-a4b"], 25233.1),
}
# For chats with images.
WITH_IMAGES = {
    f"{name}-images{kind}-sft": CONFIGS[name]
    for name in ("qwen3-vl-4b", "qwen3.5-0.8b", "gemma4-e4b")
    for kind in ("", "-lora")
}
# Qwen3.5 and 3.6, each for what suits its size.
QWEN3_5 = {
    "qwen3.5-0.8b-sft": (CONFIGS["qwen3.5-0.8b"], 752.4),
    "qwen3.6-27b-sft": (CONFIGS["qwen3.6-27b"], 26895.9),
}
OTHERS = {name.replace("-sft", method): shape for name, (shape, _) in MODELS.items() for method in ("-dpo", "-grpo")}
ADAPTED = {
    name.replace("-sft", method): shape
    for name, (shape, _) in MODELS.items()
    for method in ("-lora-sft", "-lora-dpo", "-lora-grpo", "-qlora-sft")
}
ADAPTED |= {name.replace("-sft", "-lora-sft"): shape for name, (shape, _) in RELATIVES.items()}
ADAPTED |= {name: CONFIGS["qwen3.6-27b"] for name in ("qwen3.6-27b-lora-sft", "qwen3.6-27b-qlora-sft")}
ADAPTED["qwen3.5-0.8b-lora-sft"] = CONFIGS["qwen3.5-0.8b"]
OTHERS |= ADAPTED | WITH_IMAGES | {name: CONFIGS["qwen3.5-0.8b"] for name in ("qwen3.5-0.8b-dpo", "qwen3.5-0.8b-grpo")}
MODELS |= RELATIVES | QWEN3_5
NAMES = [name for name, _ in config.shipped()]
PAIR = '{"prompt": "w3", "chosen": "w4", "rejected": "w5"}'


@pytest.fixture
def files(tmp_path):
    """A model directory without weights and a data file for each method, to fill a recipe's paths with."""
    directory = write_model(tmp_path / "model")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rows = dict.fromkeys(("sft", "distill"), '{"text": "w3 w4"}')
    rows |= {"dpo": PAIR, "reward": PAIR, "grpo": '{"question": "w3", "answer": "w4"}'}
    for method, row in rows.items():
        (tmp_path / f"{method}.jsonl").write_text(row + "\n")
    return directory, tmp_path


shipped = cache(load_recipe)  # nobody changes what it returns


def problems(name, files, world_size=None, shape=None, *overrides):
    directory, rows = files
    if shape is not None:
        (directory / "config.json").write_text(json.dumps(shape))
    path = rows / f"{shipped(name).method}.jsonl"
    recipe = load_recipe(name, [f"model.path={directory}", f"data.train.path={path}", *overrides])
    return preflight(recipe, recipe.launch.nproc if world_size is None else world_size)


def test_the_recipes_that_are_promised_ship():
    quickstarts = {"quickstart", *(f"quickstart-{kind}" for kind in ("lora", "dpo", "grpo", "distill", "images"))}
    assert {*MODELS, *OTHERS, "sft", "dpo", "distill", "grpo", "reward", *quickstarts} <= set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted([*MODELS, *OTHERS]))
def test_a_models_recipe_fits_its_shape_on_its_own_mesh_and_on_others(name, files):
    shape = MODELS[name][0] if name in MODELS else OTHERS[name]
    for world_size in {shipped(name).launch.nproc, 8} | ({1} if name not in ADAPTED else set()):
        shared = ["parallel.ep=1"] if shipped(name).parallel.ep > world_size else []
        assert problems(name, files, world_size, shape, *shared) == []


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_models_shape_has_its_published_size(name):
    from dtrain import models

    shape, millions = MODELS[name]
    model = models.build(models.parse_config(copy.deepcopy(shape)), device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.slow
def test_a_shape_that_does_not_belong_is_seen(name, files):
    shape, _ = MODELS[name]
    smaller = copy.deepcopy(shape)
    smaller.get("text_config", smaller).update(vocab_size=VOCAB - 1, pad_token_id=None)
    found = problems(name, files, None, smaller)
    assert any("the tokenizer's highest id" in problem for problem in found), found
    assert any("train.global_batch" in one for one in problems(name, files, 3, shape, "train.global_batch=16"))


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
    assert preflight(recipe, recipe.launch.nproc) == []
    (tmp_path / "build" / "arithmetic" / "pairs.jsonl").write_text(PAIR)
    (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-300").mkdir(parents=True)
    assert recipe.checkpoint.keep_every == 300  # which the second quickstart starts from
    teacher = copytree(tmp_path / "build" / "arithmetic" / "model", tmp_path / "runs" / "quickstart" / "export")
    (teacher / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("quickstart-dpo", "quickstart-grpo", "quickstart-distill"):
        following = load_recipe(name)
        assert preflight(following, following.launch.nproc) == []


def test_the_recipe_of_images_fits_what_its_tool_writes(tmp_path, monkeypatch):
    from tests.test_tools import FEW_PICTURES, run_tool

    run_tool("make_shapes.py", tmp_path / "build" / "shapes", *FEW_PICTURES)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart-images")
    assert preflight(recipe, recipe.launch.nproc) == []


@pytest.mark.parametrize("name", NAMES)
def test_headers_say_what_how_and_what_to_override(name):
    header = [line for line in config.find(name).read_text().splitlines() if line.startswith("#")]
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
    assert config.diff(written, load_recipe(tmp_path / f"{name}.yaml")) == []
