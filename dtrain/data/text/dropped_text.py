"""Text of messages that a chat template leaves out of the rendered conversation.

Some templates write a part of a message only: R1-Distill's removes everything up to `</think>`, Qwen2.5's does not know
`reasoning_content`, Llama 3's writes a tool call and not the text next to it. What is not rendered is not trained, so
the amount is counted and reported.

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
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.template import REASONING, ChatTemplate

EXAMPLE = 200  # characters of an example that are kept
SHOWN = 60  # characters of an example in a message
WAY_OUT = "set data.chat_template to the file of a template that writes this text"
CONFIRM = "data.allow_dropped_text"
MARKS = range(0x105000, 0x10F000)  # private characters; none is a delimiter of template.py or of control_tokens.py
# A mark is put in front of a word that follows white space, the end of a tag, or a mark of punctuation in CJK text.
_BEGIN_OF_WORD = re.compile(r"(?<=[\s>\]。，、！？])(?=\w)")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class DroppedText:
    """Amount of text in messages that should be trained.

    Attributes:
        characters: Characters of all of it, white space at the ends of each text left out.
        dropped: Characters that the template leaves out.
        example: The first text that is left out.
    """

    characters: int = 0
    dropped: int = 0
    example: str = ""

    @property
    def is_mostly_dropped(self) -> bool:
        """Whether more than half of the text is left out, so that a run asks for a confirmation."""
        return 2 * self.dropped > self.characters

    def __add__(self, other: "DroppedText") -> "DroppedText":
        example = self.example or other.example
        return DroppedText(self.characters + other.characters, self.dropped + other.dropped, example)


def describe_dropped_text(text: DroppedText, rows: str, place: str) -> str:
    """Return a sentence on the text that the template leaves out of a data set, with an example.

    Args:
        rows: The number of rows that lose text, such as "8 rows".
        place: File and line of the example.
    """
    example = text.example.strip()
    shown = example[:SHOWN] + ("..." if len(example) > SHOWN else "")
    return (
        f"the chat template leaves out {text.dropped:,} of the {text.characters:,} characters that should be trained, "
        f"in {rows}, for example in {place}: {shown!r}"
    )


def find_dropped_text(
    template: ChatTemplate, messages: Messages, tools: Messages | None, wanted: Collection[int], rendered: str
) -> DroppedText:
    """Count the characters of messages[i], i in `wanted`, that the template leaves out.

    Args:
        wanted: Indexes of the messages that should be trained.
        rendered: The conversation as the template writes it.
    """
    found = DroppedText()
    is_complete = True
    position = 0
    for index, message in enumerate(messages):
        begin = position
        for text in texts_of(message):
            at = rendered.find(text, position)
            if at >= 0:
                position = at + len(text)
            if index in wanted:
                found += DroppedText(len(text))
                is_complete = is_complete and at >= 0
        if index in wanted:
            found += _dropped_calls(message, rendered[begin:])
    if is_complete:
        return found
    return found + _dropped_by_marks(template, messages, tools, wanted)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message, reasoning first, white space at their ends left out."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    values = [reasoning, *(part.get("text") for part in parts)]
    texts = [value.strip() for value in values if isinstance(value, str)]
    return [text for text in texts if text]


def _dropped_calls(message: Mapping[str, Any], rendered: str) -> DroppedText:
    """Count the tool calls of a message whose function is not named in `rendered`, the text from the message on."""
    found = DroppedText()
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text = f"{function['name']}({written})"
        is_dropped = function["name"] not in rendered
        found += DroppedText(len(text), len(text) if is_dropped else 0, text if is_dropped else "")
    return found


def _dropped_by_marks(
    template: ChatTemplate, messages: Messages, tools: Messages | None, wanted: Collection[int]
) -> DroppedText:
    used = {character for message in messages for text in texts_of(message) for character in text}
    marks = iter([chr(code) for code in MARKS if chr(code) not in used])
    num_words = sum(len(_BEGIN_OF_WORD.findall(text)) + 1 for index in wanted for text in texts_of(messages[index]))
    stride = 1 + num_words // (len(MARKS) // 2)
    pieces: list[tuple[str, str]] = []  # a mark, and the text that it stands for
    marked_messages = list(messages)
    for index in sorted(wanted):
        marked_messages[index] = _marked_message(messages[index], marks, stride, pieces)
    try:
        written = set(template.render(marked_messages, tools))
    except UserError:  # the template takes the conversation itself, but not with marks: nothing is known
        return DroppedText()
    lost = [mark not in written for mark, _ in pieces]
    dropped = sum(len(text) for is_lost, (_, text) in zip(lost, pieces, strict=True) if is_lost)
    if dropped == 0:
        return DroppedText()
    # The example is the first run of pieces that are left out.
    begin = lost.index(True)
    end = lost.index(False, begin) if False in lost[begin:] else len(lost)
    return DroppedText(0, dropped, "".join(text for _, text in pieces[begin:end])[:EXAMPLE])


def _marked_message(
    message: Mapping[str, Any], marks: Iterator[str], stride: int, pieces: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return a message with marks in its texts; each mark and its text are appended to `pieces`."""
    marked = dict(message)
    reasoning = [name for name in REASONING if isinstance(message.get(name), str)]
    if reasoning:  # a template reads one of the names, so all get the same text
        marked |= dict.fromkeys(reasoning, _marked_text(message[reasoning[0]], marks, stride, pieces))
    content = message.get("content")
    if isinstance(content, str):
        marked["content"] = _marked_text(content, marks, stride, pieces)
    elif isinstance(content, list):
        marked["content"] = [
            {**part, "text": _marked_text(part["text"], marks, stride, pieces)} if "text" in part else part
            for part in content
        ]
    return marked


def _marked_text(text: str, marks: Iterator[str], stride: int, pieces: list[tuple[str, str]]) -> str:
    inner = text.strip()
    if not inner:
        return text
    before, after = text[: text.index(inner)], text[text.index(inner) + len(inner) :]
    words = [match.start() for match in _BEGIN_OF_WORD.finditer(inner)][::stride]
    if not words:  # the mark follows the only word
        words = [len(inner)]
    # The text in front of the first mark counts as text of that mark.
    marked = inner[: words[0]]
    for begin, word, end in zip([0, *words[1:]], words, [*words[1:], len(inner)], strict=True):
        mark = next(marks)
        pieces.append((mark, inner[begin:end]))
        marked += mark + inner[word:end]
    return before + marked + after
