"""What users see of images before a run, of it and in it: the preview, the opening lines, the plan, mfu."""

import io
import re

import pytest
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dtrain.commands.preview import preview
from dtrain.data.images.reader import ImageReader
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.models import from_pretrained
from dtrain.models.common.flops import flops_per_token
from dtrain.training import metrics as run_metrics
from tests.data.makers import write_jsonl
from tests.pictures import chat, picture_recipe, write_model, write_pictures, write_rows
from tests.running import metrics, run

BEGIN, END = "<|vision_start|>", "<|vision_end|>"


def previewed(recipe, samples: int, monkeypatch) -> str:
    """What the preview of a recipe prints; an image that it decodes is an error."""

    def refuse(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageReader, "pixels", refuse)
    out = io.StringIO()
    preview(recipe, samples=samples, out=out)
    return out.getvalue()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a model without weights, and rows with pictures of 16 x 16, 9 x 24, 40 x 12 ... pixels."""
    root = tmp_path_factory.mktemp("views")
    write_model(root / "qwen3-vl", weights=False)
    write_rows(root)
    return root


def test_a_preview_shows_images_as_marks_in_their_places(root, monkeypatch):
    """Sizes are multiples of the 8 pixels of a token, of which at most 9 fit into the processor's 24 x 24."""
    text = previewed(picture_recipe(root), 12, monkeypatch)
    assert "<|image_pad|>" not in text
    asked = text.split("--- row ")[1:]
    assert f"user\n{BEGIN}[image 0.png 16 × 16, 4 tokens]{END}What is it?<|im_end|>" in asked[0]
    two = (
        rf"Is it {BEGIN}\[image 1\.png \d+ × 8, \d tokens\]{END} or {BEGIN}\[image 3\.png 24 × 24, 9 tokens\]{END} and"
    )
    assert re.search(two, asked[1])
    assert "[image" not in asked[2] and "[[two and two" in asked[2]
    assert re.search(r"\[image 2\.png 40 × 8, 5 tokens\]", text)  # 40 pixels wide
    sizes = re.findall(r"\[image \d\.png (\d+) × (\d+), (\d+) tokens?\]", text)
    assert len(sizes) == 12 and all(int(wide) * int(tall) == 64 * int(tokens) for wide, tall, tokens in sizes)


def test_a_preview_of_packed_rows_and_of_pairs_gives_each_document_its_own_images(root, monkeypatch):
    packed = previewed(picture_recipe(root, "data.packing=true"), 1, monkeypatch)
    first = packed.split("--- row ")[1]
    rows = re.findall(r"rows\.jsonl:(\d+)", first.splitlines()[0])
    shown = [
        re.findall(r"image (\d)\.png", line) for line in first.splitlines() if "What is" in line or "Is it" in line
    ]
    expected = [{0: [n % 5], 1: [n % 5, (n + 2) % 5], 2: []}[n % 3] for n in (int(row) - 1 for row in rows)]
    assert [[int(name) for name in names] for names in shown[: len(expected)]] == expected

    names = write_pictures(root / "pairs")
    asked = [chat(name, "Which one?")["messages"][0] for name in names]
    rows = [{"prompt": [each], "chosen": "this one", "rejected": "that"} for each in asked]
    file = write_jsonl(root / "pairs" / "pairs.jsonl", rows)
    text = previewed(picture_recipe(root, "method=dpo", f"data.train.path={file}"), 2, monkeypatch)
    sides = re.findall(r"- (chosen|rejected):\n.*\n.*\[image (\d)\.png", text)
    assert sides == [("chosen", "0"), ("rejected", "0"), ("chosen", "1"), ("rejected", "1")]


@pytest.mark.slow
def test_a_run_says_its_tower_and_counts_its_flops(tmp_path, monkeypatch, capfd):
    """Of a step whose four rows show three pictures, one of them twice: in two micro-batches it is encoded twice, in
    one once."""
    monkeypatch.setattr(run_metrics, "model_flops_utilisation", lambda flops_per_sec, *_: flops_per_sec)
    counted = {}
    for size in (4, 2):
        name = f"of-{size}"
        options = ["train.vision=projector", "train.steps=1", f"train.micro_batch={size}"]
        recipe = run(picture_recipe(tmp_path, *options, name=name))
        (row,) = metrics(recipe)
        counted[size] = row["mfu"] * row["step_time"]
    printed = "".join(capfd.readouterr())
    whole = transformers.AutoModelForImageTextToText.from_pretrained(recipe.model.path)
    parts = {name: part.numel() for name, part in whole.model.visual.named_parameters()}
    trained = sum(count for name, count in parts.items() if "merger" in name)
    line = f"vision    {sum(parts.values()):,} parameters, {trained:,} of them trained (train.vision=projector)\n"
    assert printed.count(line) == 2 and "other parts" not in printed

    tokenizer = Tokenizer.from_directory(recipe.model.path)
    rows = list(
        open_rows(recipe.data, tokenizer=tokenizer, progress=False, print_line=lambda line: None, epochs=1).iterate()
    )
    model = from_pretrained(recipe.model.path, vision=True)
    lengths = [len(row["input_ids"]) for row in rows[:4]]
    text = sum(length * flops_per_token(model, length) for length in lengths)
    (tower,) = model.model.vision
    for part, parameter in tower.named_parameters():
        parameter.requires_grad = "merger" in part
    images = [
        (pixels, tuple(grid))
        for row in rows[:4]
        for pixels, grid in zip(row["pixels"].split(row["grids"].prod(1).tolist()), row["grids"].tolist(), strict=True)
    ]
    assert len(images) == 4  # pictures 0, 1, 3 and 3
    flops = []
    for pixels, grid in images:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            features = tower(pixels, [grid])
            (features.tokens.sum() + sum(added.sum() for added in features.deepstack.values())).backward()
        flops.append(counter.get_total_flops())
    for size, expected in ((4, sum(flops[:3])), (2, sum(flops))):
        assert counted[size] == pytest.approx(text + expected, rel=1e-9)
