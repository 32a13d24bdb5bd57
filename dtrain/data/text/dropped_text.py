"""Text of messages that a chat template leaves out of the rendered conversation.

Some templates write only a part of a message: R1-Distill's removes everything up to `</think>`, Qwen2.5's does not know
`reasoning_content`, Llama 3's writes a tool call and not the text next to it. Text that is not rendered is not trained,
so the amount is counted and reported.

The amount is found by rendering once more with a mark in front of each word, and looking which marks are written:

    message     <think>\\nI add one.\\n</think>\\n\\nFour it is
    marked      <think>\\nI ①add ②one.\\n</think>\\n\\n③Four ④it ⑤is
    rendered    ③Four ④it ⑤is          the text of ① and ②, from the start through `</think>\\n\\n`, is left out

Marks are compared instead of text, because a template may rewrite what it keeps: it trims, or quotes for JSON. A mark
is a private character and is never within a tag such as `<think>`, which the template may look for. Conversations whose
texts are all found in the rendered text, in order, are not rendered again.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.data.text.template import REASONING, ChatTemplate

MAX_EXAMPLE = 200  # characters of an example that are stored
MAX_EXAMPLE_LENGTH = 60  # characters of an example in a message
# The fix for dropped text, and the key that accepts it.
DROPPED_TEXT_FIX = "set data.chat_template to the file of a template that writes this text"
ALLOW_DROPPED_TEXT_KEY = "data.allow_dropped_text"
MARKS = range(0x105000, 0x10F000)  # private characters; none is a delimiter of template.py or of tokenizer.py
# A mark is put in front of a word that follows white space, the end of a tag, or CJK punctuation.
_BEGIN_OF_WORD = re.compile(r"(?<=[\s>\]。，、！？])(?=\w)")

Messages = Sequence[Mapping[str, Any]]


class MarkedPiece(NamedTuple):
    """A mark, and a piece of text.

    Attributes:
        mark: The private character.
        text: The text that is left out if the mark is.
    """

    mark: str
    text: str


@dataclass(frozen=True)
class DroppedText:
    """The amount of text that should be trained, and how much of it the template leaves out.

    Attributes:
        characters: Characters of all texts, without white space at their ends.
        dropped: Characters that the template leaves out.
        example: The first text that is left out.
    """

    characters: int = 0
    dropped: int = 0
    example: str = ""

    @property
    def is_mostly_dropped(self) -> bool:
        """True if more than half of the text is left out. A run then asks for a confirmation."""
        return 2 * self.dropped > self.characters

    def __add__(self, other: "DroppedText") -> "DroppedText":
        example = self.example or other.example
        return DroppedText(self.characters + other.characters, self.dropped + other.dropped, example)


def describe_dropped_text(text: DroppedText, rows: str, location: str) -> str:
    """Return a sentence on the text that the template leaves out of a data set, with an example.

    Args:
        text: The amount of text.
        rows: The number of rows that lose text, such as "8 rows".
        location: File and line of the example.
    """
    example = text.example.strip()
    if len(example) > MAX_EXAMPLE_LENGTH:
        example = f"{example[:MAX_EXAMPLE_LENGTH]}..."
    return (
        f"the chat template leaves out {text.dropped:,} of the {text.characters:,} characters that should be trained, "
        f"in {rows}, for example in {location}: {example!r}"
    )


def find_dropped_text(
    template: ChatTemplate, messages: Messages, tools: Messages | None, trained: Collection[int], rendered: str
) -> DroppedText:
    """Count the characters of messages that should be trained, and how many of them the template leaves out.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: Its tools.
        trained: Indices of the messages that should be trained.
        rendered: The conversation as the template writes it.
    """
    found = DroppedText()
    # Usually all texts are in `rendered`, one after the other, and nothing needs to be rendered again.
    is_complete = True
    position = 0  # in `rendered`, after the last text that was found
    for index, message in enumerate(messages):
        begin_of_message = position
        for text in texts_of(message):
            begin = rendered.find(text, position)
            if begin >= 0:
                position = begin + len(text)
            if index in trained:
                found += DroppedText(len(text))
                if begin < 0:
                    is_complete = False
        if index in trained:
            found += _dropped_calls(message, rendered[begin_of_message:])
    if is_complete:
        return found
    return found + _dropped_by_marks(template, messages, tools, trained)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message without white space at their ends, reasoning first.

    Example:
        >>> texts_of({"role": "assistant", "content": " 4\\n", "reasoning_content": "I add."})
        ['I add.', '4']
    """
    values = []
    for name in REASONING:  # several names for the same text
        if message.get(name) is not None:
            values.append(message[name])
            break
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            values.append(part.get("text"))
    else:
        values.append(content)
    texts = [value.strip() for value in values if isinstance(value, str)]
    return [text for text in texts if text]


def _dropped_calls(message: Mapping[str, Any], rendered: str) -> DroppedText:
    """Count the characters of a message's tool calls. A call is left out if `rendered` does not name its function.

    `rendered` is the rendered text from the message on.
    """
    found = DroppedText()
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments")
        arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text = f"{function['name']}({arguments_text})"
        is_dropped = function["name"] not in rendered
        found += DroppedText(len(text), len(text) if is_dropped else 0, text if is_dropped else "")
    return found


def _dropped_by_marks(
    template: ChatTemplate, messages: Messages, tools: Messages | None, trained: Collection[int]
) -> DroppedText:
    """Render the conversation with marks, and count the text of the marks that the template does not write."""
    used_characters: set[str] = set()
    for message in messages:
        for text in texts_of(message):
            used_characters.update(text)
    free_marks = iter([chr(code) for code in MARKS if chr(code) not in used_characters])
    num_words = 0
    for index in trained:
        for text in texts_of(messages[index]):
            num_words += len(_BEGIN_OF_WORD.findall(text)) + 1
    # Long conversations have more words than there are marks: then only every n-th word gets one.
    stride = 1 + num_words // (len(MARKS) // 2)
    pieces: list[MarkedPiece] = []
    marked_messages = list(messages)
    for index in sorted(trained):
        marked_messages[index] = _marked_message(messages[index], free_marks, stride, pieces)
    try:
        rendered_characters = set(template.render(marked_messages, tools))
    except UserError:  # the template accepts the conversation itself, but not with marks: nothing is known
        return DroppedText()
    dropped = 0
    first_run = ""  # the example: the first pieces in a row that are left out
    is_first_run_over = False
    for piece in pieces:
        if piece.mark in rendered_characters:
            is_first_run_over = is_first_run_over or dropped > 0
            continue
        dropped += len(piece.text)
        if not is_first_run_over:
            first_run += piece.text
    return DroppedText(0, dropped, first_run[:MAX_EXAMPLE])


def _marked_message(
    message: Mapping[str, Any], free_marks: Iterator[str], stride: int, pieces: list[MarkedPiece]
) -> dict[str, Any]:
    """Return a message with marks in its texts. Each mark and its text are appended to `pieces`."""
    marked = dict(message)
    reasoning_names = [name for name in REASONING if isinstance(message.get(name), str)]
    if reasoning_names:
        # A template reads one of the names, so all get the same text.
        marked_reasoning = _marked_text(message[reasoning_names[0]], free_marks, stride, pieces)
        for name in reasoning_names:
            marked[name] = marked_reasoning
    content = message.get("content")
    if isinstance(content, str):
        marked["content"] = _marked_text(content, free_marks, stride, pieces)
    elif isinstance(content, list):
        marked_parts = []
        for part in content:
            if "text" in part:
                part = {**part, "text": _marked_text(part["text"], free_marks, stride, pieces)}
            marked_parts.append(part)
        marked["content"] = marked_parts
    return marked


def _marked_text(text: str, free_marks: Iterator[str], stride: int, pieces: list[MarkedPiece]) -> str:
    """Return a text with a mark in front of every `stride`-th word.

    For example, "I add one." becomes "I ①add ②one.", with the pieces (①, "I add ") and (②, "one.").
    """
    inner = text.strip()
    if not inner:
        return text
    begin_of_inner = text.index(inner)
    before = text[:begin_of_inner]
    after = text[begin_of_inner + len(inner) :]
    mark_positions = [match.start() for match in _BEGIN_OF_WORD.finditer(inner)][::stride]
    if not mark_positions:  # the mark follows the only word
        mark_positions = [len(inner)]
    marked = inner[: mark_positions[0]]
    for number, position in enumerate(mark_positions):
        is_last = number == len(mark_positions) - 1
        end = len(inner) if is_last else mark_positions[number + 1]
        begin = 0 if number == 0 else position  # the text in front of the first mark counts as text of that mark
        mark = next(free_marks)
        pieces.append(MarkedPiece(mark, inner[begin:end]))
        marked += mark + inner[position:end]
    return before + marked + after
