"""`RunningSequence`: one request from the queue to its completion; the key of its prompt, and its end by stop texts."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dtrain.inference.kv_cache import slot_size
from dtrain.inference.request import Request
from dtrain.inference.sampling import random_key


class PromptKey(NamedTuple):
    """Identity of a prompt: its token ids, and the digest of its images, None without."""

    ids: tuple[int, ...]
    images: str | None

    @classmethod
    def of(cls, request: Request) -> "PromptKey":
        return cls(tuple(request.prompt), None if request.images is None else request.images.digest)


class StopTexts:
    """Search for stop texts in the text of a completion's tokens, token by token. Nothing is encoded.

    A character may be spread over several tokens: what a token adds is read as the difference between two decodings of
    the last few tokens, and while its end is no whole character (U+FFFD) the next token is read together with it.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[list[int]], str]):
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


class RunningSequence:
    """State of one request from the queue to its completion."""

    def __init__(self, ticket: int, request: Request, decode: Callable[[list[int]], str] | None):
        self.ticket, self.request = ticket, request
        self.prompt = PromptKey.of(request)
        self.key = random_key(request)
        self.ids: list[int] = []  # seen by the host
        self.logprobs: list[float] = []
        self.drawn = 0  # tokens drawn, seen or not
        self.prompt_routed: Tensor | None = None  # [P, layers, k]
        self.routed: list[Tensor] = []  # of the tokens seen by the host, but the last one, [1, layers, k] each
        self.is_done = False
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._texts = StopTexts(request.sampling.stop, decode) if request.sampling.stop and decode else None

    @property
    def capacity(self) -> int:
        """Number of positions that its own tokens may come to fill."""
        return slot_size(self.request.sampling.max_new_tokens)

    @property
    def has_all(self) -> bool:
        return self.drawn == self.request.sampling.max_new_tokens

    @property
    def has_ended(self) -> bool:
        """Return whether it needs no row any more; what was drawn may not have been looked at."""
        return self.is_done or self.has_all

    def push(self, token: int, logprob: float) -> Literal["stop", "length"] | None:
        """Take a token. Return how the completion ends with it, None where it goes on."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids or (self._texts is not None and self._texts.complete(self.ids)):
            return "stop"
        return "length" if len(self.ids) == self.request.sampling.max_new_tokens else None

    def all_routed(self) -> Tensor | None:
        """Return `Completion.routed`."""
        if not self.request.routed or self.prompt_routed is None:
            return None
        prompt = self.prompt_routed.cpu()
        return torch.cat([prompt, *self.routed, prompt.new_full((1, *prompt.shape[1:]), -1)])
