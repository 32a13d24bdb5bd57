"""Rows of prompts: what is asked, the columns that rewards read, the cut at the beginning, the cache."""

import pytest

from dtrain.base.errors import UserError
from dtrain.data.formats.prompts import PromptOptions, normalise_prompt
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.data.test_pair_batches import section

ASK = {"role": "user", "content": "2 + 2?"}
REPLY = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("row, name, asked, columns", [
    ({"messages": [ASK, REPLY], "level": 3}, "messages", [ASK], {"level": 3, "answer": "4"}),
    ({"messages": [ASK, REPLY, ASK], "answer": "x"}, "messages", [ASK, REPLY, ASK], {"answer": "x"}),
    ({"conversations": [{"from": "human", "value": "2 + 2?"}]}, "sharegpt", [ASK], {}),
    ({"question": "2 + 2?", "answer": "#### 4"}, "question", [ASK], {"answer": "#### 4"}),
    ({"prompt": [ASK], "solution": "4"}, "prompt_completion", [ASK], {"solution": "4"}),
    ({"prompt": [ASK], "completion": [REPLY]}, "prompt_completion", [ASK], {"completion": [REPLY], "answer": "4"}),
    ({"prompt": "2 + 2 =", "completion": " 4"}, "prompt_completion", "2 + 2 =", {"completion": " 4", "answer": " 4"}),
    ({"instruction": "Add", "input": "2, 2", "output": "4"}, "alpaca", [{"role": "user", "content": "Add\n\n2, 2"}],
     {"output": "4", "answer": "4"}),
    ({"prompt_ids": [3, 4], "wanted": 5, "system": "s"}, "tokenized", [3, 4], {"wanted": 5, "system": "s"}),
    ({"question": "2 + 2?", "system": "Be brief."}, "question", [SYSTEM, ASK], {"system": "Be brief."}),
    ({"question": "q", "prompts": 1, "completions": 2, "completion_ids": 3}, "question",
     [{"role": "user", "content": "q"}], {}),
])  # fmt: skip
def test_rows_in_one_shape(row, name, asked, columns):
    prompt = normalise_prompt(row, name)
    assert prompt.content == asked and {k: v for k, v in prompt.columns.items() if v is not None} == columns


def test_a_system_message_is_added_where_there_is_none():
    assert normalise_prompt({"question": "q"}, "question", "Be brief.").content[0] == SYSTEM
    assert normalise_prompt({"messages": [SYSTEM, ASK]}, "messages", "Other.").content == [SYSTEM, ASK]
    assert normalise_prompt({"prompt": "text"}, "prompt_completion", "Other.").content == "text"


@pytest.mark.parametrize("row, name, words", [
    ({"messages": [REPLY]}, "messages", "no user message for the model to answer; the last is of role assistant"),
    ({"messages": [SYSTEM]}, "messages", "the last is of role system"),
    ({"prompt": [ASK, REPLY]}, "prompt_completion", "prompt: there is no user message"),
    ({"question": 7}, "question", "question must be a string"),
    ({"prompt_ids": []}, "tokenized", "prompt_ids must hold at least one id"),
    ({"text": "t"}, "question", "no question"),
])  # fmt: skip
def test_mistakes_name_the_key(row, name, words):
    with pytest.raises(UserError, match=words):
        normalise_prompt(row, name)


def opened(tmp_path, rows, room=8, template=templates.QWEN25, **changes):
    said = []
    model = save(tmp_path / "model", byte_level(), template)
    tokenizer = Tokenizer.from_directory(model)
    data = section(write_jsonl(tmp_path / "a.jsonl", rows), max_length=16, **changes)
    options = PromptOptions(room)
    found = open_rows(
        data, kind="prompts", prompts=options, tokenizer=tokenizer, print_line=said.append, progress=False
    )
    return found, tokenizer, "\n".join(said)


def test_a_prompt_loses_its_beginning(tmp_path):
    rows, tokenizer, said = opened(tmp_path, [{"prompt": "abcdefghijkl", "answer": "m"}, {"prompt": "ab"}])
    assert not rows.packing and "2 prompts of 2 rows" in said and "1 prompts truncated" in said
    ((ids, trained),) = rows.samples[0]
    assert len(ids) == 8 and "abcdefghijkl".endswith(tokenizer.decode(ids.tolist())) and not trained.any()
    assert rows.samples.row(0) == {"prompt": "abcdefghijkl", "columns": {"answer": "m"}}


@pytest.mark.parametrize("too_long, words", [("drop", "1 prompt of 2 rows"), ("error", None)])
def test_what_is_too_long_may_be_dropped_or_refused(tmp_path, too_long, words):
    data = [{"prompt": "abcdefghijkl"}, {"prompt": "ab"}]
    if words is None:
        with pytest.raises(UserError, match=r"a.jsonl:1: the prompt has 12 tokens, .* room for 8"):
            opened(tmp_path, data, too_long=too_long)
    else:
        assert words in opened(tmp_path, data, too_long=too_long)[2]


def test_a_chat_ends_with_the_generation_prompt(tmp_path):
    rows, tokenizer, said = opened(tmp_path, [{"messages": [ASK, REPLY]}], room=10**6)
    ((ids, _),) = rows.samples[0]
    text = tokenizer.decode(ids.tolist())
    assert text.endswith("<|im_start|>assistant\n") and "2 + 2?" in text and "format messages (detected)" in said


def test_other_columns_are_other_data(tmp_path):
    one, _, _ = opened(tmp_path / "1", [{"prompt": "ab", "answer": "4"}])
    other, _, _ = opened(tmp_path / "2", [{"prompt": "ab", "answer": "5"}])
    assert one.fingerprint != other.fingerprint


def test_rows_that_hold_no_prompt_are_refused(tmp_path):
    with pytest.raises(UserError, match="no known format has the keys text"):
        opened(tmp_path, [{"text": "t"}])


def test_prompts_without_a_reply_are_refused_where_replies_train_too(tmp_path):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    file = write_jsonl(tmp_path / "rows.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    options = {"kind": "prompts", "prompts": PromptOptions(64, loss_on="assistant"), "progress": False}
    with pytest.raises(UserError, match=r"rows.jsonl:1: rows of format question have no reply to train on"):
        open_rows(section(file), tokenizer=Tokenizer.from_directory(model), **options)
