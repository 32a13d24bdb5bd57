"""Reward: the completion is JSON."""

import json
from collections.abc import Sequence
from typing import Any


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
        value = json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return not required_keys or (isinstance(value, dict) and all(key in value for key in required_keys))


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
