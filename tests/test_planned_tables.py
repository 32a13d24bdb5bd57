"""The tables of memory and GPUs on the pages are what the plan says."""

import json
import re

import pytest

from dtrain import recipe as config
from dtrain.commands.plan.hardware import USABLE
from dtrain.commands.plan.plan import resolve_plan
from dtrain.methods import load_recipe
from tests.documented import Directory
from tests.pages import ROOT
from tests.pictures import write_photo_rows
from tests.test_docs import page
from tools import plan_recipes

TABLES = {"memory": "recipes/README.md", "gpus": "docs/gpus.md"}


def planned_rows(kind):
    (table,) = [table for table in page(TABLES[kind]).tables if table[0][0] == "recipe"]
    return {row[0].strip("`"): row for row in table[1:]}


def test_every_recipe_is_named_and_those_of_models_are_planned():
    text = (ROOT / "recipes" / "README.md").read_text()
    of_models = set()
    for name, _ in config.shipped():
        base, _, kind = name.rpartition("-")
        named = name if kind == "sft" or base in ("", "quickstart") else f"{base}-sft"
        assert f"`{named}`" in text, name
        of_models |= {name} if base not in ("", "quickstart") else set()
    assert list(planned_rows("memory")) == list(plan_recipes.recipes("memory")) == sorted(of_models)
    assert list(planned_rows("gpus")) == list(plan_recipes.recipes("gpus"))


def test_the_plan_that_is_shown_is_the_plan_s(tmp_path):
    from tests import test_recipes as recipes

    (shown,) = [block.text for block in page("recipes/README.md").blocks if block.text.startswith("$ dtrain plan ")]
    command, *lines = shown.splitlines()
    name, path = command.split()[3:]
    model = tmp_path / path.removeprefix("model.path=")
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(recipes.MODELS[name][0]))
    found = Directory(tmp_path).expect(["plan", name, path]).splitlines()
    assert [line for line in lines if line not in ("...", *(line.rstrip() for line in found))] == []


# Of tied and quantized weights, a reference, experts, one rank and eight.
COMPUTED = (
    ("memory", "llama3.1-8b-qlora-sft"),
    ("memory", "qwen3-30b-a3b-sft"),
    ("gpus", "qwen3-0.6b-sft"),
)


# Tokens of a photo of 1024 × 768: squares of 32 pixels; of 48, as many of the same shape as 280 have room for.
PHOTO = {"qwen3-vl-4b": 24 * 32, "qwen3.5-0.8b": 24 * 32, "gemma4-e4b": 14 * 19}


@pytest.mark.parametrize("model", PHOTO)
def test_rows_of_recipes_for_images_are_planned_full_of_photos(model, tmp_path):
    name = f"{model}-images-sft"
    rows = write_photo_rows(tmp_path, plan_recipes.recipes("memory")[name])
    recipe = load_recipe(name, [f"model.path={tmp_path}", f"data.train.path={rows}", f"run.dir={tmp_path}/run"])
    images = resolve_plan(recipe, recipe.launch.nproc, "cpu").row_images
    tokens = [image.tokens for image in images]
    assert set(tokens) == {PHOTO[model]} and sum(tokens) > 0.9 * recipe.data.max_length


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "name"), COMPUTED)
def test_rows_of_the_tables_of_recipes_are_the_plan_s(kind, name):
    assert plan_recipes.row(kind, name) == planned_rows(kind)[name]


def test_the_rows_of_the_tables_of_recipes_agree_with_themselves_and_the_recipes():
    for name, row in planned_rows("memory").items():
        recipe = load_recipe(name)
        assert int(row[1]) == recipe.launch.nproc and int(row[2].split()[0]) >= 1, name
        *parts, peak = (0.0 if cell == "–" else float(cell) for cell in row[3:])
        assert sum(parts) == pytest.approx(peak, abs=0.05 * (len(parts) + 1)), name
    for name, row in planned_rows("gpus").items():
        for peak, gpu in ((row[1], row[2]), (row[4], row[5])):
            gib = float(peak.split()[0])
            holding = [size for size in plan_recipes.SIZES if gib * 2**30 <= plan_recipes.MEMORY[size] * USABLE]
            assert gpu == (f"{holding[0]} GB" if holding else "–"), name


def fitting():
    """GPUs, model, keys -> the row of docs/gpus.md that says what it needs."""
    (table,) = [table for table in page("docs/gpus.md").tables if table[0] == list(plan_recipes.HEADS["fits"])]
    return {(row[0], row[1], row[2].strip("`–")): row for row in table[1:]}


def test_the_models_of_each_gpu_in_the_readme_are_those_that_were_planned():
    (table,) = [table for table in page("README.md").tables if table[0][0] == "GPU"]
    told, planned = {}, {}
    assert list(fitting()) == list(plan_recipes.FITS)
    for gpus, *cells in table[1:]:
        for place, cell in enumerate(cells):
            told[gpus.partition(" (")[0], place] = re.findall(r"([\d.]+B), (\d+) GiB", cell)
            assert len(re.findall("GiB", cell)) == len(told[gpus.partition(" (")[0], place])
    for (gpus, model, keys), row in fitting().items():
        place = 2 if "nf4" in keys else 1 if "lora" in keys else 0
        figure = model.rpartition("-")[2], f"{float(row[3].split()[0]):.0f}"
        planned.setdefault((gpus, place), []).append(figure)
    assert told == planned


@pytest.mark.processes
def test_what_fits_a_gpu_is_the_plan_s():
    row = plan_recipes.FITS[1]
    assert plan_recipes.fits(*row) == fitting()[row]
