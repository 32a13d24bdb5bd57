"""Rewards for the form of a completion: patterns, tags, JSON, length, repetition."""

import json
import re
from collections.abc import Sequence

from dtrain.base.errors import UserError
from dtrain.base.ranges import is_finite


def regex(
    completions: Sequence[str], *, pattern: str, full: bool = False, ignore_case: bool = False
) -> list[float | None]:
    """Reward completions that contain a pattern.

    Args:
        completions: Completions of the policy.
        pattern: A regular expression of Python's re. `.` also matches a newline. The rewards' timeout ends a match that
            takes too long.
        full: Whether the pattern must match the whole completion.
        ignore_case: Whether upper and lower case are the same.

    Returns:
        1.0 or 0.0 for each completion.

    Example:
        >>> regex(["yes, sure", "no"], pattern="yes|maybe")
        [1.0, 0.0]
        >>> regex(["YES", "yes, sure"], pattern="yes", full=True, ignore_case=True)
        [1.0, 0.0]
    """
    flags = re.DOTALL
    if ignore_case:
        flags |= re.IGNORECASE
    compiled = re.compile(pattern, flags)
    matches = compiled.fullmatch if full else compiled.search
    return [float(matches(text) is not None) for text in completions]


def format_tags(
    completions: Sequence[str], *, tags: Sequence[str] = ("think", "answer"), strict: bool = True, prefix: str = ""
) -> list[float | None]:
    """Reward completions with each tag opened and closed once, one tag after the other.

    Args:
        completions: Completions of the policy.
        tags: Names of the tags, in order.
        strict: Whether only white space is allowed between and around the tags.
        prefix: Text that the chat template has already put before the completion, such as "<think>".

    Returns:
        1.0 or 0.0 for each completion.

    Example:
        >>> format_tags(["<think>a</think>\\n<answer>b</answer>", "<answer>b</answer><think>a</think>", "b"])
        [1.0, 0.0, 0.0]
        >>> format_tags(["a</think> so <answer>b</answer>"], strict=False, prefix="<think>")
        [1.0]

    Reference:
        The format reward of DeepSeek-R1, arXiv:2501.12948.
    """
    return [float(_has_tags_in_order(prefix + text, tags, strict)) for text in completions]


def _has_tags_in_order(text: str, tags: Sequence[str], strict: bool) -> bool:
    end_of_last = 0  # position after the last closing tag
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        opened, closed = text.find(opening, end_of_last), text.find(closing)
        is_in_order = end_of_last <= opened <= closed  # `opened` is -1 if the tag comes before the last one
        if not is_in_order:
            return False
        if strict and text[end_of_last:opened].strip():
            return False
        end_of_last = closed + len(closing)
    return not (strict and text[end_of_last:].strip())


def json_valid(completions: Sequence[str], *, required_keys: Sequence[str] = ()) -> list[float | None]:
    """Reward completions that are one JSON value, perhaps in a fenced block. NaN is no JSON (RFC 8259).

    Args:
        completions: Completions of the policy.
        required_keys: If there are any, the value must be an object with at least these keys.

    Returns:
        1.0 or 0.0 for each completion.

    Example:
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
        # `int` raises ValueError for NaN and Infinity. Numbers are not converted, because they may be very long.
        value = json.loads(text, parse_constant=int, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    if not required_keys:
        return True
    return isinstance(value, dict) and all(key in value for key in required_keys)


def length_penalty(
    completion_ids: Sequence[Sequence[int]], *, target_tokens: int, max_tokens: int
) -> list[float | None]:
    """Penalise long completions: 0 up to target_tokens, then linearly down to -1 at max_tokens and beyond.

    Stop tokens count, and in an environment all turns of the model.

    Example:
        >>> length_penalty([[0] * 10, [0] * 15, [0] * 40], target_tokens=10, max_tokens=20)
        [0.0, -0.5, -1.0]
    """
    if not target_tokens < max_tokens:
        raise UserError(f"length_penalty: target_tokens={target_tokens} must be below max_tokens={max_tokens}")
    span = max_tokens - target_tokens
    penalties: list[float | None] = []
    for ids in completion_ids:
        excess = max(len(ids) - target_tokens, 0)
        penalties.append(-min(excess / span, 1.0) + 0.0)  # adding 0.0 turns -0.0 into 0.0
    return penalties


def repetition_penalty(
    completion_ids: Sequence[Sequence[int]], *, ngram_size: int = 3, max_penalty: float = -1.0
) -> list[float | None]:
    """Penalise repetition: max_penalty times the fraction of n-grams of tokens that occurred before.

    Completions that are shorter than an n-gram get 0.

    Args:
        completion_ids: Token ids of the completions.
        ngram_size: Tokens of an n-gram.
        max_penalty: The penalty if all n-grams were repeated, at most 0.

    Example:
        >>> repetition_penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5], [7]], ngram_size=2)
        [0.0, -0.75, 0.0]

    Reference:
        Yeo et al., arXiv:2502.03373, appendix C.2, as in TRL 1.16.
    """
    if ngram_size < 1:
        raise UserError(f"repetition_penalty: ngram_size={ngram_size} must be a whole number, at least 1")
    if not is_finite(max_penalty) or max_penalty > 0:
        # A positive value would reward repetition.
        raise UserError(f"repetition_penalty: max_penalty={max_penalty} must be a finite number, at most 0")
    penalties: list[float | None] = []
    for ids in completion_ids:
        num_ngrams = max(0, len(ids) - ngram_size + 1)
        ngrams = [tuple(ids[start : start + ngram_size]) for start in range(num_ngrams)]
        repeated = num_ngrams - len(set(ngrams))
        penalties.append(max_penalty * repeated / num_ngrams if repeated else 0.0)
    return penalties
