"""The tables of docs/gpus.md, README.md and recipes/README.md that follow from plans and from recipe/models.toml.

    .venv/bin/python tools/plan_recipes.py sizes [MODEL ...]    # docs/gpus.md: what `auto` chooses, peak, speed
    .venv/bin/python tools/plan_recipes.py models               # recipes/README.md: what models need beside a recipe

Prints Markdown, a row as soon as it is planned: in half a minute, and in two where much was tried. Of the models
config.json alone is needed; tests/test_recipes.py has them. README's table of GPUs follows from `sizes`.
tests/test_planned_tables.py holds some rows to the plan.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.commands.plan.choose import chosen_plan
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.report import gib
from dtrain.recipe.models import IMAGES_PREFIX, SPECIAL
from dtrain.recipe.world import FASTEST_VALUES, get_key
from dtrain.training import load_recipe
from tests import test_recipes

CARDS = {"24 GB": ("4090", 1), "80 GB": ("h100", 1), "8 × 80 GB": ("h100", 8)}
"""GPUs as the table names them → the GPU of `dtrain plan`, and how many."""
ROWS: tuple[tuple[str, str, str], ...] = (
    ("24 GB", "Llama-3.2-1B", "sft"),
    ("24 GB", "Qwen3-4B", "lora-sft"),
    ("24 GB", "Qwen3-8B", "lora-sft"),
    ("24 GB", "Qwen3-8B", "lora-dpo"),
    ("24 GB", "Qwen3-14B", "qlora-sft"),
    ("80 GB", "Llama-3.2-1B", "sft"),
    ("80 GB", "Qwen3-4B", "sft"),
    ("80 GB", "Qwen3-8B", "sft"),
    ("80 GB", "Qwen3-8B", "lora-sft"),
    ("80 GB", "Qwen3-32B", "lora-sft"),
    ("80 GB", "Qwen3-30B-A3B", "lora-sft"),
    ("80 GB", "Llama-3.1-70B", "qlora-sft"),
    ("8 × 80 GB", "Qwen3-8B", "sft"),
    ("8 × 80 GB", "Qwen3-8B", "dpo"),
    ("8 × 80 GB", "Qwen3-8B", "grpo"),
    ("8 × 80 GB", "Qwen3-14B", "sft"),
    ("8 × 80 GB", "Qwen3-32B", "sft"),
    ("8 × 80 GB", "Qwen3-30B-A3B", "sft parallel.ep=8 optimizer.state=bfloat16"),
    ("8 × 80 GB", "Llama-3.1-70B", "lora-sft"),
)
"""GPUs, a model, and a general recipe with the keys that the model needs beside it."""
HEADS = {
    "sizes": ("GPUs", "model", "recipe", "chosen", "peak", "tokens/s"),
    "models": ("recipe", "models", "keys", "why"),
}


def shape_of(model: str) -> dict[str, Any]:
    """config.json of a model of ROWS, as published."""
    if model == "Qwen3-30B-A3B":
        return test_recipes.MODELS["qwen3-30b-a3b"][0]
    llama, qwen = test_recipes.LLAMA_3_1_8B, test_recipes.QWEN3_8B
    base = llama if model.startswith("Llama") else qwen
    hidden, intermediate, layers, heads, tied = {
        "Llama-3.2-1B": (2048, 8192, 16, 32, True),
        "Llama-3.1-70B": (8192, 28672, 80, 64, False),
        "Qwen3-4B": (2560, 9728, 36, 32, True),
        "Qwen3-8B": (4096, 12288, 36, 32, False),
        "Qwen3-14B": (5120, 17408, 40, 40, False),
        "Qwen3-32B": (5120, 25600, 64, 64, False),
    }[model]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "tie_word_embeddings": tied}
    sizes |= {"head_dim": 64} if model == "Llama-3.2-1B" else {}
    return base | sizes | ({"max_window_layers": layers} if base is qwen else {})


def sizes_row(cards: str, model: str, words: str) -> list[str]:
    """The cells of a row of ROWS: what `auto` chooses, the peak of a rank, tokens of a second over all GPUs."""
    (gpu, ranks), (name, *keys) = CARDS[cards], words.split()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape_of(model)))
        recipe = load_recipe(name, [f"model.path={directory}", "data.train.path=data.jsonl", *keys])
        plan = chosen_plan(recipe, ranks, GPUS[gpu])
    values = {key: get_key(plan.spec.recipe, key) for key in FASTEST_VALUES}
    shown = [key for key, value in values.items() if key == "train.micro_batch" or value != FASTEST_VALUES[key]]
    chosen = " ".join(f"{key.partition('.')[2]}={str(values[key]).lower()}" for key in shown)
    speed = f"{round(plan.tokens / plan.time.total, -2):,.0f}"
    return [cards, model, f"`{words}`", f"`{chosen}`", gib(plan.step.peak), speed]


def models_rows() -> Iterator[list[str]]:
    """The rows of what recipe/models.toml has for models beside the general recipes."""
    for special in SPECIAL:
        recipes = [f"`{recipe.removeprefix(IMAGES_PREFIX)}`" for recipe in special.recipes]
        with_images = " with images" if special.recipes[0].startswith(IMAGES_PREFIX) else ""
        models = "all" if {"small", "medium", "large", "mixtures"} <= {*special.models} else ", ".join(special.models)
        keys = "<br>".join(f"`{key}`" for key in special.keys)
        yield [", ".join(recipes) + with_images, models, keys, special.why]


def main(table: str, *names: str) -> None:
    print("| " + " | ".join(HEADS[table]) + " |\n|" + " --- |" * len(HEADS[table]))
    planned = (sizes_row(*row) for row in ROWS if not names or row[1] in names)
    for row in models_rows() if table == "models" else planned:
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
