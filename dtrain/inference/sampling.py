"""Sampling of the next token, and the state of running sequences.

Each row is sampled with its own settings and random numbers, so its token does not depend on the other rows. Every
filter is a threshold on a row's probabilities, so the order of equal probabilities does not matter. A sample is one
uniform number looked up in the row's cumulative distribution. Example with 4 tokens, top_p = 0.7 and the number 0.6:

    probabilities            0.5   0.1   0.3   0.1
    top_p keeps              0.5         0.3             (0.5 alone does not reach 0.7, with 0.3 it does)
    cumulative               0.5   0.5   0.8   0.8
    scaled number            0.6 · 0.8 = 0.48            (0.8 is the probability of all kept tokens)
    sampled                  token 0, the first one whose cumulative value is above 0.48
    log-probability          log(0.5 / 0.8)

Shapes: R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.base.randomness import random_key, random_uniform
from dtrain.base.top_p import find_top_p_threshold
from dtrain.base.torch_functions import cumsum
from dtrain.inference.kv_cache import PromptKey, slot_size
from dtrain.inference.request import Request, SamplingParams

# Elements of the logits that are sampled at once. On a CPU they should fit into its cache. On a GPU the number limits
# the memory of temporary copies.
_ELEMENTS_PER_CHUNK = {"cpu": 2**20}
_ELEMENTS_PER_CHUNK_ELSEWHERE = 2**27
# Size of the blocks of tokens that `sample_from_cdf` sums before it looks at single tokens.
_BLOCK = 128
# Logits divided by a smaller temperature may leave float32's range.
_COLD_TEMPERATURE = 1e-3
# For top_p, a CPU sorts this number of tokens with the highest probability first. Mostly these reach p.
_TOP_P_CANDIDATES = 1024


def request_key(request: Request) -> int:
    """Return the key of a request's random numbers: 64 bits of seed, prompt and sample."""
    return random_key(request.seed, request.prompt_index, request.sample_index)


def check_request(request: Request, vocabulary: int, name: str, *, has_decode: bool) -> None:
    """Raise UserError if no model with this vocabulary can complete a request.

    Args:
        request: The request.
        vocabulary: Size of the vocabulary.
        name: Name of the request in messages, such as "request 3".
        has_decode: Whether the engine can decode ids to text.
    """
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise UserError(f"the prompt of {name} is empty: a completion needs at least one token to follow")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise UserError(f"the prompt of {name} has a token id outside the model's vocabulary of {vocabulary}")
    if sampling.max_new_tokens < 0:
        _refuse(sampling, "max_new_tokens", "must not be negative")
    if not 0.0 <= sampling.temperature < float("inf"):
        _refuse(
            sampling, "temperature", "must be a number of at least 0. 0 selects the token with the highest probability"
        )
    if sampling.top_k is not None and not -1 <= sampling.top_k < 2**63:
        _refuse(sampling, "top_k", "must be a positive number below 2**63, or null for all tokens")
    if not 0.0 < sampling.top_p <= 1.0:
        _refuse(sampling, "top_p", "must be above 0 and at most 1")
    if not 0.0 <= sampling.min_p <= 1.0:
        _refuse(sampling, "min_p", "must be from 0 to 1")
    if any(not text for text in sampling.stop):
        _refuse(sampling, "stop", "has an empty text")
    if sampling.stop and not has_decode:
        raise UserError(f"stop={list(sampling.stop)}: stop texts need a tokenizer, and this engine has no `decode`")


def _refuse(sampling: SamplingParams, setting: str, problem: str) -> NoReturn:
    raise UserError(f"{setting}={getattr(sampling, setting)} {problem}")


class Sampler:
    """Sampler of the next token of R rows.

    Args:
        settings: Settings of each row.
        keys: Key of each row's random numbers.
        device: The device.
    """

    def __init__(self, settings: Sequence[SamplingParams], keys: Sequence[int], device: torch.device):
        self._settings = settings
        self._device = device
        self._keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self._chunks: list[_Chunk] = []

    def prepare(self, vocabulary: int) -> None:
        """Copy the rows' settings to the device, for logits [R, vocabulary].

        `sample` calls this method if nobody has. A captured step calls it before the capture, because a graph cannot
        contain copies from the host.
        """
        max_elements = _ELEMENTS_PER_CHUNK.get(self._device.type, _ELEMENTS_PER_CHUNK_ELSEWHERE)
        rows = max(1, max_elements // vocabulary)
        self._chunks = []
        for start in range(0, len(self._settings), rows):
            self._chunks.append(_Chunk.of(self._settings[start : start + rows], start, self._device))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything but the values of tensors on which the kernels of `sample` depend, after `prepare`."""
        return tuple(chunk.shape for chunk in self._chunks)

    def load(self, other: "Sampler") -> None:
        """Copy the rows of another sampler of the same shape to the memory of this one. Both must be prepared."""
        self._keys.copy_(other._keys)
        for chunk, other_chunk in zip(self._chunks, other._chunks, strict=True):
            for tensor, other_tensor in zip(chunk.tensors, other_chunk.tensors, strict=True):
                tensor.copy_(other_tensor)

    def sample(self, logits: Tensor, num_sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token for each row.

        At temperature 0, the sample is the token with the highest probability, and the first one if several are equal.
        Filters are ignored then, and the log-probability is that of the unchanged logits.

        Args:
            logits: [R, V].
            num_sampled: The number of tokens that each row's completion has so far, int64 [R].

        Returns:
            Tokens, int64 [R], and their log-probabilities, [R] in max(float32, the dtype).
        """
        if not self._chunks:
            self.prepare(logits.shape[1])
        numbers = random_uniform(num_sampled, self._keys)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for chunk in self._chunks:
            chunk_tokens, chunk_logprobs = _sample(logits[chunk.rows], numbers[chunk.rows], chunk)
            tokens.append(chunk_tokens)
            logprobs.append(chunk_logprobs)
        if len(tokens) == 1:
            return tokens[0], logprobs[0]
        return torch.cat(tokens), torch.cat(logprobs)


@dataclass
class _Chunk:
    """Settings of n consecutive rows, of which m have a filter.

    Tensors are on the device, and None if no row needs them.

    Attributes:
        rows: The rows.
        temperature: [n, 1], 1 for greedy rows.
        is_cold: Whether a temperature is below `_COLD_TEMPERATURE`.
        greedy: Whether each row is greedy, [n]; or a bool for all rows.
        filtered: Indices of the rows with a filter, [m].
        top_k: [m], 0 where it is off.
        top_p: [m, 1].
        min_p: [m, 1].
        max_top_k: The largest top_k.
    """

    rows: slice
    temperature: Tensor | None
    is_cold: bool
    greedy: Tensor | bool
    filtered: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    max_top_k: int

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.temperature, self.greedy, self.filtered, self.top_k, self.top_p, self.min_p

    @property
    def tensors(self) -> list[Tensor]:
        """The settings that are tensors."""
        return [value for value in self._fields if isinstance(value, Tensor)]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything but the values of tensors on which the kernels depend."""
        sizes = [value.shape if isinstance(value, Tensor) else value for value in self._fields]
        return self.rows.start, self.rows.stop, self.is_cold, self.max_top_k, *sizes

    @classmethod
    def of(cls, settings: Sequence[SamplingParams], start: int, device: torch.device) -> "_Chunk":
        """Return the settings of the rows from `start` on."""

        def tensor(values: list) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.float64 if isinstance(values[0], float) else None)

        temperatures = [float(row.temperature or 1.0) for row in settings]
        greedy = [row.temperature == 0 for row in settings]
        top_ks = [row.top_k if row.top_k is not None and row.top_k > 0 else 0 for row in settings]
        filtered: list[int] = []
        for index, row in enumerate(settings):
            has_filter = top_ks[index] > 0 or row.top_p < 1 or row.min_p > 0
            if has_filter and not greedy[index]:
                filtered.append(index)
        max_top_k = max((top_ks[index] for index in filtered), default=0)

        chunk = cls(
            rows=slice(start, start + len(settings)),
            temperature=None,
            is_cold=min(temperatures) < _COLD_TEMPERATURE,
            greedy=all(greedy),
            filtered=None,
            top_k=None,
            top_p=None,
            min_p=None,
            max_top_k=max_top_k,
        )
        if any(value != 1.0 for value in temperatures):
            chunk.temperature = tensor(temperatures)[:, None]
        if any(greedy) and not all(greedy):
            chunk.greedy = tensor(greedy)
        if filtered:
            chunk.filtered = tensor(filtered)
        if max_top_k:
            chunk.top_k = tensor([top_ks[index] for index in filtered])
        if any(settings[index].top_p < 1 for index in filtered):
            chunk.top_p = tensor([float(settings[index].top_p) for index in filtered])[:, None]
        if any(settings[index].min_p > 0 for index in filtered):
            chunk.min_p = tensor([float(settings[index].min_p) for index in filtered])[:, None]
        return chunk


def _sample(logits: Tensor, numbers: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Sample a token for each row of a chunk.

    Args:
        logits: [n, V].
        numbers: A uniform random number for each row, float64 [n].
        chunk: Settings of the rows.

    Returns:
        Tokens, int64 [n], and their log-probabilities, [n].
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [n, V]
    if chunk.temperature is not None:
        temperature = chunk.temperature.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).tiny)
        if chunk.is_cold:
            # Dividing by a small temperature may overflow. If the largest score is moved to 0 first, scores can only
            # overflow to -inf, whose probability 0 is right.
            scores = torch.where(temperature < _COLD_TEMPERATURE, scores - scores.amax(-1, keepdim=True), scores)
        scores = scores / temperature
    probabilities = scores.softmax(-1)
    kept_probability = None  # of the tokens that the filters keep, [m]
    if chunk.filtered is not None:
        kept = filter_probabilities(
            probabilities[chunk.filtered], chunk.top_k, chunk.top_p, chunk.min_p, chunk.max_top_k
        )
        kept_probability = kept.sum(-1)
        probabilities[chunk.filtered] = kept
    if chunk.greedy is True:
        tokens = scores.argmax(-1)
    else:
        tokens = sample_from_cdf(probabilities, numbers)
        if chunk.greedy is not False:
            tokens = torch.where(chunk.greedy, scores.argmax(-1), tokens)
    logprobs = probabilities.gather(1, tokens[:, None]).squeeze(1).log()
    if kept_probability is not None:
        logprobs[chunk.filtered] -= kept_probability.log()
    return tokens, logprobs


def filter_probabilities(
    probabilities: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int = 0,
) -> Tensor:
    """Set the probabilities of filtered tokens to 0. The others are not renormalised.

    The filters are applied in the order of the arguments, each to what the one before keeps. Tokens with the same
    probability as the last one that is kept are kept, too.

    Args:
        probabilities: [m, V].
        top_k: Keep the k highest, int64 [m]. 0: off.
        top_p: After renormalising, keep the most probable tokens up to the one whose cumulative probability reaches p,
            at least one (arXiv:1904.09751, section 3.1), [m, 1].
        min_p: Keep tokens with at least min_p times the highest probability (arXiv:2407.01082), [m, 1].
        max_top_k: The largest top_k.

    Returns:
        [m, V].

    Example:
        >>> probabilities = torch.tensor([[0.5, 0.1, 0.3, 0.1]])
        >>> filter_probabilities(probabilities, top_p=torch.tensor([[0.7]])).tolist()
        [[0.5, 0.0, 0.30000001192092896, 0.0]]
    """
    size = probabilities.shape[1]
    if top_k is not None:
        largest = probabilities.topk(min(max_top_k, size), -1).values
        threshold = largest.gather(1, top_k.clamp(1, largest.shape[1])[:, None] - 1)  # [m, 1]
        is_removed = (probabilities < threshold) & (top_k > 0)[:, None]
        probabilities = probabilities.masked_fill(is_removed, 0.0)
    if top_p is not None:
        needed = top_p * probabilities.sum(-1, keepdim=True, dtype=torch.float64)
        if probabilities.device.type == "cpu":
            threshold = _top_p_threshold(probabilities, top_p, needed, _TOP_P_CANDIDATES)
        else:
            # On a GPU sorting is slow, and checking whether the candidates suffice would make the host wait.
            threshold = find_top_p_threshold(probabilities, probabilities, needed)
        probabilities = probabilities.masked_fill((probabilities < threshold) & (top_p < 1.0), 0.0)
    if min_p is not None:
        threshold = min_p.to(probabilities.dtype) * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
    return probabilities


def _top_p_threshold(probabilities: Tensor, top_p: Tensor, needed: Tensor, num_candidates: int) -> Tensor:
    """Return the smallest probability that top_p keeps, [m, 1].

    Args:
        probabilities: [m, V].
        top_p: [m, 1].
        needed: Probability that the kept tokens must reach, float64 [m, 1].
        num_candidates: The number of tokens to search first. If these do not reach `needed`, all are searched.
    """
    size = probabilities.shape[1]
    if num_candidates < size:
        largest = probabilities.topk(num_candidates, -1).values
    else:
        largest = probabilities.sort(-1, descending=True).values
    sums = cumsum(largest, torch.float64)
    # A token is kept if those before it do not reach p.
    count = (sums - largest < needed).sum(-1, keepdim=True).clamp(min=1)
    if num_candidates < size and bool(((sums[:, -1:] < needed) & (top_p < 1.0)).any()):
        return _top_p_threshold(probabilities, top_p, needed, size)
    return largest.gather(1, count - 1)


def sample_from_cdf(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Sample from distributions by inverting their cumulative distribution functions.

    A token of probability 0 is never sampled. The search takes two steps, first over blocks of 128 tokens and then over
    the tokens of one block, because a cumulative sum over all V tokens takes longer than the softmax.

    Args:
        probabilities: [n, V], whose sum need not be 1.
        numbers: A number in (0, 1) for each row, float64 [n].

    Returns:
        Tokens, int64 [n].

    Example:
        >>> probabilities = torch.tensor([[0.5, 0.0, 0.3]]).expand(3, -1)
        >>> sample_from_cdf(probabilities, torch.tensor([0.1, 0.6, 0.7], dtype=torch.float64)).tolist()
        [0, 0, 2]
    """
    size = probabilities.shape[1]
    in_full_blocks = size - size % _BLOCK
    block_sums = probabilities[:, :in_full_blocks].unflatten(1, (-1, _BLOCK)).sum(-1)
    if in_full_blocks < size:
        rest = probabilities[:, in_full_blocks:].sum(-1, keepdim=True)
        block_sums = torch.cat([block_sums, rest], 1)
    block, fraction = _invert_cdf(block_sums, numbers[:, None])
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)  # [n, 128]
    in_block = probabilities.gather(1, columns.clamp(max=size - 1))
    if in_full_blocks < size:
        in_block = in_block.masked_fill(columns >= size, 0.0)
    index, _ = _invert_cdf(in_block, fraction)
    # With NaNs, the index may be beyond the end.
    return (block * _BLOCK + index).squeeze(1).clamp(max=size - 1)


def _invert_cdf(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Find the weight at a fraction of the sum of all weights.

    For example, weights 2, 1, 1 and the fraction 0.6: 2.4 of 4 is in the second weight, at 0.4 of it.

    Args:
        weights: [n, m].
        fraction: In (0, 1), [n, 1].

    Returns:
        Index of the weight, [n, 1], and the fraction of that weight at which the point is, [n, 1].
    """
    sums = cumsum(weights, torch.float64)  # [n, m]
    total = sums[:, -1:]
    # Rounding could make the product equal to the total. A target below the total guarantees that the first cumulative
    # sum above the target belongs to a weight above 0.
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True).clamp(max=weights.shape[1] - 1)
    upper = sums.gather(1, index)
    lower = torch.where(index > 0, sums.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index, ((target - lower) / (upper - lower)).clamp(0.0, 1.0)


class StopTexts:
    """Search for stop texts in a completion, token by token.

    Stop texts are compared as text, because a tokenizer may split the same text in several ways. Several tokens may
    make one character, so the text that a token adds is the difference between two decodings of the last few tokens.
    While that text ends in an incomplete character (U+FFFD), it is decoded again with the next token.

    Args:
        texts: The stop texts, at least one.
        decode: Decodes token ids.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[list[int]], str]):
        self._texts = tuple(texts)
        self._decode = decode
        self._max_length = max(map(len, self._texts))
        self._tail = ""  # the end of the text of the decoded tokens, which may be the beginning of a stop text
        # Tokens before `_decoded` are done. Those from `_context` on are decoded again with the new ones, because the
        # text of a token may depend on the ones before it.
        self._context, self._decoded = 0, 0

    def complete(self, ids: list[int]) -> bool:
        """Check whether the last token completes a stop text. Must be called after each token.

        Args:
            ids: All tokens of the completion so far.
        """
        before = self._decode(ids[self._context : self._decoded])
        text = self._decode(ids[self._context :])
        unseen = self._tail + text[len(before) :]
        if any(stop in unseen for stop in self._texts):
            return True
        if len(text) > len(before) and not text.endswith("\ufffd"):
            self._context, self._decoded = self._decoded, len(ids)
            self._tail = unseen[max(0, len(unseen) - self._max_length + 1) :]
        return False


class RunningSequence:
    """State of a request from the queue to its completion.

    Attributes:
        ticket: Identity of the request in the engine.
        request: The request.
        prompt: Key of the prompt.
        key: Key of the random numbers.
        ids: Tokens that the host has read.
        logprobs: Their log-probabilities.
        num_sampled: The number of sampled tokens, read or not.
        prompt_routed: Experts of the prompt's tokens, [P, layers, k], if recorded.
        routed: Experts of the tokens in `ids` but the last one, [1, layers, k] each, if requested.
        is_done: Whether the completion has ended, or was cancelled.
    """

    def __init__(self, ticket: int, request: Request, decode: Callable[[list[int]], str] | None):
        self.ticket, self.request = ticket, request
        self.prompt = PromptKey.of(request)
        self.key = request_key(request)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.num_sampled = 0
        self.prompt_routed: Tensor | None = None
        self.routed: list[Tensor] = []
        self.is_done = False
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._texts: StopTexts | None = None
        if request.sampling.stop and decode:
            self._texts = StopTexts(request.sampling.stop, decode)

    @property
    def capacity(self) -> int:
        """Capacity of a slot that has room for all tokens the request allows."""
        return slot_size(self.request.sampling.max_new_tokens)

    @property
    def has_all(self) -> bool:
        """Whether `max_new_tokens` tokens are sampled. The host may not have read all of them yet."""
        return self.num_sampled == self.request.sampling.max_new_tokens

    @property
    def has_ended(self) -> bool:
        """Whether the sequence can leave its row: the completion has ended, or all allowed tokens are sampled."""
        return self.is_done or self.has_all

    def push(self, token: int, logprob: float) -> Literal["stop", "length"] | None:
        """Append a token. Return how it ends the completion, or None if it does not."""
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
        last_token = prompt.new_full((1, *prompt.shape[1:]), -1)
        return torch.cat([prompt, *self.routed, last_token])
