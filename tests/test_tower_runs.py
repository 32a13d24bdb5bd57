"""Runs that choose what is trained of a vision tower by name: they train that alone, and resume exactly."""

import pytest

from dtrain.base.errors import UserError
from tests.data.makers import write_jsonl
from tests.pictures import chat, picture_recipe
from tests.problem_lines import preflight
from tests.running import metrics, run, weights

pytestmark = pytest.mark.slow

CHOICES = {
    "parameters": ["train.vision=all", "train.train_only=['model.visual.*']"],
    "adapter": ["lora={rank: 2, target: '.*visual.*(qkv|linear_fc1)'}"],
}
ALL = {**CHOICES, "all": ["train.vision=all"]}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_of_the_tower_alone_resumes(tmp_path, choice):
    overrides = [*CHOICES[choice], "checkpoint.every=2", "model.init=pretrained"]
    whole = picture_recipe(tmp_path, *overrides, name="whole")
    assert not preflight(whole, 1)
    run(whole)
    assert all(".visual." in name for name in weights(whole))
    again = picture_recipe(
        tmp_path, *overrides, f"checkpoint.resume={whole.run.directory}/checkpoints/step-2", name="again"
    )
    run(again)
    assert [row["loss"] for row in metrics(again)] == [row["loss"] for row in metrics(whole)][2:]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("parameters", "train.vision=all: no data have images"),
        ("adapter", "only layers of the vision tower, and the data have no images. Name other layers"),
        ("all", "no data have images, so the model is built without its vision tower. Set train.vision=frozen"),
    ],
)
def test_without_images_there_is_no_tower_to_train(tmp_path, choice, words):
    recipe = picture_recipe(tmp_path, *ALL[choice], "model.init=pretrained")
    write_jsonl(tmp_path / "rows.jsonl", [chat("What is two and two?") for _ in range(12)])
    with pytest.raises(UserError, match=words.replace("*", r"\*")):
        run(recipe)
