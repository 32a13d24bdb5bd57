"""Prompts that are plain text: written as a user's message they are the rows of messages, to the id."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from dtrain.checkpoint.rundir import trained_prompts
from dtrain.config import schema
from dtrain.data.labelled import LabelledEncoder
from dtrain.data.pairs import PairEncoder
from dtrain.data.prompts import PromptEncoder, PromptOptions
from dtrain.data.sample import Encoder
from dtrain.data.sources import open_rows, prompts_trained
from dtrain.data.template import choose_template
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl

ASK, SAY, OTHER = " Who? ", "Me, 東京!", "You"
MESSAGES = {"prompt": [{"role": "user", "content": ASK}], "completion": [{"role": "assistant", "content": SAY}]}
PAIR = {
    "prompt": MESSAGES["prompt"],
    "chosen": MESSAGES["completion"],
    "rejected": [{"role": "assistant", "content": OTHER}],
}
CASES = [
    (Encoder, {}, "prompt_completion", {"prompt": ASK, "completion": SAY}, MESSAGES),
    (Encoder, {"loss_on": "all"}, "prompt_completion", {"prompt": ASK, "completion": SAY}, MESSAGES),
    (PairEncoder, {}, "preference", {"prompt": ASK, "chosen": SAY, "rejected": OTHER}, PAIR),
    (
        LabelledEncoder,
        {},
        "prompt_completion",
        {"prompt": ASK, "completion": SAY, "label": True},
        {**MESSAGES, "label": True},
    ),
    (PromptEncoder, {"options": PromptOptions(4096)}, "prompt_completion", {"prompt": ASK}, MESSAGES),
    (
        PromptEncoder,
        {"options": PromptOptions(4096, "Be brief.", loss_on="completion")},
        "prompt_completion",
        {"prompt": ASK, "completion": SAY},
        MESSAGES,
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save(directory, byte_level(), templates.QWEN3)
    return directory


def coder(kind, directory, **options):
    tokenizer = Tokenizer.from_directory(directory)
    template = choose_template(directory, tokenizer.special_tokens, None, None)
    return kind(tokenizer, template, max_length=4096, **options)


def documents(encoder, row, name):
    """Ids and trained tokens of each document of a row."""
    return [(list(one.ids), list(one.trained)) for one in encoder.documents_of(encoder.row_of(row, name), name)]


@pytest.mark.parametrize("kind, options, name, plain, messages", CASES)
def test_as_user_the_ids_and_the_trained_tokens_are_those_of_messages(directory, kind, options, name, plain, messages):
    as_user, as_text = (coder(kind, directory, prompts_as=how, **options) for how in ("user", "text"))
    assert documents(as_user, plain, name) == documents(as_text, messages, name)
    assert documents(as_user, messages, name) == documents(as_text, messages, name)
    assert documents(as_text, plain, name) != documents(as_text, messages, name)
    assert as_user.content_of(as_user.row_of(plain, name), name) == as_text.content_of(messages, name)
    assert as_user.fingerprint != as_text.fingerprint


def test_as_user_the_ids_are_those_of_transformers(directory):
    oracle = PreTrainedTokenizerFast.from_pretrained(directory)
    prompt = coder(PromptEncoder, directory, prompts_as="user", options=PromptOptions(4096))
    ((ids, _),) = documents(prompt, {"prompt": ASK}, "prompt_completion")
    expected = oracle.apply_chat_template(MESSAGES["prompt"], add_generation_prompt=True, return_dict=False)
    assert ids == expected
    ((whole, _),) = documents(
        coder(Encoder, directory, prompts_as="user"), {"prompt": ASK, "completion": SAY}, "prompt_completion"
    )
    conversation = MESSAGES["prompt"] + MESSAGES["completion"]
    assert whole == oracle.apply_chat_template(conversation, return_dict=False)


def test_rewards_read_the_columns_of_the_file(directory):
    """As user too, where the completion is no part of what is trained."""
    for how in ("text", "user"):
        encoder = coder(PromptEncoder, directory, prompts_as=how, options=PromptOptions(4096))
        row = encoder.row_of({"p": ASK, "c": SAY}, "prompt_completion", {"prompt": "p", "completion": "c"})
        (document,) = encoder.documents_of(row, "prompt_completion")
        assert json.loads(document.columns)["columns"] == {"completion": SAY, "answer": SAY}


def test_a_pair_of_texts_without_a_prompt_is_refused(directory):
    encoder = coder(PairEncoder, directory, prompts_as="user")
    with pytest.raises(UserError, match="data.prompts_as=user: the row has chosen and rejected alone"):
        encoder.row_of({"chosen": "ab", "rejected": "ac"}, "preference")


def section(path, **data):
    return schema.Data(train=schema.DataSource(path=str(path)), max_length=64, num_workers=1, **data)


ROWS = {
    "plain": ([{"prompt": ASK, "completion": SAY}], "text"),
    "messages": ([MESSAGES], "user"),
    "text": ([{"text": ASK + SAY}], "text"),
    "tokenized": ([{"input_ids": [1, 2, 3]}], "user"),
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("prompts_as", [None, "user", "text"])
def test_one_line_says_what_is_done_and_the_key_that_does_the_other(tmp_path, directory, form, prompts_as):
    rows, usual = ROWS[form]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    said, tokenizer = [], Tokenizer.from_directory(directory)
    data = section(tmp_path / "rows.jsonl", prompts_as=prompts_as)
    open_rows(data, tokenizer=tokenizer, say=said.append, progress=False)
    (line,) = [one for one in said if "prompts_as" in one] or [None]
    template = choose_template(directory, tokenizer.special_tokens, None, None)
    assert prompts_trained(data, "examples", template) == (prompts_as or usual)
    assert prompts_trained(data, "examples", None) == (prompts_as or "text")
    has_template_line = any(one.startswith("chat template") for one in said)
    if form != "plain":
        assert line is None and has_template_line == (form == "messages")
    else:
        done, other = ("user", "text") if prompts_as == "user" else ("text", "user")
        assert f"(data.prompts_as={done}); data.prompts_as={other}" in line
        assert has_template_line == (prompts_as == "user")


def test_a_model_without_a_template_is_refused_as_user_and_told_nothing_else(tmp_path):
    save(tmp_path, byte_level(), None)
    write_jsonl(tmp_path / "rows.jsonl", ROWS["plain"][0])
    tokenizer, said = Tokenizer.from_directory(tmp_path), []
    open_rows(section(tmp_path / "rows.jsonl"), tokenizer=tokenizer, say=said.append, progress=False)
    assert not [one for one in said if "prompts_as" in one]
    with pytest.raises(UserError, match=r"data.prompts_as=user writes prompts by a chat template, .* has none"):
        open_rows(section(tmp_path / "rows.jsonl", prompts_as="user"), tokenizer=tokenizer, progress=False)


def test_a_run_says_how_it_trained_and_its_export_and_checkpoints_with_it(tmp_path):
    run = tmp_path / "run"
    for path in (run / "export", run / "checkpoints" / "step-4" / "adapter"):
        path.mkdir(parents=True)
    assert trained_prompts(run) is None
    (run / "config.yaml").write_text("")
    for known, expected in (({"prompts_as": "text"}, "text"), ({"prompts_as": "user"}, "user"), ({}, None)):
        (run / "about.json").write_text(json.dumps(known))
        places = (run, run / "export", run / "checkpoints" / "step-4", run / "checkpoints" / "step-4" / "adapter")
        assert [trained_prompts(place) for place in places] == [expected] * 4
    assert trained_prompts(tmp_path) is None
