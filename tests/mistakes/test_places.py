"""`validate` and `run` say the same words of a recipe's files and devices; what validate passes, run trains."""

import json
import shutil
import sys

import pytest

from dtrain.commands.cli import main
from dtrain.training import load_recipe
from tests.mistakes import Mistake, write_sound
from tests.mistakes.places import METHODS, PLACES
from tests.tiny import save_weights, write_model

SOUND = (
    ("sft", ()),
    ("sft", ("model.path={root}/whole", "model.init=pretrained", "lora={rank: 2}")),
    ("sft", ("train.steps=null", "train.epochs=1", "train.global_batch=auto", "data.val.path={root}/rows.jsonl")),
    ("dpo", ("dpo.reference={root}/whole",)),
    ("grpo", ("grpo.rewards=[{fn: math_exact, kwargs: {column: wanted}}]",)),
    ("grpo", ("grpo.rewards=[{fn: rewards_of_mine.takes_any}]",)),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a sound recipe of each method, and with models whose weights are not."""
    root = tmp_path_factory.mktemp("places")
    write_sound(root)
    whole = save_weights(write_model(root / "whole")) / "model.safetensors"
    for name, changes in {"wide": {"hidden_size": 64}, "deep": {"num_hidden_layers": 3}}.items():
        shutil.copy(whole, write_model(root / name, **changes))
    shutil.copy(whole, write_model(root / "shallow", num_hidden_layers=1))
    (write_model(root / "cut") / "model.safetensors").write_bytes(whole.read_bytes()[:-100])
    (write_model(root / "damaged") / "model.safetensors").write_bytes(b"no safetensors")
    for name, places in {"sharded": ["one"], "gone": ["one", "two"]}.items():
        shutil.copy(whole, write_model(root / name) / "one.safetensors")
        table = {"weight_map": {f"nowhere.{place}": f"{place}.safetensors" for place in places}}
        (root / name / "model.safetensors.index.json").write_text(json.dumps(table))
    (root / "runs" / "used").mkdir(parents=True)
    (root / "runs" / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    (root / "runs" / "used" / "config.yaml").write_text("method: sft\n")
    return root


@pytest.fixture
def answer(root, capsys, monkeypatch):
    """Status of `dtrain COMMAND` on a recipe with the mistake, and the lines that it refused it with."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])

    def answer(mistake: Mistake, command: str) -> tuple[int, list[str]]:
        mistake.write(root)
        status = main([command, str(root / f"{mistake.base}.yaml"), *mistake.words(root)])
        said = capsys.readouterr().err.rpartition("dtrain: ")[2].splitlines()
        return status, [line.strip().removeprefix("- ") for line in said if not line.startswith("the recipe has")]

    return answer


@pytest.mark.parametrize("mistake", PLACES, ids=lambda one: one.name)
def test_validate_and_run_refuse_in_the_same_words(mistake, root, answer):
    status, said = answer(mistake, "validate")
    assert status == 1 and not [words for words in mistake.says if words not in "\n".join(said)], said
    again, told = answer(mistake, "run")
    assert again == 1 and told and set(told) <= set(said), (told, said)
    assert not (root / "runs" / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("base", "words"), SOUND, ids=lambda one: one if isinstance(one, str) else " ".join(one)[:60])
def test_what_validate_passes_reaches_its_steps(base, words, root, answer):
    number = SOUND.index((base, words))
    mistake = Mistake((*words, f"run.name=sound-{number}"), (), base=base)
    if "rewards_of_mine" in str(words):
        mistake = Mistake(mistake.typed, (), {"rewards_of_mine.py": "def takes_any(completions, **columns):\n"
                                              "    return [0.0 for _ in completions]\n"}, base)  # fmt: skip
    assert answer(mistake, "validate")[0] == 0
    assert not (root / "runs" / f"sound-{number}").exists()  # nothing was started
    assert answer(mistake, "run")[0] == 0
    rows = (root / "runs" / f"sound-{number}" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) >= 10


def test_all_mistakes_are_told_at_once(answer):
    several = ("grpo.beta=0.1", "launch.device=cuda", "metrics.wandb=mine", "model.path={root}/cut",
               "model.init=pretrained", "data.train.path={root}/chat.jsonl")  # fmt: skip
    chat = next(one.files for one in PLACES if "chat.jsonl" in one.files)
    _, said = answer(Mistake(several, (), chat), "validate")
    for words in ("grpo.beta", "launch.device=cuda", "metrics.wandb", "cut short", "chat.jsonl:1"):
        assert any(words in line for line in said), (words, said)
    # What the text of the recipe shows is answered first, and at once.
    _, said = answer(Mistake((*several, "train.stpes=1", "lora=1"), (), chat), "validate")
    assert "train.stpes" in said[0] and "lora=1" in said[1] and len(said) == 3, said


def test_a_saved_recipe_holds_the_sections_of_all_methods_at_their_defaults(root):
    assert all(one.typed[0].split(".")[0] != one.base for one in METHODS)
    loaded = load_recipe(root / "sft.yaml")
    assert loaded.unused_keys == [] and load_recipe(load_recipe({}, ["grpo.beta=0.1"])).unused_keys == ["grpo.beta"]
