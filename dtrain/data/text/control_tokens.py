"""Control tokens that a user writes as text: their escape in rendered chats, and the ids of such texts.

A chat template writes control tokens (`<|im_end|>`, `<|image_pad|>`) and the words of users into one string, in which a
tokenizer cannot tell them apart: a user who writes `<|im_end|>` would end the turn. So a control token in the content
of a user or a tool is escaped before the template sees it, by a private character behind its first one. The tokenizer
reads an escaped token as its characters. Torch is not imported.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from dtrain.base.errors import UserError

ESCAPE = "\U0010fffd"
STAND_INS = range(0xF0000, 0xFFFFE)  # private characters, each for one control token
WRITERS = ("assistant", "system", "developer", "model")  # roles whose content may hold control tokens


class ControlTokens:
    """Texts of a tokenizer's control tokens, and their escaped form."""

    def __init__(self, texts: Sequence[str]):
        self.texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))  # the longest match counts

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    @cached_property
    def _escaped_or_not(self) -> re.Pattern[str]:
        escaped = "|".join(re.escape(text[0] + ESCAPE + text[1:]) for text in self.texts)
        return re.compile(f"(?P<escaped>{escaped})|(?P<control>{self._pattern.pattern})" if escaped else r"(?!)")

    def escape(self, text: str) -> str:
        """Return `text` with each control token in its escaped form."""
        return self._pattern.sub(lambda match: match[0][0] + ESCAPE + match[0][1:], text)

    def escape_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chat message, the control tokens in its content escaped unless its role may write them."""
        content = message.get("content")
        if message.get("role") in WRITERS or not self.texts:
            return message
        if isinstance(content, str):
            return {**message, "content": self.escape(content)}
        if isinstance(content, list):
            return {**message, "content": [self._escape_part(part) for part in content]}
        return message

    def _escape_part(self, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self.escape(part["text"])}
        return part

    def has_escaped(self, text: str) -> bool:
        return ESCAPE in text and any(match["escaped"] for match in self._escaped_or_not.finditer(text))

    def with_stand_ins(self, text: str) -> tuple[str, list[int]]:
        """Return `text` with escaped tokens as plain characters and each control token as its stand-in, and the place
        in `text` of each character and of the end. Raises UserError where `text` has a stand-in's character."""
        if any(ord(character) in STAND_INS for character in text):
            raise UserError(
                "the conversation has private characters that dtrain writes control tokens with, and a control token "
                "in a user's message; remove either"
            )
        pieces: list[str] = []
        places: list[int] = []
        start = 0
        for match in self._escaped_or_not.finditer(text):
            begin, end = match.span()
            pieces.append(text[start:begin])
            places += range(start, begin)
            if match["escaped"]:
                pieces.append(match[0].replace(ESCAPE, "", 1))
                places += [begin, *range(begin + 2, end)]
            else:
                pieces.append(self._stand_in(match[0]))
                places.append(begin)
            start = end
        pieces.append(text[start:])
        return "".join(pieces), [*places, *range(start, len(text) + 1)]

    def _stand_in(self, text: str) -> str:
        return chr(STAND_INS[self.texts.index(text)])

    def backend_of_stand_ins(self, backend: Backend) -> Backend:
        """Return the tokenizer `backend`, in which stand-ins have the ids of the control tokens, whose own texts are
        plain characters to it."""
        written = json.loads(backend.to_str())
        names = {text: self._stand_in(text) for text in self.texts}
        for token in written["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = written["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
        elif model.get("vocab") is not None:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        renamed = Backend.from_str(json.dumps(written))
        for text, stand_in in names.items():
            if renamed.token_to_id(stand_in) != backend.token_to_id(text):
                raise UserError(f"the tokenizer cannot be built without the text of its token {text!r}")
        return renamed
