"""Rows with images: every way to write them, their tokens, labels and truncation, the cache, and what is refused."""

import base64
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.errors import UserError
from dtrain.data.images.files import ImageRecord
from dtrain.data.images.reader import ImageReader
from dtrain.data.rows.rows import Batches
from dtrain.data.sources.sources import open_file_checks, open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe.schema import Data, DataSource
from tests.data.images.makers import encoded, picture, png_that_claims
from tests.data.makers import write_jsonl
from tests.pictures import chat, write_model, write_pictures

QUESTION = "What is it, and why?"
ANSWER = {"role": "assistant", "content": "two and two"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models without weights, by family."""
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family, weights=False) for family in ("qwen3-vl", "gemma3")}


def rows_of(model: Path, file: Path, cache: Path | None = None, kind: str = "examples", lines=None, **options):
    """The opened rows of `file`, one document each and in the file's order; options: of the section data."""
    section = Data(train=DataSource(path=str(file)), packing=False, shuffle=False, num_workers=1)
    for name, value in options.items():
        setattr(section, name, value)
    say = (lambda line: None) if lines is None else lines.append
    tokenizer = Tokenizer.from_directory(model)
    return open_rows(section, tokenizer=tokenizer, cache_dir=cache, progress=False, print_line=say, kind=kind, epochs=1)


@pytest.mark.parametrize(
    ("row", "reads_images"),
    [({"text": QUESTION}, False), ({"input_ids": [1, 2]}, False), ({"messages": [ANSWER]}, True)],
)
def test_rows_that_have_no_messages_read_no_images(models, tmp_path, row, reads_images):
    section = Data(train=DataSource(path=str(write_jsonl(tmp_path / "rows.jsonl", [row]))))
    (look,) = open_file_checks(section, tokenizer=Tokenizer.from_directory(models["qwen3-vl"]))
    assert (look.encoder.images is not None) == reads_images


def only(model: Path, directory: Path, row: dict, name: str = "rows.jsonl", **options):
    """What the one document of `row` is, of a file in `directory`."""
    rows = rows_of(model, write_jsonl(directory / name, [row]), **options)
    return next(rows.iterate())


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def part(image):
    return {"type": "image", "image": image}


TEXT = {"type": "text", "text": QUESTION}


def uri(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


WAYS = {
    "a path": lambda at: user(part("0.png"), TEXT),
    "a path of its own": lambda at: user({"type": "image", "path": "0.png"}, TEXT),
    "an absolute path": lambda at: user(part(str(at / "0.png")), TEXT),
    "a data URI": lambda at: user(part(uri(at / "0.png")), TEXT),
    "OpenAI's": lambda at: user({"type": "image_url", "image_url": {"url": uri(at / "0.png")}}, TEXT),
    "a file URI": lambda at: user({"type": "image", "url": (at / "0.png").as_uri()}, TEXT),
    "datasets'": lambda at: user(part({"bytes": None, "path": "0.png"}), TEXT),
    "bare parts and a column": lambda at: user({"type": "image"}, TEXT) | {"images": ["0.png"]},
    "placeholders and a column": lambda at: {
        "messages": [{"role": "user", "content": f"<image>{QUESTION}"}, ANSWER], "images": ["0.png"],
    },
    "a column alone": lambda at: {"messages": [{"role": "user", "content": QUESTION}, ANSWER], "images": "0.png"},
    "sharegpt": lambda at: {
        "conversations": [
            {"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": ANSWER["content"]},
        ],
        "images": ["0.png"],
    },
    "alpaca": lambda at: {"instruction": f"<image>{QUESTION}", "output": ANSWER["content"], "images": ["0.png"]},
    "prompt and completion": lambda at: {
        "prompt": [{"role": "user", "content": [part("0.png"), TEXT]}], "completion": [ANSWER],
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_an_image_is_the_same_row(models, tmp_path, way):
    write_pictures(tmp_path)
    first = only(models["qwen3-vl"], tmp_path, WAYS["a path"](tmp_path), "first.jsonl")
    row = only(models["qwen3-vl"], tmp_path, WAYS[way](tmp_path))
    assert first["grids"].tolist() == [[1, 4, 4]]
    assert row.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(row[name], value), name


def test_bytes_of_parquet(models, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    write_pictures(tmp_path)
    image = {"bytes": (tmp_path / "0.png").read_bytes(), "path": "elsewhere.png"}
    messages = [{"role": "user", "content": f"<image>{QUESTION}"}, ANSWER]
    table = pyarrow.Table.from_pylist([{"messages": messages, "images": [image]}] * 2)
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = rows_of(models["qwen3-vl"], tmp_path / "rows.parquet", tmp_path / "cache")
    first = only(models["qwen3-vl"], tmp_path, WAYS["a path"](tmp_path))
    for row in rows.iterate():
        assert torch.equal(row["pixels"], first["pixels"])
        assert torch.equal(row["input_ids"], first["input_ids"])
    (stored,) = (tmp_path / "cache").glob("*/image_bytes.bin")
    assert stored.read_bytes() == image["bytes"]  # once, as it came


def test_tokens_are_those_of_the_expanded_text_and_never_trained(models, tmp_path):
    """The ids are those of the tokenizers library, of the text with each image's tokens in it."""
    write_pictures(tmp_path)
    row = user(part("0.png"), {"type": "text", "text": " or "}, part("2.png"), TEXT)
    texts = {
        "qwen3-vl": "<|im_start|>user\n<|vision_start|>{0}<|vision_end|> or <|vision_start|>{1}<|vision_end|>{2}"
        "<|im_end|>\n<|im_start|>assistant\n{3}<|im_end|>\n",
        "gemma3": "<bos><start_of_turn>user\n\n\n<start_of_image>{0}<end_of_image>\n\n or "
        "\n\n<start_of_image>{1}<end_of_image>\n\n{2}<end_of_turn>\n<start_of_turn>model\n{3}<end_of_turn>\n",
    }
    counts = {"qwen3-vl": ("<|image_pad|>", 4, 5), "gemma3": ("<image_soft_token>", 9, 9)}
    for family, (token, *numbers) in counts.items():
        made = only(models[family], tmp_path, row, loss_on="all")
        tokenizer = Backend.from_file(str(models[family] / "tokenizer.json"))
        runs = [token * number for number in numbers]
        text = texts[family].format(*runs, QUESTION, ANSWER["content"])
        expected = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
        assert torch.equal(made["input_ids"], expected)
        is_image = expected == tokenizer.token_to_id(token)
        assert int(is_image.sum()) == sum(numbers)
        assert torch.equal(made["labels"][:-1] == IGNORE_INDEX, is_image[1:])


def test_a_placeholder_in_the_words_of_a_user_is_text(models, tmp_path):
    write_pictures(tmp_path)
    row = user(part("0.png"), {"type": "text", "text": "<|image_pad|> <image> <|im_end|>"})
    made = only(models["qwen3-vl"], tmp_path, row)
    assert int((made["image_features"] >= 0).sum()) == 4
    tokenizer = Tokenizer.from_directory(models["qwen3-vl"])
    ends = (made["input_ids"] == tokenizer.vocabulary["<|im_end|>"]).sum()
    assert int(ends) == 2  # of two turns
    assert "<|image_pad|> <image> <|im_end|>" in tokenizer.decode(made["input_ids"].tolist())


def test_packed_rows_count_features_on_and_keep_each_document_s_places(models, tmp_path):
    write_pictures(tmp_path)
    alone = [chat("0.png", QUESTION), chat("What is two and two?"), chat("1.png", "Or ", "3.png")]
    file = write_jsonl(tmp_path / "rows.jsonl", alone)
    singles = list(rows_of(models["qwen3-vl"], file).iterate())
    (packed,) = rows_of(models["qwen3-vl"], file, packing=True).iterate()
    assert packed["grids"].tolist() == [grid for row in singles for grid in row["grids"].tolist()]
    assert torch.equal(packed["rotary_ids"], torch.cat([row["rotary_ids"] for row in singles]))
    places = packed["image_features"][packed["image_features"] >= 0]
    assert torch.equal(places, torch.arange(len(places)))
    assert torch.equal(packed["pixels"], torch.cat([row["pixels"] for row in singles if len(row["pixels"])]))


@pytest.mark.processes
def test_workers_change_nothing(models, tmp_path):
    write_pictures(tmp_path)
    chats = [chat("0.png", QUESTION), chat("What is two and two?"), chat("1.png", "Or ", "3.png")] * 2
    rows = rows_of(models["qwen3-vl"], write_jsonl(tmp_path / "rows.jsonl", chats))
    here = [batch.rows for batch in Batches(rows, global_batch=4)]
    there = [batch.rows for batch in Batches(rows, global_batch=4, num_workers=1)]
    for own, other in zip(sum(here, []), sum(there, []), strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name].flatten(), other[name].flatten()) for name in own)


@pytest.mark.parametrize(
    ("too_long", "max_length", "kept", "words"),
    [
        ("truncate", 45, 2, ["1 rows dropped"]),  # the third would end within its second image
        ("truncate", 40, 3, ["1 samples truncated"]),  # in front of it
        ("drop", 45, 2, ["1 rows dropped"]),
        ("error", 45, None, ["rows.jsonl:3", "data.max_length is 45"]),
        ("truncate", 9, None, ["1.png", "9 tokens", "data.image_max_pixels"]),
    ],
)
def test_no_image_is_cut(models, tmp_path, too_long, max_length, kept, words):
    """A row of which a cut leaves half an image is dropped; an image that is too large for any row is refused."""
    write_pictures(tmp_path)
    (tmp_path / "1.png").write_bytes(encoded(picture(24, 24)))
    last = chat("0.png", QUESTION, "1.png", answer="x")
    last["messages"].insert(0, {"role": "user", "content": "Say so. "})
    last["messages"].insert(1, {"role": "assistant", "content": "two"})
    file = write_jsonl(tmp_path / "rows.jsonl", [chat("0.png", "So "), chat("So it is"), last])
    lines = []
    if kept is None:
        with pytest.raises(UserError) as error:
            rows_of(models["qwen3-vl"], file, lines=lines, too_long=too_long, max_length=max_length)
        assert all(word in str(error.value) for word in words), error.value
        return
    rows = list(rows_of(models["qwen3-vl"], file, lines=lines, too_long=too_long, max_length=max_length).iterate())
    assert len(rows) == kept
    assert all(word in "\n".join(lines) for word in words), lines
    for row in rows:
        assert int((row["image_features"] >= 0).sum()) == int(row["grids"].prod(1).sum()) // 4


def test_a_cache_is_of_its_images(models, tmp_path):
    """Tokens are read again for the same images and processor alone; a file that changes within a run is refused."""
    write_pictures(tmp_path)
    file = write_jsonl(tmp_path / "rows.jsonl", [chat("0.png", QUESTION)])
    model, lines = models["qwen3-vl"], []
    first = rows_of(model, file, tmp_path / "cache", lines=lines)
    again = rows_of(model, file, tmp_path / "cache", lines=lines)
    assert again.fingerprint == first.fingerprint
    assert not [line for line in lines if "anew" in line]
    bound = rows_of(model, file, tmp_path / "cache", image_max_pixels=64)
    assert next(bound.iterate())["grids"].tolist() == [[1, 2, 2]]
    (tmp_path / "0.png").write_bytes(encoded(picture(16, 16, seed=9)))
    with pytest.raises(UserError, match="not the one that the run began with"):
        next(again.iterate())
    other = rows_of(model, file, tmp_path / "cache", lines=lines)
    assert any("0.png is another one now" in line and "made again" in line for line in lines)
    assert other.fingerprint != first.fingerprint
    (tmp_path / "0.png").unlink()
    with pytest.raises(UserError, match=r"rows.jsonl:1: image 1 of 1: 0.png: there is no such image"):
        rows_of(model, file, tmp_path / "cache")


def test_rows_of_equal_images_are_on_one_side_of_a_share(models, tmp_path):
    """A share of the rows for validation is drawn by the images' content, not by their names."""
    write_pictures(tmp_path)
    for number in range(40):
        (tmp_path / f"copy{number}.png").write_bytes((tmp_path / "0.png").read_bytes())
    chats = [chat(f"copy{number}.png", QUESTION) for number in range(40)] + [
        chat("2.png", f"Say {n} now") for n in "abc"
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", chats)
    counts = {split: 0 for split in ("train", "val")}
    for split in counts:
        section = Data(train=DataSource(path=str(file)), val=0.5, packing=False, num_workers=1)
        tokenizer = Tokenizer.from_directory(models["qwen3-vl"])
        rows = open_rows(section, split=split, tokenizer=tokenizer, progress=False, print_line=lambda line: None)
        counts[split] = sum(row["grids"].tolist() == [[1, 4, 4]] for row in rows.build(list(range(len(rows.samples)))))
    assert sorted(counts.values()) == [0, 40]


def test_images_of_a_row_that_is_read_twice_are_read_once(models, tmp_path):
    """As its content, which decides whether a share has it, and as its tokens."""
    write_pictures(tmp_path)
    reader = ImageReader(Tokenizer.from_directory(models["qwen3-vl"]), models["qwen3-vl"])
    first = reader.read(["0.png", "1.png"], tmp_path)
    assert reader.read(["0.png", "1.png"], tmp_path) is first
    (other,) = reader.read(["1.png"], tmp_path)
    assert other.image.digest == first[1].image.digest != first[0].image.digest
    with pytest.raises(UserError, match="no such image"):
        reader.read(["1.png"], tmp_path / "elsewhere")


def claims(height: int, width: int):
    return lambda at: (at / "big.png").write_bytes(png_that_claims(width, height)) and user(part("big.png"), TEXT)


BAD = {
    "no file": (lambda at: user(part("none.png"), TEXT), ["rows.jsonl:1", "image 1 of 1", "none.png", "no such image"]),
    "torn header": (
        lambda at: (at / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0") and user(part("torn.png"), TEXT),
        ["rows.jsonl:1", "torn.png", "is the file complete?"],
    ),
    "torn pixels": (
        lambda at: (at / "0.png").write_bytes((at / "0.png").read_bytes()[:-5]) and user(TEXT, part("0.png")),
        ["rows.jsonl:1", "image 1 of 1: 0.png: the image is torn", "is the file complete?"],
    ),
    "empty": (lambda at: (at / "no.png").write_bytes(b"") or user(part("no.png"), TEXT), ["no.png", "0 bytes"]),
    "no image": (lambda at: user(part("rows.jsonl"), TEXT), ["rows.jsonl", "cannot read this file as an image"]),
    "a bomb": (claims(9000, 9000), ["big.png", "81.0 megapixels", "data.image_most_pixels"]),
    "an aspect": (claims(1, 500), ["big.png", "200 times"]),
    "more placeholders": (
        lambda at: {"messages": [{"role": "user", "content": "<image> <image>"}, ANSWER], "images": ["0.png"]},
        ["2 places", "has 1"],
    ),
    "more images": (
        lambda at: {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": ["0.png", "1.png"]},
        ["1 places", "has 2"],
    ),
    "twice": (lambda at: user(part("0.png"), TEXT) | {"images": ["0.png"]}, ["Keep one of them"]),
    "a URL of nobody": (lambda at: user(part("http://127.0.0.1:9/0.png"), TEXT), ["image 1 of 1"]),
    "plain text": (lambda at: {"text": "two and two", "images": ["0.png"]}, ["texts take none"]),
    "a token by hand": (
        lambda at: {"messages": [{"role": "user", "content": [part("0.png")]}, {**ANSWER, "content": "<|image_pad|>"}]},
        ["2 times <|image_pad|> for 1 images"],
    ),
    "a kind": (lambda at: user({"type": "audio", "audio": "0.wav"}), ["messages[0].content[0]", "'audio'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_row_and_fix(models, tmp_path, name):
    make, words = BAD[name]
    write_pictures(tmp_path)
    with pytest.raises(UserError) as error:
        only(models["qwen3-vl"], tmp_path, make(tmp_path), cache=tmp_path / "cache")
    assert all(word in str(error.value) for word in words), error.value


def test_images_that_are_all_too_long_are_reported(models, tmp_path):
    write_pictures(tmp_path)
    image, text = (
        user(part("0.png"), {"type": "text", "text": QUESTION * 9}),
        {"messages": [user(TEXT)["messages"][0], ANSWER]},
    )
    length = len(only(models["qwen3-vl"], tmp_path, text)["input_ids"])
    lines: list[str] = []
    both = write_jsonl(tmp_path / "both.jsonl", [image, image, text])
    rows_of(models["qwen3-vl"], both, lines=lines, max_length=length, too_long="drop")
    assert any("every row with an image is left out as too long (2 rows)" in line for line in lines), lines
    images = write_jsonl(tmp_path / "images.jsonl", [image, image])
    with pytest.raises(
        UserError, match=rf"all 2 rows are left out, longer than data.max_length={length}.*image_max_pixels"
    ):
        rows_of(models["qwen3-vl"], images, max_length=length, too_long="drop")


def test_a_model_of_texts_refuses_images(models, tmp_path):
    write_pictures(tmp_path)
    model = write_model(tmp_path / "model", weights=False)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config["text_config"], "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* takes none .*or remove them"):
        only(model, tmp_path, user(part("0.png"), TEXT))


def test_methods_of_texts_refuse_images(models, tmp_path):
    write_pictures(tmp_path)
    with pytest.raises(UserError, match=r"trains on text only. Set method=sft, dpo or grpo"):
        only(models["qwen3-vl"], tmp_path, {**user(part("0.png"), TEXT), "label": True}, kind="labelled")


def test_notes_are_said_once(models, tmp_path):
    write_pictures(tmp_path)
    for number in (0, 1):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(16, 16, "CMYK"), "JPEG"))
    lines = []
    rows_of(
        models["qwen3-vl"], write_jsonl(tmp_path / "rows.jsonl", [chat("0.png", "1.png", QUESTION)] * 3), lines=lines
    )
    assert sum("CMYK" in line for line in lines) == 1
    assert "train data: 6 images in 24 of the tokens, which are not trained" in lines


def test_records_tell_equal_images(tmp_path):
    records = [ImageRecord("a", digest * 64, None, path="a") for digest in "0fa"]
    assert len({record.key for record in records}) == 3
    assert all(0 <= record.key < 2**63 for record in records)


def test_an_image_that_cannot_be_decoded_is_named_by_its_row(models, tmp_path):
    """Its file is whole, and its pixels are not what it says."""
    write_pictures(tmp_path)
    data = encoded(picture(16, 16), "TIFF", compression="tiff_lzw")
    (tmp_path / "1.png").write_bytes(data[:8] + b"\xff" * 40 + data[48:])
    file = write_jsonl(tmp_path / "rows.jsonl", [chat("0.png", QUESTION), chat("1.png", QUESTION)])
    rows = rows_of(models["qwen3-vl"], file).iterate()
    assert next(rows)["grids"].tolist() == [[1, 4, 4]]
    with pytest.raises(UserError, match=rf"^{file}:2: {tmp_path}/1.png: the image is torn"):
        next(rows)
