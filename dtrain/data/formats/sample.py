"""Rows of a data file to token ids and the mask of the tokens that are trained. Torch is not imported.

What is trained, by `loss_on` and kind of row:

               messages, sharegpt, alpaca           prompt and completion            text        tokenized
    assistant  every assistant message              the completion                   everything  as its labels say
    completion assistant messages after the last    the completion (of messages:     everything  as its labels say
               user message                         its assistant messages)
    last       the last assistant message           the completion (of messages:     everything  as its labels say
                                                    its last assistant message)
    all        everything                           everything                       everything  as its labels say

A message with `train: false` is never trained. What is trained of an assistant message says `replies.py`. Strings end
with the EOS token, which is trained, and begin with what the tokenizer's post-processor puts there (BOS, for most);
templates write their own. A token that holds a trained character is trained.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from dtrain.data.formats.encoder import LONG, Document, RowEncoder
from dtrain.data.formats.formats import Conversation, PromptCompletion, Text, TokenizedRow, normalise
from dtrain.data.text.replies import Span
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer

UNTRAINED = "no trained token"
CUT = "no trained token within data.max_length"


class Encoder(RowEncoder):
    """Encoder of rows to samples of one document, trained by `loss_on`: assistant, completion, last or all."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, loss_on: str = "assistant", **limits: Any
    ):
        super().__init__(tokenizer, template, **limits)
        self.loss_on = loss_on
        self.decides = [loss_on]

    def content_of(self, row: Mapping[str, Any], name: str) -> Any:
        sample = normalise(self.in_messages(row, name), name)
        if isinstance(sample, Conversation):
            return [sample.messages, sample.tools]
        if isinstance(sample, PromptCompletion):
            return [sample.prompt, sample.completion]
        return sample.text if isinstance(sample, Text) else sample.ids

    def documents_of(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        ids, trained = self.encode(normalise(self.in_messages(row, name), name))
        full = len(ids)
        if self.drops(full):
            return LONG
        reason = CUT if _has_target(trained) else UNTRAINED
        ids, trained = ids[: self.max_length], trained[: self.max_length]
        return [Document(ids, trained, full)] if _has_target(trained) else reason

    def encode(self, sample: Conversation | PromptCompletion | Text | TokenizedRow) -> tuple[list[int], bytearray]:
        """Return token ids and, a byte each, whether they are trained; not yet truncated. Raises UserError."""
        if isinstance(sample, Conversation):
            return self._conversation(sample)
        if isinstance(sample, TokenizedRow):
            self.check_ids(sample.ids, "input_ids")
            return sample.ids, bytearray(sample.trained)
        if isinstance(sample, Text):
            return self._string(sample.text, 0)
        start = 0 if self.loss_on == "all" else len(sample.prompt)
        return self._string(sample.prompt + sample.completion, start)

    def _conversation(self, sample: Conversation) -> tuple[list[int], bytearray]:
        replies = self.replies
        messages = replies.with_objects(sample.messages, sample.tools)
        if self.loss_on == "all":
            shut = [index for index, flag in enumerate(sample.train) if flag is False]
            if not shut:
                ids = self.tokenizer.encode(replies.template.render(messages, sample.tools))
                return ids, bytearray(b"\1" * len(ids))
            text, spans = replies.blocks(messages, sample.tools, shut)
            ids, covered = self._masked(text, spans)
            return ids, bytearray(1 - inside for inside in covered)
        text, spans = replies.find(messages, sample.tools, self._wanted(sample))
        return self._masked(text, spans)

    def _wanted(self, sample: Conversation) -> list[int]:
        """Return the indices of the messages that are trained."""
        roles = [message["role"] for message in sample.messages]
        replies = [index for index, role in enumerate(roles) if role == "assistant" and index >= sample.prompt]
        if self.loss_on == "completion" and not sample.prompt:
            users = [index for index, role in enumerate(roles) if role == "user"]
            replies = [index for index in replies if not users or index > users[-1]]
        if self.loss_on == "last":
            replies = replies[-1:]
        return [index for index in replies if sample.train[index] is not False]

    def _masked(self, text: str, spans: Sequence[Span]) -> tuple[list[int], bytearray]:
        """Return the ids of `text`, and the mask of those that hold a character of a span."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        trained = bytearray(len(ids))
        for start, end in spans:
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, end, key=itemgetter(0))
            trained[first:last] = b"\1" * max(0, last - first)
        return ids, trained

    def _string(self, text: str, start: int) -> tuple[list[int], bytearray]:
        """Return ids and mask of a plain string, trained from character `start` on and in its EOS token."""
        ids, trained = self._masked(text, [(start, len(text))])
        before, after = self.around(ids)
        return [*before, *ids, *after], bytearray(len(before)) + trained + b"\1" * len(after)


def _has_target(trained: bytearray) -> bool:
    return trained.find(1, 1) > 0  # the first token is nobody's target
