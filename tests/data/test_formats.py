"""Rows of every format to their one shape, and what is said of rows that are wrong."""

import json

import pytest

from dtrain.base.errors import UserError
from dtrain.data.formats.formats import Conversation, Text, TokenizedRow, detect_format, normalise
from dtrain.data.formats.prompts import normalise_prompt

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def test_detection():
    assert detect_format({"messages": [USER]}) == "messages"
    assert detect_format({"prompt": "p", "messages": [USER]}) == "messages"
    assert detect_format({"conversations": []}) == "sharegpt"
    assert detect_format({"instruction": "i", "output": "o"}) == "alpaca"
    assert detect_format({"prompt": "p", "completion": "c"}) == "prompt_completion"
    assert detect_format({"prompt": "p", "chosen": "c", "rejected": "r"}) == "preference"
    assert detect_format({"text": "t", "messages": None}) == "text"
    assert detect_format({"input_ids": [1], "text": "t"}) == "tokenized"
    assert detect_format({"question": "t"}) is None


def test_messages_lose_marks_and_nulls():
    row = {
        "messages": [
            {**USER, "tool_calls": None, "train": False},
            {**REPLY, "train": False},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {**REPLY, "weight": 0},
            {**REPLY, "weight": 1, "reasoning_content": "hm"},
        ],
        "tools": json.dumps([{"type": "function"}]),
    }
    sample = normalise(row, "messages")
    kept = [USER, REPLY, {"role": "assistant", "content": "ab"}, REPLY, {**REPLY, "reasoning_content": "hm"}]
    assert sample == Conversation(kept, [False, False, None, False, True], [{"type": "function"}])


def test_thoughts_that_are_parts_of_the_content():
    first, second = ({"type": "thinking", "thinking": one} for one in ("hm", [{"type": "text", "text": ", ja"}]))
    said = [first, second, {"type": "text", "text": "a"}]
    thought = {"role": "assistant", "reasoning_content": "hm, ja"}
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [USER, {"role": "assistant", "content": said}, {**REPLY, "content": [first], "tool_calls": [call]}]
    found = normalise({"messages": messages}, "messages").messages
    assert found[1] == {**thought, "content": "a"}
    assert "content" not in found[2] and found[2]["reasoning_content"] == "hm"
    for wrong, told in (
        ([USER, {**REPLY, "content": said, "reasoning_content": "x"}], "so has reasoning_content. Keep one"),
        ([USER, {**REPLY, "content": [said[2], first]}], r"content\[1\] is of type 'thinking'"),
        ([{**USER, "content": said}, REPLY], "only an assistant's content begins with thoughts"),
    ):
        with pytest.raises(UserError, match=told):
            normalise({"messages": wrong}, "messages")


def test_sharegpt_speakers_and_calls():
    row = {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "a", "weight": 0},
        ],
    }
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert normalise(row, "sharegpt") == Conversation(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "a"},
        ],
        [None, None, None, None, False],
    )


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("messages", {"messages": [USER, REPLY]}),
        ("prompt_completion", {"prompt": [USER], "completion": [REPLY]}),
    ],
)
def test_a_system_column_is_the_system_message_in_every_method(name, row):
    """As prompts and pairs have it, so that a model is asked as it was trained."""
    asked = normalise_prompt({**row, "system": "be brief"}, name).content
    sample = normalise({**row, "system": "be brief"}, name)
    assert sample.messages == [*asked, REPLY] and asked == [{"role": "system", "content": "be brief"}, USER]
    assert sample.train == [None] * 3 and sample.prompt == (2 if name == "prompt_completion" else 0)
    own = {"role": "system", "content": "own"}
    for key in {"messages", "prompt"} & {*row}:
        row = {**row, key: [own, *row[key]], "system": "be brief"}
    assert normalise(row, name).messages == [own, USER, REPLY]


def test_alpaca():
    sample = normalise({"instruction": "add", "input": "1 1", "output": "2", "history": [["a", "b"]]}, "alpaca")
    assert [message["content"] for message in sample.messages] == ["a", "b", "add\n\n1 1", "2"]
    sample = normalise({"instruction": "add", "input": "", "output": "2"}, "alpaca")
    assert sample.messages == [{"role": "user", "content": "add"}, {"role": "assistant", "content": "2"}]


def test_prompt_completion_text_and_tokens():
    assert normalise({"prompt": "p", "completion": "c"}, "prompt_completion") == Text("p", "c")
    chat = normalise({"prompt": [USER, REPLY, USER], "completion": [REPLY]}, "prompt_completion")
    assert chat == Conversation([USER, REPLY, USER, REPLY], [None] * 4, prompt=3)
    assert normalise({"text": "t"}, "text") == Text("", "t")
    assert normalise({"input_ids": [5, 6], "labels": [-100, 6]}, "tokenized") == TokenizedRow([5, 6], [False, True])
    assert normalise({"input_ids": "[5, 6]"}, "tokenized") == TokenizedRow([5, 6], [True, True])
    said_twice = {"input_ids": [5, 6], "attention_mask": [1, 1], "completion_mask": [0, 1], "labels": [-100, 6]}
    assert normalise(said_twice, "tokenized") == TokenizedRow([5, 6], [False, True])


def chat(**message):
    return {"messages": [USER, {**REPLY, **message}]}


@pytest.mark.parametrize("row, name, words", [
    (chat(role="gpt"), "messages", ["messages[1].role is 'gpt'", "did you mean 'assistant'"]),
    (chat(role="assitant"), "messages", ["did you mean 'assistant'"]),
    (chat(role=None), "messages", ["messages[1] has no role"]),
    (chat(content=None), "messages", ["messages[1].content is null"]),
    ({"messages": [USER, {"role": "assistant"}]}, "messages", ["messages[1] has no content"]),
    ({"conversations": [{"from": "gpt", "value": None}]}, "sharegpt", ["conversations[0].value is null"]),
    ({"instruction": "q", "output": None}, "alpaca", ["output is null in this row"]),
    ({"prompt": "q", "completion": None}, "prompt_completion", ["completion is null in this row"]),
    ({"instruction": "q", "output": None, "text": "t"}, "alpaca", ["no output", "looks like format text"]),
    (chat(content=7), "messages", ["messages[1].content must be a string, not a number"]),
    (chat(content=[{"type": "video"}]), "messages", ["messages[1].content[0]", "'video'", "texts and images"]),
    (chat(content=[{"type": "image"}]), "messages", ["1 image part without an image", "images"]),
    (chat(train="no"), "messages", ["messages[1].train must be true or false"]),
    (chat(weight=0.5), "messages", ["messages[1].weight is 0.5"]),
    (chat(train=True, weight=0), "messages", ["different things"]),
    ({"messages": [{**USER, "train": True}]}, "messages", ["messages[0] is a user message", "data.loss_on=all"]),
    (chat(tool_calls=["f"]), "messages", ["messages[1].tool_calls[0]"]),
    ({"messages": []}, "messages", ["empty list"]),
    ({"messages": {"a": 1}}, "messages", ["messages must be a list, not an object"]),
    ({"messages": "hello"}, "messages", ["not JSON"]),
    ({"messages": [USER], "tools": [3]}, "messages", ["tools[0]"]),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", ["conversations[0].from is 'alien'", "human"]),
    ({"conversations": [{"from": "human"}]}, "sharegpt", ["conversations[0] has no value"]),
    ({"text": 5}, "text", ["text must be a string"]),
    ({"prompt": "p", "completion": [REPLY]}, "prompt_completion", ["both"]),
    ({"input_ids": [1, 2], "labels": [1]}, "tokenized", ["2 entries and labels 1"]),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "tokenized", ["labels[0] is 2", "not be shifted"]),
    ({"input_ids": [1, "2"]}, "tokenized", ["input_ids[1]"]),
    ({"input_ids": [1, -2]}, "tokenized", ["negative"]),
    ({"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]}, "tokenized", ["attention_mask has zeros", "padding"]),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "tokenized", ["completion_mask is not read", "labels"]),
    ({"chosen": "a", "rejected": "b"}, "preference", ["preferences", "set method=dpo"]),
    ({"chosen": "a", "rejected": "b"}, "messages", ["no messages", "looks like format preference"]),
    ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, "tokenized", ["no input_ids", "set method=dpo"]),
    ({"text": "t"}, "messages", ["no messages", "looks like format text", "data.train.sources"]),
    ({"question": "t"}, "messages", ["no messages", "question", "prompt, completion"]),
])  # fmt: skip
def test_mistakes_name_the_key(row, name, words):
    with pytest.raises(UserError) as error:
        normalise(row, name)
    assert all(word in str(error.value) for word in words), str(error.value)
