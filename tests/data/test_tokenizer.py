"""tokenizer.json and its neighbours, against transformers."""

import json
import pickle
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.base.errors import UserError
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.generate import encode_prompt
from tests.data.makers import CORPUS, byte_level, metaspace, save


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_ids_and_text_equal_transformers(tmp_path, make):
    save(tmp_path, make(), pad_token="<unk>")
    ours, theirs = Tokenizer.from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*CORPUS[:3], "", " <|eot_id|> two  spaces", "</s>é"]:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids
            assert ours.decode(ids, True) == theirs.decode(ids, True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.size == max(theirs.get_vocab().values()) + 1
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize("make, bos", [(byte_level, "<|begin_of_text|>"), (metaspace, "<s>")])
def test_a_text_with_its_own_bos_gets_no_second_one(tmp_path, make, bos):
    tokenizer = Tokenizer.from_directory(save(tmp_path, make(), bos_token=bos))
    text = f"{bos}two and two"
    plain = tokenizer.encode(text)
    assert plain[0] == tokenizer.bos_id and tokenizer.encode(text, add_special_tokens=True) == plain
    assert encode_prompt(tokenizer, text, None) == plain
    assert tokenizer.encode("two", add_special_tokens=True) == [tokenizer.bos_id, *tokenizer.encode("two")]


def test_a_text_of_two_bos_keeps_both(tmp_path):
    """No BOS is taken away where the post-processor adds none."""
    for name, made in (("a", byte_level()), ("b", byte_level(bos=None))):
        tokenizer = Tokenizer.from_directory(save(tmp_path / name, made))
        assert tokenizer.encode("<|begin_of_text|>" * 2 + "a", True) == tokenizer.encode("<|begin_of_text|>" * 2 + "a")


def test_special_tokens_from_every_file(tmp_path):
    save(tmp_path, byte_level(), bos_token=None, eos_token={"content": "<|eot_id|>", "lstrip": False})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9, "pad_token_id": 0, "vocab_size": 1000}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|eot_id|>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, [4, 2, 8, 9], 0)
    assert (tokenizer.size, tokenizer.id_limit) == (420, 1000)


def test_pad_falls_back_to_eos_and_to_zero(tmp_path):
    assert Tokenizer.from_directory(save(tmp_path / "a", byte_level())).pad_id == 4
    bare = Tokenizer.from_directory(save(tmp_path / "b", byte_level(), bos_token=None, eos_token=None))
    assert (bare.pad_id, bare.bos_id, bare.eos_id, bare.eos_ids) == (0, None, None, [])


def test_offsets_hold_leading_spaces(tmp_path):
    """The byte-level post-processor would cut them off."""
    tokenizer = Tokenizer.from_directory(save(tmp_path, byte_level()))
    text = "the lazy  dog. "
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert [text[start:end] for start, end in offsets] == [tokenizer.decode([token]) for token in ids]
    assert "".join(text[start:end] for start, end in offsets) == text


def test_pickles_by_directory(tmp_path):
    tokenizer = Tokenizer.from_directory(save(tmp_path, byte_level()))
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint
    assert len(pickle.dumps(tokenizer)) < 1000


@pytest.mark.parametrize("files, words", [
    ({}, ["has no tokenizer.json"]),
    ({"tokenizer.model": "x"}, ["tokenizer.model", "AutoTokenizer", "save_pretrained"]),
    ({"vocab.json": "{}"}, ["vocab.json", "AutoTokenizer"]),
    ({"tokenizer.json": '{"model": {'}, ["tokenizer.json is not JSON", "whole"]),
    ({"tokenizer.json": "{}"}, ["has no model"]),
    ({"tokenizer.json": '{"model": {"type": "Future"}}'}, ["not readable", "up to date"]),
])  # fmt: skip
def test_directories_without_a_tokenizer(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        Tokenizer.from_directory(tmp_path)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_named_token_that_is_not_there(tmp_path):
    save(tmp_path, byte_level(), eos_token="<|none|>")
    with pytest.raises(UserError, match=r"eos_token is '<\|none\|>'"):
        Tokenizer.from_directory(tmp_path)


def test_added_tokens_of_the_config_alone(tmp_path):
    tokenizer = byte_level()
    extra = {str(tokenizer.get_vocab_size()): {"content": "<|extra|>", "special": True}}
    save(tmp_path, tokenizer, added_tokens_decoder=extra, pad_token="<|extra|>")
    ours, theirs = Tokenizer.from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("a<|extra|>b") == theirs("a<|extra|>b", add_special_tokens=False).input_ids
    assert ours.pad_id == tokenizer.get_vocab_size() == ours.size - 1


def test_limits_of_the_file_do_not_hold(tmp_path):
    """tokenizer.json may say to cut and to pad, as somebody once used it."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    ours = Tokenizer.from_directory(save(tmp_path, tokenizer))
    assert ours.encode(CORPUS[0]) == Tokenizer.from_directory(save(tmp_path / "b", byte_level())).encode(CORPUS[0])


def test_torch_free():
    """Tokenizers load no torch, for `validate`."""
    names = "sources.files formats.formats text.tokenizer text.template text.replies formats.encoder rows.pool".split()
    code = "".join(f"import dtrain.data.{name}\n" for name in names) + "import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_half_a_character_is_named(tmp_path):
    tokenizer = Tokenizer.from_directory(save(tmp_path, byte_level()))
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(UserError, match="half a character at 3, "):
            encode("abc\ud83d")
