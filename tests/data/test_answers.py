"""Templates that write the answers of tools into the turn that asked: the answers are never trained."""

import pytest

from dtrain.base.errors import UserError
from dtrain.data.text.replies import Replies
from dtrain.data.text.template import ChatTemplate
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


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_leaves_calls_out_is_refused_where_rows_have_some(tools):
    """Phi-4-mini's has one form for all turns; nothing of it reads tool_calls."""
    replies = Replies(ChatTemplate(templates.ONE_FORM, "one form", {"eos_token": "<E>"}))
    with pytest.raises(UserError, match=r"messages\[1\] has tool_calls, .* one form, does not write"):
        replies.with_calls([USER, ASK, TOLD, SAY], tools)
    assert replies.with_calls([USER, SAY], tools) == [USER, SAY]
    text, spans = replies.find([USER, SAY, USER, SAY], tools, [1, 3])
    assert [text[start:end] for start, end in spans] == ["yes[/]", "yes[/]"]
    writing = Replies(ChatTemplate(templates.ANSWERS, "answers", {"bos_token": "<B>"}))
    assert writing.with_calls([USER, ASK], tools) == [USER, ASK]
