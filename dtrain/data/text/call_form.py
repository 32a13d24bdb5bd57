"""The form in which a chat template reads tool calls, found by rendering calls with known arguments.

`formats.py` reads the arguments of every call as an object, however a file writes them. Templates expect different
forms. For a call of `weather` with `{"city": "Oslo"}`:

    Qwen3, Llama 3, Mistral     write an object with `tojson`; some accept JSON text as well
    Gemma 4, GLM, Qwen3.5       write each argument of an object in a form of their own; JSON text comes out wrong
    DeepSeek V3, R1             join the arguments as text to the rest; an object ends in an error
    DeepSeek V3                 writes calls only where the message's content is null
    gpt-oss                     writes the first call of a message and leaves out the others
    Gemma 3, Phi-4-mini         write no calls at all

A template's source does not show which of these it does. So calls are rendered in each form, and the first form whose
text contains all arguments is the template's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.template import NULL_CONTENT, ChatTemplate

Message = Mapping[str, Any]
NAME = "dtrain_tool"
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "dtrain asks"}
_TEXT = "dtrain says"


class Content(Enum):
    """The content that a template gets for a message with calls and without text."""

    AS_READ = "as the row has it"
    ABSENT = "absent"
    NULL = "null"
    EMPTY = "an empty text"


@dataclass(frozen=True)
class CallForm:
    """The form in which a template reads a message with calls.

    Attributes:
        takes_text: Whether the template reads arguments as JSON text. Otherwise it reads an object.
        content: The content that a message without text needs for its calls to be written.
    """

    takes_text: bool
    content: Content

    def apply(self, message: Message) -> dict[str, Any]:
        """Return a message with calls in this form. The arguments of `message` are objects."""
        changed = with_text_arguments(message) if self.takes_text else dict(message)
        if self.content is Content.ABSENT:
            changed.pop("content", None)
        elif self.content is Content.NULL:
            changed["content"] = NULL_CONTENT
        elif self.content is Content.EMPTY:
            changed["content"] = ""
        return changed


@dataclass(frozen=True)
class CallKind:
    """A kind of message with calls. A template may treat each kind differently.

    Attributes:
        has_tools: Whether the conversation lists tools.
        content: The message's content: a text, an empty text, or None if it has none.
        is_parallel: Whether the message has more than one call.
    """

    has_tools: bool
    content: str | None
    is_parallel: bool

    @classmethod
    def of(cls, message: Message, tools: Sequence[Message] | None) -> "CallKind":
        """Return the kind of a message with calls. Texts that are not empty are one kind."""
        content = message.get("content")
        return cls(tools is not None, _TEXT if content else content, len(message["tool_calls"]) > 1)

    def probe(self) -> dict[str, Any]:
        """Return a message of this kind, whose calls have known arguments."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.content is not None:
            message["content"] = self.content
        message["tool_calls"] = [_probe_call(number) for number in range(2 if self.is_parallel else 1)]
        return message


def learn_call_form(template: ChatTemplate, kind: CallKind, before: Sequence[Message] = (QUESTION,)) -> CallForm | None:
    """Return the form in which `template` writes messages of this kind. None if it does not write their calls.

    Args:
        template: The chat template.
        kind: The kind of message.
        before: The conversation before the message. The default is a single question of a user, which some templates
            refuse.
    """
    probe = kind.probe()

    def render(form: CallForm) -> str | None:
        try:
            return template.render([*before, form.apply(probe)], [TOOL] if kind.has_tools else None)
        except UserError:
            return None

    for form in _forms(kind):
        text = render(form)
        if text is None or not _writes(text, probe, form):
            continue
        # Qwen3.5's and GLM 4.5's templates loop over an absent content. The marks of `ChatTemplate.render_marked` would
        # be in that loop and change the text, so that the message is not found. An empty text needs no loop.
        empty = CallForm(form.takes_text, Content.EMPTY)
        if not kind.content and form.content is Content.AS_READ and render(empty) == text:
            return empty
        return form
    return None


def why_refused(template: ChatTemplate, kind: CallKind, count: int) -> str:
    """Return the error for a message with `count` calls that the template does not write, with a fix.

    The reason is found by trying simpler messages: with one call, and without text.
    """
    calls = "its call" if count == 1 else f"its {count} calls"
    another = "name a template that writes them with data.chat_template"
    if kind.is_parallel and learn_call_form(template, CallKind(kind.has_tools, kind.content, is_parallel=False)):
        return (
            f"has {count} tool_calls, and the chat template, {template.origin}, writes one call in a message: "
            f"{another}, or give each call a message of its own"
        )
    if kind.content and learn_call_form(template, CallKind(kind.has_tools, None, kind.is_parallel)):
        return (
            f"has tool_calls and text, and the chat template, {template.origin}, does not write {calls} next to text: "
            f"{another}, or remove the text"
        )
    return (
        f"has tool_calls, and the chat template, {template.origin}, does not write them in full: "
        f"{another}, or write the calls into the content"
    )


def with_text_arguments(message: Message) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text, as in OpenAI's API."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _forms(kind: CallKind) -> Iterator[CallForm]:
    """Yield the forms to try, objects before texts. A message with text keeps its content."""
    contents = [Content.AS_READ]
    if not kind.content:
        contents += [Content.ABSENT, Content.NULL, Content.EMPTY]
    for takes_text in (False, True):
        for content in contents:
            yield CallForm(takes_text, content)


def _probe_call(number: int) -> dict[str, Any]:
    arguments = {"first": f"dtrain argument {number}", "second": 271828 + number}
    # Mistral's templates want ids of nine characters.
    return {"type": "function", "id": f"call{number:05}", "function": {"name": NAME, "arguments": arguments}}


def _writes(text: str, probe: Message, form: CallForm) -> bool:
    """Return True if a rendered text contains the arguments of all calls, as JSON or in the template's notation."""
    for call in probe["tool_calls"]:
        arguments = call["function"]["arguments"]
        if form.takes_text and json.dumps(arguments) not in text:
            return False
        if str(arguments) in text:  # Python's notation, {'city': 'Oslo'}: the template expected text
            return False
        if not all(str(value) in text for value in arguments.values()):
            return False
    return True
