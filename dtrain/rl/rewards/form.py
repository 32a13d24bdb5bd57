"""Rewards of a completion's form: patterns, layout, JSON, length, repetition."""

import json
import re
from collections.abc import Sequence
from itertools import islice

from dtrain.base.errors import UserError
from dtrain.base.ranges import is_finite


def regex(
    completions: Sequence[str], *, pattern: str, full: bool = False, ignore_case: bool = False
) -> list[float | None]:
    """Return 1.0 where `pattern` (Python's re, `.` matches a newline too) is found in the completion, or with `full`
    matches all of it, else 0.0. A pattern that takes too long is ended by the rewards' timeout.

    >>> regex(["yes, sure", "no"], pattern="yes|maybe")
    [1.0, 0.0]
    >>> regex(["YES", "yes, sure"], pattern="yes", full=True, ignore_case=True)
    [1.0, 0.0]
    """
    compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    matches = compiled.fullmatch if full else compiled.search
    return [float(matches(text) is not None) for text in completions]


def format_tags(
    completions: Sequence[str], *, tags: Sequence[str] = ("think", "answer"), strict: bool = True, prefix: str = ""
) -> list[float | None]:
    """Return 1.0 where each of `tags` is opened and closed once, one after the other, else 0.0; `strict`: with nothing
    but white space between and around them (DeepSeek-R1's format reward, arXiv:2501.12948).

    prefix: text that the chat template has put before the completion already, such as "<think>".

    >>> format_tags(["<think>a</think>\\n<answer>b</answer>", "<answer>b</answer><think>a</think>", "b"])
    [1.0, 0.0, 0.0]
    >>> format_tags(["a</think> so <answer>b</answer>"], strict=False, prefix="<think>")
    [1.0]
    """
    return [float(_is_laid_out(prefix + text, tags, strict)) for text in completions]


def _is_laid_out(text: str, tags: Sequence[str], strict: bool) -> bool:
    place = 0
    for tag in tags:
        begin, end = f"<{tag}>", f"</{tag}>"
        if text.count(begin) != 1 or text.count(end) != 1:
            return False
        opened, closed = text.find(begin, place), text.find(end)
        if opened < place or closed < opened or (strict and text[place:opened].strip()):
            return False
        place = closed + len(end)
    return not (strict and text[place:].strip())


def json_valid(completions: Sequence[str], *, required_keys: Sequence[str] = ()) -> list[float | None]:
    """Return 1.0 where the completion, or the one fenced block that it is, is one JSON value (RFC 8259: no NaN), else
    0.0. With required_keys it has to be an object with at least these.

    >>> json_valid(['{"a": 1}', "{a: 1}", "```json\\n[1]\\n```"])
    [1.0, 0.0, 1.0]
    >>> json_valid(['{"name": "x", "age": 3}', '{"name": "x"}', "[]"], required_keys=["name", "age"])
    [1.0, 0.0, 0.0]
    """
    return [float(_is_valid(text, required_keys)) for text in completions]


def _is_valid(text: str, required_keys: Sequence[str]) -> bool:
    text = text.strip()
    first, _, rest = text.partition("\n")
    if first.rstrip() in ("```", "```json") and rest.endswith("```"):
        text = rest.removesuffix("```")
    try:
        value = json.loads(text, parse_constant=int, parse_int=str, parse_float=str)  # int refuses NaN and the like
    except (ValueError, RecursionError):
        return False
    return not required_keys or (isinstance(value, dict) and all(key in value for key in required_keys))


def length_penalty(
    completion_ids: Sequence[Sequence[int]], *, target_tokens: int, max_tokens: int
) -> list[float | None]:
    """Return 0 up to target_tokens, from there linearly down to −1 at max_tokens and beyond; stop tokens count, and
    in an environment all turns that the model drew.

    >>> length_penalty([[0] * 10, [0] * 15, [0] * 40], target_tokens=10, max_tokens=20)
    [0.0, -0.5, -1.0]
    """
    if not target_tokens < max_tokens:
        raise UserError(f"length_penalty: target_tokens={target_tokens} must be below max_tokens={max_tokens}")
    span = max_tokens - target_tokens
    return [-min(max(len(ids) - target_tokens, 0) / span, 1.0) + 0.0 for ids in completion_ids]


def repetition_penalty(
    completion_ids: Sequence[Sequence[int]], *, ngram_size: int = 3, max_penalty: float = -1.0
) -> list[float | None]:
    """Return max_penalty times the share of n-grams of tokens that stood in the completion before; 0 where it is
    shorter than an n-gram (Yeo et al., arXiv:2502.03373, appendix C.2, as TRL 1.16 has it).

    >>> repetition_penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5], [7]], ngram_size=2)
    [0.0, -0.75, 0.0]
    """
    if ngram_size < 1:
        raise UserError(f"repetition_penalty: ngram_size={ngram_size} must be a whole number, at least 1")
    if not is_finite(max_penalty) or max_penalty > 0:
        # A positive value would reward repetition.
        raise UserError(f"repetition_penalty: max_penalty={max_penalty} must be a finite number, at most 0")
    penalties: list[float | None] = []
    for ids in completion_ids:
        ngrams = list(zip(*(islice(ids, start, None) for start in range(ngram_size)), strict=False))
        repeated = len(ngrams) - len(set(ngrams))
        penalties.append(max_penalty * repeated / len(ngrams) if repeated else 0.0)
    return penalties
