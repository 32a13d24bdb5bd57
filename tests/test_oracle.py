"""Ten AdamW steps of SFT beside the same steps written by hand on transformers' model: loss, grad norm and weights."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dtrain.data.rows.rows import Batches
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.training import load_recipe
from tests.running import run, trajectory
from tests.tiny import write_model, write_rows

transformers = pytest.importorskip("transformers")

STEPS, ROWS, LR, DECAY = 10, 6, 5e-3, 0.1


def by_hand(model, batches, dft=False, smoothing=0.0):
    """The trajectory [(loss, grad norm, token accuracy)] and final weights of transformers' model, whose parameters
    that require a gradient are trained. A batch is a list of documents (input_ids, labels), labels shifted already.
    dft: each token's loss is weighted by its own probability, as TRL 1.16 has it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, STEPS, min_lr_rate=0.1)
    trajectory = []
    for documents in batches:
        count = sum(sum(label != -100 for label in labels) for _, labels in documents)
        total, correct = 0.0, 0
        for ids, labels in documents:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            nll = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels), reduction="none", label_smoothing=smoothing
            )
            correct += (logits.argmax(-1) == torch.tensor(labels)).sum().item()
            loss = (nll * nll.neg().exp().detach() if dft else nll).sum() / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trajectory.append((total, norm.item(), correct / count))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return trajectory, model.state_dict()


def padded_batches(path):
    """The rows in the order of the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    documents = [(row["input_ids"], row["labels"][1:] + [-100]) for row in rows]
    return [documents[start : start + ROWS] for start in range(0, STEPS * ROWS, ROWS)]


def packed_batches(recipe):
    """The documents that share the rows of each packed batch: which ones is not what this test is about."""
    tokenizer = Tokenizer.from_directory(recipe.model.path)
    rows = open_rows(recipe.data, tokenizer=tokenizer, progress=False, print_line=lambda line: None)
    batches = []
    for batch in islice(Batches(rows, global_batch=ROWS), STEPS):
        documents = []
        for row in batch.rows:
            for document in row["seq_ids"].unique():
                inside = row["seq_ids"] == document
                documents.append((row["input_ids"][inside].tolist(), row["labels"][inside].tolist()))
        batches.append(documents)
    return batches


@pytest.mark.parametrize("family, packing", [("llama", True), ("qwen2", True), ("qwen3", False), ("gemma3", True)])
def test_ten_steps_equal_transformers(tmp_path, family, packing):
    assert_equal(tmp_path, family, packing)


def test_ten_steps_of_dft_equal_transformers(tmp_path):
    assert_equal(tmp_path, "llama", False, sft={"loss": "dft"})


def test_ten_steps_with_label_smoothing_equal_transformers(tmp_path):
    assert_equal(tmp_path, "gemma3", False, sft={"label_smoothing": 0.1})


FROZEN = {  # keys of `train`, and whether a parameter of that name is trained; qwen3's head is tied
    "the last layer": ({"train_only": ["model.layers.1.*"]}, lambda name, tied: name.startswith("model.layers.1.")),
    "not embedding and norms": (
        {"freeze": ["*embed_tokens*", "*norm*"]},
        lambda name, tied: "embed" not in name and "norm" not in name,
    ),
    "norms": ({"train_only": ["*norm.weight"]}, lambda name, tied: name.endswith("norm.weight")),
    "the head": (
        {"train_only": ["model.layers.*", "lm_head.weight"], "freeze": ["model.layers.*"]},
        lambda name, tied: name.startswith("lm_head") or (tied and "embed_tokens" in name),
    ),
}


# Of a tied head and of an untied one what they do not share.
@pytest.mark.parametrize(
    ("case", "family"),
    [("the last layer", "qwen3"), ("not embedding and norms", "llama"), ("norms", "llama")]
    + [("the head", family) for family in ("qwen3", "llama")],
)
def test_ten_steps_of_some_parameters_equal_transformers(tmp_path, case, family):
    section, trains = FROZEN[case]
    tied = family == "qwen3"
    assert_equal(tmp_path, family, tied, section, lambda name: trains(name, tied))


def prepared(tmp_path, family, packing, train=None, **sections):
    """transformers' model with random weights, a recipe of ten steps that trains them, and the path of its rows."""
    directory = write_model(tmp_path / "model", family, tied=family in ("qwen3", "gemma3"))
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    source.save_pretrained(directory)
    path = write_rows(tmp_path / "rows.jsonl", count=STEPS * ROWS, longest=20)
    recipe = load_recipe(
        {
            "run": {"name": "run", "dir": str(tmp_path / "runs")},
            "model": {"path": str(directory)},
            "data": {"train": {"path": str(path)}, "max_length": 40 if packing else 20, "packing": packing},
            "train": {"steps": STEPS, "global_batch": ROWS, "micro_batch": 3, "dtype": "float32", **(train or {})},
            "optimizer": {"lr": LR, "weight_decay": DECAY},
            "scheduler": {"warmup_steps": 3},
            "checkpoint": {"every": None},
            "metrics": {"tensorboard": False},
            **sections,
        },
        ["data.shuffle=false"],
    )
    return source, recipe, path


def assert_equal(tmp_path, family, packing, section=None, trains=lambda name: True, **sections):
    """Ten steps of a recipe, `section` in its `train`, and the same by hand."""
    source, recipe, path = prepared(tmp_path, family, packing, train=section, **sections)
    directory = recipe.model.path
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    batches = packed_batches(recipe) if packing else padded_batches(path)
    asked = recipe.sft
    expected, weights = by_hand(model, batches, dft=asked.loss == "dft", smoothing=asked.label_smoothing)
    start = source.state_dict()
    run(recipe)
    for (loss, norm, *_, accuracy), (want, want_norm, want_accuracy) in zip(trajectory(recipe), expected, strict=True):
        assert accuracy == want_accuracy
        assert abs(loss - want) <= 1e-5 * want
        assert abs(norm - want_norm) <= 1e-4 * want_norm
    exported = load_file(Path(recipe.run.dir) / "run" / "export" / "model.safetensors")
    for name, value in exported.items():
        # Of the weight and of the way that Adam can go: it makes steps of a gradient that is zero but for rounding.
        scale = weights[name].abs().max() + STEPS * LR
        assert (value - weights[name]).abs().max() <= 1e-4 * scale, name
        assert trains(name) or torch.equal(value, start[name]), name
