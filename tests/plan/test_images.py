"""Images that a plan takes the rows of a step to have, and what it says where it knows of none."""

import json
from dataclasses import replace

import pytest

from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan, resolve_plan
from dtrain.commands.plan.report import text
from dtrain.commands.plan.step import plan_step
from dtrain.data.images.processor import Layout
from dtrain.recipe.schema import DataSource
from dtrain.training.full_rows import split_row
from dtrain.training.setup.data import DocumentImages, densest_images
from tests.data.makers import write_jsonl
from tests.pictures import picture_recipe, write_model


def image(tokens: int) -> Layout:
    return Layout(8, 8 * tokens, (1, 2, 2 * tokens), tokens)


def test_a_row_has_the_images_of_the_document_with_the_most_patches():
    sizes = [(10, [image(3)]), (40, [image(8), image(1)]), (100, [image(20)]), (9, [])]
    documents = [DocumentImages(tokens, images) for tokens, images in sizes]
    assert densest_images(documents, 100, packed=False) == (image(20),)
    assert densest_images(documents, 100, packed=True) == (image(3),) * 10
    only_images = DocumentImages(5, [image(5)])
    assert densest_images([only_images], 17, packed=True) == (image(5),) * 3
    assert densest_images([only_images], 16, packed=True) == (image(5),) * 2  # a token of text before each half


def test_images_stand_within_the_documents_of_their_row():
    for images in ([], [image(3)], [image(3)] * 10, [image(60)], [image(1), image(60)], [image(97), image(1)]):
        for length in (100, 101):
            (first, some), (second, others) = split_row(images, length, 2)
            assert first + second == length and [*some, *others] == images
            assert sum(each.tokens for each in some) < first and sum(each.tokens for each in others) < second
    assert [tokens for tokens, _ in split_row([image(3)] * 2, 101, 2)] == [51, 50]
    assert split_row([image(3)], 20, 1) == [(20, [image(3)])]


def test_a_plan_says_what_images_it_takes_rows_to_have(tmp_path):
    write_model(tmp_path / "qwen3-vl", weights=False)
    recipe = picture_recipe(tmp_path, "launch.device=cpu")
    page = text(make_plan(recipe, 1, GPUS["h100"]))
    assert (
        "images: every row is assumed to have 2 images of " in page and "the most by the first rows of data.tr" in page
    )
    assert "of these, vision tower" in page and "train.vision=frozen" in page

    plain = write_jsonl(tmp_path / "plain.jsonl", [{"messages": [{"role": "user", "content": "a"}] * 2}])
    reasons = {str(plain): "the first rows of data.train have none", "none.jsonl": "cannot be read"}
    for path, why in reasons.items():
        spec = resolve_plan(replace(recipe, data=replace(recipe.data, train=DataSource(path=path))), 1, "cpu")
        assert not spec.has_images and not spec.row_images
        assert len(spec.notes) == 1 and spec.notes[0].startswith("images are left out: ") and why in spec.notes[0]


@pytest.mark.slow
def test_few_layers_stand_for_all_where_the_first_add_features_of_the_tower(tmp_path):
    file = write_model(tmp_path / "qwen3-vl", weights=False) / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {"num_hidden_layers": 14, "layer_types": None}
    config["vision_config"] |= {"depth": 5, "deepstack_visual_indexes": [*range(5)]}
    file.write_text(json.dumps(config))
    recipe = picture_recipe(tmp_path, "launch.device=cpu", "train.global_batch=1", "train.micro_batch=1")
    spec = resolve_plan(recipe, 1, "cpu")
    assert plan_step(spec) == plan_step(spec, whole=True)
