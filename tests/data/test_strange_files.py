"""Files as other tools write them: what is read as it is, and what a refusal advises for the others."""

import gzip
import json

import pytest

from dtrain.base.errors import UserError
from dtrain.data.formats.formats import normalise
from dtrain.data.sources.files import detect_formats, file_kind, parse_row, read_chunks
from dtrain.data.sources.reading import RowReading
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.data.test_columns import opened, section

KEY = "data.train.columns"
ASK, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def refused(tmp_path, row, kind="examples"):
    file = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError) as error:
        detect_formats([file], "auto", kind, RowReading(), KEY)
    return str(error.value)


@pytest.mark.parametrize("row, kind, advice", [
    ({"question": "q", "answer": "a"}, "examples", "{instruction: question, output: answer}"),
    ({"instruction": "q", "context": "c", "response": "a", "category": "x"}, "examples",
     "{input: context, output: response}"),
    ({"id": "7", "frage": "q", "antwort": "a"}, "examples", "{instruction: frage, output: antwort}"),
    ({"body": "t", "id": "7"}, "examples", "{text: body}"),
    ({"dialog": [ASK, REPLY]}, "examples", "{messages: dialog}"),
    ({"problem": "q", "solution": "a"}, "prompts", "{question: problem}"),
    ({"question": "q", "response_rejected": "b", "response_chosen": "a"}, "examples",
     "set method=dpo and 'data.train.columns={prompt: question, chosen: response_chosen, rejected: response_reje"),
    ({"question": "q", "response_rejected": "b", "response_chosen": "a"}, "pairs",
     "{prompt: question, chosen: response_chosen, rejected: response_rejected}"),
    ({"prompt": "q", "response_0": "a", "response_1": "b", "better": 0}, "examples", "are two replies: name"),
    ({"context": [ASK], "response1": "a", "response2": "b"}, "pairs", "are two replies: name the better"),
    ({"history": "q", "human_ref_A": "a", "human_ref_B": "b"}, "examples", "are two replies: name"),
    ({"prompt": "q", "response": "a", "helpfulness": 4}, "pairs", "write the best and the worst of a prompt"),
    ({"prompt": "q", "completion": "a", "label": False}, "pairs", "method=kto trains on single replies"),
    ({"chosen_chat": [REPLY], "rejected_chat": [REPLY], "history": [ASK]}, "examples",
     "{prompt: history, chosen: chosen_chat, rejected: rejected_chat}"),
    ({"dialog": [ASK, "an aside", REPLY]}, "examples", "{messages: dialog}"),
    ({"data": [{"text": "a"}]}, "examples", "`jq -c '.data[]' FILE > rows.jsonl`"),
    ({"What is 2 + 2?": "What is 3 + 3?", "4": "6"}, "examples", "begins with the names of its columns"),
])  # fmt: skip
def test_an_unknown_row_is_answered_with_what_to_do(tmp_path, row, kind, advice):
    assert advice in refused(tmp_path, row, kind)


@pytest.mark.parametrize("row, kind", [
    ({"prompt": "q", "responses": ["a", "b"], "scores": [5, 1]}, "examples"),
    ({"prompt": "q", "response": "a", "helpfulness": 4}, "pairs"),
    ({"prompt": "q", "response_0": "a", "response_1": "b"}, "examples"),
    ({"context": [ASK], "score": 3}, "examples"),
])  # fmt: skip
def test_nothing_is_mapped_that_would_train_the_wrong_text(tmp_path, row, kind):
    assert "columns={" not in refused(tmp_path, row, kind)


def test_conversations_may_name_sharegpt_s_speakers_as_roles():
    row = {"conversations": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]}
    assert normalise(row, "sharegpt").messages == [ASK, REPLY]
    with pytest.raises(UserError, match=r"conversations\[0\].role is \['human'\]|has no role"):
        normalise({"conversations": [{"role": ["human"], "content": "q"}]}, "sharegpt")


def test_function_calls_in_openai_s_former_way_are_kept():
    call, tool = {"name": "f", "arguments": "{}"}, {"name": "f", "parameters": {}}
    row = {
        "messages": [ASK, {"role": "assistant", "content": "", "function_call": call},
                     {"role": "function", "name": "f", "content": "1"}, REPLY],
        "functions": [tool],
    }  # fmt: skip
    sample = normalise(row, "messages")
    assert sample.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "function_call" not in sample.messages[1]
    assert [message["role"] for message in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.tools == [{"type": "function", "function": tool}]
    with pytest.raises(UserError, match=r"messages\[1\].tool_calls\[0\]"):
        normalise({"messages": [ASK, {**REPLY, "function_call": "f"}]}, "messages")


@pytest.mark.parametrize("replies, noted", [(["", ""], True), (["", "ten four"], False)])
def test_answers_without_text_are_noted(tmp_path, replies, noted):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    rows = [{"messages": [ASK, {"role": "assistant", "content": reply}]} for reply in replies]
    _, said = opened(model, section(str(write_jsonl(tmp_path / "rows.jsonl", rows))))
    assert ("note: train data: one token of a sample is trained" in said) is noted


LINE = json.dumps({"text": "a"})


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", gzip.compress(LINE.encode(), mtime=0), ["a.jsonl:1", "gzipped", ".gz"]),
    ("a.jsonl", LINE.encode("utf-16"), ["a.jsonl:1", "UTF-16", "iconv"]),
    ("a.jsonl", json.dumps({"text": "a"}, indent=1).encode(), ["a.jsonl:1", "jq -c . a.jsonl"]),
    ("a.jsonl", b"{'text': 'a'}", ["a.jsonl:1", "Python's own notation", "json.dumps"]),
    ("a.json", f"[{LINE},]".encode(), ["a.json:1", "a comma before the ]"]),
])  # fmt: skip
def test_what_a_file_really_is_is_said(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        [parse_row(chunk.file, line, row) for chunk in read_chunks(tmp_path / name) for line, row in chunk.rows]
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", ["a.tsv", "a.xlsx"])
def test_a_table_of_another_program_becomes_csv(tmp_path, name):
    with pytest.raises(UserError, match="save the table as .csv, with commas"):
        file_kind(tmp_path / name)
