"""One row of a data file to token ids and the mask of the tokens that are trained. Torch is not imported.

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

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from dtrain.data.files import Chunk, parse
from dtrain.data.formats import Completion, Conversation, Text, Tokens, normalise
from dtrain.data.replies import Replies, Span
from dtrain.data.template import ChatTemplate
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError

LOSS_ON = ("assistant", "completion", "last", "all")
TOO_LONG = ("truncate", "drop", "error")
UNTRAINED = "no trained token"
CUT = "no trained token within data.max_length"
LONG = "longer than data.max_length"


@dataclass
class EncodedChunk:
    """The samples of one chunk of rows, one behind the other, and what became of the rest.

    tokens    int32, the ids of all samples        trained   one byte a token, 1 = a target
    lengths   tokens of each sample                lines     the line each stands on
    full      its length before truncation         left_out  (line, reason) of the rows that are no sample
    """

    rows: int = 0
    size: int = 0
    tokens: array = field(default_factory=lambda: array("i"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)


class Encoder:
    """Rows to samples, with one tokenizer, one template (None: chats are refused) and the recipe's options."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_length: int,
        loss_on: str = "assistant",
        too_long: str = "truncate",
    ):
        if loss_on not in LOSS_ON:
            raise UserError(f"data.loss_on is {loss_on!r}; known are {', '.join(LOSS_ON)}")
        if too_long not in TOO_LONG:
            raise UserError(f"data.too_long is {too_long!r}; known are {', '.join(TOO_LONG)}")
        if max_length < 2:
            raise UserError(f"data.max_length is {max_length}; a sample needs at least 2 tokens to train one")
        self.tokenizer, self.template = tokenizer, template
        self.max_length, self.loss_on, self.too_long = max_length, loss_on, too_long
        self._replies = Replies(template) if template else None
        self._affixes: tuple[list[int], list[int]] | None = None

    def __reduce__(self):
        return _encoder, (self.tokenizer, self.template, self.max_length, self.loss_on, self.too_long)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides what a row becomes."""
        template = self.template.fingerprint if self.template else None
        parts = [self.tokenizer.fingerprint, template, self.max_length, self.loss_on, self.too_long]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def replies(self) -> Replies | None:
        return self._replies

    def encode_chunk(self, chunk: Chunk, name: str) -> EncodedChunk:
        """The samples of rows in format `name`. Raises UserError with file and line in front."""
        result = EncodedChunk(size=chunk.size)
        for line, raw in chunk.rows:
            result.rows += 1
            row = parse(chunk.file, line, raw)
            try:
                ids, trained = self.encode(normalise(row, name))
            except UserError as problem:
                raise UserError(f"{chunk.file}:{line}: {problem}") from problem
            self._keep(result, chunk.file, line, ids, trained)
        return result

    def encode(self, sample: Conversation | Completion | Text | Tokens) -> tuple[list[int], bytearray]:
        """Token ids and, a byte each, whether they are trained; not yet truncated. Raises UserError."""
        if isinstance(sample, Conversation):
            return self._conversation(sample)
        if isinstance(sample, Tokens):
            limit = self.tokenizer.id_limit
            if max(sample.ids, default=0) >= limit:
                raise UserError(f"input_ids holds the id {max(sample.ids)}, beyond the model's vocabulary of {limit}")
            return sample.ids, bytearray(sample.trained)
        if isinstance(sample, Text):
            return self._string(sample.text, 0)
        start = 0 if self.loss_on == "all" else len(sample.prompt)
        return self._string(sample.prompt + sample.completion, start)

    def _keep(self, result: EncodedChunk, file: str, line: int, ids: Sequence[int], trained: bytearray) -> None:
        full = len(ids)
        if full > self.max_length:
            if self.too_long == "error":
                raise UserError(
                    f"{file}:{line}: the row has {full} tokens and data.max_length is {self.max_length}; "
                    "raise it, or set data.too_long to truncate or drop"
                )
            if self.too_long == "drop":
                result.left_out.append((line, LONG))
                return
        reason = CUT if _has_target(trained) else UNTRAINED
        ids, trained = ids[: self.max_length], trained[: self.max_length]
        if not _has_target(trained):
            result.left_out.append((line, reason))
            return
        result.tokens.extend(ids)
        result.trained += trained
        result.lengths.append(len(ids))
        result.lines.append(line)
        result.full.append(full)

    def _conversation(self, sample: Conversation) -> tuple[list[int], bytearray]:
        if self._replies is None:
            raise UserError(
                f"the row is a conversation, and {self.tokenizer.directory} has no chat template; "
                "name a file with data.chat_template, or take the instruct model's directory"
            )
        messages = self._replies.with_objects(sample.messages, sample.tools)
        if self.loss_on == "all":
            shut = [index for index, flag in enumerate(sample.train) if flag is False]
            if not shut:
                text = self.template.render(messages, sample.tools)
                ids = self.tokenizer.encode(text)
                return ids, bytearray(b"\1" * len(ids))
            text, spans = self._replies.blocks(messages, sample.tools, shut)
            ids, covered = self._masked(text, spans)
            return ids, bytearray(1 - inside for inside in covered)
        text, spans = self._replies.find(messages, sample.tools, self._wanted(sample))
        return self._masked(text, spans)

    def _wanted(self, sample: Conversation) -> list[int]:
        """The messages that are trained."""
        roles = [message["role"] for message in sample.messages]
        replies = [index for index, role in enumerate(roles) if role == "assistant" and index >= sample.prompt]
        if self.loss_on == "completion" and not sample.prompt:
            users = [index for index, role in enumerate(roles) if role == "user"]
            replies = [index for index in replies if not users or index > users[-1]]
        if self.loss_on == "last":
            replies = replies[-1:]
        return [index for index in replies if sample.train[index] is not False]

    def _masked(self, text: str, spans: Sequence[Span]) -> tuple[list[int], bytearray]:
        """Ids of `text`, and which of them hold a character of a span."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        trained = bytearray(len(ids))
        for start, end in spans:
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, end, key=itemgetter(0))
            trained[first:last] = b"\1" * max(0, last - first)
        return ids, trained

    def _string(self, text: str, start: int) -> tuple[list[int], bytearray]:
        """A plain string, trained from character `start` on and in its EOS token."""
        if self.tokenizer.eos_id is None:
            raise UserError(
                f"the tokenizer of {self.tokenizer.directory} names no EOS token, which must end each text; "
                "name it as eos_token in tokenizer_config.json"
            )
        if self._affixes is None:
            self._affixes = self.tokenizer.affixes()
        before, after = self._affixes
        ids, trained = self._masked(text, [(start, len(text))])
        if before and ids[: len(before)] == before:
            before = []  # the text brings its own
        if ids[-1:] and ids[-1] in self.tokenizer.eos_ids:
            after = []
        elif after[-1:] != [self.tokenizer.eos_id]:
            after = [*after, self.tokenizer.eos_id]
        return [*before, *ids, *after], bytearray(len(before)) + trained + b"\1" * len(after)


def _has_target(trained: bytearray) -> bool:
    return trained.find(1, 1) > 0  # the first token is nobody's target


def _encoder(tokenizer, template, max_length, loss_on, too_long) -> Encoder:
    return Encoder(tokenizer, template, max_length=max_length, loss_on=loss_on, too_long=too_long)
