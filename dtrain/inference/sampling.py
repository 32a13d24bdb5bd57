"""Draws of the next token and its log-probability from logits, each row by its own settings and random numbers; and the
sequences that they make longer, with their ends by stop texts.

Every filter is a threshold on a row's probabilities, so that what is kept never depends on the order of equal ones; and
a draw is one number looked up in the row's distribution function. Nothing that a row gets depends on the other rows.
Letters: R rows, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.randomness import random_key, random_uniform
from dtrain.base.top_p import smallest_kept_value
from dtrain.base.torch_functions import cumsum
from dtrain.inference.kv_cache import PromptKey, slot_size
from dtrain.inference.request import Request, SamplingParams

# Logits looked at together: what a CPU's cache holds, and on a GPU a bound on the copies.
_CHUNK = {"cpu": 2**20}
_CHUNK_ELSEWHERE = 2**27
_BLOCK = 128  # tokens whose probabilities are summed before the distribution function is made
# Below it a logit divided by the temperature may leave float32's range.
_COLD = 1e-3
# How many of the likeliest tokens a CPU sorts before it sorts them all: these hold top_p's share, mostly.
_LIKELIEST = 1024


def request_key(request: Request) -> int:
    """Return the key of a request's draws: 64 bits of seed, prompt and sample."""
    return random_key(request.seed, request.prompt_index, request.sample_index)


def check_request(request: Request, vocabulary: int, name: str, *, has_decode: bool) -> None:
    """Raise UserError for a request that no model with this vocabulary can answer; `name` says which request it is."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise UserError(f"the prompt of {name} is empty: a completion needs at least one token to follow")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise UserError(f"the prompt of {name} has a token id outside the model's vocabulary of {vocabulary}")
    problems = {
        "max_new_tokens": sampling.max_new_tokens < 0 and "must not be negative",
        "temperature": not 0.0 <= sampling.temperature < float("inf")
        and "must be a number of at least 0; 0 takes the likeliest token",
        "top_k": sampling.top_k is not None
        and not -1 <= sampling.top_k < 2**63
        and "must be a positive number below 2**63, or null for all tokens",
        "top_p": not 0.0 < sampling.top_p <= 1.0 and "must be above 0 and at most 1",
        "min_p": not 0.0 <= sampling.min_p <= 1.0 and "must be from 0 to 1",
        "stop": any(not text for text in sampling.stop) and "has an empty text",
    }
    for setting, problem in problems.items():
        if problem:
            raise UserError(f"{setting}={getattr(sampling, setting)} {problem}")
    if sampling.stop and not has_decode:
        raise UserError(f"stop={list(sampling.stop)}: stop texts need a tokenizer, and the engine was given no decode")


class Sampler:
    """Sampler of the next token of R rows, each by its SamplingParams and the key of its random numbers."""

    def __init__(self, settings: Sequence[SamplingParams], keys: Sequence[int], device: torch.device):
        self._settings = settings
        self._device = device
        self._keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self._chunks: list[_Chunk] = []

    def prepare(self, vocabulary: int) -> None:
        """Put the rows' settings on the device, for logits [R, vocabulary]. `draw` does it too."""
        rows = max(1, _CHUNK.get(self._device.type, _CHUNK_ELSEWHERE) // vocabulary)
        self._chunks = [
            _Chunk.of(self._settings[start : start + rows], start, self._device)
            for start in range(0, len(self._settings), rows)
        ]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes that the kernels of a draw depend on, beside the values of tensors, once prepared."""
        return tuple(chunk.shape for chunk in self._chunks)

    def load(self, other: "Sampler") -> None:
        """Take over the rows of another of the same shape, both prepared, into the memory that this one has."""
        self._keys.copy_(other._keys)
        for mine, theirs in zip(self._chunks, other._chunks, strict=True):
            for own, new in zip(mine.tensors, theirs.tensors, strict=True):
                own.copy_(new)

    def draw(self, logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 and their logprobs [R] in max(float32, the dtype), from logits [R, V].

        drawn: [R] int64, how many tokens of its completion each row has. temperature 0 takes the likeliest token, the
        first among equals, its logprob that of the plain logits; filters play no part there.
        """
        if not self._chunks:
            self.prepare(logits.shape[1])
        numbers = random_uniform(drawn, self._keys)
        draws = [_draw(logits[chunk.rows], numbers[chunk.rows], chunk) for chunk in self._chunks]
        if len(draws) == 1:
            return draws[0]
        return torch.cat([tokens for tokens, _ in draws]), torch.cat([logprobs for _, logprobs in draws])


@dataclass
class _Chunk:
    """Settings of some rows as tensors on the device; None where no row needs them."""

    rows: slice
    temperature: Tensor | None  # [n, 1]; 1 where greedy
    is_cold: bool  # whether any is below _COLD
    greedy: Tensor | bool  # [n], or whether all are or none is
    filtered: Tensor | None  # [m]: the rows with a filter
    top_k: Tensor | None  # [m], 0 where off
    top_p: Tensor | None  # [m, 1]
    min_p: Tensor | None  # [m, 1]
    most: int  # the largest top_k

    @property
    def tensors(self) -> list[Tensor]:
        held = self.temperature, self.greedy, self.filtered, self.top_k, self.top_p, self.min_p
        return [tensor for tensor in held if isinstance(tensor, Tensor)]

    @property
    def shape(self) -> tuple[Any, ...]:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        sizes = tuple((v.shape if isinstance(v, Tensor) else v) for v in values if not isinstance(v, slice))
        return self.rows.start, self.rows.stop, *sizes

    @classmethod
    def of(cls, settings: Sequence[SamplingParams], start: int, device: torch.device) -> "_Chunk":
        def tensor(values: list) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.float64 if isinstance(values[0], float) else None)

        temperatures = [float(row.temperature or 1.0) for row in settings]
        greedy = [row.temperature == 0 for row in settings]
        top_ks = [row.top_k if row.top_k is not None and row.top_k > 0 else 0 for row in settings]
        drawn = [index for index, is_greedy in enumerate(greedy) if not is_greedy]
        filtered = [i for i in drawn if top_ks[i] or settings[i].top_p < 1 or settings[i].min_p > 0]
        has_top_p = any(settings[i].top_p < 1 for i in filtered)
        has_min_p = any(settings[i].min_p > 0 for i in filtered)
        most = max((top_ks[i] for i in filtered), default=0)
        return cls(
            rows=slice(start, start + len(settings)),
            temperature=tensor(temperatures)[:, None] if any(value != 1.0 for value in temperatures) else None,
            is_cold=min(temperatures) < _COLD,
            greedy=tensor(greedy) if drawn and any(greedy) else not drawn,
            filtered=tensor(filtered) if filtered else None,
            top_k=tensor([top_ks[i] for i in filtered]) if most else None,
            top_p=tensor([float(settings[i].top_p) for i in filtered])[:, None] if has_top_p else None,
            min_p=tensor([float(settings[i].min_p) for i in filtered])[:, None] if has_min_p else None,
            most=most,
        )


def _draw(logits: Tensor, numbers: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [n, V]
    if chunk.temperature is not None:
        temperature = chunk.temperature.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).tiny)
        if chunk.is_cold:  # counted from the largest one, which stays 0
            scores = torch.where(temperature < _COLD, scores - scores.amax(-1, keepdim=True), scores)
        scores = scores / temperature
    probabilities = scores.softmax(-1)
    kept = None
    if chunk.filtered is not None:
        left = filter_probabilities(probabilities[chunk.filtered], chunk.top_k, chunk.top_p, chunk.min_p, chunk.most)
        kept = left.sum(-1)
        probabilities[chunk.filtered] = left
    if chunk.greedy is True:
        tokens = scores.argmax(-1)
    else:
        tokens = sample_from_cdf(probabilities, numbers)
        if chunk.greedy is not False:
            tokens = torch.where(chunk.greedy, scores.argmax(-1), tokens)
    logprobs = probabilities.gather(1, tokens[:, None]).squeeze(1).log()
    if kept is not None:
        logprobs[chunk.filtered] -= kept.log()
    return tokens, logprobs


def filter_probabilities(
    probabilities: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    most: int = 0,
) -> Tensor:
    """Return probabilities [m, V] with 0 for what is left out, not renormalised.

    top_k [m] int64 (0: off; `most` is the largest of them): the likeliest k. Then top_p [m, 1] (arXiv:1904.09751,
    section 3.1): of what is left, renormalised, the likeliest up to the one that reaches p, always at least one. Then
    min_p [m, 1] (arXiv:2407.01082): those of at least min_p times the largest. Equals of the last one kept stay too.
    """
    size = probabilities.shape[1]
    if top_k is not None:
        largest = probabilities.topk(min(most, size), -1).values
        least = largest.gather(1, top_k.clamp(1, largest.shape[1])[:, None] - 1)  # [m, 1]
        probabilities = probabilities.masked_fill((probabilities < least) & (top_k > 0)[:, None], 0.0)
    if top_p is not None:
        share = top_p * probabilities.sum(-1, keepdim=True, dtype=torch.float64)
        if probabilities.device.type == "cpu":
            least = _least_of_top_p(probabilities, top_p, share, _LIKELIEST)
        else:  # a sort is slow there, and a look whether the likeliest suffice would wait
            least = smallest_kept_value(probabilities, probabilities, share)
        probabilities = probabilities.masked_fill((probabilities < least) & (top_p < 1.0), 0.0)
    if min_p is not None:
        least = min_p.to(probabilities.dtype) * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities


def _least_of_top_p(probabilities: Tensor, top_p: Tensor, share: Tensor, most: int) -> Tensor:
    """Return the smallest probability that top_p keeps, [m, 1]; the `most` likeliest are searched for it first."""
    size = probabilities.shape[1]
    if most < size:
        largest = probabilities.topk(most, -1).values
    else:
        largest = probabilities.sort(-1, descending=True).values
    sums = cumsum(largest, torch.float64)
    count = (sums - largest < share).sum(-1, keepdim=True).clamp(min=1)  # before each token less than p is reached
    if most < size and bool(((sums[:, -1:] < share) & (top_p < 1.0)).any()):
        return _least_of_top_p(probabilities, top_p, share, size)
    return largest.gather(1, count - 1)


def sample_from_cdf(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens [n] int64 on which numbers [n] float64 in (0, 1) fall in the distribution functions of
    probabilities [n, V], which need not sum to 1. A token of probability 0 is never taken.

    In two steps, blocks of tokens and then the tokens of one: a running sum over all V costs more than the softmax.
    """
    size = probabilities.shape[1]
    whole = size - size % _BLOCK
    sums = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < size:
        sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], 1)
    block, share = _fall(sums, numbers[:, None])
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)  # [n, 128]
    inside = probabilities.gather(1, columns.clamp(max=size - 1))
    if whole < size:
        inside = inside.masked_fill(columns >= size, 0.0)
    index, _ = _fall(inside, share)
    return (block * _BLOCK + index).squeeze(1).clamp(max=size - 1)  # beyond it: of NaNs


def _fall(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index [n, 1] of the weight in which a share [n, 1] of the sum falls, and the part of it below that."""
    sums = cumsum(weights, torch.float64)  # [n, m]
    total = sums[:, -1:]
    # Below the total, whatever the product is rounded to: the first larger sum is then of a weight above 0.
    target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True).clamp(max=weights.shape[1] - 1)
    upper = sums.gather(1, index)
    lower = torch.where(index > 0, sums.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index, ((target - lower) / (upper - lower)).clamp(0.0, 1.0)


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
        self.key = request_key(request)
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
