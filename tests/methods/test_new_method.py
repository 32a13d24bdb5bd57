"""A method is one file and one entry of `METHODS`: a new one trains alike on one process and two, and as by hand."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from dtrain import models
from dtrain.base.errors import RecipeError
from dtrain.methods import Method
from dtrain.recipe import to_yaml
from dtrain.training import METHODS, load_recipe, method_class, recipe_keys
from tests.problem_lines import method_problems, preflight
from tests.running import metrics, run, trajectory, weights
from tests.tiny import save_weights, tiny_recipe, write_model, write_rows

FILE = Path(__file__).with_name("focal.py")
MOST_LINES = 60
GAMMA, STEPS, ROWS, RATE = 1.5, 4, 6, 0.05


@pytest.fixture(autouse=True)
def focal(monkeypatch):
    monkeypatch.setitem(METHODS, "focal", "tests.methods.focal:FocalMethod")


def recipe_at(root, *overrides, name="run"):
    """A recipe of a few steps of plain SGD on rows of the file's order, by a YAML file of its own."""
    model, rows, path = root / "model", root / "rows.jsonl", root / f"{name}.yaml"
    if not model.exists():
        save_weights(write_model(model, "llama", tied=False))
        write_rows(rows, count=STEPS * ROWS, longest=20)
    tree = {
        "method": "focal",
        "focal": {"gamma": GAMMA},
        "run": {"dir": str(root / "runs")},
        "model": {"path": str(model)},
        "data": {"train": {"path": str(rows)}, "max_length": 20, "packing": False, "shuffle": False},
        "train": {"steps": STEPS, "global_batch": ROWS, "micro_batch": 3, "dtype": "float64", "max_grad_norm": None},
        "optimizer": {"name": "sgd", "lr": RATE, "weight_decay": 0.0},
        "scheduler": {"name": "constant", "warmup": 0},
        "checkpoint": {"every": STEPS, "export": "none"},
        "metrics": {"tensorboard": False},
    }
    path.write_text(yaml.safe_dump(tree))
    return load_recipe(path, overrides)


def by_hand(recipe):
    """The losses of plain SGD on the dense model, and its weights at the end."""
    model = models.from_pretrained(recipe.model.path, dtype=torch.float64)
    rows = [json.loads(line) for line in Path(recipe.data.train.path).read_text().splitlines()]
    losses = []
    for start in range(0, len(rows), ROWS):
        lost = []
        for row in rows[start : start + ROWS]:
            labels, logits = torch.tensor(row["labels"][1:]), model(torch.tensor([row["input_ids"]]))[0, :-1]
            p = logits.softmax(-1)[labels >= 0, labels[labels >= 0]]  # [trained]
            lost.append(-((1 - p) ** GAMMA) * p.log())
        loss = torch.cat(lost).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("name", METHODS)
def test_every_entry_is_a_method_with_a_section_of_its_own(name):
    method = method_class(name)
    assert issubclass(method, Method) and method.about and method.measures
    assert fields(method.Section)
    assert method.Section.__doc__.startswith(f"`{name}`: ")


def test_it_is_one_file_of_few_lines():
    assert len(FILE.read_text().splitlines()) <= MOST_LINES


def test_its_keys_are_keys_of_a_recipe(tmp_path):
    recipe = recipe_at(tmp_path)
    assert "focal.gamma" in recipe_keys() and recipe.focal.gamma == GAMMA
    assert preflight(recipe, 1) == []
    assert load_recipe(yaml.safe_load(to_yaml(recipe))) == recipe and "sft" not in yaml.safe_load(to_yaml(recipe))
    with pytest.raises(RecipeError, match=r"focal\.gama is not a key of a recipe; did you mean focal\.gamma\?"):
        recipe_at(tmp_path, "focal.gama=1")
    with pytest.raises(RecipeError, match=r"focal\.gamma=much must be a number"):
        recipe_at(tmp_path, "focal.gamma=much")
    with pytest.raises(RecipeError, match=r"method=focl is not one of sft, .*, focal; did you mean focal\?"):
        recipe_at(tmp_path, "method=focl")
    (low,) = preflight(recipe_at(tmp_path, "focal.gamma=-1"), 1)
    assert low == "focal.gamma=-1.0 must be a finite number, at least 0"
    zero = recipe_at(tmp_path, "focal.gamma=0")
    assert preflight(zero, 1) == method_problems(zero)
    (other,) = preflight(recipe_at(tmp_path, "dpo.beta=1"), 1)
    assert other.startswith("dpo.beta is read only by method=dpo, and this recipe has method=focal")
    assert preflight(tiny_recipe(tmp_path, "focal.gamma=1"), 1)[0].startswith(
        "focal.gamma is read only by method=focal"
    )


def test_without_its_entry_it_is_no_method(tmp_path, monkeypatch):
    monkeypatch.delitem(METHODS, "focal")
    with pytest.raises(RecipeError, match=r"method=focal is not one of sft, dpo, kto, grpo, distill, reward"):
        recipe_at(tmp_path)


def test_two_ranks_train_as_one_and_as_by_hand(tmp_path):
    validates = [f"data.val.path={tmp_path / 'rows.jsonl'}", f"train.validate_every={STEPS}"]
    alone = run(recipe_at(tmp_path, *validates, name="one"))
    together = run(recipe_at(tmp_path, *validates, name="two"), 2)
    losses, expected = by_hand(alone)
    assert [row["loss"] for row in metrics(alone) if "loss" in row] == pytest.approx(losses, rel=1e-12)
    for one, two in zip(trajectory(alone), trajectory(together), strict=True):
        assert two == pytest.approx(one, rel=1e-9)
    last = [row for recipe in (alone, together) for row in metrics(recipe) if "val_loss" in row]
    assert last[1]["val_loss"] == pytest.approx(last[0]["val_loss"], rel=1e-9) and last[0]["val_token_accuracy"] >= 0
    for recipe in (alone, together):
        held = {name.removeprefix("model."): tensor for name, tensor in weights(recipe, STEPS).items()}
        for name, tensor in expected.items():
            torch.testing.assert_close(held[name], tensor.detach(), rtol=1e-9, atol=1e-12)
