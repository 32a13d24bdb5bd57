"""Files of a model that are broken in every way: one clear error that names the file, never a traceback or a wait."""

import json
import os
import time
import tracemalloc

import pytest

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.json_files import OWN_FILE_BYTES, read_text
from dtrain.base.model_directory import read_weights_index
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.models.read_config import read_config
from tests.problem_lines import preflight
from tests.tiny import tiny_recipe, write_model

DEEP = 100_000
CONTENTS = {
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep objects": '{"model": ' * DEEP + "1" + "}" * DEEP,
    "objects 500 deep": '{"model": ' * 500 + "1" + "}" * 500,
    "a list": "[]",
    "a text": '"x"',
    "null": "null",
    "NaN": '{"model": NaN}',
    "Infinity": '{"model": {}, "eos_token": -Infinity}',
    "nothing": "",
    "a byte order mark": "\ufeff{}",
    "no UTF-8": b"\xff\xfe{}",
    "zeros": b"\0" * 100,
    "a name twice": '{"model": {}, "model": {}}',
    "a number of a million digits": '{"model": ' + "9" * 10**6 + "}",
    "cut short": '{"model": {',
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def told(directory):
    """Every problem that is found in the directory of a model, by all that reads its small files."""
    found = []
    for read in (
        read_config,
        lambda path: choose_template(path, Tokenizer.from_directory(path)),
        read_weights_index,
    ):
        try:
            read(directory)
        except UserError as error:
            found.append(str(error))
    return "\n".join(found)


@pytest.fixture
def directory(tmp_path):
    return write_model(tmp_path / "broken")


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", [*FILES, "chat_template.json", "model.safetensors.index.json"])
def test_every_content_that_is_none_is_named(directory, name, content):
    text = CONTENTS[content]
    (directory / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.monotonic()
    said = told(directory)
    assert str(directory / name) in said and len(said) < 4000
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json"])
def test_a_run_is_refused_with_the_files_name(tmp_path, directory, name):
    (directory / name).write_text(CONTENTS["deep lists"])
    recipe = tiny_recipe(tmp_path, f"model.path={directory}", "model.init=pretrained")
    assert str(directory / name) in "\n".join(preflight(recipe, 1))


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_what_is_no_file_is_not_waited_for(directory, name, kind):
    path = directory / name
    path.unlink(missing_ok=True)
    {"directory": path.mkdir, "pipe": lambda: os.mkfifo(path)}.get(
        kind, lambda: path.symlink_to("/dev/zero" if kind == "device" else path)
    )()
    said = told(directory)
    assert name == "chat_template.jinja" and kind == "loop" or name in said


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tokenizer_config.json", "eos_token"),
        ("tokenizer_config.json", "added_tokens_decoder"),
        ("tokenizer_config.json", "chat_template"),
        ("special_tokens_map.json", "pad_token"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer.json", "model"),
        ("tokenizer.json", "added_tokens"),
        ("config.json", "architectures"),
        ("config.json", "model_type"),
        ("config.json", "rope_scaling"),
        ("config.json", "rope_parameters"),
        ("config.json", "layer_types"),
        ("config.json", "torch_dtype"),
        ("config.json", "eos_token_id"),
        ("config.json", "vocab_size"),
        ("config.json", "text_config"),
    ],
)
def test_values_of_the_wrong_kind_end_in_no_traceback(directory, name, key):
    wrong = [[], [[]], [{}], {}, {"a": 1}, {"0": {}}, {"x": {"content": "w1"}}, {"content": 3}, {"default": 3}, "", "x"]
    wrong += ["\ud800", 3, -1, 3.5, 1e308, 10**30, True, ["x"], [None], [{"name": "default"}], [{"template": "x"}]]
    path = directory / name
    whole = json.loads(path.read_text()) if path.is_file() else {}
    for value in wrong:
        path.write_text(json.dumps({**whole, key: value}))
        said = told(directory)
        assert len(said) < 4000, value


def header(text, length=None):
    return (len(text) if length is None else length).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        header("{}", 2**62),
        header("[" * DEEP + "]" * DEEP),
        header('{"a":' * DEEP + "1" + "}" * DEEP),
        header('{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}') + b"1234",
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
               '"b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}') + b"123456",
        header('{"../../a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + b"1234",
        header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}') + b"1234",
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}') + b"1234",
    ],
)  # fmt: skip
def test_weights_with_a_crafted_header_are_refused(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=str(directory)):
        models.from_pretrained(directory)


def test_an_index_stays_in_its_directory(directory):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "no file of this directory" in told(directory)


def test_a_template_that_is_no_utf_8_or_no_template_is_named(tmp_path, directory):
    path = directory / "chat_template.jinja"
    loops = b"{% for a in b %}" * 50 + b"{% endfor %}" * 50
    for content in (b"{{ \xff }}", b"a" * (2 << 20), b"{{ " + b"(" * 20000, loops):
        path.write_bytes(content)
        with pytest.raises(UserError, match=str(path)):
            choose_template(directory, Tokenizer.from_directory(directory))
        with pytest.raises(UserError, match=str(path)):
            choose_template(tmp_path, Tokenizer.from_directory(directory), str(path))


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    tracemalloc.start()
    try:
        assert read_text(tmp_path / "a.json", OWN_FILE_BYTES) == "{}"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 22


def test_a_file_of_several_pieces_is_read_up_to_the_limit(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 1_500_000)
    assert read_text(tmp_path / "a.txt", 3_000_000) == "é" * 1_500_000
    with pytest.raises(UserError, match="a.txt is larger than 2 MiB"):
        read_text(tmp_path / "a.txt", 2_999_999)
