"""The tables of models and GPUs on the pages are what the plan and the table of models say."""

import json
import re

import pytest

from dtrain.commands.plan.choose import FREE_SHARE
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import resolve_plan
from dtrain.recipe import models
from dtrain.recipe.world import FASTEST_VALUES
from dtrain.training import load_recipe
from tests.documented import Directory
from tests.pictures import write_photo_rows
from tests.test_docs import page
from tests.test_recipes import MODELS
from tools import plan_recipes


def table(path, kind):
    """Rows of the table on a page that the tool makes."""
    (rows,) = [rows for rows in page(path).tables if rows[0] == list(plan_recipes.HEADS[kind])]
    return rows[1:]


def planned():
    """(GPUs, model, recipe with its keys) -> the row of docs/gpus.md."""
    return {(row[0], row[1], row[2].strip("`")): row for row in table("docs/gpus.md", "sizes")}


def test_what_models_need_beside_a_recipe_is_the_table_s():
    assert table("recipes/README.md", "models") == list(plan_recipes.models_rows())


def test_every_row_is_planned_and_fits_its_gpus():
    assert list(planned()) == list(plan_recipes.ROWS)
    names = {key.partition(".")[2] for key in FASTEST_VALUES}
    for (gpus, *_), row in planned().items():
        (gpu, _), chosen = plan_recipes.CARDS[gpus], dict(word.split("=") for word in row[3].strip("`").split())
        assert {"micro_batch"} <= chosen.keys() <= names and int(chosen["micro_batch"]) >= 1
        assert float(row[4].split()[0]) <= GPUS[gpu].memory_gib * (1 - FREE_SHARE)


# Tokens of a photo of 1024 × 768: squares of 32 pixels; of 48, as many of the same shape as 280 have room for.
PHOTO = {"qwen3-vl-4b": 24 * 32, "qwen3.5-0.8b": 24 * 32, "gemma4-e4b": 14 * 19}


@pytest.mark.parametrize("model", PHOTO)
def test_rows_with_images_are_planned_full_of_photos(model, tmp_path):
    rows = write_photo_rows(tmp_path, MODELS[model][0])
    keys = [*models.model_overrides(model, "images-sft"), f"model.path={tmp_path}", f"data.train.path={rows}"]
    recipe = load_recipe("sft", [*keys, f"run.dir={tmp_path}/run"])
    tokens = [image.tokens for image in resolve_plan(recipe, 1, "cpu").row_images]
    assert set(tokens) == {PHOTO[model]} and sum(tokens) > 0.9 * recipe.data.max_length


@pytest.mark.slow
@pytest.mark.processes
def test_a_row_is_what_the_plan_chooses():
    row = ("24 GB", "Qwen3-8B", "lora-sft")
    assert plan_recipes.sizes_row(*row) == planned()[row]


@pytest.mark.slow
@pytest.mark.processes
def test_the_plan_that_is_shown_is_the_plan_s(tmp_path):
    (shown,) = [block.text for block in page("recipes/README.md").blocks if block.text.startswith("$ dtrain plan ")]
    command, *lines = shown.splitlines()
    words = command.split()[2:]
    model = tmp_path / words[2].removeprefix("model.path=")
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(plan_recipes.shape_of(model.name)))
    printed = Directory(tmp_path).expect(words).splitlines()
    assert [line for line in lines if line not in ("...", *(line.rstrip() for line in printed))] == []


def test_the_models_of_each_gpu_are_those_that_were_planned():
    (rows,) = [rows for rows in page("docs/gpus.md").tables if rows[0][0] == "GPU" and "sft" in rows[0][1]]
    shown, expected = {}, {}
    for gpus, *cells in rows[1:]:
        for place, cell in enumerate(cells):
            if figures := re.findall(r"([\dAB.-]+), (\d+) GiB", cell):
                shown[gpus.partition(" (")[0], place] = figures
                assert len(re.findall("GiB", cell)) == len(figures)
    for (gpus, model, words), row in planned().items():
        place = {"sft": 0, "lora-sft": 1, "qlora-sft": 2}.get(words.split()[0])
        if place is not None:
            figure = model.split("-", 1)[1].removeprefix("3.1-").removeprefix("3.2-"), f"{float(row[4].split()[0]):.0f}"
            expected.setdefault((gpus, place), []).append(figure)
    assert shown == expected
