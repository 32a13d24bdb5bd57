"""The tables of docs/gpus.md and recipes/README.md: the shipped recipes of a model by plan.

    .venv/bin/python tools/plan_recipes.py gpus|memory [NAME ...]

gpus: each SFT recipe on one GPU and on eight. memory: each recipe's parts at the peak, on its own launch.nproc. Prints
Markdown, a row as soon as it is planned, in about ten seconds. Of the models config.json alone is needed:
tests/test_recipes.py has them. tests/test_docs.py holds the tables to the plan.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain import config
from dtrain.plan.hardware import GPUS, USABLE
from dtrain.plan.plan import Plan, make_plan
from dtrain.plan.report import gib
from tests import test_recipes

SIZES = (24, 48, 80, 141)  # GB, as GPUs are sold
MEMORY = {24: 24 * 2**30, 48: 48 * 2**30, 80: GPUS["h100"].memory_gib * 2**30, 141: GPUS["h200"].memory_gib * 2**30}
PARTS = ("parameters", "gradients", "optimizer state", "reference", "activations")
HEADS = {
    "gpus": ("recipe", "one GPU: peak", "of", "tokens/s", "eight: peak", "of", "tokens/s"),
    "memory": (
        *("recipe", "ranks", "micro-batch · accumulation", "parameters", "gradients", "optimizer", "reference"),
        *("activations", "other", "peak"),
    ),
}


def recipes(table: str) -> dict[str, dict[str, Any]]:
    """Name -> config.json, of the shipped recipes of a model that `table` has."""
    shapes = {name: shape for name, (shape, _) in test_recipes.MODELS.items()} | test_recipes.OTHERS
    return {name: shapes[name] for name in sorted(shapes) if table == "memory" or name.endswith("-sft")}


def row(table: str, name: str) -> list[str]:
    """The cells of a recipe's row."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(recipes(table)[name]))
        overrides = [f"model.path={directory}", "data.train.path=data.jsonl"]
        if table == "memory":
            return [f"`{name}`", *_parts(_plan(name, overrides))]
        return [f"`{name}`", *(cell for ranks in (1, 8) for cell in _on_gpus(_plan(name, overrides, ranks)))]


def _plan(name: str, overrides: list[str], ranks: int | None = None) -> Plan:
    """On so many H100s of a node, or as many as the recipe says. A batch that so many ranks cannot share is as large as
    they need."""
    recipe = config.load(name, overrides)
    ranks = ranks or recipe.launch.nproc
    least = recipe.train.micro_batch * ranks
    if recipe.train.global_batch != "auto" and recipe.train.batch % least:
        recipe = config.load(name, [*overrides, f"train.global_batch={least}"])
    return make_plan(recipe, ranks, GPUS["h100"])


def _on_gpus(plan: Plan) -> tuple[str, str, str]:
    """The peak, the least GPU that has it, and tokens of a second over all GPUs by the estimate."""
    holds = next((f"{size} GB" for size in SIZES if plan.step.peak <= MEMORY[size] * USABLE), "–")
    return gib(plan.step.peak), holds, f"{round(plan.tokens / plan.time.total, -2):,.0f}"


def _parts(plan: Plan) -> list[str]:
    """Ranks, sizes, and GiB of the parts at the peak."""
    sizes, parts, peak = plan.sizes, [plan.step.parts.get(part, 0) for part in PARTS], plan.step.peak
    shown = [f"{size / 2**30:.1f}" if size else "–" for size in (*parts, peak - sum(parts), peak)]
    return [str(sizes.world_size), f"{sizes.micro_batch} · {sizes.accumulation}", *shown]


def main(table: str, *names: str) -> None:
    print("| " + " | ".join(HEADS[table]) + " |\n|" + " --- |" * len(HEADS[table]))
    for name in recipes(table):
        if not names or name in names:
            print("| " + " | ".join(row(table, name)) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
