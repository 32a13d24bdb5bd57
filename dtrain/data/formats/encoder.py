"""Rows of data files to token ids and loss masks: the base class of all encoders, and the encoder of single examples.

A sample is one document, or two for a preference pair (pairs.py). prompts.py encodes prompts. This table shows which
tokens of an example are trained, by `data.loss_on` and kind of row:

               messages, sharegpt, alpaca            prompt and completion                   text         tokenized
    assistant  every assistant message               the completion                          everything   its labels
    completion the assistant messages after the      the completion; in messages, its        everything   its labels
               last user message                     assistant messages
    last       the last assistant message            the completion; in messages, its last   everything   its labels
                                                     assistant message
    all        everything                            everything                              everything   its labels

A message with `train: false` is never trained. replies.py describes which characters of an assistant message count. A
token is trained if at least one of its characters is. For example, with loss_on=assistant:

    text      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    trained                                                          Hello<|im_end|>

A plain string is framed: the tokens that the tokenizer's post-processor adds (BOS, for most) are put before the string,
and the EOS token, which is trained, after it. Chat templates write their own tokens.

A prompt that is a string, such as {"prompt": "2 + 2 =", "completion": " 4"}, is either continued as raw text or put
into the chat template. `data.prompts_as` decides: `text` or `user`. With `user`, the row is read as if its prompt were
a user message and its completion an assistant message.

This module does not import torch.
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
from dtrain.data.sources.reading import RowReading
from dtrain.data.text.dropped_text import DroppedText, find_dropped_text
from dtrain.data.text.replies import Messages, Replies, Span
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Affixes, Tokenizer

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader, LaidOutImage

# Values of data.prompts_as.
TEXT, USER = "text", "user"
PROMPTS_AS_KEY = "data.prompts_as"

AS_WRITTEN = RowReading()  # rows of one of dtrain's formats, with its names of columns

# Reasons why a row gives no sample.
TOO_LONG = "longer than data.max_length"
NO_TRAINED_TOKEN = "no trained token"
NO_TRAINED_TOKEN_LEFT = "no trained token within data.max_length"
IMAGE_CUT = "data.max_length would cut an image in half"
TOO_LONG_REASONS = (TOO_LONG, IMAGE_CUT)

# Formats that the chat template may write, and whose rows may have images.
TEMPLATED = {*CHAT_FORMATS, "prompt_completion", "preference", "question"}


class ValidationSplit(NamedTuple):
    """One side of a split of the data into training and validation rows.

    A hash of a row's content is converted to a number from 0 to 1. Rows with a number below the threshold are
    validation rows. So rows with equal content are on the same side, whatever file they are in.

    Attributes:
        size: The recipe's `data.val`: a fraction of the rows, or their number.
        seed: Seed of the hash.
        is_validation: Whether this is the side of the validation rows.
        threshold: The fraction. If `size` is a number of rows, it is known only after all rows have been hashed
            (`cache.with_split_threshold`), and None before.

    Example:
        >>> split = ValidationSplit(0.25, seed=0, is_validation=True, threshold=0.25)
        >>> other = split._replace(is_validation=False)
        >>> rows = [f"row {number}" for number in range(1000)]
        >>> sum(split.contains(row) for row in rows)
        246
        >>> all(split.contains(row) != other.contains(row) for row in rows)
        True
    """

    size: float
    seed: int
    is_validation: bool
    threshold: float | None = None

    def random_number(self, content: Any) -> float:
        """Return the hash number of a row, from 0 to 1. `content` is a value that JSON can write."""
        text = json.dumps([self.seed, content], sort_keys=True, default=str)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64

    def contains(self, content: Any) -> bool:
        """Check whether a row with this content is on this side. Every row is if the threshold is not known yet."""
        return self.threshold is None or (self.random_number(content) < self.threshold) == self.is_validation


class SpelledToken(NamedTuple):
    """A row whose text contains the text of a control token, such as `<|im_end|>`.

    Attributes:
        line: Line of the row.
        text: The first such control token.
    """

    line: int
    text: str


class SpelledTokens(NamedTuple):
    """Control tokens whose texts a row contains.

    Attributes:
        as_characters: Control tokens that the tokenizer has read as plain characters.
        as_tokens: Control tokens that the tokenizer has read as tokens, because `data.special_tokens` does not escape
            them.
    """

    as_characters: list[str]
    as_tokens: list[str]


class EncodedExample(NamedTuple):
    """An example before truncation.

    Attributes:
        ids: Token ids.
        trained: For each token a byte, 1 if it is trained.
        text: Amount of text that should be trained, and how much of it the chat template leaves out.
    """

    ids: list[int]
    trained: bytearray
    text: DroppedText = DroppedText()


class Document(NamedTuple):
    """An encoded document.

    Attributes:
        ids: Token ids.
        trained: For each token a byte, 1 if it is trained.
        full_length: Number of tokens before truncation.
        columns: Columns of the row as JSON, if the encoder stores them.
        images: Images, in the order of their tokens.
        text: Amount of text that should be trained, and how much of it the chat template leaves out.
    """

    ids: Sequence[int]
    trained: bytearray
    full_length: int
    columns: bytes = b""
    images: "Sequence[LaidOutImage]" = ()
    text: DroppedText = DroppedText()

    def with_columns(self, **columns: Any) -> "Document":
        """Return the document with these columns, which `Samples.row` reads."""
        return self._replace(columns=json.dumps({"columns": columns}).encode())


@dataclass
class EncodedChunk:
    """The documents of one chunk of rows, and the rows that were left out.

    Attributes:
        rows: Number of rows, without those of the other side of a validation split.
        num_other_rows: Number of rows of the other side.
        num_string_prompts: Rows whose prompt is a string.
        size: Bytes of the data file that the chunk covers.
        tokens: Ids of all documents, one after the other, int32.
        trained: For each token a byte, 1 if it is a target.
        lengths: Tokens of each document.
        lines: Line of each document.
        full_lengths: Tokens of each document before truncation.
        left_out: Line and reason of the rows that gave no sample.
        columns: Columns of each document as JSON, if they are stored.
        images: Images of each document.
        image_notes: Sentences on some images, each once.
        num_image_rows_too_long: Rows with images that were left out as too long.
        escaped: Rows with the text of a control token that is read as characters (`SpelledTokens.as_characters`).
        kept: Rows with the text of a control token that is read as a token (`SpelledTokens.as_tokens`).
        text: Amount of text that should be trained, and how much of it the chat template leaves out.
        dropping_rows: Rows that lose text: the line, and an example of the text.
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
        """Append a document of the row in this line."""
        self.tokens.extend(document.ids)
        self.trained += document.trained
        self.lengths.append(len(document.ids))
        self.lines.append(line)
        self.full_lengths.append(document.full_length)
        self.columns.append(document.columns)
        self.images.append([image.record for image in document.images])
        for image in document.images:
            for note in image.notes:
                if note not in self.image_notes:
                    self.image_notes.append(note)


class RowEncoder:
    """Base class of the encoders, which turn rows into samples.

    A subclass defines `encode_row` and `row_content`, and the attributes that differ from those below.

    Attributes:
        documents: Documents of a sample.
        noun: Name of the samples in messages, in the plural.
        loss_on: Which tokens of a conversation are trained, as in `data.loss_on`.
        generates: Whether the trained model generates text. If not, how replies end does not matter.
        accepts_images: Whether rows may have images.
        stores_columns: Whether the cache stores columns of the rows, for rewards or losses.
        fingerprint_marks: Marks of this kind of encoder, part of the fingerprint.
        fingerprint_options: Options that decide how a row is encoded, part of the fingerprint.
        string_columns: Columns that are strings in a row with a string prompt, by format.
        directory: Directory of the data file that is read. Paths of images are relative to it.
        split: Side of a validation split whose rows are encoded; None for all rows.
    """

    documents = 1
    noun = "samples"
    loss_on = "all"
    generates = True
    accepts_images = False
    stores_columns = False
    fingerprint_marks: Sequence[str] = ()
    fingerprint_options: Sequence[Any] = ()
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
        """Set the limits of the recipe.

        Args:
            tokenizer: The model's tokenizer.
            template: The chat template; None refuses conversations.
            max_length: Maximum number of tokens of a document.
            too_long: What to do with longer documents: truncate, drop or error.
            prompts_as: How string prompts are read: text or user.
            images: Reader of images; None if the model takes no images.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.max_length = max_length
        self.too_long = too_long
        self.prompts_as = prompts_as
        self.images = images
        self.directory: Path | None = None
        self.split: ValidationSplit | None = None
        self._replies: Replies | None = None
        self._affixes: Affixes | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides how a row is encoded."""
        template = (self.template.fingerprint, sorted(self.template.control_tokens.escaped)) if self.template else None
        return digest(
            *self.fingerprint_marks,
            self.tokenizer.fingerprint,
            self.tokenizer.control_tokens.texts,
            template,
            self.max_length,
            *self.fingerprint_options,
            self.too_long,
            self.prompts_as,
            self.images.fingerprint if self.images else None,
            *(self.split or ()),
        )[:16]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode a row.

        Args:
            row: The row, with dtrain's names of columns.
            name: The row's format.

        Returns:
            The documents of the sample, or the reason why the row gives no sample.

        Raises:
            UserError: If the row is wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define encode_row")

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the content of a row, as a value for JSON.

        Columns that are not read, and marks of what is trained, are no part of it. Rows with equal content are on the
        same side of a validation split.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define row_content")

    def has_string_prompt(self, row: Mapping[str, Any], name: str) -> bool:
        """Return True if the prompt of a row in format `name`, and its completions, are strings."""
        columns = self.string_columns.get(name)
        return columns is not None and all(isinstance(row.get(column), str) for column in columns)

    def as_messages(self, row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Convert the prompt and completions of a row to messages, if they are strings and `prompts_as` is user.

        Any other row is returned unchanged.
        """
        if self.prompts_as != USER or not self.has_string_prompt(row, name):
            return row
        changed = dict(row)
        for column in self.string_columns[name]:
            role = "user" if column == "prompt" else "assistant"
            changed[column] = [{"role": role, "content": row[column]}]
        return changed

    def encode_chunk(self, chunk: Chunk, name: str, reading: RowReading = AS_WRITTEN) -> EncodedChunk:
        """Encode the rows of a chunk.

        Args:
            chunk: The rows.
            name: Their format.
            reading: How they are read.

        Raises:
            UserError: If a row is wrong, with file and line.
        """
        result = EncodedChunk(size=chunk.size)
        self.directory = Path(chunk.file).absolute().parent

        def encode(row: Mapping[str, Any]) -> list[Document] | str | None:
            if self.split is not None and not self.split.contains(self.row_content(row, name)):
                return None
            return self.encode_row(row, name)

        for line, row, documents in read_rows(chunk, reading, encode):
            if documents is None:
                result.num_other_rows += 1
                continue
            result.rows += 1
            if self.has_string_prompt(row, name):
                result.num_string_prompts += 1
            if isinstance(documents, str):
                reason = documents
                result.left_out.append((line, reason))
                if reason in TOO_LONG_REASONS and has_images(row):
                    result.num_image_rows_too_long += 1
                continue
            row_text = DroppedText()
            for document in documents:
                result.add(line, document)
                row_text += document.text
            if self.is_templated(row, name):
                spelled = self.spelled_tokens(row, documents)
                if spelled.as_characters:
                    result.escaped.append(SpelledToken(line, spelled.as_characters[0]))
                if spelled.as_tokens:
                    result.kept.append(SpelledToken(line, spelled.as_tokens[0]))
            result.add_text(line, row_text)
        return result

    def is_templated(self, row: Mapping[str, Any], name: str) -> bool:
        """Return True if the chat template writes a row in format `name`."""
        if self.template is None or name not in TEMPLATED:
            return False
        return self.prompts_as == USER or not self.has_string_prompt(row, name)

    def spelled_tokens(self, row: Mapping[str, Any], documents: Sequence[Document]) -> SpelledTokens:
        """Return the control tokens that the texts of a row contain, by how the tokenizer has read them.

        For example, a user's message contains `<|im_end|>`. If this token is escaped, it becomes several ordinary
        tokens and is listed in `as_characters`. If `data.special_tokens` does not escape it, it becomes the control
        token and is listed in `as_tokens`. Escaped control tokens are never listed in `as_tokens`, because the template
        and assistant messages write them on purpose.

        Args:
            row: The row, which the chat template has written.
            documents: The documents of the row.
        """
        assert self.template is not None
        control_tokens = self.template.control_tokens
        spelled: set[str] = set()
        for text in find_strings(row):
            spelled.update(match[0] for match in control_tokens.find(text))
        if not spelled:  # almost always
            return SpelledTokens([], [])
        as_tokens: set[str | None] = set()
        as_characters: set[str] = set()
        for document in documents:
            for piece in self.tokenizer.pieces(document.ids):
                as_tokens.add(piece.control)
                as_characters.update(match[0] for match in control_tokens.find(piece.text))
        return SpelledTokens(
            as_characters=sorted(spelled & as_characters),
            as_tokens=sorted((spelled & as_tokens) - control_tokens.escaped),
        )

    def split_numbers(self, chunk: Chunk, name: str, reading: RowReading = AS_WRITTEN) -> list[float]:
        """Return the hash number of each row for the validation split. Raises UserError with file and line."""
        split = self.split
        assert split is not None
        self.directory = Path(chunk.file).absolute().parent

        def number_of(row: Mapping[str, Any]) -> float:
            return split.random_number(self.row_content(row, name))

        return [number for _, _, number in read_rows(chunk, reading, number_of)]

    def check_shapes(self, chunk: Chunk, name: str, reading: RowReading = AS_WRITTEN) -> None:
        """Check that rows can be parsed and have the shape of their format, without tokenising them.

        Raises:
            UserError: As `encode_chunk`.
        """
        # Tokenized rows cost nothing to encode, and encoding also compares their ids with the vocabulary.
        read = self.encode_row if name == "tokenized" else self.row_content
        self.directory = Path(chunk.file).absolute().parent
        for _ in read_rows(chunk, reading, lambda row: read(row, name)):
            pass

    @property
    def replies(self) -> Replies:
        """Finder of replies. Raises UserError if the model has no chat template."""
        if self.template is None:
            raise UserError(
                f"the row is a conversation, but {self.tokenizer.directory} has no chat template. Name a template file "
                "with data.chat_template, or use the directory of the instruct model"
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
        """Render a conversation as text.

        Args:
            messages: The conversation. Tool calls are written in the form that the template reads.
            tools: Tools that the conversation lists.
            add_generation_prompt: Whether the text ends with the beginning of a reply.
            variables: Variables for the template.
            images: Images of the messages' parts, in order. Their placeholders become image tokens.

        Raises:
            UserError: If the template refuses the conversation, or if it has images and `images` is empty.
        """
        if not images:
            self.refuse_images(messages)
        messages = self.replies.with_calls(without_images(messages), tools)
        text = self.replies.template.render(messages, tools, add_generation_prompt, variables)
        if images and self.images:
            return self.images.expand(text, [image.layout for image in images]).text
        return text

    def count_text(self, messages: Messages, tools: Messages | None, trained: Collection[int]) -> DroppedText:
        """Count the text of the messages with these indices, and the part that the chat template leaves out."""
        messages = self.replies.with_calls(without_images(messages), tools)
        rendered = self.replies.template.render(messages, tools)
        return find_dropped_text(self.replies.template, messages, tools, trained, rendered)

    def check_image_tokens(self, ids: Sequence[int], images: "Sequence[LaidOutImage]") -> None:
        """Raise UserError if `ids` have more or fewer image tokens than the images need."""
        if images and self.images:
            self.images.check_token_count(ids, images)

    def encode_conversation(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        """Return the ids of a full conversation, as transformers' `apply_chat_template` does.

        The ids include everything that the template writes after the token that ends the last turn.

        Raises:
            UserError: If the template refuses the conversation.
        """
        return self.tokenizer.encode(self.render(messages, tools))

    def encode_text(self, text: str, ends: bool = True) -> list[int]:
        """Return the ids of a plain string, framed by the tokens of `text_affixes`.

        Args:
            text: The string.
            ends: Whether the tokens after the string, such as EOS, are added too.
        """
        ids = self.tokenizer.encode(text)
        before, after = self.text_affixes(ids)
        return [*before, *ids, *(after if ends else [])]

    def refuse_images(self, messages: Messages) -> None:
        """Raise UserError if messages have images."""
        if image_parts(messages):
            raise UserError(
                "the row has images, but this method trains on text only. Set method=sft, dpo or grpo, or remove the "
                "images"
            )

    def check_ids(self, ids: Sequence[int], key: str) -> None:
        """Raise UserError if a tokenized row has an id that the model has no embedding for."""
        limit = self.tokenizer.id_limit
        if max(ids, default=0) >= limit:
            raise UserError(
                f"{key} contains the id {max(ids)}, beyond the model's vocabulary of {limit}. Tokenize the rows with "
                "the tokenizer of this model"
            )

    def read_images(self, messages: Messages) -> "list[LaidOutImage]":
        """Return the images of a conversation, with layouts from their headers.

        Raises:
            UserError: If an image cannot be read, or if this encoder or the model takes no images.
        """
        if not self.accepts_images:
            self.refuse_images(messages)
        values = [part["image"] for part in image_parts(messages)]
        if not values:
            return []
        if self.images is None:
            raise UserError(
                f"the row has images, but the model in {self.tokenizer.directory} takes none (its config.json has no "
                "vision_config). Use a model that takes images, or remove them"
            )
        return self.images.read(values, self.directory)

    def image_content(self, messages: Messages) -> list[list[str]]:
        """Return the entries that a conversation's images add to `row_content`.

        Returns:
            A list with one entry, the list of the images' digests. An empty list if there are no images.
        """
        digests = [image.image.digest for image in self.read_images(messages)]
        return [digests] if digests else []

    def images_in_range(
        self, ids: Sequence[int], images: "Sequence[LaidOutImage]", kept: range
    ) -> "Sequence[LaidOutImage] | None":
        """Return the images whose tokens are at the positions `kept` of `ids`; None if an image would be cut.

        Raises:
            UserError: If an image has too many tokens for any row.
        """
        if not images or not self.images:
            return images
        return self.images.images_in_range(ids, images, kept, self.max_length)

    def is_dropped(self, length: int) -> bool:
        """Return True if `data.too_long` drops a row because of its length.

        Args:
            length: Number of tokens of the row's longest document.

        Raises:
            UserError: If the row is too long and `data.too_long` is "error".
        """
        if length <= self.max_length or self.too_long == "truncate":
            return False
        if self.too_long == "error":
            raise UserError(
                f"the row has {length} tokens and data.max_length is {self.max_length}. "
                "Raise it, or set data.too_long to truncate or drop"
            )
        return True

    def text_affixes(self, ids: Sequence[int]) -> Affixes:
        """Return the ids that frame a plain string.

        Before the string: the ids that the tokenizer's post-processor adds (BOS, for most), unless `ids` begin with
        them. After the string: the EOS token, unless `ids` end with one.

        Args:
            ids: Ids of the string.

        Raises:
            UserError: If the tokenizer has no EOS token.
        """
        if self.tokenizer.eos_id is None:
            raise UserError(
                f"the tokenizer of {self.tokenizer.directory} names no EOS token, which must end each text. "
                "Name it as eos_token in tokenizer_config.json"
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
        return Affixes(before, after)


class Encoder(RowEncoder):
    """Encoder of single examples. `loss_on` decides what is trained; image tokens never are.

    Attributes:
        loss_on: assistant, completion, last or all; see the module's table.
    """

    accepts_images = True

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, loss_on: str = "assistant", **limits: Any
    ):
        super().__init__(tokenizer, template, **limits)
        self.loss_on = loss_on
        self.fingerprint_options = [loss_on]

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the messages and tools, the texts, or the ids of an example."""
        sample = normalise(self.as_messages(row, name), name)
        if isinstance(sample, Conversation):
            return [without_images(sample.messages), sample.tools, *self.image_content(sample.messages)]
        if isinstance(sample, Text):
            return sample.completion if name == "text" else [sample.prompt, sample.completion]
        return sample.ids

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode an example to one document. One that is too long loses its end."""
        sample = normalise(self.as_messages(row, name), name)
        images = self.read_images(sample.messages) if isinstance(sample, Conversation) else []
        ids, trained, text = self._encode_example(sample, images)
        full_length = len(ids)
        if self.is_dropped(full_length):
            return TOO_LONG
        remaining_images = self.images_in_range(ids, images, range(self.max_length))
        if remaining_images is None:
            return IMAGE_CUT
        had_target = _has_target(trained)
        ids, trained = ids[: self.max_length], trained[: self.max_length]
        if _has_target(trained):
            return [Document(ids, trained, full_length, images=remaining_images, text=text)]
        if had_target:
            return NO_TRAINED_TOKEN_LEFT
        if text.dropped:
            return f"{NO_TRAINED_TOKEN}, since the chat template leaves out {text.dropped} characters of the reply"
        return NO_TRAINED_TOKEN

    def encode(
        self, sample: Conversation | Text | TokenizedRow, images: "Sequence[LaidOutImage]" = ()
    ) -> tuple[list[int], bytearray]:
        """Encode an example without truncating it.

        Args:
            sample: The example.
            images: Images of the conversation's parts, in order.

        Returns:
            Token ids, and for each a byte that is 1 if it is trained.

        Raises:
            UserError: If the example is wrong.
        """
        ids, trained, _ = self._encode_example(sample, images)
        return ids, trained

    def _encode_example(
        self, sample: Conversation | Text | TokenizedRow, images: "Sequence[LaidOutImage]"
    ) -> EncodedExample:
        if isinstance(sample, Conversation):
            return self._encode_conversation_example(sample, images)
        if isinstance(sample, TokenizedRow):
            self.check_ids(sample.ids, "input_ids")
            return EncodedExample(sample.ids, bytearray(sample.trained))
        first_trained = 0 if self.loss_on == "all" else len(sample.prompt)
        ids, trained = self._encode_string(sample.prompt + sample.completion, first_trained)
        return EncodedExample(ids, trained)

    def _encode_conversation_example(self, sample: Conversation, images: "Sequence[LaidOutImage]") -> EncodedExample:
        """Encode a conversation: render it, find the characters to train, and tokenise with a mask.

        With loss_on=all, everything but the messages marked `train: false` is trained. Otherwise only replies are.
        """
        replies = self.replies
        messages = replies.with_calls(without_images(sample.messages), sample.tools)
        if self.loss_on == "all":
            # Everything is trained but the messages that are marked `train: false`, with their headers.
            trained_messages = [index for index, mark in enumerate(sample.train) if mark is not False]
            untrained_messages = [index for index, mark in enumerate(sample.train) if mark is False]
            if not untrained_messages and not images:
                # The usual case needs no spans of messages, so templates that cannot be marked work, too.
                text = replies.template.render(messages, sample.tools)
                ids = self.tokenizer.encode(text)
                trained = bytearray(b"\1" * len(ids))
            else:
                text, spans = replies.blocks(messages, sample.tools, untrained_messages)
                ids, is_untrained = self._encode_with_mask(text, spans, images)
                trained = bytearray(1 - flag for flag in is_untrained)
        else:
            trained_messages = self._trained_replies(sample)
            text, spans = replies.find(messages, sample.tools, trained_messages)
            ids, trained = self._encode_with_mask(text, spans, images)
        if images and self.images:
            for position in self.images.image_positions(ids):
                trained[position] = 0
        dropped = find_dropped_text(replies.template, messages, sample.tools, trained_messages, text)
        return EncodedExample(ids, trained, dropped)

    def _trained_replies(self, sample: Conversation) -> list[int]:
        """Return the indices of the messages that `loss_on` trains."""
        roles = [message["role"] for message in sample.messages]
        replies = [index for index, role in enumerate(roles) if role == "assistant" and index >= sample.prompt]
        if self.loss_on == "completion" and not sample.prompt:
            users = [index for index, role in enumerate(roles) if role == "user"]
            if users:
                replies = [index for index in replies if index > users[-1]]
        if self.loss_on == "last":
            replies = replies[-1:]
        return [index for index in replies if sample.train[index] is not False]

    def _encode_with_mask(
        self, text: str, spans: Sequence[Span], images: "Sequence[LaidOutImage]" = ()
    ) -> tuple[list[int], bytearray]:
        """Return the ids of `text` with its images, and for each id 1 if it has a character of a span."""
        if images and self.images:
            expanded = self.images.expand(text, [image.layout for image in images])
            text = expanded.text
            spans = [(expanded.map_position(start), expanded.map_position(end)) for start, end in spans]
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        self.check_image_tokens(ids, images)
        mask = bytearray(len(ids))
        for start, end in spans:
            # The first token that ends after `start`, and the first token that begins at `end` or later.
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, end, key=itemgetter(0))
            mask[first:last] = b"\1" * max(0, last - first)
        return ids, mask

    def _encode_string(self, text: str, first_trained: int) -> tuple[list[int], bytearray]:
        """Encode a plain string with its frame. The characters from `first_trained` on and the EOS are trained."""
        ids, trained = self._encode_with_mask(text, [(first_trained, len(text))])
        before, after = self.text_affixes(ids)
        return [*before, *ids, *after], bytearray(len(before)) + trained + b"\1" * len(after)


def find_strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value. Keys and names of columns are left out.

    Example:
        >>> list(find_strings({"role": "user", "content": [{"text": "Hi"}, 3]}))
        ['user', 'Hi']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_strings(item)


def _has_target(trained: bytearray) -> bool:
    """Return True if a token after the first is trained. Nothing predicts the first token."""
    return trained.find(1, 1) > 0


def resolve_prompts_as(chosen: str | None, num_trained_string_prompts: int, template: ChatTemplate | None) -> str:
    """Return the mode in which an evaluation reads string prompts, `text` or `user`.

    Args:
        chosen: `data.prompts_as`, if it is set.
        num_trained_string_prompts: Training rows with string prompts, which were read as text.
        template: The chat template. Without one, prompts are read as text.

    Example:
        >>> resolve_prompts_as(None, 0, template=None)
        'text'
    """
    if template is None:
        return TEXT
    return chosen or (TEXT if num_trained_string_prompts else USER)


def refuse_without_template(prompts_as: str | None, template: ChatTemplate | None, directory: Path) -> None:
    """Raise UserError if `data.prompts_as` is user and the model in `directory` has no chat template."""
    if prompts_as == USER and template is None:
        raise UserError(
            f"{PROMPTS_AS_KEY}=user puts prompts into the chat template, but {directory} has none. Name a file with "
            f"data.chat_template, use the directory of the instruct model, or set {PROMPTS_AS_KEY}=text"
        )


def describe_string_prompts(
    label: str, count: int, prompts_as: str, template: ChatTemplate | None, is_all: bool = True
) -> list[str]:
    """Return a line on how string prompts are read and how to change it; none without such prompts or a template.

    Args:
        label: Name of the data.
        count: Number of string prompts.
        prompts_as: How they are read: text or user.
        template: The chat template.
        is_all: Whether `count` is of all rows, not only of the first ones.
    """
    if not count or template is None:
        return []
    prompts = f"{count:,} {plural(count, 'prompt')}" if is_all else f"{count:,} of the first prompts"
    if prompts_as == USER:
        reading = f"read as a user's message, in the chat template ({PROMPTS_AS_KEY}=text: continued as raw text)"
    else:
        reading = f"continued as raw text, without the chat template ({PROMPTS_AS_KEY}=user: read as a user's message)"
    return [f"{label}: {prompts} as plain text: {reading}"]
