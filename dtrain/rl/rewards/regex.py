"""Reward: a regular expression matches."""

import re
from collections.abc import Sequence


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
