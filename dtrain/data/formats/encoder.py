"""Rows of a data file to token ids and the mask of the tokens that are trained: the base of all encoders, and that of
single examples. Torch is not imported.

A sample is one document, or the two of a pair (pairs.py); prompts.py encodes prompts. What is trained of an example, by
`loss_on` and kind of row:

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

Prompts that are plain strings are continued as raw text, or put into the chat template: `data.prompts_as` says which,
text or user. Under user a row is read as if its prompt were a user's message, and its completions an assistant's.
"""

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.json_files import digest
from dtrain.base.ranges import plural
from dtrain.data.formats.formats import CHAT_FORMATS, Conversation, Text, TokenizedRow, normalise
from dtrain.data.formats.image_parts import has_images, image_parts, without_images
from dtrain.data.sources.files import Chunk, read_rows
from dtrain.data.text.dropped_text import DroppedText, find_dropped_text
from dtrain.data.text.replies import Messages, Replies, Span
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader, LaidOutImage

TEXT, USER = "text", "user"
PROMPTS_AS_KEY = "data.prompts_as"

NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
TOO_LONG = "longer than data.max_length"
NO_TRAINED_TOKEN = "no trained token"
NO_TRAINED_TOKEN_LEFT = "no trained token within data.max_length"
IMAGE_CUT = "data.max_length would cut an image in half"
TOO_LONG_REASONS = (TOO_LONG, IMAGE_CUT)
# Formats that the chat template may write, and whose rows may have images.
TEMPLATED = {*CHAT_FORMATS, "prompt_completion", "preference", "question"}


class ValidationSplit(NamedTuple):
    """The validation rows, or the others, chosen by the rows' content, whatever their file.

    Each content draws a number from 0 to 1 by its hash. Rows that draw less than `threshold` are validation rows.

    Attributes:
        size: The recipe's `data.val`: a share of the rows, or their number.
        seed: Of the draws.
        is_validation: Whether these are the validation rows.
        threshold: The share. For a number of rows it is known once all rows have drawn (see cache.py); None before.
    """

    size: float
    seed: int
    is_validation: bool
    threshold: float | None = None

    def random_number(self, content: Any) -> float:
        """Return the number that a row of that content, which JSON can write, draws."""
        text = json.dumps([self.seed, content], sort_keys=True, default=str)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64

    def contains(self, content: Any) -> bool:
        """Return whether this part has a row of that content; of a part whose bound is not known, True."""
        return self.threshold is None or (self.random_number(content) < self.threshold) == self.is_validation


class SpelledToken(NamedTuple):
    """A row that has the text of a control token: its line, and the first such text."""

    line: int
    text: str


class Encoded(NamedTuple):
    """Token ids of an example, not yet truncated, a byte for each that says whether it is trained, and the text of the
    messages that should be trained, with what the chat template leaves out of it."""

    ids: list[int]
    trained: bytearray
    text: DroppedText = DroppedText()


class Document(NamedTuple):
    """Token ids, a byte for each that says whether it is trained, and the length before truncation; the row's columns
    as JSON where the encoder keeps them; the images, in the order of their tokens; the text of the row's messages that
    should be trained, and what of it the chat template leaves out."""

    ids: Sequence[int]
    trained: bytearray
    full: int
    columns: bytes = b""
    images: "Sequence[LaidOutImage]" = ()
    text: DroppedText = DroppedText()

    def with_columns(self, **columns: Any) -> "Document":
        """Return the document with these columns, as `Samples.row` reads them again."""
        return self._replace(columns=json.dumps({"columns": columns}).encode())


@dataclass
class EncodedChunk:
    """The documents of one chunk of rows, one behind the other, and the rows that were left out.

    tokens    int32, the ids of all documents      trained   one byte a token, 1 = a target
    lengths   tokens of each document              lines     the line that each comes from
    full      its length before truncation         left_out  (line, reason) of the rows that are no sample
    columns   each document's, as JSON, where they are kept
    images    each document's; image_notes: sentences on some of them, to be said once
    others    rows of the other part, which are none of `rows`
    plain_prompts   of `rows`, those whose prompt is a plain string
    images_too_long   rows with images that are left out as too long
    escaped   of `rows`, those in which the text of a control token is read as characters
    kept      of `rows`, those whose own text has a control token that is read as a token, although it could have been
              escaped
    text            the text that should be trained, and what of it the chat template leaves out
    dropping        the lines of the rows that the template leaves text out of, and an example of that text
    """

    rows: int = 0
    num_other_rows: int = 0
    num_string_prompts: int = 0
    size: int = 0
    tokens: array = field(default_factory=lambda: array("i"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    full_lengths: list[int] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)
    columns: list[bytes] = field(default_factory=list)
    images: "list[list[ImageRecord]]" = field(default_factory=list)
    image_notes: list[str] = field(default_factory=list)
    num_image_rows_too_long: int = 0
    escaped: list[SpelledToken] = field(default_factory=list)
    kept: list[SpelledToken] = field(default_factory=list)
    text: DroppedText = DroppedText()
    dropping_rows: list[tuple[int, str]] = field(default_factory=list)

    def add_text(self, line: int, text: DroppedText) -> None:
        """Count the text of a row."""
        self.text += text
        if text.dropped:
            self.dropping_rows.append((line, text.example))

    def add(self, line: int, document: Document) -> None:
        self.tokens.extend(document.ids)
        self.trained += document.trained
        self.lengths.append(len(document.ids))
        self.lines.append(line)
        self.full_lengths.append(document.full)
        self.columns.append(document.columns)
        self.images.append([image.record for image in document.images])
        for note in (note for image in document.images for note in image.notes):
            if note not in self.image_notes:
                self.image_notes.append(note)


class RowEncoder:
    """Encoder of rows to samples, with one tokenizer, one template (None: chats are refused) and the recipe's limits.

    too_long: truncate, drop or error, for a row beyond `max_length`.
    """

    documents = 1  # of a sample
    noun = "samples"  # what these are
    loss_on = "all"  # of a reply, what is trained
    generates = True  # whether the trained model generates text
    accepts_images = False
    stores_columns = False  # whether the cache holds what rewards or a loss read
    marks: Sequence[str] = ()  # of its kind, in the fingerprint
    decides: Sequence[Any] = ()  # beside the limits, what a row becomes
    # Of each format that may have a plain prompt, the columns that are then strings.
    string_columns: Mapping[str, Sequence[str]] = MappingProxyType(
        {"prompt_completion": ("prompt", "completion"), "preference": ("prompt", "chosen", "rejected")}
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_length: int,
        too_long: str = "truncate",
        prompts_as: str = TEXT,
        images: "ImageReader | None" = None,
    ):
        self.tokenizer, self.template = tokenizer, template
        self.max_length, self.too_long, self.prompts_as = max_length, too_long, prompts_as
        self.images = images  # None: the model takes none
        self.directory: Path | None = None  # of the file whose rows are read; paths of images are relative to it
        self.split: ValidationSplit | None = None  # of the rows; None: all of them
        self._replies: Replies | None = None
        self._affixes: tuple[list[int], list[int]] | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides what a row becomes."""
        template = (self.template.fingerprint, sorted(self.template.control_tokens.escaped)) if self.template else None
        limits = self.max_length, *self.decides, self.too_long, self.prompts_as
        tokens = self.tokenizer.fingerprint, self.tokenizer.control_tokens.texts
        images = self.images.fingerprint if self.images else None
        return digest(*self.marks, *tokens, template, *limits, images, *(self.split or ()))[:16]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Return the documents of a row in format `name`, or why it is left out. Raises UserError."""
        raise NotImplementedError(f"{type(self).__name__} makes no documents")

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the content of a row in format `name`, for JSON: no marks of what is trained, no other columns."""
        raise NotImplementedError(f"{type(self).__name__} tells no content")

    def has_string_prompt(self, row: Mapping[str, Any], name: str) -> bool:
        """Return whether the prompt (and its completions) of a row in format `name` is a plain string."""
        columns = self.string_columns.get(name)
        return columns is not None and all(isinstance(row.get(column), str) for column in columns)

    def as_messages(self, row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return `row`, its plain strings as messages where `prompts_as` is user."""
        if self.prompts_as != USER or not self.has_string_prompt(row, name):
            return row
        roles = {column: "user" if column == "prompt" else "assistant" for column in self.string_columns[name]}
        return {**row, **{column: [{"role": role, "content": row[column]}] for column, role in roles.items()}}

    def encode_chunk(self, chunk: Chunk, name: str, columns: Mapping[str, str] = NO_COLUMNS) -> EncodedChunk:
        """Encode rows in format `name` with their own names of our `columns`. Raises UserError with file and line."""
        result = EncodedChunk(size=chunk.size)
        self.directory = Path(chunk.file).absolute().parent

        def documents_of(row: Mapping[str, Any]) -> list[Document] | str | None:
            is_other = self.split is not None and not self.split.contains(self.row_content(row, name))
            return None if is_other else self.encode_row(row, name)

        for line, row, documents in read_rows(chunk, columns, documents_of):
            if documents is None:
                result.num_other_rows += 1
                continue
            result.rows += 1
            result.num_string_prompts += self.has_string_prompt(row, name)
            if isinstance(documents, str):
                result.left_out.append((line, documents))
                result.num_image_rows_too_long += documents in TOO_LONG_REASONS and has_images(row)
                continue
            for document in documents:
                result.add(line, document)
            if self.is_templated(row, name):
                escaped, kept = self.special_tokens_of(row, documents)
                result.escaped += [SpelledToken(line, text) for text in escaped[:1]]
                result.kept += [SpelledToken(line, text) for text in kept[:1]]
            result.add_text(line, sum((document.text for document in documents), start=DroppedText()))
        return result

    def is_templated(self, row: Mapping[str, Any], name: str) -> bool:
        """Return whether the chat template writes a row in format `name`."""
        if self.template is None or name not in TEMPLATED:
            return False
        return self.prompts_as == USER or not self.has_string_prompt(row, name)

    def special_tokens_of(self, row: Mapping[str, Any], documents: Sequence[Document]) -> tuple[list[str], list[str]]:
        """Return the control tokens that a templated row spells: those read as characters, and those read as tokens.

        A token that `data.special_tokens` escapes is not among the second ones: the assistant and the system message
        may write it.
        """
        assert self.template is not None
        control_tokens = self.template.control_tokens
        spelled = {match[0] for text in find_strings(row) for match in control_tokens.find(text)}
        if not spelled:  # almost always
            return [], []
        pieces = [piece for document in documents for piece in self.tokenizer.pieces(document.ids)]
        as_tokens = {control for control, _ in pieces}
        as_characters = {match[0] for _, text in pieces for match in control_tokens.find(text)}
        return sorted(spelled & as_characters), sorted((spelled & as_tokens) - control_tokens.escaped)

    def split_numbers(self, chunk: Chunk, name: str, columns: Mapping[str, str] = NO_COLUMNS) -> list[float]:
        """Return the numbers that the rows of a chunk draw for `part`. Raises UserError with file and line."""
        part = self.split
        assert part is not None
        self.directory = Path(chunk.file).absolute().parent
        return [
            draw
            for _, _, draw in read_rows(chunk, columns, lambda row: part.random_number(self.row_content(row, name)))
        ]

    def look_at(self, chunk: Chunk, name: str, columns: Mapping[str, str] = NO_COLUMNS) -> None:
        """Check rows as `encode_chunk` does, parsed and for the format's shape, but do not tokenise them."""
        look = self.encode_row if name == "tokenized" else self.row_content
        self.directory = Path(chunk.file).absolute().parent
        for _ in read_rows(chunk, columns, lambda row: look(row, name)):
            pass

    @property
    def replies(self) -> Replies:
        """The finder of replies. Raises UserError where the model has no chat template."""
        if self.template is None:
            raise UserError(
                f"the row is a conversation, and {self.tokenizer.directory} has no chat template; "
                "name a file with data.chat_template, or take the instruct model's directory"
            )
        if self._replies is None:
            self._replies = Replies(self.template)
        return self._replies

    def render(
        self,
        messages: Messages,
        tools: Messages | None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        images: "Sequence[LaidOutImage]" = (),
    ) -> str:
        """Return a conversation as text, its calls as the template takes them, and the tokens of `images` where its
        parts have images. Raises UserError."""
        if not images:
            self.refuse_images(messages)
        messages = self.replies.with_calls(without_images(messages), tools)
        text = self.replies.template.render(messages, tools, add_generation_prompt, variables)
        if images and self.images:
            return self.images.expand(text, [image.layout for image in images]).text
        return text

    def count_text(self, messages: Messages, tools: Messages | None, trained: Collection[int]) -> DroppedText:
        """Count the text of messages[i], i in `trained`, and the part of it that the chat template leaves out."""
        messages = self.replies.with_calls(without_images(messages), tools)
        rendered = self.replies.template.render(messages, tools)
        return find_dropped_text(self.replies.template, messages, tools, trained, rendered)

    def check_image_tokens(self, ids: Sequence[int], images: "Sequence[LaidOutImage]") -> None:
        """Raise UserError where `ids` have image tokens beside those of `images`, or fewer."""
        if images and self.images:
            self.images.check_token_count(ids, images)

    def encode_conversation(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        """Return the ids of a whole conversation, those of transformers' `apply_chat_template`: what the template
        writes behind the token that ends the last turn is part of them. Raises UserError."""
        return self.tokenizer.encode(self.render(messages, tools))

    def encode_text(self, text: str, ends: bool = True) -> list[int]:
        """Return the ids of a plain string, framed; ends: with what stands behind it."""
        ids = self.tokenizer.encode(text)
        before, after = self.text_affixes(ids)
        return [*before, *ids, *(after if ends else [])]

    def refuse_images(self, messages: Messages) -> None:
        """Raise UserError where messages have images."""
        if image_parts(messages):
            raise UserError(
                "the row has images, and this method trains on text alone: set method=sft, dpo or grpo, or remove the "
                "images"
            )

    def check_ids(self, ids: Sequence[int], key: str) -> None:
        """Raise UserError for an id of a tokenized row that the model has no embedding for."""
        limit = self.tokenizer.id_limit
        if max(ids, default=0) >= limit:
            raise UserError(f"{key} holds the id {max(ids)}, beyond the model's vocabulary of {limit}")

    def read_images(self, messages: Messages) -> "list[LaidOutImage]":
        """Return the images of a conversation, laid out from their headers. Raises UserError that names the first wrong
        one, and where this encoder or the model takes none."""
        if not self.accepts_images:
            self.refuse_images(messages)
        values = [part["image"] for part in image_parts(messages)]
        if values and self.images is None:
            raise UserError(
                f"the row has images, and the model in {self.tokenizer.directory} takes none (its config.json has no "
                "vision_config): take a model that does, or remove the images"
            )
        return self.images.read(values, self.directory) if values and self.images else []

    def image_content(self, messages: Messages) -> list[list[str]]:
        """Return what `row_content` has of a conversation's images: the list of their digests; nothing without."""
        digests = [image.image.digest for image in self.read_images(messages)]
        return [digests] if digests else []

    def images_in_range(
        self, ids: Sequence[int], images: "Sequence[LaidOutImage]", kept: range
    ) -> "Sequence[LaidOutImage] | None":
        """Return the images at places `kept` of a row; None where one would be cut. Raises UserError."""
        return self.images.within(ids, images, kept, self.max_length) if images and self.images else images

    def is_dropped(self, length: int) -> bool:
        """Return whether a row whose longest document has `length` tokens is dropped. Raises UserError if refused."""
        if length <= self.max_length or self.too_long == "truncate":
            return False
        if self.too_long == "error":
            raise UserError(
                f"the row has {length} tokens and data.max_length is {self.max_length}; "
                "raise it, or set data.too_long to truncate or drop"
            )
        return True

    def text_affixes(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids that belong before and after those of a plain string: what the tokenizer's post-processor puts
        in front (BOS, for most) unless the string brings its own, and the EOS token, likewise."""
        if self.tokenizer.eos_id is None:
            raise UserError(
                f"the tokenizer of {self.tokenizer.directory} names no EOS token, which must end each text; "
                "name it as eos_token in tokenizer_config.json"
            )
        if self._affixes is None:
            self._affixes = self.tokenizer.affixes()
        before, after = self._affixes
        if before and list(ids[: len(before)]) == before:
            before = []
        if ids and ids[-1] in self.tokenizer.eos_ids:
            after = []
        elif after[-1:] != [self.tokenizer.eos_id]:
            after = [*after, self.tokenizer.eos_id]
        return before, after


class Encoder(RowEncoder):
    """Encoder of rows to samples of one document, trained by `loss_on`: assistant, completion, last or all. Tokens of
    images never are."""

    accepts_images = True

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, loss_on: str = "assistant", **limits: Any
    ):
        super().__init__(tokenizer, template, **limits)
        self.loss_on = loss_on
        self.decides = [loss_on]

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        sample = normalise(self.as_messages(row, name), name)
        if isinstance(sample, Conversation):
            return [without_images(sample.messages), sample.tools, *self.image_content(sample.messages)]
        if isinstance(sample, Text):
            return sample.completion if name == "text" else [sample.prompt, sample.completion]
        return sample.ids

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        sample = normalise(self.as_messages(row, name), name)
        images = self.read_images(sample.messages) if isinstance(sample, Conversation) else []
        ids, trained, text = self._encoded(sample, images)
        full = len(ids)
        if self.is_dropped(full):
            return TOO_LONG
        kept = self.images_in_range(ids, images, range(self.max_length))
        if kept is None:
            return IMAGE_CUT
        reason = NO_TRAINED_TOKEN_LEFT if _has_target(trained) else NO_TRAINED_TOKEN
        if reason == NO_TRAINED_TOKEN and text.dropped:
            reason = f"{NO_TRAINED_TOKEN}, since the chat template leaves out {text.dropped} characters of the reply"
        ids, trained = ids[: self.max_length], trained[: self.max_length]
        return [Document(ids, trained, full, images=kept, text=text)] if _has_target(trained) else reason

    def encode(
        self, sample: Conversation | Text | TokenizedRow, images: "Sequence[LaidOutImage]" = ()
    ) -> tuple[list[int], bytearray]:
        """Return token ids and, a byte each, whether they are trained; not yet truncated. images: those of the
        conversation's parts, in order. Raises UserError."""
        ids, trained, _ = self._encoded(sample, images)
        return ids, trained

    def _encoded(self, sample: Conversation | Text | TokenizedRow, images: "Sequence[LaidOutImage]") -> Encoded:
        if isinstance(sample, Conversation):
            return self._conversation(sample, images)
        if isinstance(sample, TokenizedRow):
            self.check_ids(sample.ids, "input_ids")
            return Encoded(sample.ids, bytearray(sample.trained))
        start = 0 if self.loss_on == "all" else len(sample.prompt)
        return Encoded(*self._string(sample.prompt + sample.completion, start))

    def _conversation(self, sample: Conversation, images: "Sequence[LaidOutImage]") -> Encoded:
        replies = self.replies
        messages = replies.with_calls(without_images(sample.messages), sample.tools)
        if self.loss_on == "all":
            shut = [index for index, flag in enumerate(sample.train) if flag is False]
            wanted = [index for index, flag in enumerate(sample.train) if flag is not False]
            if not shut and not images:
                text = replies.template.render(messages, sample.tools)
                ids = self.tokenizer.encode(text)
                found = find_dropped_text(replies.template, messages, sample.tools, wanted, text)
                return Encoded(ids, bytearray(b"\1" * len(ids)), found)
            text, spans = replies.blocks(messages, sample.tools, shut)
            ids, covered = self._masked(text, spans, images)
            trained = bytearray(1 - inside for inside in covered)
        else:
            wanted = self._wanted(sample)
            text, spans = replies.find(messages, sample.tools, wanted)
            ids, trained = self._masked(text, spans, images)
        for place in self.images.image_positions(ids) if images and self.images else ():
            trained[place] = 0
        found = find_dropped_text(replies.template, messages, sample.tools, wanted, text)
        return Encoded(ids, trained, found)

    def _wanted(self, sample: Conversation) -> list[int]:
        roles = [message["role"] for message in sample.messages]
        replies = [index for index, role in enumerate(roles) if role == "assistant" and index >= sample.prompt]
        if self.loss_on == "completion" and not sample.prompt:
            users = [index for index, role in enumerate(roles) if role == "user"]
            replies = [index for index in replies if not users or index > users[-1]]
        if self.loss_on == "last":
            replies = replies[-1:]
        return [index for index in replies if sample.train[index] is not False]

    def _masked(
        self, text: str, spans: Sequence[Span], images: "Sequence[LaidOutImage]" = ()
    ) -> tuple[list[int], bytearray]:
        """Return the ids of `text`, its images' placeholders expanded, and the mask of those that hold a character of a
        span."""
        if images and self.images:
            expanded = self.images.expand(text, [image.layout for image in images])
            text, spans = (
                expanded.text,
                [(expanded.map_position(start), expanded.map_position(end)) for start, end in spans],
            )
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        self.check_image_tokens(ids, images)
        trained = bytearray(len(ids))
        for start, end in spans:
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, end, key=itemgetter(0))
            trained[first:last] = b"\1" * max(0, last - first)
        return ids, trained

    def _string(self, text: str, start: int) -> tuple[list[int], bytearray]:
        ids, trained = self._masked(text, [(start, len(text))])
        before, after = self.text_affixes(ids)
        return [*before, *ids, *after], bytearray(len(before)) + trained + b"\1" * len(after)


def find_strings(value: Any) -> Iterator[str]:
    """Yield the strings in a value of JSON, names of columns and keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_strings(item)


def _has_target(trained: bytearray) -> bool:
    return trained.find(1, 1) > 0  # the first token is nobody's target


def resolve_prompts_as(chosen: str | None, trained_plain: int, template: ChatTemplate | None) -> str:
    """Return how an evaluation reads plain prompts: as `chosen` (`data.prompts_as`), else as the training data's, of
    which `trained_plain` rows had one, else as a user's messages; without a template as text."""
    if template is None:
        return TEXT
    return chosen or (TEXT if trained_plain else USER)


def refuse_without_template(prompts_as: str | None, template: ChatTemplate | None, directory: Path) -> None:
    """Raise UserError for `user` where the model in `directory` has no chat template."""
    if prompts_as == USER and template is None:
        raise UserError(
            f"{PROMPTS_AS_KEY}=user puts prompts into the chat template, and {directory} has none; name a file with "
            f"data.chat_template, take the instruct model's directory, or set {PROMPTS_AS_KEY}=text"
        )


def describe_string_prompts(
    label: str, count: int, prompts_as: str, template: ChatTemplate | None, is_all: bool = True
) -> list[str]:
    """Return the line that tells what is done with `count` plain prompts, and the key that does the other; none without
    a prompt or a template. is_all: False where the count is of the first rows alone."""
    if not count or template is None:
        return []
    number, noun = (f"{count:,}", plural(count, "prompt")) if is_all else (f"{count:,} of the first", "prompts")
    prompts = f"{label}: {number} {noun} as plain text"
    if prompts_as == USER:
        return [
            f"{prompts}: read as a user's message, in the chat template ({PROMPTS_AS_KEY}=text: continued as raw text)"
        ]
    return [
        f"{prompts}: continued as raw text, without the chat template ({PROMPTS_AS_KEY}=user: read as a user's message)"
    ]
