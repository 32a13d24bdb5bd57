"""Rows with a label: a reply and whether it is wanted; an example and a pair with a number that a model learns to give.

A row with a reply has a prompt and a completion in any format of single examples, and `label` (or LLaMA-Factory's
`kto_tag`): true or false. What is trained is the completion; of a conversation the assistant's messages after the last
user message. A row of preferences becomes two samples: the chosen completion, which is wanted, and the rejected one.

An example with a number is any row of formats.FORMATS with a column `label`; all of its text is read. A pair is a row
of preferences, whose `margin` is 0 where it has none. The score of a document is read at its last token. So a
conversation is encoded as transformers encodes it, with what its template writes behind the last turn; and what is too
long loses its beginning, never its end. Torch is not imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
ENDS = "to their ends"  # else a cache from before would be read, whose documents end with their last turn
_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # as CSV and tables have them


@dataclass(frozen=True)
class Label:
    """The number that a row has beside its text.

    column: `margin` of pairs, `label` of examples. classes: how many there are, so that a label is a whole number
    below; None: any finite number.
    """

    column: str
    classes: int | None = None

    def read(self, row: Mapping[str, Any]) -> float:
        """Return the row's number. Raises UserError."""
        raw = row.get(self.column)
        value = _number(raw)
        if value is None and self.column == "margin":
            return 0.0
        if value is None:
            raise UserError(f"the row has no {self.column}: give it one, or map its column to this name")
        if self.classes is not None:
            if not isinstance(value, int) or not 0 <= value < self.classes:
                raise UserError(
                    f"{self.column} is {raw!r}, and must be a whole number from 0 to {self.classes - 1}, as "
                    f"reward.num_labels={self.classes} says"
                )
        elif isinstance(value, bool) or not is_number(value):
            raise UserError(f"{self.column} is {raw!r}, and must be a finite number")
        return float(value)


def _number(value: Any) -> Any:
    """Return a value as JSON has it: CSV has numbers as texts and nothing as "", tables with gaps have 1 as 1.0."""
    if isinstance(value, str):
        try:
            value = float(value) if value else None
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


class LabelledPairEncoder(PairEncoder):
    """Encoder of pairs, each with its margin."""

    generates = False
    accepts_images = False
    stores_columns = True
    keeps_ends = True
    marks = ("pairs", "margins", ENDS)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, label: Label, **limits: Any):
        super().__init__(tokenizer, template, **limits)
        self.label = label

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        kept, pair = {self.label.column: self.label.read(row)}, super().encode_row(row, name)
        return pair if isinstance(pair, str) else [document.with_columns(**kept) for document in pair]


class LabelledTextEncoder(RowEncoder):
    """Encoder of whole texts, each with its label."""

    generates = False
    stores_columns = True
    marks = ("labels", ENDS)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, label: Label, **limits: Any):
        super().__init__(tokenizer, template, **limits)
        self.label = label
        self.decides = [label.classes]
        self._examples = Encoder(tokenizer, template, loss_on="all", **limits)

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        return [self._examples.row_content(self._unlabelled(row), name), self.label.read(row)]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        kept = {self.label.column: self.label.read(row)}
        sample = normalise(self.as_messages(self._unlabelled(row), name), name)
        text = DroppedText()
        if isinstance(sample, Conversation):
            ids = self.encode_conversation(sample.messages, sample.tools)
            text = self.count_text(sample.messages, sample.tools, range(len(sample.messages)))
        else:
            ids, _ = self._examples.encode(sample)
        if self.is_dropped(len(ids)):
            return TOO_LONG
        read = ids[-self.max_length :]
        if not read:
            return NO_TOKEN
        return [Document(read, bytearray(b"\1" * len(read)), len(ids), text=text).with_columns(**kept)]

    def _unlabelled(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row without its label, which elsewhere says whether a reply is good."""
        return {key: value for key, value in row.items() if key != self.label.column}


class LabelledEncoder(Encoder):
    """Encoder of rows of replies, whose column `label` is kept: true for a wanted reply."""

    stores_columns = True
    accepts_images = False
    marks = ("labelled",)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, **limits: Any):
        super().__init__(tokenizer, template, loss_on="completion", **limits)
        self._pairs = PairEncoder(tokenizer, template, **limits)
        self._pairs.accepts_images = False

    def row_content(self, row: Mapping[str, Any], name: str) -> Any:
        if name == "preference":
            return self._pairs.row_content(row, name)
        wanted, rest = read_label(row)
        return [super().row_content(rest, name), wanted]

    def encode_row(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        if name == "preference":
            pair = self._pairs.encode_row(row, name)
            return (
                pair if isinstance(pair, str) else [pair[0].with_columns(label=True), pair[1].with_columns(label=False)]
            )
        wanted, rest = read_label(row)
        documents = super().encode_row(rest, name)
        return (
            documents if isinstance(documents, str) else [document.with_columns(label=wanted) for document in documents]
        )


def read_label(row: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether the row's reply is wanted, and the row without its label. Raises UserError."""
    named = [key for key in LABELS if row.get(key) is not None]
    if not named:
        raise UserError(
            "the row has no label: kto needs label: true or false beside each reply (kto_tag, or another column by "
            "data.train.columns={label: NAME})"
        )
    wanted = _WORDS.get(str(row[named[0]]).lower())
    if wanted is None:
        raise UserError(f"{named[0]} is {format_value(row[named[0]])}: it must be true (the reply is wanted) or false")
    return wanted, {key: value for key, value in row.items() if key not in LABELS}


def is_desirable(samples: "Samples", index: int) -> bool:
    """Return whether the reply of a sample of `LabelledEncoder` is wanted."""
    return samples.row(index)["columns"]["label"]
