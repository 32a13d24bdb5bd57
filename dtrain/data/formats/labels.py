"""Rows with a label: replies that are desirable or not (KTO), and numbers or classes that a reward model learns.

Replies. A row has a prompt and a completion in any format of single examples, and `label` (or LLaMA-Factory's
`kto_tag`), true or false. The completion is trained; in a conversation, the assistant messages after the last user
message. A preference row becomes two samples: the chosen completion, which is desirable, and the rejected one.

Numbers. A row in any format of `formats.FORMATS` has a number in its column `label`, and all of its text is read. A
pair is a preference row, whose `margin` is 0 if it has none. For example:

    {"prompt": "2 + 2 =", "completion": " 4", "label": true}        a desirable reply
    {"text": "Great film!", "label": 1}                             class 1
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": 0.5}

A reward model computes the score of a document at its last token. So a conversation is encoded with all text that its
template writes after the last turn, as transformers does, and a document that is too long loses its beginning, never
its end.

This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.ranges import format_value, is_number
from dtrain.data.formats.encoder import TOO_LONG, Document, Encoder, RowEncoder
from dtrain.data.formats.formats import LABELS, Conversation, normalise
from dtrain.data.formats.pairs import PairEncoder
from dtrain.data.text.dropped_text import DroppedText
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtrain.data.rows.cache import Samples

NO_TOKEN = "no token"
# Part of the fingerprint since documents include the text that a template writes after the last turn. Caches of earlier
# versions do not have this text, and must not be used.
KEEPS_ENDS_MARK = "to their ends"
# Labels as CSV files and tables write them.
_BOOLEAN_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class Label:
    """The number that a row has in addition to its text.

    Attributes:
        column: `label` for single examples, `margin` for pairs.
        classes: Number of classes. Labels are then whole numbers from 0 to `classes` - 1. None: any finite number.
    """

    column: str
    classes: int | None = None

    def read(self, row: Mapping[str, Any]) -> float:
        """Return the number of a row.

        Raises:
            UserError: If the row has no label, or a value that is not allowed.

        Example:
            >>> Label("label", classes=3).read({"text": "Great film!", "label": "1"})
            1.0
            >>> Label("margin").read({"chosen": "a", "rejected": "b"})
            0.0
        """
        raw = row.get(self.column)
        value = _parse_number(raw)
        if value is None and self.column == "margin":
            return 0.0
        if value is None:
            raise UserError(f"the row has no {self.column}. Give it one, or map its column to this name")
        if self.classes is not None:
            if not isinstance(value, int) or not 0 <= value < self.classes:
                raise UserError(
                    f"{self.column} is {raw!r}, but with reward.num_labels={self.classes} it must be a whole number "
                    f"from 0 to {self.classes - 1}"
                )
        elif isinstance(value, bool) or not is_number(value):
            raise UserError(f"{self.column} is {raw!r}, but it must be a finite number")
        return float(value)


def _parse_number(value: Any) -> Any:
    """Return a value as JSON would write it.

    CSV files write numbers as text and nothing as "". Tables with gaps write 1 as 1.0.
    """
    if isinstance(value, str):
        if not value:
            return None
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


class LabelledPairEncoder(PairEncoder):
    """Encoder of preference pairs, each with its margin."""

    generates = False
    accepts_images = False
    stores_columns = True
    keeps_ends = True
    fingerprint_marks = ("pairs", "margins", KEEPS_ENDS_MARK)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, label: Label, **limits: Any):
        super().__init__(tokenizer, template, **limits)
        self.label = label

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode a pair to two documents, each with the margin."""
        margin = self.label.read(row)
        documents = super().encode_row(row, name)
        if isinstance(documents, str):
            return documents
        return [document.with_columns(**{self.label.column: margin}) for document in documents]


class LabelledTextEncoder(RowEncoder):
    """Encoder of full texts, each with its label."""

    generates = False
    stores_columns = True
    fingerprint_marks = ("labels", KEEPS_ENDS_MARK)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, label: Label, **limits: Any):
        super().__init__(tokenizer, template, **limits)
        self.label = label
        self.fingerprint_options = [label.classes]
        self._examples = Encoder(tokenizer, template, loss_on="all", **limits)

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the content of the example and the label."""
        return [self._examples.row_content(self._without_label(row), name), self.label.read(row)]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode a text with its label to one document. One that is too long loses its beginning."""
        label = self.label.read(row)
        sample = normalise(self.as_messages(self._without_label(row), name), name)
        text = DroppedText()
        if isinstance(sample, Conversation):
            ids = self.encode_conversation(sample.messages, sample.tools)
            text = self.count_text(sample.messages, sample.tools, range(len(sample.messages)))
        else:
            ids, _ = self._examples.encode(sample)
        if self.is_dropped(len(ids)):
            return TOO_LONG
        truncated_ids = ids[-self.max_length :]
        if not truncated_ids:
            return NO_TOKEN
        document = Document(truncated_ids, bytearray(b"\1" * len(truncated_ids)), len(ids), text=text)
        return [document.with_columns(**{self.label.column: label})]

    def _without_label(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row without its label, because `normalise` reads `label` as the mark of a good or bad reply."""
        return {key: value for key, value in row.items() if key != self.label.column}


class LabelledEncoder(Encoder):
    """Encoder of replies. It stores the column `label`: whether the reply is desirable."""

    stores_columns = True
    accepts_images = False
    fingerprint_marks = ("labelled",)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, **limits: Any):
        super().__init__(tokenizer, template, loss_on="completion", **limits)
        self._pairs = PairEncoder(tokenizer, template, **limits)
        self._pairs.accepts_images = False  # KTO trains on text only

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the content of the reply and the label, or of the pair."""
        if name == "preference":
            return self._pairs.row_content(row, name)
        reply = read_label(row)
        return [super().row_content(reply.row, name), reply.is_desirable]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        """Encode a reply to one document. A preference row gives two samples, the chosen and the rejected reply."""
        if name == "preference":
            pair = self._pairs.encode_row(row, name)
            if isinstance(pair, str):
                return pair
            chosen, rejected = pair
            return [chosen.with_columns(label=True), rejected.with_columns(label=False)]
        reply = read_label(row)
        documents = super().encode_row(reply.row, name)
        if isinstance(documents, str):
            return documents
        return [document.with_columns(label=reply.is_desirable) for document in documents]


class LabelledReply(NamedTuple):
    """A row with a reply.

    Attributes:
        is_desirable: The row's label.
        row: The row without its label.
    """

    is_desirable: bool
    row: dict[str, Any]


def read_label(row: Mapping[str, Any]) -> LabelledReply:
    """Read the label of a reply.

    Raises:
        UserError: If the row has no label, or one that is neither true nor false.

    Example:
        >>> read_label({"prompt": "2 + 2 =", "completion": " 4", "label": "True"})
        LabelledReply(is_desirable=True, row={'prompt': '2 + 2 =', 'completion': ' 4'})
    """
    names = [key for key in LABELS if row.get(key) is not None]
    if not names:
        raise UserError(
            "the row has no label. kto needs label: true or false for each reply (or kto_tag, or another column by "
            "data.train.columns={label: NAME})"
        )
    value = row[names[0]]
    is_desirable_reply = _BOOLEAN_WORDS.get(str(value).lower())
    if is_desirable_reply is None:
        raise UserError(f"{names[0]} is {format_value(value)}, but it must be true (the reply is wanted) or false")
    rest = {key: value for key, value in row.items() if key not in LABELS}
    return LabelledReply(is_desirable_reply, rest)


def is_desirable(samples: "Samples", index: int) -> bool:
    """Return True if the reply of a sample of `LabelledEncoder` is desirable."""
    return samples.row(index)["columns"]["label"]
