"""Spans of the model's own replies in a rendered conversation. These spans are trained.

A reply begins after the header of the assistant's turn, which the generation prompt writes before the model speaks. It
ends with the token that ends the turn, inclusive. White space that a template writes after that token is not part of
it, because the model stops at the token. So a model learns to write its reply and to end its turn, and nothing that is
put into its prompt. For example:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                    -----------------------===============
                                             header             reply

How a reply is found:

1. `ChatTemplate.render_marked` returns the characters that come from each message: its turn. So a turn is trained as
   the template writes it in this conversation. For example, thinking that a template strips from earlier turns (Qwen3)
   is not trained.
2. The header is removed from the beginning of the turn. Usually the header is the generation prompt. If the turn does
   not begin with the generation prompt (which may have an empty thinking block that earlier turns lack), the header is
   the text that the template writes before a reply in the middle of a conversation. A probe, a short known
   conversation, shows this text.
3. If the template has no loop that can be marked, a turn is found by rendering the conversation up to the message and
   through the message.
4. If the template has `{% generation %}` blocks, each block is a reply, and steps 2 and 3 are not needed.

If none of these steps finds the reply, the row is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.data.text.call_form import QUESTION, TOOL, CallForm, CallKind, learn_call_form, why_refused
from dtrain.data.text.dropped_text import texts_of
from dtrain.data.text.template import ChatTemplate, MarkedText
from dtrain.data.text.tokenizer import Tokenizer

REPLY = "dtrain replies"  # text of a probe's reply
CALL = {"type": "function", "id": "call00000"}
MAX_ENDING_LENGTH = 40  # characters of an ending in a note
Span = tuple[int, int]  # characters [start, end)
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Headers:
    """Texts around a reply, found with a probe. None: the probe does not show this text.

    Attributes:
        prompt: Text that the generation prompt adds.
        turn: Text before a reply in the middle of a conversation.
        ending: Text after a reply within its turn, without white space at its ends.
    """

    prompt: str | None
    turn: str | None
    ending: str | None


class RenderedSpans(NamedTuple):
    """A rendered conversation, and spans in it.

    Attributes:
        text: The text.
        spans: Characters [start, end), in order.
    """

    text: str
    spans: list[Span]


class Replies:
    """Finder of replies in conversations that one template renders.

    Attributes:
        template: The template.
    """

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._headers: dict[bool, Headers] = {}  # with tools or without
        self._call_forms: dict[CallKind, CallForm | None] = {}

    def headers(self, with_tools: bool = False) -> Headers:
        """Return the headers of conversations with or without tools. Each is found once, with a probe."""
        if with_tools not in self._headers:
            self._headers[with_tools] = self._probe_headers([TOOL] if with_tools else None)
        return self._headers[with_tools]

    def with_calls(self, messages: Messages, tools: Messages | None) -> Messages:
        """Return messages with their tool calls in the form that the template reads.

        Args:
            messages: Messages whose calls have objects as arguments.
            tools: Tools that the conversation lists.

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

    def find(self, messages: Messages, tools: Messages | None, indices: Iterable[int]) -> RenderedSpans:
        """Render a conversation, and find the replies messages[i] for i in `indices`.

        Raises:
            UserError: If the template refuses the conversation, or a reply cannot be found with certainty.
        """
        marked = self.template.render_marked(messages, tools)
        indices = sorted(indices)
        all_replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        if marked.generations and indices == all_replies:
            spans = marked.generations
        else:
            for index in indices:
                if marked.generations:
                    spans += self._generation_blocks_of(marked, index)
                else:
                    spans.append(self._find_reply(messages, tools, marked, index))
        return RenderedSpans(marked.text, [(start, end) for start, end in spans if start < end])

    def blocks(self, messages: Messages, tools: Messages | None, indices: Iterable[int]) -> RenderedSpans:
        """Render a conversation, and find messages[i] for i in `indices`, with their headers. Raises as `find`."""
        marked = self.template.render_marked(messages, tools)
        return RenderedSpans(marked.text, [self._block(messages, tools, marked, index) for index in sorted(indices)])

    def _probe_headers(self, tools: Messages | None) -> Headers:
        """Find the headers by rendering a known question and reply.

        For example, Qwen's template renders the probe as

            <|im_start|>user\\ndtrain asks<|im_end|>\\n<|im_start|>assistant\\ndtrain replies<|im_end|>\\n...

        so the header of a turn is "<|im_start|>assistant\\n", and the ending is "<|im_end|>".
        """
        reply = {"role": "assistant", "content": REPLY}
        prompt = None
        try:
            before = self.template.render([QUESTION], tools)
            prompted = self.template.render([QUESTION], tools, add_generation_prompt=True)
            if prompted.startswith(before):
                prompt = prompted[len(before) :]
        except UserError:
            pass
        messages = [QUESTION, reply, QUESTION]
        try:
            marked = self.template.render_marked(messages, tools)
            start, end = self._block(messages, tools, marked, 1)
        except UserError:
            return Headers(prompt, None, None)
        header, reply_text, ending = marked.text[start:end].partition(REPLY)
        if not reply_text:
            return Headers(prompt, None, None)
        return Headers(prompt, header, ending.strip())

    def _call_form(self, kind: CallKind) -> CallForm | None:
        if kind not in self._call_forms:
            self._call_forms[kind] = learn_call_form(self.template, kind)
        return self._call_forms[kind]

    def _block(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int) -> Span:
        """Return the span of messages[index]: by the marks, or else between two prefixes of the conversation."""
        block = marked.blocks[index]
        if block is not None:
            for number, other in enumerate(marked.blocks):
                if number != index and other is not None and block[0] <= other[0] and other[1] <= block[1]:
                    raise self._not_found(index, "it writes several messages as one turn")
            return block
        try:
            before = self.template.render(messages[:index], tools)
            after = self.template.render(messages[: index + 1], tools)
        except UserError as problem:
            raise self._not_found(index, "it has no single loop over the messages") from problem
        if not (marked.text.startswith(after) and after.startswith(before)):
            raise self._not_found(index, "it rewrites earlier turns, and has no single loop over the messages")
        return len(before), len(after)

    def _find_reply(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int) -> Span:
        """Return the span of the reply messages[index]."""
        start, block_end = self._block(messages, tools, marked, index)
        turn = marked.text[start:block_end]
        headers = self.headers(tools is not None)
        turn = turn[: self._length_without_answers(messages, tools, marked, index, turn)]
        end = start + len(turn.rstrip())
        end += self._length_of_late_ending(marked, end, headers)
        header_end = _end_of_header(turn, headers)
        if header_end is not None:
            return start + header_end, end
        has_no_headers = headers.turn is not None and not headers.turn.strip()
        if has_no_headers:
            return start, end
        # The turn begins with another header. A turn that opens the conversation may have none, or a default system
        # message before it. Any other turn begins after the generation prompt of the messages before it.
        opens_conversation = all(message["role"] in ("system", "developer") for message in messages[:index])
        if opens_conversation:
            opening = _begin_of_opening(turn, messages[index], headers)
            if opening is not None:
                return start + opening, end
        return self._end_of_prompt(messages, tools, marked, index), end

    def _length_of_late_ending(self, marked: MarkedText, end: int, headers: Headers) -> int:
        """Return the length of an EOS token that the template writes after the turn that ends at `end`; 0 if none.

        Some templates write the end of a turn in front of the next one, or at the very end of the conversation.
        """
        eos = self.template.variables.get("eos_token")
        if headers.ending == "" and eos and marked.text.startswith(eos, end):
            return len(eos)
        return 0

    def _length_without_answers(
        self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int, text: str
    ) -> int:
        """Return the number of characters of a turn before the answers of tools.

        Some templates (Gemma 4's) write the answers into the turn that called the tools. They are found by rendering
        the same conversation without the answers.
        """
        after = index + 1
        while after < len(messages) and messages[after]["role"] == "tool":
            after += 1
        has_answers = after > index + 1
        if not has_answers or any(marked.blocks[index + 1 : after]):
            return len(text)
        why = "it writes the answers of tools as a part of it"
        try:
            without = self.template.render_marked([*messages[: index + 1], *messages[after:]], tools)
        except UserError as problem:
            raise self._not_found(index, why) from problem
        block = without.blocks[index]
        if block is None:
            raise self._not_found(index, why)
        start, end = block
        return len(commonprefix([text, without.text[start:end]]))

    def _end_of_prompt(self, messages: Messages, tools: Messages | None, marked: MarkedText, index: int) -> int:
        """Return the position at which the reply messages[index] begins: the end of its generation prompt.

        The conversation up to the message is rendered with the generation prompt. If the full conversation begins with
        this text, the reply begins where this text ends.

        Raises:
            UserError: If the full conversation begins with another text.
        """
        why = "its turn begins unlike its generation prompt"
        start, end = self._block(messages, tools, marked, index)
        try:
            prompt = self.template.render(messages[:index], tools, add_generation_prompt=True)
            without_prompt = self.template.render(messages[:index], tools)
        except UserError as problem:
            raise self._not_found(index, why) from problem
        adds_nothing = prompt == without_prompt
        if adds_nothing and messages[index - 1]["role"] == "tool":
            if marked.blocks[index - 1] is None:
                return start  # the turn that called a tool continues after the answer
            if marked.text.startswith(prompt) and start < len(prompt) <= end:
                return len(prompt)  # the answers end directly before the reply (DeepSeek V3)
        if not adds_nothing and marked.text.startswith(prompt) and start <= len(prompt) <= end:
            return len(prompt)
        raise self._not_found(index, why)

    def _generation_blocks_of(self, marked: MarkedText, index: int) -> list[Span]:
        block = marked.blocks[index]
        if block is None:
            raise self._not_found(index, "it has no single loop over the messages")
        return [span for span in marked.generations if block[0] <= span[0] and span[1] <= block[1]]

    def _not_found(self, index: int, why: str) -> UserError:
        return UserError(
            f"messages[{index}]: dtrain cannot tell where the reply begins and ends in what the chat template, "
            f"{self.template.origin}, writes: {why}. Put {{% generation %}} and {{% endgeneration %}} around the "
            "reply in a copy of the template and name it with data.chat_template, or set data.loss_on=all"
        )


def _end_of_header(turn: str, headers: Headers) -> int | None:
    """Return the position after the header of a turn: that of the generation prompt, or of a turn in the middle.

    None if the turn begins with neither header.
    """
    indent = len(turn) - len(turn.lstrip())
    for header in (headers.prompt, headers.turn):
        if header and header.strip() and turn.startswith(header.lstrip(), indent):
            return indent + len(header.lstrip())
    return None


def _begin_of_opening(text: str, message: Mapping[str, Any], headers: Headers) -> int | None:
    """Return the position of the reply in the turn of a message that opens a conversation; None if unknown.

    Such a turn may have no header, because the template writes it with the user message (DeepSeek-V3.1). Or a default
    system message may be in front of the header (Kimi K2).
    """
    indent = len(text) - len(text.lstrip())
    if any(text.startswith(message_text, indent) for message_text in texts_of(message)):
        return indent
    for header in (headers.prompt, headers.turn):
        if header and header.strip() and text.count(header.lstrip()) == 1:
            return text.index(header.lstrip()) + len(header.lstrip())
    return None


def note_on_ending(replies: Replies, tokenizer: Tokenizer, is_all_trained: bool) -> str | None:
    """Return a note if a model trained with this template would not learn to stop; otherwise None.

    The model does not learn to stop if the template ends a reply without an EOS token, or leaves that token untrained.

    Args:
        replies: Finder of replies.
        tokenizer: The model's tokenizer.
        is_all_trained: Whether the whole conversation is trained, not only what `replies` finds.
    """
    messages = [QUESTION, {"role": "assistant", "content": REPLY}]
    try:
        text, spans = replies.find(messages, None, [1])
    except UserError:  # the error of a row names its file and line
        return None
    before, reply, ending = text.rpartition(REPLY)
    if not reply:
        return None
    end_of_reply = len(before) + len(reply)
    end_of_trained = len(text) if is_all_trained else max((end for _, end in spans), default=0)
    ids, offsets = tokenizer.encode_with_offsets(text)
    eos_positions = []  # of EOS tokens after the reply
    for token, (start, _) in zip(ids, offsets, strict=True):
        if start >= end_of_reply and token in tokenizer.eos_ids:
            eos_positions.append(start)
    if eos_positions and eos_positions[0] < end_of_trained:
        return None
    if not ending.strip():
        return "note: the chat template writes no end-of-turn token: a model trained with it does not learn to stop"
    ending_text = repr(ending.strip()[:MAX_ENDING_LENGTH])
    if eos_positions:
        return (
            f"note: the chat template leaves the end of a reply, {ending_text}, untrained: a model trained with it "
            "does not learn to stop. Put the end into the {% generation %} block of a copy, and name it with "
            "data.chat_template"
        )
    eos_texts = ", ".join(repr(tokenizer.decode([token])) for token in tokenizer.eos_ids) or "none is named"
    return (
        f"note: the chat template ends a reply with {ending_text}, which is no EOS token of the model ({eos_texts}): "
        "generation does not stop there. Add the id of the token to eos_token_id in generation_config.json"
    )
