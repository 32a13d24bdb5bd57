"""The form in which a chat template writes tools, calls and answers: learnt by rendering a call that is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.call_form import NAME, QUESTION
from dtrain.data.text.replies import CALL, Messages, Replies
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tool_calls import FORMS, Parameters, ToolCall, read_calls

MARK, ANSWER = "dtrain calls", "dtrain answers"
_ARGUMENTS = {"text": MARK, "number": 2, "items": ["a", 'b "c"']}
_KINDS = {"text": {"type": "string"}, "number": {"type": "integer"}, "items": {"type": "array"}}
_PARAMETERS: Parameters = {NAME: {"type": "object", "properties": _KINDS}}
_ANSWER_MESSAGE = {"role": "tool", "name": NAME, "content": ANSWER}


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a template writes calls of tools.

    form: name of the calls' reader (`tool_calls.FORMS`). is_single: the template writes one call a turn at most.
    thinks: the generation prompt opens the thinking. ending: text that ends a turn.
    """

    replies: Replies
    tools: Messages
    form: str
    is_single: bool
    thinks: bool
    ending: str

    def behind_a_call(self, answers: Messages) -> str:
        """Return the text behind a turn that called tools which gave these answers, messages of role tool, and others
        behind them: the end of the turn, the answers, and the generation prompt. Raises UserError as the template does.
        """
        same = _with_answers(self.replies, self.tools, [{**answer, "content": ANSWER} for answer in answers])
        text = _with_answers(self.replies, self.tools, answers)
        return text[same.index(self.ending, same.rindex(MARK)) :]


def learn_tool_format(template: ChatTemplate | None, tools: Messages) -> ToolFormat:
    """Learn the form in which `template` writes calls of `tools`. Raises UserError where it leaves out the tools, calls
    or answers, or writes calls in no form that is known."""
    if template is None:
        raise UserError("grpo.tools needs a chat template that writes tools, and the model has none; name one with "
                        "data.chat_template")  # fmt: skip
    replies = Replies(template)
    prompt = template.render([QUESTION], tools, add_generation_prompt=True)
    if not all(tool["function"]["name"] in prompt for tool in tools):
        raise _unfit(template, "does not tell the model of the tools")
    plain = template.render([QUESTION, {"role": "assistant", "content": "0"}], tools)
    single, double = ([ToolCall(NAME, _ARGUMENTS)] * count for count in (1, 2))
    written = _behind(plain, template.render(_conversation(replies, tools, 1), tools))
    form = next((form for form in FORMS if read_calls(form, written, _PARAMETERS) == single), None)
    if form is None:
        shown = written if len(written) <= 300 else f"{written[:300]}..."
        known = ", ".join(FORMS)
        raise UserError(
            f"grpo.tools: the chat template, {template.origin}, writes calls in a form that dtrain does not read: "
            f"{shown!r}. It reads {known}: name a template that writes one of these with data.chat_template"
        )
    try:
        several = _behind(plain, template.render(_conversation(replies, tools, 2), tools))
        is_single = read_calls(form, several, _PARAMETERS) != double
    except UserError:
        is_single = True
    ending = replies.headers(with_tools=True).ending
    text = _with_answers(replies, tools, [_ANSWER_MESSAGE | {"tool_call_id": CALL["id"]}])
    end = text.find(ending, text.rindex(MARK)) if ending else -1
    if not ending or ANSWER not in text or not 0 <= end < text.index(ANSWER):
        raise _unfit(template, "does not end a turn that calls a tool before the answer")
    return ToolFormat(replies, tools, form, is_single, prompt.rstrip().endswith("<think>"), ending)


def _unfit(template: ChatTemplate, why: str) -> UserError:
    return UserError(f"grpo.tools: the chat template, {template.origin}, {why}: name one that does with "
                     "data.chat_template, or use grpo.environment")  # fmt: skip


def _behind(plain: str, text: str) -> str:
    return text[len(commonprefix([plain, text])) :]


def _conversation(replies: Replies, tools: Messages, count: int) -> Messages:
    calls = [_call(f"call{number:05}", NAME, _ARGUMENTS) for number in range(count)]
    return _prepared(replies, tools, [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}])


def _with_answers(replies: Replies, tools: Messages, answers: Messages) -> str:
    results = [answer for answer in answers if answer["role"] == "tool"]
    calls = [_call(result["tool_call_id"], result["name"], {"text": MARK}) for result in results]
    messages: Messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
    return replies.template.render(_prepared(replies, tools, messages), tools, add_generation_prompt=True)


def _call(number: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return CALL | {"id": number, "function": {"name": name, "arguments": dict(arguments)}}


def _prepared(replies: Replies, tools: Messages, messages: Messages) -> Messages:
    try:
        return replies.with_calls(messages, tools)
    except UserError:
        raise _unfit(replies.template, "does not write calls of tools") from None
