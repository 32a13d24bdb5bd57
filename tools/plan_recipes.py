"""The tables of docs/gpus.md and recipes/README.md: the shipped recipes of a model by plan.

    .venv/bin/python tools/plan_recipes.py gpus|memory|fits [NAME ...]

gpus: each SFT recipe on one GPU and on eight. memory: each recipe's parts at the peak, on its own launch.nproc. fits:
what `dtrain run sft` needs for models of other sizes, from which README's table of GPUs follows. Prints Markdown, a row
as soon as it is planned, in about ten seconds. Of the models config.json alone is needed: tests/test_recipes.py has
them; recipes for images are planned for photos of 1024 × 768. tests/test_docs.py holds some of their rows to the plan.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.commands.plan.hardware import GPUS, USABLE
from dtrain.commands.plan.plan import Plan, make_plan
from dtrain.commands.plan.report import gib
from dtrain.methods import load_recipe
from tests import pictures, test_recipes

SIZES = (24, 48, 80, 141)  # GB, as GPUs are sold
MEMORY = {24: 24 * 2**30, 48: 48 * 2**30, 80: GPUS["h100"].memory_gib * 2**30, 141: GPUS["h200"].memory_gib * 2**30}
PARTS = ("parameters", "gradients", "optimizer state", "reference", "activations")
LEAST = "optimizer.state=int8 train.masters=bfloat16 parallel.reduce_each=true"
NF4 = "lora={} lora.quantize=nf4"
FITS: tuple[tuple[str, str, str], ...] = (
    ("24 GB", "Llama-3.2-1B", ""),
    ("24 GB", "Qwen3-8B", "lora={}"),
    ("24 GB", "Qwen3-14B", NF4),
    ("48 GB", "Qwen3-1.7B", ""),
    ("48 GB", "Qwen3-14B", "lora={}"),
    ("48 GB", "Qwen3-32B", NF4),
    ("80 GB", "Qwen3-4B", ""),
    ("80 GB", "Qwen3-8B", LEAST),
    ("80 GB", "Qwen3-32B", "lora={}"),
    ("80 GB", "Llama-3.1-70B", NF4),
    ("8 × 80 GB", "Qwen3-14B", "parallel.reduce_each=true"),
    ("8 × 80 GB", "Qwen3-32B", LEAST),
    ("8 × 80 GB", "Llama-3.1-70B", "lora={}"),
    ("8 × 80 GB", "Llama-3.1-70B", NF4),
)
"""GPUs, a model that fits them, and the keys that it needs beside those of the recipe sft."""
HEADS = {
    "fits": ("GPUs", "model", "keys", "peak"),
    "gpus": ("recipe", "one GPU: peak", "of", "tokens/s", "eight: peak", "of", "tokens/s"),
    "memory": (
        *("recipe", "ranks", "micro-batch · accumulation", "parameters", "gradients", "optimizer", "reference"),
        *("activations", "other", "peak"),
    ),
}


def shape_of(model: str) -> dict[str, Any]:
    """config.json of a model of FITS, as published."""
    llama, qwen = test_recipes.LLAMA_3_1_8B, test_recipes.QWEN3_8B
    base = llama if model.startswith("Llama") else qwen
    hidden, intermediate, layers, heads, tied = {
        "Llama-3.2-1B": (2048, 8192, 16, 32, True),
        "Llama-3.1-70B": (8192, 28672, 80, 64, False),
        "Qwen3-1.7B": (2048, 6144, 28, 16, True),
        "Qwen3-4B": (2560, 9728, 36, 32, True),
        "Qwen3-8B": (4096, 12288, 36, 32, False),
        "Qwen3-14B": (5120, 17408, 40, 40, False),
        "Qwen3-32B": (5120, 25600, 64, 64, False),
    }[model]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "tie_word_embeddings": tied}
    sizes |= {"head_dim": 64} if model == "Llama-3.2-1B" else {}
    return base | sizes | ({"max_window_layers": layers} if base is qwen else {})


def fits(gpus: str, model: str, keys: str) -> list[str]:
    """The cells of a row of FITS."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape_of(model)))
        ranks = 8 if gpus.startswith("8 ×") else 1
        paths = [f"model.path={directory}", "data.train.path=data.jsonl"]
        peak = _plan("sft", [*paths, *keys.split()], ranks).step.peak
    if peak > MEMORY[int(gpus.split()[-2])] * USABLE:
        raise ValueError(f"{model} with {keys} needs {gib(peak)}, more than {gpus}")
    return [gpus, model, f"`{keys}`" if keys else "–", gib(peak)]


def recipes(table: str) -> dict[str, dict[str, Any]]:
    """Name -> config.json, of the shipped recipes of a model that `table` has."""
    shapes = {name: shape for name, (shape, _) in test_recipes.MODELS.items()} | test_recipes.OTHERS
    return {name: shapes[name] for name in sorted(shapes) if table == "memory" or name.endswith("-sft")}


def row(table: str, name: str) -> list[str]:
    """The cells of a recipe's row."""
    with tempfile.TemporaryDirectory() as directory:
        shape, data = recipes(table)[name], "data.jsonl"
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        if name in test_recipes.WITH_IMAGES:
            data = str(pictures.write_photo_rows(Path(directory), shape))
        overrides = [f"model.path={directory}", f"data.train.path={data}"]
        if table == "memory":
            return [f"`{name}`", *_parts(_plan(name, overrides))]
        return [f"`{name}`", *(cell for ranks in (1, 8) for cell in _on_gpus(_plan(name, overrides, ranks)))]


def _plan(name: str, overrides: list[str], ranks: int | None = None) -> Plan:
    """On so many H100s of a node, or as many as the recipe says. A batch that so many ranks cannot share is as large as
    they need, and experts are shared among no more."""
    recipe = load_recipe(name, overrides)
    ranks = ranks or recipe.launch.nproc
    least = recipe.train.micro_batch * ranks
    if recipe.parallel.ep > ranks:
        overrides = [*overrides, f"parallel.ep={ranks}"]
        recipe = load_recipe(name, overrides)
    if recipe.train.global_batch != "auto" and recipe.train.batch % least:
        recipe = load_recipe(name, [*overrides, f"train.global_batch={least}"])
    return make_plan(recipe, ranks, GPUS["h100"])


def _on_gpus(plan: Plan) -> tuple[str, str, str]:
    """The peak, the least GPU that has it, and tokens of a second over all GPUs by the estimate."""
    holds = next((f"{size} GB" for size in SIZES if plan.step.peak <= MEMORY[size] * USABLE), "–")
    return gib(plan.step.peak), holds, f"{round(plan.tokens / plan.time.total, -2):,.0f}"


def _parts(plan: Plan) -> list[str]:
    """Ranks, sizes, and GiB of the parts at the peak."""
    sizes, parts, peak = plan.spec.sizes, [plan.step.parts.get(part, 0) for part in PARTS], plan.step.peak
    shown = [f"{size / 2**30:.1f}" if size else "–" for size in (*parts, peak - sum(parts), peak)]
    return [str(sizes.world_size), f"{sizes.micro_batch} · {sizes.accumulation}", *shown]


def main(table: str, *names: str) -> None:
    print("| " + " | ".join(HEADS[table]) + " |\n|" + " --- |" * len(HEADS[table]))
    for one in FITS if table == "fits" else ():
        if not names or one[1] in names:
            print("| " + " | ".join(fits(*one)) + " |", flush=True)
    for name in recipes(table) if table != "fits" else ():
        if not names or name in names:
            print("| " + " | ".join(row(table, name)) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
