"""Images of prompts on the report's page: thumbnails of the files that the run read, names of all others."""

import base64
import hashlib
import json
import sys
from io import BytesIO

import pytest
from PIL import Image

from dtrain.commands.report import page as page_module
from dtrain.commands.report.page import Pictures, page, page_state
from dtrain.commands.report.run_files import open_runs
from dtrain.training.metrics.records import Answer, PromptImage, prompt_text
from tests.report.test_report import HOSTILE, ROWS, Read, write_run


def image_of(path, width=600, height=300, color=(200, 30, 90)) -> dict:
    """A picture of one colour, and how a line of samples names it."""
    Image.new("RGB", (width, height), color).save(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"name": path.name, "path": str(path), "digest": digest}


def opened(uri: str) -> Image.Image:
    kind, _, text = uri.partition(",")
    assert kind == "data:image/jpeg;base64"
    return Image.open(BytesIO(base64.b64decode(text, validate=True)))


def shown(read: Read) -> list[str]:
    return [given["src"] for tag, given in read.tags if tag == "img"]


def test_a_prompt_shows_its_pictures_once_beside_the_answers_of_all_steps(tmp_path):
    whole, gone, changed = (image_of(tmp_path / f"{name}.png") for name in ("whole", "gone", "changed"))
    (tmp_path / "gone.png").unlink()
    image_of(tmp_path / "changed.png", color=(0, 0, 0))
    kept = {"name": HOSTILE, "path": None, "digest": "0" * 64}
    listed = {"name": "folder", "path": str(tmp_path), "digest": whole["digest"]}
    content = [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    line = {"set": "s", "index": 0, "sample": 0, "prompt": [{"role": "user", "content": content}], "text": "red"}
    line |= {"images": [whole, gone, changed, kept, listed, "no image", {"name": "no digest"}]}
    samples = [{"step": 1, "group": 0, "prompt": "p", "completion": "c", "reward": 1.0, "images": [whole]}]
    run = write_run(tmp_path / "run", ROWS, evals=[{"step": step, **line} for step in (0, 30)], samples=samples)
    data, html = page_state(open_runs([run]), 8)
    answers = Read(html["answers"])
    assert len(shown(answers)) == len(shown(Read(html["groups"]))) == 1
    picture = opened(shown(answers)[0])
    assert (picture.format, picture.size) == ("JPEG", (256, 128))
    assert picture.getpixel((100, 60)) == pytest.approx((200, 30, 90), abs=3)
    assert all(answers.text.count(name) == 1 for name in ("whole.png", "gone.png", "changed.png", "folder"))
    assert answers.text.count("step") == 2 and "[image]Which colour?" in answers.text
    read = Read(page(data, html, ""))
    assert "hit()" in read.text and not [given for _, given in read.tags if "onerror" in given]
    assert all(src.startswith("data:image/jpeg;base64,") for src in shown(read)) and len(shown(read)) == 2
    assert not [tag for tag, given in read.tags if "style" in given]


def test_pictures_of_a_page_are_bounded(tmp_path, monkeypatch):
    entries = [image_of(tmp_path / f"{n}.png", 10, 20, (n, n, n)) for n in range(4)]
    images = [PromptImage(**entry) for entry in entries]
    assert [picture.uri is not None for picture in Pictures().of(images)] == [True] * 4
    assert opened(Pictures().of(images)[0].uri).size == (10, 20)
    size = len(Pictures().of(images)[0].uri)
    monkeypatch.setattr(page_module, "MAX_THUMBNAILS", 3)
    assert [picture.uri is not None for picture in Pictures().of(images)] == [True, True, True, False]
    monkeypatch.setattr(page_module, "MAX_THUMBNAIL_BYTES", 2 * size)
    assert sum(picture.uri is not None for picture in Pictures().of([images[0]] * 3)) == 2
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert [picture.name for picture in Pictures().of(images)] == ["0.png", "1.png", "2.png", "3.png"]


def test_lines_with_strange_images_are_read():
    line = {"step": 1, "text": "t"}
    for images in (None, {}, "x", 3, [None, {}, {"digest": 3}, {"digest": "d", "path": 3}]):
        answer = Answer.of(json.loads(json.dumps({**line, "images": images})))
        assert [image.path for image in answer.images] == ([None] if isinstance(images, list) else [])
    turn = {"role": "user", "content": [{"type": "audio", "text": 3}]}
    assert prompt_text([turn]) == 'user: [{"type": "audio", "text": 3}]'
    assert prompt_text([{"role": "user", "content": [{"type": "image", "image": "x"}, {"text": "a"}]}]) == "[image]a"
