"""Names of keys and values in other tools, and dtrain's names for the same things: `key_aliases.toml`, looked up.

A word is looked up by the last part of an unknown key, so `learning_rate` and `training_args.learning_rate` get one
answer, or by the last two where the file names these; `sequence_packing.enabled` is looked up as `sequence_packing`.
"""

import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dtrain.base import ranges

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def by_word(table: dict[str, str]) -> dict[str, str]:
    """Return text by word, of a table from a text to words with blanks between them."""
    return {word: text for text, words in table.items() for word in words.split()}


OURS = by_word(_FILE["keys"])
NEEDLESS = by_word(_FILE["needless"])
NOT_YET = by_word(_FILE["not_yet"])
FAMILIES = by_word(_FILE["families"])  # beginnings of words
METHODS = by_word(_FILE["methods"])  # words for a method, where a loss is asked for
VALUES = {key: by_word(table) for key, table in _FILE["values"].items()}  # of a key: our value by word


def answer(key: str) -> str | None:
    """Return the answer to the unknown `key`, with dots or without; None where dtrain has no answer of its own."""
    parts = _parts(key)
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in OURS:
            return f"dtrain's word for it is {OURS[word]}"
        if word in NEEDLESS:
            return f"dtrain needs no key for it: {NEEDLESS[word]}"
        if word in NOT_YET:
            return f"dtrain does not have this yet: {NOT_YET[word]}"
    family = next((word for prefix, word in FAMILIES.items() if parts[-1].startswith(prefix)), None)
    return answer(family) if family else None


def meant(key: str, value: Any) -> str | None:
    """Return our word for a `value` of `key` as other tools or people say it, with its remark; None where unknown."""
    return VALUES.get(key, {}).get(str(value).lower())


def hint(key: str, value: str, known: Collection[str]) -> str:
    """Return the end of a refusal of `value` at `key`.

    It names the value that was meant, the method that `value` is, the nearest name in `known`, or all of them.
    """
    near = meant(key, value)
    if near:
        return f"; did you mean {near}?"
    return method_hint(key, value) or ranges.hint(value, known)


def method_hint(key: str, value: Any) -> str:
    """Return the end of a refusal of `value` at `key`, if the key is a method's loss and the value another method.

    >>> method_hint("dpo.loss", "kto_pair")
    '; set method=kto, which trains single replies that are marked as wanted or not'
    """
    section, _, leaf = key.partition(".")
    other = METHODS.get(str(value).lower(), "")
    if leaf != "loss" or not other or other.startswith(f"method={section},"):
        return ""
    return f"; set {other}"


def moved(key: str, value: Any) -> tuple[str, Any] | None:
    """Return another tool's key as ours, with its value, whose word may yet be another tool's (`meant`); None where the
    table does not say that it is the same thing."""
    parts = _parts(key)
    entry = key if key in VALUES else OURS.get(".".join(parts[-2:])) or OURS.get(parts[-1]) or ""
    same = re.fullmatch(r"([a-z_0-9.]+)(=[^\s:,]+)?(?:,.*)?", entry)
    if not same or value is None or (same[2] and value is not True):
        return None
    return same[1], same[2].removeprefix("=") if same[2] else value


def _parts(key: str) -> list[str]:
    return key.lower().replace("-", "_").removesuffix(".enabled").split(".")
