"""Observations of an environment as tokens that stand behind what was sampled."""

import math
from collections.abc import Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.replies import QUESTION, REPLY
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.data.text.tool_format import ToolFormat
from dtrain.inference.request import Completion

Observation = str | Sequence[dict[str, Any]]

# Of a text that is far too long its beginning is tokenised: so many characters for each id that is needed, and so many
# ids more than needed, since those at the end, of 1024 characters or more, may be others where the text goes on.
CHARACTERS, MARGIN = 8, 4096


class Observations:
    """Encoder of what an environment says, so that it can stand behind sampled tokens.

    In a conversation it is what the chat template writes between a reply's own text and the next one: the end of the
    turn, where the model has not written it, the messages, and the generation prompt. That is learnt from a
    conversation of a question, a reply and these messages. template None: the prompts are plain texts, and so are the
    observations. calls: how tools are called, where they are; their answers come first in an
    observation that has any.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, calls: ToolFormat | None = None):
        self.tokenizer, self._template, self._calls = tokenizer, template, calls

    def text_of(self, completion: Completion) -> str:
        """Return the text of a completion, without special tokens; where tools are, with them, since they may mark a
        call, and behind the opening of the thinking that the prompt ends with."""
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=self._calls is None)
        return f"<think>{text}" if self._calls is not None and self._calls.thinks else text

    def encode(self, observation: Observation, completion: Completion, room: float = math.inf) -> list[int]:
        """Return the ids that follow `completion`. Of an observation of more than `room` ids it may be the first
        ones alone, more than `room`. Raises UserError as the template does."""
        if self._template is not None:
            messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
            text = self._behind_a_reply(self._template, messages)
        elif isinstance(observation, str):
            text = observation
        else:
            raise UserError("it observed messages: that needs a prompt of messages and a chat template")
        length = CHARACTERS * (room + MARGIN)
        while length < len(text):
            ids = self._behind_a_completion(text[: int(length)], completion)
            if len(ids) > room + MARGIN:
                return ids[:-MARGIN]
            length *= CHARACTERS
        return self._behind_a_completion(text, completion)

    def _behind_a_completion(self, text: str, completion: Completion) -> list[int]:
        """Return the ids of `text`, without the end of the turn where the model has written it."""
        ids = self._behind_a_word(text)
        if self._template is None:
            return ids
        ends = set(self.tokenizer.eos_ids)
        has_ended = bool(completion.ids) and completion.ids[-1] in ends
        end = next((index for index, token in enumerate(ids) if token in ends), None)
        if has_ended and end is not None and not self.tokenizer.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def _behind_a_reply(self, template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> str:
        if self._calls is not None and messages[0]["role"] == "tool":
            return self._calls.behind_a_call(messages)
        reply = {"role": "assistant", "content": REPLY}
        text = template.render([QUESTION, reply, *messages], add_generation_prompt=True)
        _, reply_text, rest = text.partition(REPLY)
        if not reply_text or not rest.strip():
            raise UserError(f"the chat template, {template.origin}, writes nothing after a reply")
        return rest

    def _behind_a_word(self, text: str) -> list[int]:
        """Return the ids of `text` where it continues a text: some tokenizers put a space in front of what they begin
        with."""
        head, whole = self.tokenizer.encode(REPLY), self.tokenizer.encode(REPLY + text)
        return whole[len(head) :] if whole[: len(head)] == head else self.tokenizer.encode(text)
