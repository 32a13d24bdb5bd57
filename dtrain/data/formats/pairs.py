"""Rows of preferences to the two documents of a pair: the prompt with the chosen, and with the rejected completion.

Where the completions begin. A template or a tokenizer may write the end of a prompt otherwise once something follows
it (thinking that is dropped, tokens that merge). So the prompt of a pair is the longest beginning, in tokens, that the
prompt alone, prompt + chosen and prompt + rejected have in common; without a prompt of its own, that the other two
have. Every token behind it is trained, in both documents, through the token that ends the turn; the white space that
a template writes after that one is left out, as in encoder.py. A prompt of messages is rendered with the generation
prompt; plain strings are framed as encoder.py frames them. At least one token stays in the prompt and in each
completion: a document's first token is predicted from nothing.

What is too long loses the beginning of its prompt, as much as the longer completion asks for and all but one token at
most, the same in both documents; then each completion loses its end. Documents that are rated keep their ends
(`labels.py`). Torch is not imported.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import LONG, USER, Document, RowEncoder
from dtrain.data.formats.preferences import ChatPair, TextPair, TokenPair, normalise_pair, shared_length
from dtrain.data.text.replies import Messages

Ids = list[int]
EQUAL = "chosen and rejected are the same tokens"
EQUAL_CUT = "chosen and rejected are the same tokens within data.max_length"


class PairEncoder(RowEncoder):
    """Encoder of preferences to samples of two documents, chosen and rejected."""

    documents = 2
    noun = "pairs"
    marks: Sequence[str] = ("pairs",)
    keeps_ends = False  # of the documents: what a template writes behind the last turn, and of what is too long

    def content_of(self, row: Mapping[str, Any], name: str) -> Any:
        pair = self._pair(row, name)
        return [pair.prompt, pair.chosen, pair.rejected, getattr(pair, "tools", None)]

    def documents_of(self, row: Mapping[str, Any], name: str) -> list[Document] | str:
        prompt, chosen, rejected = self.encode(self._pair(row, name))
        full = len(prompt) + len(chosen), len(prompt) + len(rejected)
        if self.drops(max(full)):
            return LONG
        if chosen == rejected:
            return EQUAL
        prompt, chosen, rejected = fit(prompt, chosen, rejected, self.max_length, self.keeps_ends)
        if chosen == rejected:
            return EQUAL_CUT
        return [
            Document([*prompt, *completion], bytearray(len(prompt)) + b"\1" * len(completion), length)
            for completion, length in zip((chosen, rejected), full, strict=True)
        ]

    def _pair(self, row: Mapping[str, Any], name: str) -> ChatPair | TextPair | TokenPair:
        """Return the pair of a row. Raises UserError."""
        pair = normalise_pair(self.in_messages(row, name), name)
        if isinstance(pair, TextPair) and self.prompts_as == USER:
            raise UserError(
                "data.prompts_as=user makes the prompt a user's message, and the row has no prompt of its own: chosen "
                "and rejected are strings that begin alike. Give it one, named prompt, or set data.prompts_as=text"
            )
        return pair

    def encode(self, pair: ChatPair | TextPair | TokenPair) -> tuple[Ids, Ids, Ids]:
        """Return the ids of the prompt and of the two completions, none empty, not yet truncated. Raises UserError."""
        if isinstance(pair, TokenPair):
            for ids, key in ((pair.prompt, "prompt_ids"), (pair.chosen, "chosen_ids"), (pair.rejected, "rejected_ids")):
                self.check_ids(ids, key)
            return pair.prompt, pair.chosen, pair.rejected
        if isinstance(pair, ChatPair):
            prompt: Ids | None = self.tokenizer.encode(self.rendered(pair.prompt, pair.tools, True))
            chosen, rejected = (self._chat([*pair.prompt, *more], pair.tools) for more in (pair.chosen, pair.rejected))
        else:
            prompt = None if pair.prompt is None else self.text(pair.prompt, ends=False)
            chosen, rejected = (self.text((pair.prompt or "") + text) for text in (pair.chosen, pair.rejected))
        limit = min(len(chosen), len(rejected)) - 1  # of chosen and rejected, each keeps a token
        at = min(shared_length(chosen, rejected), limit)
        if prompt is not None:
            at = min(at, shared_length(prompt, chosen))
        if at < 1:
            raise UserError(
                "the prompt has no token, so that there is nothing to predict a completion's first token from; "
                "give the row a prompt that is not empty"
            )
        return chosen[:at], chosen[at:], rejected[at:]

    def _chat(self, messages: Messages, tools: Messages | None) -> Ids:
        """Return the ids of a prompt with its completion."""
        text = self.rendered(messages, tools)
        return self.tokenizer.encode(text if self.keeps_ends else text.rstrip())


def fit(prompt: Ids, chosen: Ids, rejected: Ids, max_length: int, keeps_ends: bool = False) -> tuple[Ids, Ids, Ids]:
    """Cut the three so that the prompt (never empty) and either completion have at most `max_length` tokens.
    keeps_ends: a completion loses its beginning, not its end."""
    kept = min(len(prompt), max(1, max_length - max(len(chosen), len(rejected))))
    left = max_length - kept
    chosen, rejected = (ids[max(0, len(ids) - left) :] if keeps_ends else ids[:left] for ids in (chosen, rejected))
    return prompt[len(prompt) - kept :], chosen, rejected
