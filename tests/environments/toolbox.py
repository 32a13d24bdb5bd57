"""Tools for tests, found by import path. No torch: the environments' process imports this file."""

import functools
import time
from typing import Any, Literal


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Both are whole.

    Args:
        a: The first.
        b: The second,
            which may be left out.

    Returns:
        Their sum.
    """
    return a + b


def look_up(words: list[str], how: Literal["exact", "near"] = "exact", most: float | None = None) -> dict[str, Any]:
    """Looks words up.

    Args:
        words: What is looked up.
        how: The way.
        most: No more than these.
    """
    return {word: len(word) for word in words}


async def several(one: int | str, many: dict[str, list[int]], any_of: "list[int] | dict[str, bool] | None" = None):
    """Take arguments of many kinds."""
    return f"{one} {many}"


def say(text: str, times: int = 1) -> str:
    """Says a text.

    Args:
        text: What is said.
        times: How often.
    """
    return text * times


@functools.cache
def halve(number: float) -> float:
    """Halves a number."""
    return 1 / (2 / number)


def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"


def bare(text):
    """No hints."""


def silent(text: str):
    return text


def strange(when: time.struct_time):
    """A hint that JSON cannot fill."""


def open_ended(*texts: str):
    """Any number."""


def mixed(pair: tuple[int, int]):
    """A hint that is not read."""


@functools.partial
def bent(number: int) -> int:
    """A decorator that gives something else."""
    return number


VALUE = 3


def after(word: str) -> str:
    """The word 30 behind another.

    Args:
        word: Such as w4.
    """
    number = int(word[1:])
    return f"w{number + 30}" if number % 5 else 1 / 0
