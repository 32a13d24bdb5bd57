"""Images in `dtrain generate`, `chat` and `serve`: transformers' answers, by its own image processor; and refusals."""

import base64
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from dtrain.base.errors import UserError
from dtrain.commands import cli
from dtrain.commands.serve import start
from dtrain.data.formats.prompts import Prompt, PromptEncoder, PromptOptions
from dtrain.data.images.reader import ImageReader
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer as DtrainTokenizer
from dtrain.inference.chats import ChatEncoder, image_part
from dtrain.inference.generate import image_problem
from dtrain.models.common.config import is_in_vision_tower
from dtrain.rl.remote.publish import write_marker
from tests import pictures
from tests.data.images.makers import CLIP, encoded, picture, png_that_claims
from tests.models.oracle import VOCAB, save
from tests.models.test_vision_models import END, IMAGE, START, make
from tests.models.vision.oracle import WideIslands
from tests.serve.serving import ask, controlled, make_model, serving

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}w8 {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}w92 " + PAD + " w93{% else %}{{ part.text }}{% endif %} {% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}w9{% endif %}"
)
SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
DRAWN = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model's directory, transformers' model in float64, and two files of images."""
    narrow, wide = make("qwen3-vl")
    root = tmp_path_factory.mktemp("images")
    directory = save(narrow, root / "model")
    words = {f"w{index}" if index != IMAGE else PAD: index for index in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, "w1"])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"eos_token": "w1", "pad_token": "w0", "image_token": PAD}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps({**SIZES, **CLIP, **kind}))
    files = [root / "one.png", root / "two.png"]
    for file, size in zip(files, ((20, 30), (16, 8)), strict=True):
        file.write_bytes(encoded(picture(*size)))
    return directory, wide, files


def words_of(ids):
    return " ".join(f"w{token}" for token in ids if token != 1)


def answered(made, *parts):
    """The ids of transformers' answer: words are numbers, images files, an answer a list."""
    directory, theirs, _ = made
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    ids, pixels, grids = [], [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
        elif isinstance(part, int):
            ids.append(part)
        else:
            image = processor(images=[picture_in(part)], return_tensors="pt")
            pixels.append(image["pixel_values"])
            grids += image["image_grid_thw"].tolist()
            ids += [START, *[IMAGE] * (grids[-1][1] * grids[-1][2] // 4), END]
    ids = torch.tensor([ids])
    given = {"attention_mask": torch.ones_like(ids)}
    if pixels:
        given |= {"mm_token_type_ids": (ids == IMAGE).int(), "image_grid_thw": torch.tensor(grids)}
        given["pixel_values"] = torch.cat(pixels).double()
    with WideIslands():
        whole = theirs.generate(ids, **given, do_sample=False, max_new_tokens=DRAWN, eos_token_id=1, pad_token_id=0)
    return whole[0, ids.shape[1] :].tolist()


def picture_in(file):
    from PIL import Image

    return Image.open(file).convert("RGB")


def data_uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def run(capsys):
    def run(*words):
        status = cli.main([*map(str, words), "--dtype", "float64", "--max-new-tokens", str(DRAWN)])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


def test_generate_puts_images_in_front_of_each_prompt(made, run):
    directory, _, (photo, logo) = made
    shown = ["--image", photo, "--image", logo]
    status, out, err = run("generate", directory, "--prompt", "w5", "--prompt", "w6 w7", *shown)
    expected = [answered(made, 8, photo, logo, *words, 9) for words in ((5,), (6, 7))]
    assert status == 0, err
    assert out == [words_of(ids) for ids in expected] and expected[0] != answered(made, 8, logo, photo, 5, 9)


def test_chat_shows_images_with_the_next_message(made, run, monkeypatch):
    directory, _, (photo, logo) = made
    lines = [
        "w5",
        f"/image {photo}",
        "w6",
        "w7",
        "/image nowhere.png",
        f"/image {logo}",
        "/reset",
        f"/image {logo}",
        "w5",
    ]
    typed = iter([*lines, "/exit"])
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(isatty=lambda: True)
    )  # where an error is told, and the talk goes on
    monkeypatch.setattr("builtins.input", lambda mark: next(typed))
    status, out, err = run("chat", directory, "--temperature", "0")
    first = answered(made, 8, 5, 9)
    before = [8, 5, 8, *(token for token in first if token != 1), 8, photo, 6]
    second = answered(made, *before, 9)
    third = answered(made, *before, 8, [token for token in second if token != 1], 8, 7, 9)
    alone = answered(made, 8, logo, 5, 9)
    assert status == 0 and out[1:] == [words_of(ids) for ids in (first, second, third, alone)]
    assert err.count("dtrain:") == 1 and "nowhere.png: there is no such image" in err


def shows(*parts):
    """A chat of one message with these parts: words, or the URLs of images."""
    kinds = [
        {"type": "text", "text": part} if part.startswith("w") else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]
    messages = [{"role": "user", "content": kinds}]
    return {"messages": messages, "temperature": 0, "max_tokens": DRAWN, "return_token_ids": True}


def test_a_server_answers_images_and_refuses_what_it_cannot_read(made):
    directory, _, (photo, logo) = made
    path, good = "/v1/chat/completions", data_uri(photo.read_bytes())
    is_half_updated = data_uri(encoded(picture(64, 64))[:-2000])
    bad = {
        "https://example.org/a.png": "files and addresses are not read here",
        str(photo): "files and addresses are not read here",
        "file://" + str(photo): "files and addresses are not read here",
        data_uri(png_that_claims(9_000, 9_000)): "81.0 megapixels, more than the 64",
        data_uri(b"hello"): "cannot read this file as an image",
        "data:image/png;base64,!!": "not whole base64",
        is_half_updated: "the image is torn",
    }
    with serving(directory) as (url, _):
        status, answer = ask(url, path, {**shows("w5", good, "w6", data_uri(logo.read_bytes())), "n": 2})
        expected = answered(made, 8, 5, photo, 6, logo, 9)
        assert status == 200 and [choice["token_ids"] for choice in answer["choices"]] == [expected] * 2
        status, answer = ask(url, path, shows("w5"))
        assert status == 200 and answer["choices"][0]["token_ids"] == answered(made, 8, 5, 9)
        for value, words in bad.items():
            status, answer = ask(url, path, shows("w5", good, value))
            assert status == 400 and words in answer["error"]["message"], answer
            assert answer["error"]["message"].startswith("messages[0].content[2]"), answer
        status, answer = ask(url, path, shows(*[good] * 15))
        assert status == 400 and "messages[0].content[0]: the image becomes 8 tokens" in answer["error"]["message"]
        large = data_uri(png_that_claims(6000, 6000))
        status, answer = ask(url, path, shows("w5", large, large))
        assert status == 400 and answer["error"]["param"] == "messages[0].content[2]"
        assert "64 megapixels in total" in answer["error"]["message"]
        status, answer = ask(url, path, {"messages": [{"role": "user", "content": [{"text": "w5", "image_url": {}}]}]})
        assert status == 400 and "must have the field text, and no other" in answer["error"]["message"]


def test_image_tokens_in_the_words_of_a_message_are_refused(tmp_path, made):
    directory = pictures.write_model(tmp_path, "gemma3", weights=False)
    tokenizer = DtrainTokenizer.from_directory(directory)
    template, reader = choose_template(directory, tokenizer), ImageReader(tokenizer, directory)
    chats = ChatEncoder(PromptEncoder(tokenizer, template, max_length=99, options=PromptOptions(99), images=reader))
    messages = [{"role": "user", "content": [image_part(made[2][0])]}, {"role": "assistant", "content": "a photo"}]
    prompt = chats.encode(Prompt([*messages, {"role": "user", "content": "<image_soft_token>"}]))  # written escaped
    assert chats.images_of(prompt).feature_index.max() == 8
    messages[1]["content"] = "a <image_soft_token>"
    with pytest.raises(
        UserError, match="10 image tokens .<image_soft_token>., but its images have 9. Only images may write this token"
    ):
        chats.encode(Prompt([*messages, {"role": "user", "content": "why?"}]))


def test_a_server_whose_weights_may_change_takes_images_too(made, monkeypatch):
    directory, services, good = made[0], [], data_uri(made[2][0].read_bytes())

    def note(sock, service, **options):
        sock.close()
        services.append(service)

    monkeypatch.setattr(start, "serve", note)
    words = ["serve", str(directory), "--port", "0", "--max-length", "64", *controlled(directory.parent)]
    assert cli.main(words) == 0
    (service,) = services
    assert service.parser.chat(shows("w5", good)).requests[0].images is not None


def test_an_update_may_leave_the_tower_out_as_a_whole(made, tmp_path):
    """As of a trainer of texts, on disk and in a broadcast; the tower stays, and what it sees too."""
    directory, _, (photo, _) = made
    tensors = {name: 1.1 * tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    of_tower = sorted(name for name in tensors if ".visual." in name)
    texts = {name: tensor for name, tensor in tensors.items() if name not in of_tower}
    question = shows("w5", data_uri(photo.read_bytes()))
    with serving(directory, key="secret", control=tmp_path) as (url, _):
        before = ask(url, "/weight_checker", {"action": "checksum"})[1]["checksums"]

        def update(step, held):
            written = tmp_path / f"step-{step}"
            written.mkdir()
            save_file(held, written / "model.safetensors", metadata={"format": "pt"})
            write_marker(written)
            named = {"names": list(held), "shapes": [list(tensor.shape) for tensor in held.values()]}
            checked = ask(url, "/check_weights", {**named, "dtypes": ["float32"] * len(held)})
            return ask(url, "/update_weights_from_disk", {"model_path": str(written)}), checked

        assert [status for status, _ in update(1, texts)] == [200, 200]
        from_disk, checked = update(2, texts | {of_tower[0]: tensors[of_tower[0]]})
        assert from_disk[0] == 400 and f"missing: {of_tower[1]}" in from_disk[1]["error"]["message"]
        assert checked[0] == 400 and "is missing" in checked[1]["error"]["message"]
        after = ask(url, "/weight_checker", {"action": "checksum"})[1]["checksums"]
        same = {name for name in before if before[name] == after[name]}
        assert same == {name for name in before if is_in_vision_tower(name)} and same
        assert ask(url, "/v1/chat/completions", question)[0] == 200


def test_images_beside_token_ids_are_of_one_prompt_that_has_their_tokens(made):
    good = data_uri(made[2][0].read_bytes())
    body = {"prompt": [8, START, *[IMAGE] * 8, END, 5, 9], "images": [good], "max_tokens": DRAWN, "temperature": 0}
    bad = {
        "4 image tokens, but by this model's image processor its images have 8": {"prompt": [8, *[IMAGE] * 4, 9]},
        "those of an image in a row ([8])": {"prompt": [8, *[IMAGE] * 4, 5, *[IMAGE] * 4, 9]},
        "images need a single prompt of token ids": {"prompt": "w5"},
        "need a single prompt of token ids with image tokens, and no echo": {"echo": True},
        "images[0]: ": {"images": [data_uri(b"hello")]},
        "images[0]='cat.png' must contain the image": {"images": ["cat.png"]},
        "by this model's image processor its images have 1": {"mm_processor_kwargs": {"max_pixels": 128}},
    }
    with serving(made[0]) as (url, _):
        status, answer = ask(url, "/v1/completions", {**body, "return_token_ids": True})
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == answered(made, 8, made[2][0], 5, 9)
        for words, change in bad.items():
            status, answer = ask(url, "/v1/completions", body | change)
            assert status == 400 and words in answer["error"]["message"], answer


def test_models_of_text_refuse_images(made, run, tmp_path, monkeypatch):
    text, (_, _, (photo, _)) = make_model(tmp_path, 1), made
    status, _, err = run("generate", made[0], "--prompt", "w5", "--image", photo, "--raw")
    assert status == 1 and "--raw leaves out: leave --raw out" in err
    (text / "model.safetensors").rename(text / "elsewhere")  # it is refused before weights are read
    status, _, err = run("generate", text, "--prompt", "w5", "--image", photo)
    assert status == 1 and "--image" in err and "takes no images (its config.json has no vision_config)" in err
    (text / "elsewhere").rename(text / "model.safetensors")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {photo}\n"))
    status, _, err = run("chat", text)
    assert status == 1 and "takes no images" in err
    with serving(text) as (url, _):
        status, answer = ask(url, "/v1/chat/completions", shows("w5", data_uri(photo.read_bytes())))
        assert status == 400 and "takes no images" in answer["error"]["message"]
        assert answer["error"]["param"] == "messages[0].content[1]"


@pytest.mark.slow
def test_weights_without_a_tower_take_no_images(tmp_path):
    directory = pictures.write_model(tmp_path, "qwen3-vl")
    assert image_problem(directory) is None
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    assert "have no complete vision tower" in image_problem(directory)
