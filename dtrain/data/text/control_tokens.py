"""Control tokens that a user writes as text: their escape in rendered chats, and the ids of such texts.

A chat template writes control tokens (`<|im_end|>`, `<|image_pad|>`) and the words of users into one string, in which a
tokenizer cannot tell them apart: a user who writes `<|im_end|>` would end the turn. So a control token in the content
of a user or a tool is escaped before the template sees it, by a private character behind its first one. The tokenizer
reads an escaped token as its characters.

`data.special_tokens` chooses which tokens are escaped. By default these are the tokens of the conversation's structure:
what the template writes itself, what stands for an image, and padding, begin and end of text. Other control tokens stay
tokens, as in transformers' `apply_chat_template`, because users write them on purpose. For example, Qwen2-VL's
`<|im_end|>` is escaped and its grounding mark `<|box_start|>` is not. Torch is not imported.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from dtrain.base.errors import UserError

ESCAPE = "\U0010fffd"
STAND_INS = range(0xF0000, 0xFFFFE)  # private characters, each for one control token
WRITERS = ("assistant", "system", "developer", "model")  # roles whose content may hold control tokens


class ControlTokens:
    """Texts of a tokenizer's control tokens, and their escaped form.

    Attributes:
        texts: All of them, the longest first.
        escaped: Those that `escape` escapes. By default all.
    """

    def __init__(self, texts: Sequence[str], escaped: Collection[str] | None = None):
        self.texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))  # the longest match counts
        self.escaped = frozenset(self.texts if escaped is None else escaped)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    @cached_property
    def _escaped_or_not(self) -> re.Pattern[str]:
        escaped = "|".join(re.escape(text[0] + ESCAPE + text[1:]) for text in self.texts)
        return re.compile(f"(?P<escaped>{escaped})|(?P<control>{self._pattern.pattern})" if escaped else r"(?!)")

    def find(self, text: str) -> list[re.Match[str]]:
        """Return the matches of control tokens in `text`, in order."""
        return list(self._pattern.finditer(text))

    def escape(self, text: str) -> str:
        """Return `text` with each control token of `escaped` in its escaped form."""

        def written(match: re.Match[str]) -> str:
            token = match[0]
            return token[0] + ESCAPE + token[1:] if token in self.escaped else token

        return self._pattern.sub(written, text)

    def escape_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chat message, the control tokens in its content escaped unless its role may write them."""
        if message.get("role") in WRITERS or not self.escaped or "content" not in message:
            return message
        return {**message, "content": self._escape_value(message["content"])}

    def _escape_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self._escape_value(part) for part in value]
        if isinstance(value, dict):
            return {key: part if key == "type" else self._escape_value(part) for key, part in value.items()}
        return value

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

    def backend_of_stand_ins(self, backend: Backend) -> tuple[Backend, dict[int | None, int]]:
        """Return the tokenizer `backend` with stand-ins in the place of control tokens, whose own texts are plain
        characters to it, and a map from its ids of added tokens to those of `backend`.

        A control token of one character that is a piece of the model, too, stays that piece.
        """
        written = json.loads(backend.to_str())
        stand_ins = {text: self._stand_in(text) for text in self.texts}
        for token in written["added_tokens"]:
            if token["content"] in stand_ins:  # found in the text as it is written, before a normalizer changes it
                token |= {"content": stand_ins[token["content"]], "normalized": False}
        model, unknown = written["model"], written["model"].get("unk_token")
        can_lose = model["type"] in ("BPE", "Unigram") or unknown is not None
        hidden = {text: 2 * own for text, own in stand_ins.items() if len(text) > 1 and can_lose}  # no text has these
        if isinstance(model["vocab"], dict):
            model["vocab"] = {hidden.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[hidden.get(text, text), score] for text, score in model["vocab"]]
        if unknown in hidden:
            model["unk_token"] = hidden[unknown]
        if "merges" in model:
            merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [merge for merge in merges if not {*merge, "".join(merge)} & hidden.keys()]
        changed = Backend.from_str(json.dumps(written))
        added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        return changed, {changed.token_to_id(stand_ins.get(text, text)): number for text, number in added.items()}
