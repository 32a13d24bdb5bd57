"""Rows with a reply and whether it is wanted, to samples of one document. Torch is not imported.

A row has a prompt and a completion in any format of single examples, and `label` (or LLaMA-Factory's `kto_tag`): true
or false. What is trained is the completion; of a conversation the assistant's messages after the last user message.
A row of preferences becomes two samples: the chosen completion, which is wanted, and the rejected one.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.data.encoder import BAD, Document
from dtrain.data.formats import LABELS
from dtrain.data.pairs import PairEncoder
from dtrain.data.sample import Encoder
from dtrain.data.template import ChatTemplate
from dtrain.data.tokenizer import Tokenizer
from dtrain.errors import UserError
from dtrain.ranges import shown

_WORDS = {"true": True, "false": False, "1": True, "0": False}  # as CSV has them


class LabelledEncoder(Encoder):
    """Rows of replies to samples, whose targets are marked BAD where the reply is not wanted."""

    marks = ("labelled",)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, **limits: Any):
        super().__init__(tokenizer, template, loss_on="completion", **limits)
        self._pairs = PairEncoder(tokenizer, template, **limits)

    def content_of(self, row: Mapping[str, Any], name: str) -> Any:
        if name == "preference":
            return self._pairs.content_of(row, name)
        is_wanted, rest = read_label(row)
        return [super().content_of(rest, name), is_wanted]

    def documents_of(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        if name == "preference":
            found = self._pairs.documents_of(row, name)
            return found if isinstance(found, str) else [found[0], _unwanted(found[1])]
        is_wanted, rest = read_label(row)
        found = super().documents_of(rest, name)
        return found if isinstance(found, str) or is_wanted else [_unwanted(one) for one in found]


def read_label(row: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether the row's reply is wanted, and the row without its label. Raises UserError."""
    named = [key for key in LABELS if row.get(key) is not None]
    if not named:
        raise UserError(
            "the row has no label: kto needs label: true or false beside each reply (kto_tag, or another column by "
            "data.train.columns={label: NAME})"
        )
    found = _WORDS.get(str(row[named[0]]).lower())
    if found is None:
        raise UserError(f"{named[0]} is {shown(row[named[0]])}: it must be true (the reply is wanted) or false")
    return found, {key: value for key, value in row.items() if key not in LABELS}


def _unwanted(document: Document) -> Document:
    return document._replace(trained=document.trained.replace(b"\1", bytes([BAD])))
