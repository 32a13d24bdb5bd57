"""Tokenizers as GGUF files have them, read back by transformers: ids, types, special tokens, and refusals."""

import json

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from dtrain.base.errors import UserError
from dtrain.checkpoint.gguf.export import export_gguf
from dtrain.data.text.tokenizer import Tokenizer
from tests.checkpoint.gguf.models import (
    LLAMA3,
    QWEN2,
    ROWS,
    TEXTS,
    add_tokens,
    byte_level,
    make,
    sentencepiece,
    tokenizer_of,
    values,
)

KINDS = {
    "gpt-2": ("llama", lambda: byte_level()),
    "llama-bpe": ("llama", lambda: byte_level(LLAMA3, ignore_merges=True)),
    "smaug-bpe": ("phi3", lambda: byte_level(LLAMA3)),
    "qwen2": ("qwen3", lambda: byte_level(QWEN2)),
    "default": ("phi3", lambda: sentencepiece(adds_space=True)),  # transformers' own of Phi-3 is Llama 2's
    "gemma": ("gemma3", lambda: sentencepiece(adds_space=False)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_every_kind_gives_the_same_ids(tmp_path, kind):
    family, build = KINDS[kind]
    directory = make(tmp_path / "model", family, add_tokens(build()))
    export_gguf(directory, tmp_path / "m.gguf")
    ours, theirs = Tokenizer.from_directory(directory), tokenizer_of(tmp_path / "m.gguf")
    if kind == "llama-bpe":  # llama.cpp looks whole words up, which transformers leaves out
        theirs.model.ignore_merges = True
    ids = [theirs.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert ids == [ours.encode(text) for text in TEXTS] and max(map(len, ids)) > 10
    keys = values(tmp_path / "m.gguf")
    assert keys["tokenizer.ggml.pre"] == ("default" if kind == "gemma" else kind)
    types, tokens = keys["tokenizer.ggml.token_type"], keys["tokenizer.ggml.tokens"]
    named = dict(zip(tokens, types, strict=True))
    assert (named["<|turn|>"], named["<tool>"]) == (3, 4)  # CONTROL, USER_DEFINED
    padding = [kind for token, kind in named.items() if token.startswith("[PAD")]
    assert len(tokens) == ROWS and len(padding) == ROWS - ours.size and set(padding) == {5}  # UNUSED


def test_special_tokens_and_the_template_are_told(tmp_path):
    tokenizer = add_tokens(sentencepiece(adds_space=True), bos="<s>")
    directory = make(tmp_path / "model", "llama", tokenizer)
    named = {"bos_token": "<s>", "eos_token": "<|turn|>", "pad_token": "<unk>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    ends = [tokenizer.token_to_id("<|turn|>"), tokenizer.token_to_id("</s>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    export_gguf(directory, tmp_path / "m.gguf")
    header = values(tmp_path / "m.gguf")
    ids = {"bos": 1, "eos": ends[0], "eot": 2, "padding": 0, "unknown": 0}
    assert {name: header[f"tokenizer.ggml.{name}_token_id"] for name in ids} == ids
    adds = ("add_bos_token", "add_eos_token", "add_space_prefix")
    assert [header[f"tokenizer.ggml.{name}"] for name in adds] == [True, False, True]
    assert header["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # UNKNOWN, CONTROL, CONTROL, BYTE
    assert header["tokenizer.chat_template"] == "{{ messages }}<|turn|>"
    assert header["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    scores = dict(zip(header["tokenizer.ggml.tokens"], header["tokenizer.ggml.scores"], strict=True))
    assert scores["th"] > scores["▁the"] > scores["hat"] > scores["em"]


def test_a_name_never_makes_llama_cpp_strip_spaces(tmp_path):
    export_gguf(make(tmp_path / "model"), tmp_path / "my-Phi-3.gguf")
    assert "general.name" not in values(tmp_path / "my-Phi-3.gguf")
    tokenizer = sentencepiece(adds_space=True)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_special_tokens([AddedToken(word, rstrip=True, special=True) for word in ("</s>", "<|turn|>")])
    export_gguf(make(tmp_path / "phi", "phi3", tokenizer), tmp_path / "mine.gguf")
    assert values(tmp_path / "mine.gguf")["general.name"] == "mine (phi-3)"


def with_normalizer(normalizer):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def with_split(*steps):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def with_metaspace(scheme):
    tokenizer = sentencepiece(adds_space=True)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


def with_prefix(*before):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([*before])
    special = [(token, tokenizer.token_to_id(token)) for token in before]
    tokenizer.post_processor = TemplateProcessing(single=[*before, "$A"], special_tokens=special)
    return tokenizer


def with_token(**flags):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", **flags)])
    return tokenizer


REFUSED = {
    "normalizer: llama.cpp has none, and this one is Lowercase": lambda: with_normalizer(normalizers.Lowercase()),
    r"pre_tokenizer: llama.cpp has none that splits by \[": lambda: with_split(
        pre_tokenizers.Split(Regex(r"[\p{Lu}]+"), "isolated")
    ),
    "pre_tokenizer: llama.cpp has no step Punctuation": lambda: with_split(pre_tokenizers.Punctuation()),
    "and looks whole words up before it merges": lambda: byte_level(ignore_merges=True),
    "prepend_scheme 'first'": lambda: with_metaspace("first"),
    "llama.cpp adds it always": lambda: with_metaspace("always"),
    "adds more than one token": lambda: with_prefix("<a>", "<b>"),
    "other tokens than bos_token": lambda: with_prefix("<a>"),
    "'<x>' is single_word": lambda: with_token(single_word=True),
    "'<x>' is lstrip": lambda: with_token(lstrip=True),
    "'<x>' is rstrip": lambda: with_token(rstrip=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_part_with_other_ids_in_llama_cpp_is_refused_by_name(tmp_path, message):
    tokenizer = REFUSED[message]()
    tokenizer.add_special_tokens(["<|turn|>"])
    directory = make(tmp_path / "model", "llama", tokenizer)
    with pytest.raises(UserError, match=f"tokenizer.json: no GGUF file gives this tokenizer's ids: .*{message}"):
        export_gguf(directory, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model["merges"].remove(["t", "he"]), "no merge forms 'the' of 't' and 'he'"),
        (lambda model: model["merges"].append(["t", "h"]), "merges form 'th' at ranks apart"),
        (lambda model: model["merges"].remove(["e", "m"]), "no merge forms 'em'"),
        (lambda model: model["vocab"].pop("<0x41>"), "the byte <0x41> has no token"),
        (lambda model: model.update(type="WordLevel", unk_token="<unk>"), "its type is WordLevel"),
    ],
)
def test_merges_that_scores_cannot_say_are_refused(tmp_path, change, message):
    directory = make(tmp_path / "model", "llama", add_tokens(sentencepiece(adds_space=True)))
    written = json.loads((directory / "tokenizer.json").read_text())
    change(written["model"])
    if written["model"]["type"] == "WordLevel":
        written["model"] = {key: written["model"][key] for key in ("type", "vocab", "unk_token")}
    (directory / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match=message):
        export_gguf(directory, tmp_path / "m.gguf")


def test_composed_characters_are_asked_for(tmp_path):
    directory = make(tmp_path / "model", "qwen3", add_tokens(with_normalizer(normalizers.NFC())))
    assert "does not compose characters" in export_gguf(directory, tmp_path / "m.gguf")
