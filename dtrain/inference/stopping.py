"""End of a completion with the token that completes a stop text."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


class StopTexts:
    """Search for stop texts in the text of a completion's tokens, token by token. Nothing is encoded.

    A character may be spread over several tokens: what a token adds is read as the difference between two decodings of
    the last few tokens, and while its end is no whole character (U+FFFD) the next token is read together with it.
    """

    def __init__(self, texts: Sequence[str], decode: Decode):
        self._texts = tuple(texts)
        self._decode = decode
        self._longest = max(map(len, self._texts))
        self._tail = ""  # the end of the text before `decoded`, which may begin a stop text
        self._context, self._decoded = 0, 0  # tokens [context, decoded) are decoded again, only to be left out

    def complete(self, ids: list[int]) -> bool:
        """Return whether the last of a completion's tokens `ids` completes a stop text; called after each token."""
        before = self._decode(ids[self._context : self._decoded])
        text = self._decode(ids[self._context :])
        seen = self._tail + text[len(before) :]
        if any(stop in seen for stop in self._texts):
            return True
        if len(text) > len(before) and not text.endswith("\ufffd"):
            self._context, self._decoded = self._decoded, len(ids)
            self._tail = seen[max(0, len(seen) - self._longest + 1) :]
        return False
