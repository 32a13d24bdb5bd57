"""DPO and GRPO on rows with images: the loss of transformers' logits, meshes, tables of the reference, and resumes."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.errors import Stopped
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe.schema import Recipe
from tests.data.makers import write_jsonl
from tests.methods.comparing import assert_same_run, rows_of, samples_of
from tests.models.vision.oracle import WideIslands
from tests.pictures import chat, picture_recipe, question, write_pictures, write_rows
from tests.running import interrupt, metrics, run, run_all, trajectory
from tests.test_picture_runs import inputs_of

TRAINED = ("train.vision=all", "optimizer.eps=1e-3", "checkpoint.every=20")


def write_pairs(directory: Path, count: int = 12) -> Path:
    """Pairs whose prompts have one picture, two, and none."""
    names = write_pictures(directory)
    rows = []
    for number in range(count):
        chosen, rejected = (
            chat(*question(number, names), answer=answer)["messages"]
            for answer in ("two and two " * (1 + number % 4), "so " * (1 + number % 3))
        )
        rows.append({"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]})
    return write_jsonl(directory / "pairs.jsonl", rows)


def dpo(root: Path, *overrides: str, name: str = "dpo", family: str = "qwen3-vl") -> Recipe:
    if not (root / "pairs.jsonl").exists():
        write_pairs(root)
    data = f"data.train.path={root / 'pairs.jsonl'}"
    return picture_recipe(root, "method=dpo", data, *TRAINED, *overrides, family=family, name=name)


def grpo(root: Path, *overrides: str, name: str = "grpo") -> Recipe:
    """Rollouts of two prompts × two completions, which two steps train on; a third step draws anew."""
    if not (root / "rows.jsonl").exists():
        write_rows(root)
    shape = ("grpo.prompts_per_step=2", "grpo.group_size=2", "grpo.updates_per_rollout=2", "grpo.beta=0.1")
    noisy = "grpo.kwargs={entropy_coef: 0.01}"  # else the first loss is 0 but for roundings
    drawn = ("grpo.rewards=[{fn: tests.methods.judges.even}]", "grpo.sampling.max_new_tokens=5")
    return picture_recipe(root, "method=grpo", *shape, *drawn, noisy, *TRAINED, *overrides, name=name)


def write_reference(root: Path, model: Path) -> Path:
    """The model with other weights."""
    directory = root / "reference"
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = {name: 0.8 * tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@torch.no_grad()
def sums_of_transformers(model: Path, family: str, rows: list) -> torch.Tensor:
    """Σ log p of each row's labels by transformers' model in float64."""
    with WideIslands():
        theirs = transformers.AutoModelForImageTextToText.from_pretrained(
            model, dtype=torch.float64, attn_implementation="eager"
        )
        inputs, labels = inputs_of(family, rows, theirs.config.image_token_id)
        logprobs = theirs(**inputs).logits[:, :-1].log_softmax(-1)
    labels = labels[:, 1:]
    of_labels = logprobs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(labels == IGNORE_INDEX, 0.0, of_labels).sum(1)


def test_the_first_loss_of_pairs_is_that_of_transformers_logits(tmp_path):
    """Against a reference of other weights, scored as training goes on and beforehand."""
    live = dpo(tmp_path, "train.steps=1")
    reference = write_reference(tmp_path, Path(live.model.path))
    shared = (f"dpo.reference={reference}", "dpo.beta=0.3", "train.steps=1")
    recipes = [dpo(tmp_path, *shared), dpo(tmp_path, *shared, "dpo.precompute=true", name="table")]
    tokenizer = Tokenizer.from_directory(live.model.path)
    rows = open_rows(
        live.data, tokenizer=tokenizer, progress=False, print_line=lambda line: None, kind="pairs", epochs=1
    )
    pairs = rows.build([0, 1, 2, 3])
    policy, other = (sums_of_transformers(path, "qwen3-vl", pairs) for path in (Path(live.model.path), reference))
    margins = (policy - other).view(-1, 2).diff(dim=1).neg()
    expected = -torch.nn.functional.logsigmoid(0.3 * margins).mean().item()
    for recipe in run_all(recipes):
        assert metrics(recipe)[0]["loss"] == pytest.approx(expected, rel=1e-9), recipe.run.name


def test_a_mesh_has_the_losses_and_weights_of_one_process(tmp_path):
    alone = [run(dpo(tmp_path, name="dpo-alone")), run(grpo(tmp_path, name="grpo-alone"))]
    mesh = ("parallel.tp=2", "train.micro_batch=1")
    recipes = [dpo(tmp_path, *mesh), grpo(tmp_path, *mesh)]
    for recipe, reference in zip(run_all(recipes, 4), alone, strict=True):
        assert_same_run(recipe, reference)


def test_a_rollout_that_is_resumed_has_its_images(tmp_path):
    whole, resumed = grpo(tmp_path, name="whole"), grpo(tmp_path, name="resumed")
    run(whole)
    with pytest.raises(Stopped, match="stopped after step"):
        interrupt(resumed, 1, 1)
    run(resumed)
    assert trajectory(resumed) == trajectory(whole)
    assert rows_of(resumed) == rows_of(whole)
    assert samples_of(resumed) == samples_of(whole)
