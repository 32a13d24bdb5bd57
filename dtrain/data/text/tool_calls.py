"""Tool calls in chats: readers that turn the text of a model's turn into calls, and the form that a template uses.

`ToolFormat` finds the form in which a chat template writes tools, calls and answers by rendering a known call. Torch is
not imported.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from types import MappingProxyType
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import DECODER, check_json_size, json_type
from dtrain.data.text.call_form import NAME, QUESTION
from dtrain.data.text.replies import CALL, Messages, Replies
from dtrain.data.text.template import ChatTemplate

Parameters = Mapping[str, Mapping[str, Any]]  # by the name of a tool, the JSON schema of its arguments

UNREADABLE_NAME = "unread"  # the name of a call whose name cannot be read
ERROR_PREFIX = "error: "  # the beginning of a tool's answer where a call gave nothing

_TYPES = {"string": str, "integer": int, "number": int | float, "array": list, "object": dict, "null": type(None)}

MARK, ANSWER = "dtrain calls", "dtrain answers"
_ARGUMENTS = {"text": MARK, "number": 2, "items": ["a", 'b "c"']}
_KINDS = {"text": {"type": "string"}, "number": {"type": "integer"}, "items": {"type": "array"}}
_PARAMETERS: Parameters = {NAME: {"type": "object", "properties": _KINDS}}
_ANSWER_MESSAGE = {"role": "tool", "name": NAME, "content": ANSWER}


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. problem: why it cannot be done, for the model; None: it is written well."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_calls(form: str, text: str, parameters: Parameters) -> list[ToolCall]:
    """Read the calls in a turn's text, special tokens included, in the form of this name (a key of CALL_READERS).
    Thinking (<think>) calls nothing. parameters: schemas by which arguments that are written as texts are read."""
    _, closed, behind = text.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return []
    return CALL_READERS[form](behind if closed else text, parameters)


def _tagged_json(text: str, parameters: Parameters) -> list[ToolCall]:
    """<tool_call>{"name": .., "arguments": {..}}</tool_call>, any number of them: Hermes, Qwen2.5, Qwen3."""
    calls, begins = [], re.compile(r"<tool_call>\s*")
    begin = begins.search(text)
    while begin:
        call, end = _of_json(text, begin.end())
        calls.append(call)
        begin = begins.search(text, begin.end() if call.problem else end)
    return calls


def _tagged_parameters(text: str, parameters: Parameters) -> list[ToolCall]:
    """<tool_call><function=NAME><parameter=KEY>TEXT</parameter>..</function></tool_call>: Qwen3-Coder, Qwen3.5."""
    return [_of_parameters(block, parameters) for block in re.split(r"<tool_call>", text)[1:]]


def _bare_json(text: str, parameters: Parameters) -> list[ToolCall]:
    """A turn that is {"name": .., "parameters": {..}}, several with ; between them: Llama 3."""
    is_marked = text.lstrip().startswith("<|python_tag|>")
    at = re.compile(r"\s*(<\|python_tag\|>)?\s*").match(text).end()  # type: ignore[union-attr]  # it matches nothing too
    calls: list[ToolCall] = []
    while text.startswith("{", at) and (is_marked or re.match(r'\{\s*"name"', text[at:])):
        call, at = _of_json(text, at)
        calls.append(call)
        at = re.compile(r"\s*;?\s*").match(text, at).end()  # type: ignore[union-attr]
    if not calls and is_marked:
        return [ToolCall(UNREADABLE_NAME, problem="behind <|python_tag|> a JSON object must stand")]
    return calls


def _listed_json(text: str, parameters: Parameters) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": .., "arguments": {..}}, ..], or [TOOL_CALLS]NAME[ARGS]{..} for each: Mistral."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*", part)
        value, problem, _ = _value(part, named.end() if named else len(part) - len(part.lstrip()))
        if named:
            calls.append(_call({"name": named[1], "arguments": value}, problem))
        else:
            calls += [_call(entry, problem) for entry in (value if isinstance(value, list) and value else [value])]
    return calls


CALL_READERS: Mapping[str, Callable[[str, Parameters], list[ToolCall]]] = MappingProxyType(
    {
        "<tool_call>{JSON}</tool_call> (Hermes, Qwen)": _tagged_json,
        "<tool_call><function=..><parameter=..> (Qwen3-Coder, Qwen3.5)": _tagged_parameters,
        '{"name": .., "parameters": ..} (Llama 3)': _bare_json,
        "[TOOL_CALLS] (Mistral)": _listed_json,
    }
)
"""Readers of the forms, by their names as messages have them."""


def find_schema_violation(value: Any, schema: Mapping[str, Any], place: str) -> str | None:
    """Return why a value does not fit a JSON schema's types, enum, items, properties and required names, or None."""
    if value is None and schema.get("nullable"):
        return None
    either = schema.get("anyOf")
    if either:
        problems = [find_schema_violation(value, option, place) for option in either]
        return None if None in problems else problems[0]
    types = _listed(schema.get("type"))
    if types and not any(_is_of(value, kind) for kind in types):
        return f"{place} must be of type {' or '.join(types)}, not {json_type(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    return next(_inside(value, schema, place), None)


def _inside(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        parts = [(part, schema.get("items"), f"{place}[{number}]") for number, part in enumerate(value)]
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{place}.{name} is missing" for name in schema.get("required", []) if name not in value)
        parts = [(part, known.get(name, others), f"{place}.{name}") for name, part in value.items()]
    for part, inner, at in parts:
        if isinstance(inner, Mapping) and (why := find_schema_violation(part, inner, at)) is not None:
            yield why


def _is_of(value: Any, kind: str) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return isinstance(value, bool) and kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))


def _value(text: str, at: int) -> tuple[Any, str | None, int]:
    """Return the JSON value that begins at a place of `text`, why there is none, and its end."""
    try:
        value, end = DECODER.raw_decode(text, at)
        check_json_size(value)
        return value, None, end
    except (ValueError, RecursionError) as error:
        return None, f"the call is no valid JSON: {error}", len(text)


def _of_json(text: str, at: int) -> tuple[ToolCall, int]:
    value, problem, end = _value(text, at)
    return _call(value, problem), end


def _call(value: Any, problem: str | None = None) -> ToolCall:
    """Return the call of an object with `name` and `arguments` or `parameters`; these may be a text of JSON."""
    name = value.get("name") if isinstance(value, dict) else None
    if problem or not isinstance(name, str):
        return ToolCall(name if isinstance(name, str) else UNREADABLE_NAME,
                        problem=problem or "a call must be a JSON object with a name and arguments")  # fmt: skip
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}  # an empty text means no arguments, as OpenAI's servers read it
    if isinstance(arguments, str):
        arguments, problem, _ = _value(arguments, 0)
    if arguments is None and problem is None:
        arguments = {}
    if not isinstance(arguments, dict):
        problem = problem or f"the arguments of a call must be an object, not {json_type(arguments)}"
        return ToolCall(name, problem=problem)
    return ToolCall(name, arguments)


def _of_parameters(block: str, parameters: Parameters) -> ToolCall:
    begin = re.match(r"\s*<function=([^>\n]*)>", block)
    if begin is None:
        return ToolCall(UNREADABLE_NAME, problem="behind <tool_call> must stand <function=NAME>")
    name, rest = begin[1].strip(), block[begin.end() :].partition("</function>")[0]
    schemas = parameters.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for part in rest.split("<parameter=")[1:]:
        whole = re.match(r"([^>\n]*)>\n?(.*?)\n?</parameter>", part, re.DOTALL)
        if whole is None:
            return ToolCall(name, problem="each parameter must be written <parameter=NAME>VALUE</parameter>")
        key = whole[1].strip()
        arguments[key] = _from_text(whole[2], schemas.get(key, {}))
    return ToolCall(name, arguments)


def _from_text(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text by its schema: the text itself where that is a text, or where it fits nothing else."""
    kinds = [schema, *schema.get("anyOf", [])]
    types = {name for kind in kinds for name in _listed(kind.get("type"))}
    if types == {"string"} and not (schema.get("nullable") and text in ("null", "None")):
        return text
    written = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())  # as Python has them
    value, problem, end = _value(written, 0)
    return (
        value if problem is None and end == len(written) and find_schema_violation(value, schema, "") is None else text
    )


def _listed(types: str | Sequence[str] | None) -> Sequence[str]:
    return [types] if isinstance(types, str) else types or []


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a template writes calls of tools.

    form: name of the calls' reader (`tool_calls.CALL_READERS`). is_single: the template writes one call a turn at most.
    thinks: the generation prompt opens the thinking. ending: text that ends a turn.
    """

    replies: Replies
    tools: Messages
    form: str
    is_single: bool
    thinks: bool
    ending: str

    def text_after_call(self, answers: Messages) -> str:
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
    form = next((form for form in CALL_READERS if read_calls(form, written, _PARAMETERS) == single), None)
    if form is None:
        shown = written if len(written) <= 300 else f"{written[:300]}..."
        known = ", ".join(CALL_READERS)
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
    calls = [_example_call(f"call{number:05}", NAME, _ARGUMENTS) for number in range(count)]
    return _prepared(replies, tools, [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}])


def _with_answers(replies: Replies, tools: Messages, answers: Messages) -> str:
    results = [answer for answer in answers if answer["role"] == "tool"]
    calls = [_example_call(result["tool_call_id"], result["name"], {"text": MARK}) for result in results]
    messages: Messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
    return replies.template.render(_prepared(replies, tools, messages), tools, add_generation_prompt=True)


def _example_call(number: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return CALL | {"id": number, "function": {"name": name, "arguments": dict(arguments)}}


def _prepared(replies: Replies, tools: Messages, messages: Messages) -> Messages:
    try:
        return replies.with_calls(messages, tools)
    except UserError:
        raise _unfit(replies.template, "does not write calls of tools") from None
