"""Rows with a reply and whether it is wanted, to samples of one document. Torch is not imported.

A row has a prompt and a completion in any format of single examples, and `label` (or LLaMA-Factory's `kto_tag`): true
or false. What is trained is the completion; of a conversation the assistant's messages after the last user message.
A row of preferences becomes two samples: the chosen completion, which is wanted, and the rejected one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.ranges import shown
from dtrain.data.formats.encoder import Document, Encoder
from dtrain.data.formats.formats import LABELS
from dtrain.data.formats.pairs import PairEncoder
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtrain.data.rows.cache import Samples

_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # as CSV and tables have them


class LabelledEncoder(Encoder):
    """Encoder of rows of replies, whose column `label` is kept: true for a wanted reply."""

    keeps_columns = True
    marks = ("labelled",)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, **limits: Any):
        super().__init__(tokenizer, template, loss_on="completion", **limits)
        self._pairs = PairEncoder(tokenizer, template, **limits)

    def content_of(self, row: Mapping[str, Any], name: str) -> Any:
        if name == "preference":
            return self._pairs.content_of(row, name)
        wanted, rest = read_label(row)
        return [super().content_of(rest, name), wanted]

    def documents_of(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        if name == "preference":
            pair = self._pairs.documents_of(row, name)
            return pair if isinstance(pair, str) else [pair[0].keeping(label=True), pair[1].keeping(label=False)]
        wanted, rest = read_label(row)
        documents = super().documents_of(rest, name)
        return documents if isinstance(documents, str) else [document.keeping(label=wanted) for document in documents]


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
        raise UserError(f"{named[0]} is {shown(row[named[0]])}: it must be true (the reply is wanted) or false")
    return wanted, {key: value for key, value in row.items() if key not in LABELS}


def is_wanted(samples: "Samples", index: int) -> bool:
    """Return whether the reply of a sample of `LabelledEncoder` is wanted."""
    return samples.row(index)["columns"]["label"]
