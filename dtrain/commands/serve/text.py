"""Tokens to text as they come: whole characters, and nothing that may turn out to be the beginning of a stop text."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # written by tokenizers for bytes that make no whole character yet


class TextStream:
    """Text of one completion. decode: token ids -> text with special tokens left out.

    keep: the stop text that ended the completion stays at the end of the text. `stopped` is that text, or None.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), keep: bool = False):
        self.stopped: str | None = None
        self._decode, self._stops, self._keep = decode, stops, keep
        self._ids: list[int] = []
        # Text is decoded from `_start` on, and the text of the tokens up to `_read` was returned before: the text of a
        # token may depend on the one before it (the space of a word), not on those further back.
        self._start = self._read = 0
        self._held = ""

    def push(self, ids: Sequence[int], last: bool) -> str:
        """Return the text that `ids` add, or as much of it as is certain; `last`: no more tokens come."""
        if self.stopped is not None:
            return ""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._read])
        whole = self._decode(self._ids[self._start :])
        if last or not whole.endswith(UNFINISHED):
            self._held += whole[len(before) :]
            self._start, self._read = self._read, len(self._ids)
        matches = [(self._held.find(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if matches:
            at, _, self.stopped = min(matches)
            return self._held[: at + len(self.stopped)] if self._keep else self._held[:at]
        count = len(self._held) if last else len(self._held) - self._overlap()
        piece, self._held = self._held[:count], self._held[count:]
        return piece

    def _overlap(self) -> int:
        """Return the number of characters at the end of the held text that may begin a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
