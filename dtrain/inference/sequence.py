"""`RunningSequence`: one request from the queue to its completion."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dtrain.inference.kv_cache import slot_size
from dtrain.inference.request import Request, StopTexts
from dtrain.inference.sampling import random_key


class RunningSequence:
    """State of one request from the queue to its completion."""

    def __init__(self, ticket: int, request: Request, decode: Callable[[list[int]], str] | None):
        self.ticket, self.request = ticket, request
        self.prompt = request.prompt_key
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
