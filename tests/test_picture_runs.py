"""Runs on rows with images: transformers' losses, and on every mesh the losses and weights of one process."""

import json

import pytest
import torch
import transformers

from dtrain.base.batch import IGNORE_INDEX, collate
from dtrain.commands.cli import main
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe.schema import Recipe
from tests.models.vision.oracle import WideIslands, gemma3_images, gemma4_images
from tests.pictures import picture_recipe
from tests.running import assert_same, assert_same_weights, metrics, run, run_all, run_directory, weights

PLAIN = ("optimizer.weight_decay=0", "scheduler.name=constant", "train.max_grad_norm=null", "optimizer.eps=1e-3")


def inputs_of(family: str, rows: list, image_id: int) -> tuple[dict, torch.Tensor]:
    """What transformers' model takes of rows, and the labels, not shifted."""
    batch = collate(rows)
    ids = batch["input_ids"].masked_fill(batch["seq_ids"] < 0, 0)
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, 1:] = batch["labels"][:, :-1]
    pixels = torch.cat([row["pixels"] for row in rows if len(row["pixels"])]).double()
    grids = torch.cat([row["grids"] for row in rows])
    types = (ids == image_id).int()
    shared = {"input_ids": ids, "attention_mask": (batch["seq_ids"] >= 0).int()}
    if family == "gemma4":
        padded, places = gemma4_images(pixels, grids.tolist(), 2)
        return {**shared, "pixel_values": padded, "image_position_ids": places, "mm_token_type_ids": types}, labels
    if family == "gemma3":
        images = gemma3_images(pixels, grids.tolist(), 4)
        return {**shared, "pixel_values": images, "token_type_ids": types}, labels
    return {**shared, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": types}, labels


def losses_of_transformers(recipe: Recipe, family: str, frozen: str) -> list[float]:
    """The losses of a plain loop over transformers' model in float64, which trains all but a part of that name."""
    with WideIslands():
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            recipe.model.path, dtype=torch.float64, attn_implementation="eager"
        )
    for module in model.modules():
        if "ScaledWordEmbedding" in type(module).__name__:
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    parameters = [parameter for name, parameter in model.named_parameters() if frozen not in name]
    optimizer = torch.optim.AdamW(parameters, recipe.optimizer.lr, recipe.optimizer.betas, eps=1e-3, weight_decay=0)
    tokenizer = Tokenizer.from_directory(recipe.model.path)
    data = list(
        open_rows(recipe.data, tokenizer=tokenizer, progress=False, print_line=lambda line: None, epochs=1).iterate()
    )
    losses = []
    for start in range(0, 12, 4):
        inputs, labels = inputs_of(family, data[start : start + 4], model.config.image_token_id)
        with WideIslands():
            logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "vision", "frozen"),
    [
        ("qwen3-vl", "all", "nothing"),
        ("qwen2.5-vl", "all", "nothing"),
        ("gemma3", "projector", "vision_tower"),
        ("gemma4", "projector", "vision_tower"),
        ("qwen3.5", "frozen", "visual"),
    ],
)
def test_losses_are_those_of_transformers(tmp_path, family, vision, frozen):
    longest = 256 if family == "gemma4" else 128  # of whose images one has 70 tokens
    options = f"train.vision={vision}", f"data.max_length={longest}"
    recipe = run(picture_recipe(tmp_path, *PLAIN, *options, family=family))
    expected = losses_of_transformers(recipe, family, frozen)
    assert [row["loss"] for row in metrics(recipe)] == pytest.approx(expected, rel=1e-9)


# Name: family, overrides of every run, and of the mesh. Rows have one image, two, or none.
MESHES = {
    "packed": (
        "qwen3-vl",
        ["data.packing=true", "data.max_length=96", "train.vision=all"],
        ["parallel.tp=2", "parallel.cp=2", "train.micro_batch=1", "train.activation_checkpointing=full"],
    ),
    "padded": (
        "gemma3",
        ["train.vision=projector", "train.global_batch=8", "train.micro_batch=4"],
        ["parallel.cp=2", "parallel.cp_rotate=ring", "train.micro_batch=2", "data.num_workers=1"],
    ),
}


@pytest.mark.trap(
    "rotary positions of packed images built anew from rows that context parallel has padded",
    "radixark/miles #1296",
    "positions go on from one sample into the next",
    "each document has its own before it is packed, padded and cut: losses and weights of one process",
)
def test_a_mesh_has_the_losses_and_weights_of_one_process(tmp_path):
    saved = ("checkpoint.every=3", "optimizer.eps=1e-3")
    recipes, references = [], []
    for name, (family, shared, of_mesh) in MESHES.items():
        references.append(run(picture_recipe(tmp_path, *saved, *shared, family=family, name=f"{name}-alone")))
        recipes.append(picture_recipe(tmp_path, *saved, *shared, *of_mesh, family=family, name=name))
    for recipe, reference in zip(run_all(recipes, 4), references, strict=True):
        assert_same(recipe, reference, 1e-9)
        assert_same_weights(weights(recipe), weights(reference), 1e-9)


def test_the_command_eval_answers_as_a_run_does(tmp_path):
    rows, options = (
        tmp_path / "rows.jsonl",
        "every: 3, at_start: false, rewards: [{fn: text_exact}], sampling: {max_new_tokens: 8}",
    )
    recipe = run(picture_recipe(tmp_path, f"eval={{path: {rows}, {options}}}", "checkpoint.every=3"))
    directory, out = run_directory(recipe), tmp_path / "answers.jsonl"
    words = ["--dtype", "float64", "--reward", "text_exact", "--max-new-tokens", "8", "--device", "cpu"]
    assert main(["eval", str(directory), str(rows), "--out", str(out), *words]) == 0
    answers = [json.loads(line) for line in (directory / "evals.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["completion"] for row in again] == [row["text"] for row in answers]
    assert [row.get("images") for row in again] == [row.get("images") for row in answers]
    assert [len(row.get("images", ())) for row in again[:3]] == [1, 2, 0]
