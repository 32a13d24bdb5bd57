"""Checkpoints of a run with an adapter hold what is trained; they resume exactly, on the model that they were trained
on and on no other."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from dtrain.adapters.config import is_adapter
from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from tests.running import metrics, run, weights
from tests.tiny import save_weights, tiny_recipe, write_model

STEPS = ["train.steps=8", "train.micro_batch=4", "checkpoint.every=4", "model.init=pretrained"]
LORA = "lora={rank: 3, dora: true, dropout: 0.2, modules_to_save: [norm]}"


@pytest.fixture
def base(tmp_path):
    return save_weights(write_model(tmp_path / "base"))


def recipe_of(tmp_path, base, *overrides, name="run"):
    return tiny_recipe(tmp_path, f"model.path={base}", *STEPS, *overrides, name=name)


def losses(recipe):
    return [row["loss"] for row in metrics(recipe) if "loss" in row]


def test_a_step_holds_what_is_trained_and_its_state(tmp_path, base):
    held = weights(run(recipe_of(tmp_path, base, LORA)), 8)
    trained = {name.removeprefix("model.") for name in held if name.startswith("model.")}
    assert trained and all(is_adapter(name) or name.endswith("norm.weight") for name in trained)
    assert {name.rpartition(".")[0].removeprefix("optim.") for name in held if name.startswith("optim.")} == trained


def test_a_frozen_part_is_not_saved_where_files_hold_it(tmp_path, base):
    held = weights(run(recipe_of(tmp_path, base, "train.train_only=[model.layers.1.*]")), 8)
    assert {name.split(".layers.")[1][0] for name in held} == {"1"}


@pytest.mark.parametrize(("ranks", "overrides"), [(1, [LORA]), (2, ["train.train_only=[model.layers.1.*]"])])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, base, overrides, ranks):
    whole = run(recipe_of(tmp_path, base, *overrides, name="whole"))
    resume = f"checkpoint.resume={whole.run.directory}/checkpoints/step-4"
    again = run(recipe_of(tmp_path, base, *overrides, resume, *["parallel.tp=2"] * (ranks - 1), name="again"), ranks)
    if ranks == 1:
        assert losses(again) == losses(whole)[4:]
    assert losses(again) == pytest.approx(losses(whole)[4:], rel=1e-9)
    expected, found = weights(whole, 8), weights(again, 8)
    assert found.keys() == expected.keys()
    assert ranks > 1 or all(torch.equal(found[name], value) for name, value in expected.items())


def test_another_base_is_refused_and_the_same_elsewhere_is_not(tmp_path, base):
    run(recipe_of(tmp_path, base, LORA, "train.steps=4"))
    moved = shutil.copytree(base, tmp_path / "moved")
    run(recipe_of(tmp_path, moved, LORA, "train.steps=6"))
    assert len(losses(recipe_of(tmp_path, moved, LORA))) == 6
    save_weights(base, seed=1)
    with pytest.raises(UserError, match=r"model\.weights"):
        run(recipe_of(tmp_path, base, LORA))


def test_another_adapter_is_refused(tmp_path, base):
    run(recipe_of(tmp_path, base, LORA, "train.steps=4"))
    for change in ("lora.alpha=64", "lora.dropout=0.0"):
        with pytest.raises(UserError, match=r"(?s)lora.*checkpoint\.allow_changes=\[lora"):
            run(recipe_of(tmp_path, base, LORA, change))


OTHER_TENSORS = {
    "another rank": ([LORA], ["lora.rank=4"], "lora.rank=3"),
    "no magnitudes": ([LORA], ["lora.dora=false"], "lora.dora=true"),
    "other layers": ([LORA], ["lora.target=[q_proj]"], "lora.target=all-linear"),
    "no adapter": ([LORA], ["lora=null"], "lora={...} as it was"),
    "an adapter": ([], [LORA], "lora=null"),
    "fewer layers": ([], ["train.freeze=[model.layers.0.*]"], "train.freeze=[]"),
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_other_trained_tensors_are_no_resume_and_the_advice_works(tmp_path, base, case):
    """No key to allow is named, for it would not help. What the message names does: the first loss of the new run is
    that of the exported model in transformers."""
    before, change, back = OTHER_TENSORS[case]
    first = run(recipe_of(tmp_path, base, *before, "train.steps=4"))
    step = first.run.directory / "checkpoints" / "step-4"
    changed = [*before, *change, "train.steps=6"]
    for allowed in ("[]", "[lora,train]"):
        with pytest.raises(UserError, match=re.escape(f"Set {back} back")) as caught:
            run(recipe_of(tmp_path, base, *changed, f"checkpoint.allow_changes={allowed}"))
        assert f"dtrain export {step} OUT" in str(caught.value) and "allow_changes=" not in str(caught.value)
    assert main(["export", str(step), str(tmp_path / "out")]) == 0
    one_batch = ("data.packing=false", "train.global_batch=60", "train.steps=2")
    new = run(recipe_of(tmp_path, tmp_path / "out", *before, *change, *one_batch, name="new"))
    assert losses(new)[0] == pytest.approx(loss_by_transformers(tmp_path / "out", tmp_path / "rows.jsonl"), rel=1e-5)


def loss_by_transformers(directory, rows):
    """Return the mean loss of all trained tokens of tokenized rows."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for row in map(json.loads, rows.read_text().split("\n")[:-1]):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


def test_one_run_s_adapter_is_where_another_begins(tmp_path, base):
    """The adapter alone is taken, on the same base; the new run's saves hold no more than it."""
    first = run(recipe_of(tmp_path, base, LORA, name="first"))
    second = recipe_of(
        tmp_path, base, LORA, f"checkpoint.init_from={first.run.directory}", "optimizer.lr=1e-30", name="two"
    )
    run(second)
    before, after = weights(first, 8), weights(second, 8)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items() if name.startswith("model."))
    save_weights(base, seed=1)
    with pytest.raises(UserError, match="model.path"):
        run(recipe_of(tmp_path, base, LORA, f"checkpoint.init_from={first.run.directory}", name="three"))


def test_an_adapter_that_would_mean_another_model_is_refused(tmp_path, base):
    first = run(recipe_of(tmp_path, base, LORA, name="first"))
    changes = {
        "lora.alpha=64": "its layers, ranks or scales",
        "lora.rslora=true": "its layers, ranks or scales",
        "lora.modules_to_save=[]": "export it and set model.path",
    }
    for number, (change, words) in enumerate(changes.items()):
        start = f"checkpoint.init_from={first.run.directory}"
        with pytest.raises(UserError, match=words):
            run(recipe_of(tmp_path, base, LORA, start, change, name=f"{number}"))


def test_a_whole_run_s_weights_are_a_base_that_the_saves_then_hold(tmp_path, base):
    whole = run(recipe_of(tmp_path, base, name="whole"))
    went = [LORA, f"checkpoint.init_from={whole.run.directory}"]
    one = run(recipe_of(tmp_path, base, *went, name="one"))
    trained, held = weights(whole, 8), weights(one, 8)
    kept = [name for name in trained if name.startswith("model.") and not name.endswith("norm.weight")]
    assert all(torch.equal(held[name], trained[name]) for name in kept)
    cut = run(recipe_of(tmp_path, base, *went, "train.steps=4", name="cut"), 2)
    assert losses(cut) == pytest.approx(losses(one)[:4], rel=0.2)  # of another schedule
    resume = f"checkpoint.resume={one.run.directory}/checkpoints/step-4"
    again = run(recipe_of(tmp_path, base, LORA, resume, name="again"))
    assert losses(again) == losses(one)[4:]


def test_a_run_without_an_adapter_does_not_take_half_of_one(tmp_path, base):
    first = run(recipe_of(tmp_path, base, LORA, name="first"))
    with pytest.raises(UserError, match="export RUN OUT --merged"):
        run(recipe_of(tmp_path, base, f"checkpoint.init_from={first.run.directory}", name="two"))
