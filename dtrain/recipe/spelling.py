"""Hints for messages about mistyped YAML and numbers (error_hints.toml), and other tools' names (key_aliases.toml).

key_aliases.toml maps the names of keys and values in other tools to dtrain's names for the same things. An unknown key
is looked up by its last part, so `learning_rate` and `training_args.learning_rate` get the same explanation. If the
file contains the last two parts, these are used. A last part `enabled` is removed first: `sequence_packing.enabled` is
looked up as `sequence_packing`.
"""

import re
import tomllib
import unicodedata
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from dtrain.base import ranges
from dtrain.base.plugins import misspelt_key_hint

_HINTS = tomllib.loads(Path(__file__).with_name("error_hints.toml").read_text(encoding="utf-8"))
_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping such as {name: value}",
}
_PASTED = {copy: character for character, copies in _HINTS["look_alikes"].items() for copy in copies}

_ALIASES = tomllib.loads(Path(__file__).with_name("key_aliases.toml").read_text(encoding="utf-8"))


def yaml_hint(problem: Any) -> str:
    """Return the hint for a problem that the YAML parser reports."""
    for part, hint in _HINTS["yaml"].items():
        if part in str(problem):
            return hint
    return ""


def pasted_character_hint(text: Any) -> str:
    """Return the hint for a text with a character that only looks like the one that is meant, as in pasted text.

    Example:
        >>> pasted_character_hint("1e\u22125")
        ': it holds U+2212, minus sign, not the character it looks like: type -'
    """
    if not isinstance(text, str):
        return ""
    for character in text:
        name = unicodedata.name(character, "")
        is_undefault_blank = unicodedata.category(character) == "Zs" and character != " "
        # A single Cyrillic or Greek letter in a word of other letters. A word of that script has 2 bytes per letter.
        is_foreign_letter = name.startswith(("CYRILLIC", "GREEK")) and len(text.encode()) < 2 * len(text)
        if character in _PASTED:
            fix = f"type {_PASTED[character]}"
        elif is_undefault_blank:
            fix = "type a blank"
        elif is_foreign_letter:
            fix = "type the word anew"
        else:
            fix = ""
        if fix:
            return f": it holds U+{ord(character):04X}, {name.lower()}, not the character it looks like: {fix}"
    return ""


def number_hint(value: Any, alternatives: list) -> str:
    """Return the hint for a number that is written with a comma, or with a second =.

    Example:
        >>> number_hint("0,5", [float])
        ': write 0.5'
    """
    if not isinstance(value, str) or (int not in alternatives and float not in alternatives):
        return ""
    if re.fullmatch(r"=+ *[-\d.e]+", value):
        return ": write one ="
    if not re.fullmatch(r"[\d.]+,[\d.]*(e-?\d+)?", value):
        return ""
    is_superfluous = value.endswith(",") or float not in alternatives
    return ": leave out the comma" if is_superfluous else f": write {value.replace(',', '.')}"


def example_hint(default: Any) -> str:
    """Return the default of a key as an example, if it is a number.

    Example:
        >>> example_hint(1e-05), example_hint("auto")
        (', for example 1e-05', '')
    """
    if not _is_number(default):
        return ""
    return f", for example {ranges.format_value(default)}"


def _is_number(value: Any) -> bool:
    """Check for a number. A bool is none, though its type is a subclass of int."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_hint(value: Any, alternatives: list, default: Any) -> str:
    """Return the hint for a list that is written without brackets.

    Args:
        value: The refused value.
        alternatives: The alternatives of the key's type.
        default: The key's default, which shows how many numbers the key takes.
    """
    is_number = _is_number(value)
    if is_number and isinstance(default, list) and len(default) > 1:
        return f": it has {len(default)}, such as [{', '.join(map(str, default))}]"
    takes_list = any(get_origin(alternative) is list for alternative in alternatives)
    if not takes_list or not (is_number or isinstance(value, str)):
        return ""
    entries = re.split(r"[, ]+", str(value))
    return f": write [{', '.join(entries)}]"


def percent_hint(value: Any) -> str:
    """Return the hint for a share that is written in percent.

    Example:
        >>> percent_hint("5%")
        ': write 0.05'
    """
    is_percent = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value)
    return f": write {float(value[:-1]) / 100:g}" if is_percent else ""


def lacks_space_after_colon(word: Any) -> bool:
    """Check whether a word is a key and its value without the blank that YAML needs between them, such as `lr:1e-5`."""
    return isinstance(word, str) and re.fullmatch(r"\w+:\S+", word) is not None


def type_description(alternatives: list) -> str:
    """Return the description of a type by its alternatives, such as "text or null"."""
    names = []
    numbers = {int: "whole numbers", float: "numbers"}
    for alternative in alternatives:
        origin, arguments = get_origin(alternative), get_args(alternative)
        if alternative is NoneType:
            names.append("null")
        elif origin is dict and arguments[1] in numbers:
            names.append(f"a mapping from names to {numbers[arguments[1]]}")
        elif origin is list:
            names.append("a list of texts" if arguments[0] is str else "a list of numbers")
        else:
            names.append(_TYPE_WORDS[origin or alternative])
    return " or ".join(names)


def invert_table(table: dict[str, str]) -> dict[str, str]:
    """Return a table from words to texts, for a table from texts to words.

    Example:
        >>> invert_table({"optimizer.lr": "learning_rate base_lr"})
        {'learning_rate': 'optimizer.lr', 'base_lr': 'optimizer.lr'}
    """
    inverted = {}
    for text, words in table.items():
        for word in words.split():
            inverted[word] = text
    return inverted


DTRAIN_KEYS = invert_table(_ALIASES["keys"])
UNNEEDED_KEYS = invert_table(_ALIASES["needless"])
UNSUPPORTED_KEYS = invert_table(_ALIASES["not_yet"])
KEY_FAMILIES = invert_table(_ALIASES["families"])  # start of a word -> a word that is explained
METHODS_BY_LOSS = invert_table(_ALIASES["methods"])  # name of a method, given as a loss -> the method to set
VALUES_BY_KEY = {
    key: invert_table(table) for key, table in _ALIASES["values"].items()
}  # key -> another tool's value -> dtrain's


class KeyExplanation(NamedTuple):
    """Explanation of an unknown key of another tool.

    Attributes:
        kind: "renamed" if dtrain has a key for it, "unneeded" if it needs none, "unsupported" if it lacks the feature.
        text: The explanation for a message.
        dtrain_key: dtrain's key, if the kind is "renamed" and the key is in a section, such as "data.max_length".
    """

    kind: Literal["renamed", "unneeded", "unsupported"]
    text: str
    dtrain_key: str | None = None


# The key at the beginning of an entry of the table `keys`, such as "data.max_length: prompt and completion together".
_LEADING_KEY = re.compile(r"[a-z_]+\.[a-z_.]+[a-z]")


def explain_unknown_key(key: str) -> str | None:
    """Explain an unknown key of another tool: dtrain's key for it, or why dtrain has none.

    Args:
        key: The key, with its sections or without.

    Returns:
        An explanation. None if the key is not in key_aliases.toml.

    Example:
        >>> explain_unknown_key("training_args.learning_rate")
        "dtrain's word for it is optimizer.lr"
    """
    explanation = find_key_explanation(key)
    return None if explanation is None else explanation.text


def find_key_explanation(key: str) -> KeyExplanation | None:
    """Return the explanation of `explain_unknown_key` with its kind."""
    parts = _key_parts(key)
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in DTRAIN_KEYS:
            entry = DTRAIN_KEYS[word]
            leading_key = _LEADING_KEY.match(entry)
            dtrain_key = None if leading_key is None else leading_key[0]
            return KeyExplanation("renamed", f"dtrain's word for it is {entry}", dtrain_key)
        if word in UNNEEDED_KEYS:
            return KeyExplanation("unneeded", f"dtrain needs no key for it: {UNNEEDED_KEYS[word]}")
        if word in UNSUPPORTED_KEYS:
            return KeyExplanation("unsupported", f"dtrain does not have this yet: {UNSUPPORTED_KEYS[word]}")
    for prefix, word in KEY_FAMILIES.items():
        if parts[-1].startswith(prefix):
            return find_key_explanation(word)
    return None


def find_dtrain_value(key: str, value: Any) -> str | None:
    """Return dtrain's name, with a remark, for another tool's value of a dtrain key. None if it is unknown."""
    return VALUES_BY_KEY.get(key, {}).get(str(value).lower())


def value_hint(key: str, value: str, known: Collection[str]) -> str:
    """Return the end of a message about a refused value of a key.

    The hint is dtrain's name for the value, the method that is meant, a similar name in `known`, or all names there.
    """
    near = find_dtrain_value(key, value)
    if near:
        return f"; did you mean {near}?"
    return method_hint(key, value) or misspelt_key_hint(value, key) or ranges.name_hint(value, known)


def method_hint(key: str, value: Any) -> str:
    """Return the end of a message about a refused value, if the key is a method's loss and the value another method.

    Example:
        >>> method_hint("dpo.loss", "kto_pair")
        '; set method=kto, which trains single replies that are marked as wanted or not'
    """
    section, _, leaf = key.partition(".")
    other = METHODS_BY_LOSS.get(str(value).lower(), "")
    if leaf != "loss" or not other or other.startswith(f"method={section},"):
        return ""
    return f"; set {other}"


def find_dtrain_key(key: str, value: Any) -> tuple[str, Any] | None:
    """Return dtrain's key for another tool's key, and its value.

    Args:
        key: The other tool's key.
        value: Its value.

    Returns:
        The key and the value, which may still be another tool's name (`find_dtrain_value`). None if key_aliases.toml
        has no key with the same meaning.
    """
    if value is None:
        return None
    parts = _key_parts(key)
    if key in VALUES_BY_KEY:
        explanation = key
    else:
        explanation = DTRAIN_KEYS.get(".".join(parts[-2:])) or DTRAIN_KEYS.get(parts[-1]) or ""
    # "optimizer.lr" or "train.compile=true", possibly with a remark after a comma. Other explanations are sentences.
    match = re.fullmatch(r"([a-z_0-9.]+)(?:=([^\s:,]+))?(?:,.*)?", explanation)
    if not match:
        return None
    dtrain_key, fixed_value = match[1], match[2]
    if fixed_value is None:
        return dtrain_key, value
    # A switch such as `use_peft: true` stands for one value of a dtrain key. If it is off, it stands for nothing.
    return (dtrain_key, fixed_value) if value is True else None


def _key_parts(key: str) -> list[str]:
    """Return the parts of a key in lower case and with underscores, without a last part `enabled`."""
    return key.lower().replace("-", "_").removesuffix(".enabled").split(".")
