"""Templates that write the answers of tools into the turn that asked: the answers are never trained."""

import pytest

from dtrain.data.replies import Replies
from dtrain.data.template import ChatTemplate
from tests.data import templates

CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
USER = {"role": "user", "content": "hi"}
ASK = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "name": "f", "content": "7"}
SAY = {"role": "assistant", "content": "yes"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("messages", "trained"),
    [
        ([USER, ASK, TOLD, SAY], ["[c]f[/c][a]", "yes[/]"]),
        ([USER, ASK, TOLD, SAY, USER, SAY], ["[c]f[/c][a]", "yes[/]", "yes[/]"]),
        ([USER, ASK, TOLD, ASK, TOLD, SAY], ["[c]f[/c][a]", "[c]f[/c][a]", "yes[/]"]),
        ([USER, ASK, TOLD], ["[c]f[/c][a]"]),
        ([USER, ASK], ["[c]f[/c][a]"]),
        ([USER, SAY, USER, SAY], ["yes[/]", "yes[/]"]),
    ],
)
def test_what_a_tool_answers_is_not_trained(messages, trained):
    template = ChatTemplate(templates.ANSWERS, "answers", {"bos_token": "<B>", "eos_token": "<E>"})
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = Replies(template).find(messages, TOOLS, replies)
    assert [text[start:end] for start, end in spans] == trained
    assert text.count("7") == sum(message["role"] == "tool" for message in messages)
