"""Tool calls in the text of a model's turn: the forms that models write them in, and the form that a template writes.

A reader for each form turns text into calls. For example, with Qwen3's form,

    <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call>

is read as ToolCall(name="add", arguments={"a": 2, "b": 3}). A call that is not well-formed becomes a ToolCall with a
`problem`, a sentence for the model. (These sentences are part of what the model reads in training, so a change of their
words changes runs.)

`learn_tool_format` finds out which form a chat template writes, by rendering a known call and trying each reader on it.

This module does not import torch.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from types import MappingProxyType
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.json_files import DECODER, check_json_size, json_type
from dtrain.data.text.call_form import NAME, QUESTION
from dtrain.data.text.replies import CALL, Messages, Replies
from dtrain.data.text.template import ChatTemplate

Parameters = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments of each tool, by the tool's name

UNREADABLE_NAME = "unread"  # name of a call whose name cannot be read
ERROR_PREFIX = "error: "  # beginning of a tool's answer if the call failed

_PYTHON_TYPES = {
    "string": str,
    "integer": int,
    "number": int | float,
    "array": list,
    "object": dict,
    "null": type(None),
}
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # models write them instead of JSON's

# The known call and answer of `learn_tool_format`.
MARK, ANSWER = "dtrain calls", "dtrain answers"
_PROBE_ARGUMENTS = {"text": MARK, "number": 2, "items": ["a", 'b "c"']}
_PROBE_TYPES = {"text": {"type": "string"}, "number": {"type": "integer"}, "items": {"type": "array"}}
_PROBE_PARAMETERS: Parameters = {NAME: {"type": "object", "properties": _PROBE_TYPES}}
_PROBE_ANSWER = {"role": "tool", "name": NAME, "content": ANSWER}


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the model wrote it.

    Attributes:
        name: Name of the tool.
        arguments: The arguments by name.
        problem: Why the call cannot be made, as a sentence for the model. None if it is well-formed.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


class _JsonValue(NamedTuple):
    """A JSON value in a text.

    Attributes:
        value: The value; None if there is none.
        problem: Why there is no value, or None.
        end: Position after the value.
    """

    value: Any
    problem: str | None
    end: int


def read_calls(form: str, text: str, parameters: Parameters) -> list[ToolCall]:
    """Read the calls in the text of a turn. Text within <think> ... </think> contains no calls.

    Args:
        form: Name of the form, a key of `CALL_READERS`.
        text: The turn, with its special tokens.
        parameters: Schemas, by which arguments that a form writes as text are converted.

    Example:
        >>> form = "<tool_call>{JSON}</tool_call> (Hermes, Qwen)"
        >>> read_calls(form, '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', {})
        [ToolCall(name='add', arguments={'a': 2}, problem=None)]
    """
    _, end_of_thoughts, after_thoughts = text.rpartition("</think>")
    if end_of_thoughts:
        return CALL_READERS[form](after_thoughts, parameters)
    if text.lstrip().startswith("<think>"):
        return []  # the thoughts never end
    return CALL_READERS[form](text, parameters)


def _read_tagged_json(text: str, parameters: Parameters) -> list[ToolCall]:
    """Read <tool_call>{"name": .., "arguments": {..}}</tool_call>, any number of them: Hermes, Qwen2.5, Qwen3."""
    calls = []
    tag = re.compile(r"<tool_call>\s*")
    begin = tag.search(text)
    while begin:
        call, end = _read_json_call(text, begin.end())
        calls.append(call)
        # After a call that is no JSON, the search continues directly after its tag.
        begin = tag.search(text, begin.end() if call.problem else end)
    return calls


def _read_tagged_parameters(text: str, parameters: Parameters) -> list[ToolCall]:
    """Read <tool_call><function=NAME><parameter=KEY>TEXT</parameter>..</function></tool_call>: Qwen3-Coder, Qwen3.5."""
    blocks = text.split("<tool_call>")[1:]
    return [_call_of_parameter_block(block, parameters) for block in blocks]


def _read_bare_json(text: str, parameters: Parameters) -> list[ToolCall]:
    """Read a turn that is {"name": .., "parameters": {..}}, or several of them with ; between them: Llama 3."""
    is_marked = text.lstrip().startswith("<|python_tag|>")
    start = re.compile(r"\s*(<\|python_tag\|>)?\s*").match(text)
    assert start is not None  # the pattern also matches nothing
    position = start.end()
    calls: list[ToolCall] = []
    while text.startswith("{", position) and (is_marked or re.match(r'\{\s*"name"', text[position:])):
        call, position = _read_json_call(text, position)
        calls.append(call)
        separator = re.compile(r"\s*;?\s*").match(text, position)
        assert separator is not None  # the pattern also matches nothing
        position = separator.end()
    if not calls and is_marked:
        return [ToolCall(UNREADABLE_NAME, problem="behind <|python_tag|> a JSON object must stand")]
    return calls


def _read_listed_json(text: str, parameters: Parameters) -> list[ToolCall]:
    """Read [TOOL_CALLS][{"name": .., "arguments": {..}}, ..], or [TOOL_CALLS]NAME[ARGS]{..} for each: Mistral."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*", part)
        if named:
            value, problem, _ = _read_json(part, named.end())
            calls.append(_call_of_object({"name": named[1], "arguments": value}, problem))
            continue
        indent = len(part) - len(part.lstrip())
        value, problem, _ = _read_json(part, indent)
        entries = value if isinstance(value, list) and value else [value]
        for entry in entries:
            calls.append(_call_of_object(entry, problem))
    return calls


# The reader of each form, by the form's name in messages.
CALL_READERS: Mapping[str, Callable[[str, Parameters], list[ToolCall]]] = MappingProxyType(
    {
        "<tool_call>{JSON}</tool_call> (Hermes, Qwen)": _read_tagged_json,
        "<tool_call><function=..><parameter=..> (Qwen3-Coder, Qwen3.5)": _read_tagged_parameters,
        '{"name": .., "parameters": ..} (Llama 3)': _read_bare_json,
        "[TOOL_CALLS] (Mistral)": _read_listed_json,
    }
)


def find_schema_violation(value: Any, schema: Mapping[str, Any], position: str) -> str | None:
    """Return a sentence on why a value does not fit a JSON schema, or None.

    Only types, anyOf, enum, items, properties, additionalProperties and required are checked.

    Args:
        value: The value.
        schema: The schema.
        position: Name of the value in the sentence, such as "arguments".

    Example:
        >>> find_schema_violation({"a": "2"}, {"properties": {"a": {"type": "integer"}}}, "arguments")
        'arguments.a must be of type integer, not a string'
    """
    if value is None and schema.get("nullable"):
        return None
    alternatives = schema.get("anyOf")
    if alternatives:
        problems = [find_schema_violation(value, alternative, position) for alternative in alternatives]
        return None if None in problems else problems[0]
    types = _as_list(schema.get("type"))
    if types and not any(_has_type(value, name) for name in types):
        return f"{position} must be of type {' or '.join(types)}, not {json_type(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{position} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    for problem in _inner_violations(value, schema, position):
        return problem
    return None


def _inner_violations(value: Any, schema: Mapping[str, Any], position: str) -> Iterator[str]:
    """Yield the violations of the items of a list or the properties of an object."""
    inner: list[tuple[Any, Any, str]] = []  # value, schema and position of each part
    if isinstance(value, list):
        for number, item in enumerate(value):
            inner.append((item, schema.get("items"), f"{position}[{number}]"))
    elif isinstance(value, dict):
        for name in schema.get("required", []):
            if name not in value:
                yield f"{position}.{name} is missing"
        properties = schema.get("properties", {})
        additional = schema.get("additionalProperties")
        for name, item in value.items():
            inner.append((item, properties.get(name, additional), f"{position}.{name}"))
    for item, item_schema, item_position in inner:
        if isinstance(item_schema, Mapping):
            problem = find_schema_violation(item, item_schema, item_position)
            if problem is not None:
                yield problem


def _has_type(value: Any, name: str) -> bool:
    # In Python a bool is an int, in JSON it is not.
    if name == "boolean" or isinstance(value, bool):
        return isinstance(value, bool) and name == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(name, object))


def _read_json(text: str, position: int) -> _JsonValue:
    """Read the JSON value that begins at a position of `text`."""
    try:
        value, end = DECODER.raw_decode(text, position)
        check_json_size(value)
        return _JsonValue(value, None, end)
    except (ValueError, RecursionError) as error:
        return _JsonValue(None, f"the call is no valid JSON: {error}", len(text))


def _read_json_call(text: str, position: int) -> tuple[ToolCall, int]:
    """Return the call whose JSON object begins at a position of `text`, and the position after it."""
    value, problem, end = _read_json(text, position)
    return _call_of_object(value, problem), end


def _call_of_object(value: Any, problem: str | None = None) -> ToolCall:
    """Return the call of an object with `name`, and `arguments` or `parameters`, which may be JSON text."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        problem = problem or "a call must be a JSON object with a name and arguments"
        return ToolCall(UNREADABLE_NAME, problem=problem)
    if problem:
        return ToolCall(name, problem=problem)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        if arguments.strip():
            arguments, problem, _ = _read_json(arguments, 0)
        else:
            arguments = {}  # an empty text means no arguments, as OpenAI's servers read it
    if arguments is None and problem is None:
        arguments = {}
    if not isinstance(arguments, dict):
        problem = problem or f"the arguments of a call must be an object, not {json_type(arguments)}"
        return ToolCall(name, problem=problem)
    return ToolCall(name, arguments)


def _call_of_parameter_block(block: str, parameters: Parameters) -> ToolCall:
    """Return the call of the text after <tool_call>, in the form of Qwen3-Coder."""
    begin = re.match(r"\s*<function=([^>\n]*)>", block)
    if begin is None:
        return ToolCall(UNREADABLE_NAME, problem="behind <tool_call> must stand <function=NAME>")
    name = begin[1].strip()
    body, _, _ = block[begin.end() :].partition("</function>")
    schemas = parameters.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for part in body.split("<parameter=")[1:]:
        match = re.match(r"([^>\n]*)>\n?(.*?)\n?</parameter>", part, re.DOTALL)
        if match is None:
            return ToolCall(name, problem="each parameter must be written <parameter=NAME>VALUE</parameter>")
        key = match[1].strip()
        arguments[key] = _value_of_text(match[2], schemas.get(key, {}))
    return ToolCall(name, arguments)


def _value_of_text(text: str, schema: Mapping[str, Any]) -> Any:
    """Convert a text to the type of its schema. The text is returned unchanged if it does not fit another type."""
    types: set[str] = set()
    for alternative in (schema, *schema.get("anyOf", [])):
        types.update(_as_list(alternative.get("type")))
    is_null = schema.get("nullable") and text in ("null", "None")
    if types == {"string"} and not is_null:
        return text
    stripped = text.strip()
    json_text = _PYTHON_CONSTANTS.get(stripped, stripped)
    value, problem, end = _read_json(json_text, 0)
    is_complete = problem is None and end == len(json_text)
    if is_complete and find_schema_violation(value, schema, "") is None:
        return value
    return text


def _as_list(types: str | Sequence[str] | None) -> Sequence[str]:
    return [types] if isinstance(types, str) else types or []


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a template writes tool calls.

    Attributes:
        replies: Finder of the template's replies.
        tools: The tools that conversations list.
        form: Name of the form, a key of `CALL_READERS`.
        is_single: Whether the template writes at most one call in a turn.
        thinks: Whether the generation prompt begins the model's thoughts.
        ending: Text that ends a turn.
    """

    replies: Replies
    tools: Messages
    form: str
    is_single: bool
    thinks: bool
    ending: str

    def text_after_call(self, answers: Messages) -> str:
        """Return the text that follows a turn with tool calls: end of the turn, the answers, generation prompt.

        Args:
            answers: Messages of role tool, one for each call, and other messages after them.

        Raises:
            UserError: If the template refuses the conversation.
        """
        # Where the turn ends is found in the same conversation with known answers, because real answers may have the
        # text that ends a turn.
        probe_answers = [{**answer, "content": ANSWER} for answer in answers]
        probe_text = _render_with_answers(self.replies, self.tools, probe_answers)
        text = _render_with_answers(self.replies, self.tools, answers)
        end_of_call = probe_text.rindex(MARK)
        return text[probe_text.index(self.ending, end_of_call) :]


def learn_tool_format(template: ChatTemplate | None, tools: Messages) -> ToolFormat:
    """Find the form in which a template writes calls of `tools`.

    Raises:
        UserError: If the template leaves out the tools, calls or answers, or writes calls in an unknown form.
    """
    if template is None:
        raise UserError(
            "grpo.tools needs a chat template that writes tools, and the model has none. Name one with "
            "data.chat_template"
        )
    replies = Replies(template)
    prompt = template.render([QUESTION], tools, add_generation_prompt=True)
    if not all(tool["function"]["name"] in prompt for tool in tools):
        raise _unsuitable(template, "does not tell the model of the tools")
    without_calls = template.render([QUESTION, {"role": "assistant", "content": "0"}], tools)
    probe = ToolCall(NAME, _PROBE_ARGUMENTS)
    one_call = _text_after_common_prefix(without_calls, _render_calls(replies, tools, 1))
    form = _form_of(one_call, probe)
    if form is None:
        excerpt = one_call if len(one_call) <= 300 else f"{one_call[:300]}..."
        raise UserError(
            f"grpo.tools: the chat template, {template.origin}, writes calls in a form that dtrain does not read: "
            f"{excerpt!r}. It reads {', '.join(CALL_READERS)}. Name a template that writes one of these with "
            "data.chat_template"
        )
    try:
        two_calls = _text_after_common_prefix(without_calls, _render_calls(replies, tools, 2))
        is_single = read_calls(form, two_calls, _PROBE_PARAMETERS) != [probe, probe]
    except UserError:
        is_single = True
    ending = replies.headers(with_tools=True).ending
    text = _render_with_answers(replies, tools, [_PROBE_ANSWER | {"tool_call_id": CALL["id"]}])
    end = text.find(ending, text.rindex(MARK)) if ending else -1
    if not ending or ANSWER not in text or not 0 <= end < text.index(ANSWER):
        raise _unsuitable(template, "does not end a turn that calls a tool before the answer")
    thinks = prompt.rstrip().endswith("<think>")
    return ToolFormat(replies, tools, form, is_single, thinks, ending)


def _form_of(text: str, probe: ToolCall) -> str | None:
    """Return the form whose reader finds exactly the call `probe` in a text."""
    for form in CALL_READERS:
        if read_calls(form, text, _PROBE_PARAMETERS) == [probe]:
            return form
    return None


def _unsuitable(template: ChatTemplate, why: str) -> UserError:
    return UserError(
        f"grpo.tools: the chat template, {template.origin}, {why}. Name one that does with data.chat_template, or use "
        "grpo.environment"
    )


def _text_after_common_prefix(first: str, text: str) -> str:
    return text[len(commonprefix([first, text])) :]


def _render_calls(replies: Replies, tools: Messages, count: int) -> str:
    """Render a conversation whose last turn has `count` known calls."""
    calls = [_example_call(f"call{number:05}", NAME, _PROBE_ARGUMENTS) for number in range(count)]
    messages: Messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
    return replies.template.render(_with_calls(replies, tools, messages), tools)


def _render_with_answers(replies: Replies, tools: Messages, answers: Messages) -> str:
    """Render a conversation with a turn of calls that have the argument `MARK`, and `answers`."""
    results = [answer for answer in answers if answer["role"] == "tool"]
    calls = [_example_call(result["tool_call_id"], result["name"], {"text": MARK}) for result in results]
    messages: Messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
    return replies.template.render(_with_calls(replies, tools, messages), tools, add_generation_prompt=True)


def _example_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return CALL | {"id": call_id, "function": {"name": name, "arguments": dict(arguments)}}


def _with_calls(replies: Replies, tools: Messages, messages: Messages) -> Messages:
    try:
        return replies.with_calls(messages, tools)
    except UserError:
        raise _unsuitable(replies.template, "does not write calls of tools") from None
