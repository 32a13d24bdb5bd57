"""Spans of the model's own replies in a rendered conversation, over which the loss on replies is taken.

A reply runs from the end of the assistant's header (what the generation prompt gives before the model speaks) through
the end-of-turn token, inclusive. The white space that a template writes after that token is not part of it: the model
stops at the token. So a model learns to write and to end its turn, and nothing that is put into its prompt for it.

Search for a span. `ChatTemplate.render_marked` tells which characters of the whole conversation come from a message, so
that a turn is taken as it stands there: what a template strips from earlier turns (Qwen3's thinking) is not trained.
Within these characters the header is the generation prompt, or, where a turn does not begin with it (a generation
prompt may hold an empty thinking block that earlier turns lack), the header that the template writes before a reply
in mid-conversation, learnt from a probe. Templates whose loop cannot be marked are rendered in prefixes instead.
A `{% generation %}` block is taken at its word. What none of this decides is refused, not guessed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.call_form import QUESTION, TOOL, CallForm, CallKind, learn_call_form, why_refused
from dtrain.data.text.dropped_text import texts_of
from dtrain.data.text.template import ChatTemplate, MarkedText
from dtrain.data.text.tokenizer import Tokenizer

REPLY = "dtrain replies"
CALL = {"type": "function", "id": "call00000"}
_SHOWN = 40  # characters of an ending in a note
Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Headers:
    """Texts around a reply. None: the template would not tell.

    prompt   text that the generation prompt adds
    turn     text before a reply in mid-conversation
    ending   text after a reply within its own turn, white space at its ends left out
    """

    prompt: str | None
    turn: str | None
    ending: str | None


class Replies:
    """Finder of replies in conversations rendered by one template."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._headers: dict[bool, Headers] = {}
        self._call_forms: dict[CallKind, CallForm | None] = {}

    def headers(self, with_tools: bool = False) -> Headers:
        """Return the headers of conversations with or without tools; probed once each."""
        if with_tools not in self._headers:
            self._headers[with_tools] = self._probe([TOOL] if with_tools else None)
        return self._headers[with_tools]

    def with_calls(self, messages: Messages, tools: Messages | None) -> Messages:
        """Return `messages`, whose calls have objects as arguments, with the calls in the form that the template reads.

        Raises:
            UserError: If the template does not write calls, or not these. An empty turn would be trained otherwise.
        """
        prepared: list[Mapping[str, Any]] = []
        for index, message in enumerate(messages):
            if message.get("tool_calls"):
                kind = CallKind.of(message, tools)
                form = self._call_form(kind) or learn_call_form(self.template, kind, prepared)
                if form is None:
                    why = why_refused(self.template, kind, len(message["tool_calls"]))
                    raise UserError(f"messages[{index}] {why}")
                message = form.apply(message)
            prepared.append(message)
        return prepared

    def find(self, messages: Messages, tools: Messages | None, wanted: Iterable[int]) -> tuple[str, list[Span]]:
        """Return the conversation's text and the spans of the replies messages[i], i in `wanted`, in order.

        Raises UserError where the template refuses the conversation, or a span cannot be told for certain.
        """
        marked = self.template.render_marked(messages, tools)
        wanted, spans = sorted(wanted), []
        if marked.generations and wanted == [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            spans = marked.generations
        elif marked.generations:
            spans = [span for index in wanted for span in self._generated(marked, index)]
        else:
            spans = [self._reply(messages, tools, marked, index) for index in wanted]
        return marked.text, [span for span in spans if span[0] < span[1]]

    def blocks(self, messages: Messages, tools: Messages | None, wanted: Iterable[int]) -> tuple[str, list[Span]]:
        """Return the conversation's text and the spans of messages[i], i in `wanted`, headers included."""
        marked = self.template.render_marked(messages, tools)
        return marked.text, [self._block(messages, tools, marked, index) for index in sorted(wanted)]

    def _probe(self, tools: Messages | None) -> Headers:
        reply = {"role": "assistant", "content": REPLY}
        try:
            before = self.template.render([QUESTION], tools)
            prompted = self.template.render([QUESTION], tools, add_generation_prompt=True)
            prompt = prompted[len(before) :] if prompted.startswith(before) else None
        except UserError:
            prompt = None
        try:
            messages = [QUESTION, reply, QUESTION]
            marked = self.template.render_marked(messages, tools)
            start, end = self._block(messages, tools, marked, 1)
        except UserError:
            return Headers(prompt, None, None)
        header, reply_text, rest = marked.text[start:end].partition(REPLY)
        return Headers(prompt, header if reply_text else None, rest.strip() if reply_text else None)

    def _call_form(self, kind: CallKind) -> CallForm | None:
        if kind not in self._call_forms:
            self._call_forms[kind] = learn_call_form(self.template, kind)
        return self._call_forms[kind]

    def _block(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int) -> Span:
        """Return the span of messages[index]: by the marks, else between two prefixes of the conversation."""
        block = marked.blocks[index]
        if block is not None:
            others = (other for number, other in enumerate(marked.blocks) if number != index and other is not None)
            if any(block[0] <= start and end <= block[1] for start, end in others):
                raise self._unknown(index, "it writes several messages as one turn")
            return block
        try:
            before, after = (self.template.render(messages[:end], tools) for end in (index, index + 1))
        except UserError as problem:
            raise self._unknown(index, "it has no single loop over the messages") from problem
        if not (marked.text.startswith(after) and after.startswith(before)):
            raise self._unknown(index, "it rewrites earlier turns, and has no single loop over the messages")
        return len(before), len(after)

    def _reply(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int) -> Span:
        start, end = self._block(messages, tools, marked, index)
        text = marked.text[start:end]
        headers = self.headers(tools is not None)
        text = text[: self._own(messages, tools, marked, index, text)]
        end = start + len(text.rstrip())
        if headers.ending == "":
            # Some templates end a turn after it: directly in front of the next one, or at the very end.
            eos = self.template.variables.get("eos_token")
            if eos and marked.text.startswith(eos, end):
                end += len(eos)
        indent = len(text) - len(text.lstrip())
        for header in (headers.prompt, headers.turn):
            if header and header.strip() and text.startswith(header.lstrip(), indent):
                return start + indent + len(header.lstrip()), end
        if headers.turn is not None and not headers.turn.strip():
            return start, end  # turns of this template begin without a header
        if all(message["role"] in ("system", "developer") for message in messages[:index]):
            opening = _begin_of_opening(text, messages[index], headers)
            if opening is not None:
                return start + opening, end
        return self._end_of_prompt(messages, tools, marked, index), end

    def _own(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int, text: str) -> int:
        """Return the number of characters of `text`, the block of messages[index], before the answers of tools: some
        templates (Gemma 4's) write answers into the turn that called. Known by the same conversation without them."""
        behind = range(index + 1, len(messages))
        after = next((number for number in behind if messages[number]["role"] != "tool"), len(messages))
        if after == index + 1 or any(marked.blocks[index + 1 : after]):
            return len(text)
        try:
            without = self.template.render_marked([*messages[: index + 1], *messages[after:]], tools)
        except UserError as problem:
            raise self._unknown(index, "it writes the answers of tools as a part of it") from problem
        block = without.blocks[index]
        if block is None:
            raise self._unknown(index, "it writes the answers of tools as a part of it")
        return len(commonprefix([text, without.text[slice(*block)]]))

    def _end_of_prompt(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int) -> int:
        """Return the end of the generation prompt of messages[index], if the conversation begins with that prompt."""
        start, end = self._block(messages, tools, marked, index)
        try:
            prompt = self.template.render(messages[:index], tools, add_generation_prompt=True)
            silent = self.template.render(messages[:index], tools)
        except UserError as problem:
            raise self._unknown(index, "its turn begins unlike its generation prompt") from problem
        if prompt == silent and messages[index - 1]["role"] == "tool":
            if marked.blocks[index - 1] is None:
                return start  # the turn that called a tool goes on after the answer
            if marked.text.startswith(prompt) and start < len(prompt) <= end:
                return len(prompt)  # the answers are closed at once, before the reply (DeepSeek V3)
        if prompt != silent and marked.text.startswith(prompt) and start <= len(prompt) <= end:
            return len(prompt)
        raise self._unknown(index, "its turn begins unlike its generation prompt")

    def _generated(self, marked: MarkedText, index: int) -> list[Span]:
        block = marked.blocks[index]
        if block is None:
            raise self._unknown(index, "it has no single loop over the messages")
        return [span for span in marked.generations if block[0] <= span[0] and span[1] <= block[1]]

    def _unknown(self, index: int, why: str) -> UserError:
        return UserError(
            f"messages[{index}]: dtrain cannot tell where the reply begins and ends in what the chat template, "
            f"{self.template.origin}, writes: {why}. Put {{% generation %}} and {{% endgeneration %}} around the "
            "reply in a copy of the template and name it with data.chat_template, or set data.loss_on=all"
        )


def _begin_of_opening(text: str, message: Mapping[str, Any], headers: Headers) -> int | None:
    """Return where the reply begins in `text`, the turn of a message that opens a conversation; None if unknown.

    Such a turn may have no header, where the template writes that with the user's message (DeepSeek-V3.1), or have a
    default system message in front of the header (Kimi K2).
    """
    indent = len(text) - len(text.lstrip())
    if any(text.startswith(own, indent) for own in texts_of(message)):
        return indent
    for header in (headers.prompt, headers.turn):
        if header and header.strip() and text.count(header.lstrip()) == 1:
            return text.index(header.lstrip()) + len(header.lstrip())
    return None


def note_on_ending(replies: Replies, tokenizer: Tokenizer, is_all_trained: bool) -> str | None:
    """Return the note on a template that ends a reply with no EOS token, or leaves that token untrained; else None.

    is_all_trained: whether all that the template writes of a reply is trained, else what `replies` finds.
    """
    messages = [QUESTION, {"role": "assistant", "content": REPLY}]
    try:
        text, spans = replies.find(messages, None, [1])
    except UserError:  # of rows it is told with file and line
        return None
    before, reply, ending = text.rpartition(REPLY)
    if not reply:
        return None
    end = len(before) + len(reply)
    trained_to = len(text) if is_all_trained else max((stop for _, stop in spans), default=0)
    ids, offsets = tokenizer.encode_with_offsets(text)
    eos = [start for token, (start, _) in zip(ids, offsets, strict=True) if start >= end and token in tokenizer.eos_ids]
    if eos and eos[0] < trained_to:
        return None
    shown = repr(ending.strip()[:_SHOWN])
    if not ending.strip():
        return "note: the chat template writes no end-of-turn token: a model trained with it does not learn to stop"
    if eos:
        return (
            f"note: the chat template leaves the end of a reply, {shown}, untrained: a model trained with it does not "
            "learn to stop. Put the end into the {% generation %} block of a copy, and name it with data.chat_template"
        )
    known = ", ".join(repr(tokenizer.decode([token])) for token in tokenizer.eos_ids) or "none is named"
    return (
        f"note: the chat template ends a reply with {shown}, which is no EOS token of the model ({known}): generation "
        "does not stop there. Add the id of the token to eos_token_id in generation_config.json"
    )
