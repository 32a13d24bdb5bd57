"""The table of docs/gpus.md: each shipped SFT recipe of a model by plan, on one GPU and on eight.

    .venv/bin/python tools/plan_recipes.py [NAME ...]

Prints Markdown, a row as soon as it is planned. Of the models config.json alone is needed: tests/models has them. About
ten seconds a recipe. tests/test_docs.py holds the table to the plan.
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
HEAD = ("recipe", "one GPU: peak", "of", "tokens/s", "eight: peak", "of", "tokens/s")


def recipes() -> dict[str, dict[str, Any]]:
    """Name -> config.json, of the shipped SFT recipes that are for one model."""
    shapes = {name: shape for name, (shape, _) in test_recipes.MODELS.items()} | test_recipes.ADAPTED
    return {name: shapes[name] for name in sorted(shapes) if name.endswith("-sft")}


def plans(name: str, directory: Path, ranks: int) -> Plan:
    """On so many GPUs; each H100's NVLink. A batch that so many ranks cannot share is as large as they need."""
    recipe = config.load(name, [f"model.path={directory}", "data.train.path=data.jsonl", *_batch(name, ranks)])
    return make_plan(recipe, ranks, GPUS["h100"])


def _batch(name: str, ranks: int) -> list[str]:
    recipe = config.load(name, [])
    least = recipe.train.micro_batch * ranks
    return [] if recipe.train.global_batch % least == 0 else [f"train.global_batch={least}"]


def cells(plan: Plan) -> tuple[str, str, str]:
    """The peak, the least GPU that has it, and tokens of a second over all GPUs by the estimate."""
    holds = next((f"{size} GB" for size in SIZES if plan.step.peak <= MEMORY[size] * USABLE), "–")
    per_second = plan.tokens / plan.time.total
    return gib(plan.step.peak), holds, f"{round(per_second, -2):,.0f}"


def row(name: str, shape: dict[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        return [f"`{name}`", *(cell for ranks in (1, 8) for cell in cells(plans(name, Path(directory), ranks)))]


def main(names: list[str]) -> None:
    print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD))
    for name, shape in recipes().items():
        if not names or name in names:
            print("| " + " | ".join(row(name, shape)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
