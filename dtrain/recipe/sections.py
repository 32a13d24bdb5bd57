"""Conversion of a tree of values to typed sections, with a problem and a fix for each value that does not fit.

The types are the dataclasses of `dtrain.recipe.schema`. A value is converted if nothing is lost: the text "1e3" becomes
the integer 1000, and the number 2024 becomes the text "2024" for `run.name`. A value that does not fit is reported, and
its key keeps the default. Problems are unknown keys, wrong types, unknown choices, and values in place of a section.

A type hint such as `int | str | None` is handled as the list of its alternatives, [int, str, NoneType]
(`type_alternatives`).
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, is_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dtrain.base import ranges
from dtrain.base.errors import Problem
from dtrain.base.plugins import misspelt_key_hint
from dtrain.base.ranges import closest_name
from dtrain.recipe import spelling
from dtrain.recipe.saved import UNSET, flatten, is_named_sections, named_section_type
from dtrain.recipe.schema import MethodSections, MetricSinkEntry, Recipe, make_recipe_type

# The key of a section that is most likely meant if a text is given in place of the section, in this order.
_MAIN_KEYS = ("path", "name", "fn", "train.path")
# Sections of which a text in a list is short for one key, as in `metrics.sinks: [trackio]`.
_TEXT_KEYS: Mapping[type, str] = {MetricSinkEntry: "name"}


def list_keys(sections: MethodSections) -> list[str]:
    """List every dotted key that has a value in a recipe of any method. Entries of lists are not included.

    Args:
        sections: The sections of the methods by name.
    """
    return _list_keys(make_recipe_type(sections, sections), "")


def _list_keys(section: type, prefix: str) -> list[str]:
    keys = []
    for name, hint in get_type_hints(section).items():
        inner_section = find_section_type(type_alternatives(hint))
        if inner_section:
            keys += _list_keys(inner_section, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def find_type(hint: Any, key: str) -> Any:
    """Find the type of a dotted key.

    Args:
        hint: The type in which the key is looked up.
        key: The key, with entries of lists by their number, such as "scheduler[0].name".

    Returns:
        The type. None if there is no such key.
    """
    for part in re.findall(r"[^.\[\]]+", key):
        alternatives = type_alternatives(hint)
        if part.isdigit():
            hint = find_entry_type(alternatives)
            continue
        section = find_section_type(alternatives)
        # A name that is no key of the section may be the name of one of several sections, as in `eval.math.path`.
        hint = get_type_hints(section).get(part, named_section_type(hint)) if section else None
    return hint


def type_alternatives(hint: Any) -> list:
    """Return the members of a union, or a list of the type itself.

    Example:
        >>> type_alternatives(int | None)
        [<class 'int'>, <class 'NoneType'>]
        >>> type_alternatives(str)
        [<class 'str'>]
    """
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def find_section_type(alternatives: list) -> type | None:
    """Return the first dataclass among the alternatives of a type. None if there is none."""
    for alternative in alternatives:
        if isinstance(alternative, type) and is_dataclass(alternative):
            return alternative
    return None


def find_entry_type(alternatives: list) -> Any:
    """Return the type of the entries of the first list among the alternatives of a type. None if there is none."""
    for alternative in alternatives:
        if get_origin(alternative) is list:
            return get_args(alternative)[0]
    return None


def build_recipe(kind: type[Recipe], values: Mapping, problems: list[Problem]) -> Any:
    """Build a recipe from a tree of values.

    Args:
        kind: The type of the recipe, from `make_recipe_type`.
        values: The tree, with interpolations resolved.
        problems: A problem is appended for each value that does not fit. Its key keeps the default.
    """
    return _build_section(kind, values, "", problems, kind.method_sections)


@dataclass(frozen=True)
class _KeyType:
    """The type of a key, split into what a value in its place may be.

    Attributes:
        alternatives: All alternatives of the type.
        section: The dataclass of a section. None if the key is no section.
        entry: The dataclass of the entries of a list of sections. None if the key is no such list.
        named_section: The dataclass of several sections by name, as for `eval`. None if the key cannot hold these.
    """

    alternatives: list
    section: type | None
    entry: type | None
    named_section: Any

    @classmethod
    def of(cls, hint: Any) -> "_KeyType":
        alternatives = type_alternatives(hint)
        return cls(
            alternatives=alternatives,
            section=find_section_type(alternatives),
            entry=find_section_type([find_entry_type(alternatives)]),
            named_section=named_section_type(hint),
        )

    @property
    def is_section(self) -> bool:
        """Whether the key is a section or a list of sections."""
        return self.section is not None or self.entry is not None

    @property
    def is_optional(self) -> bool:
        """Whether the key may be null."""
        return NoneType in self.alternatives

    @property
    def scalar(self) -> Any:
        """The number or text that a section's key may have in place of the section, such as `data.val: 0.05`."""
        scalars = [alternative for alternative in self.alternatives if alternative in (int, float, str, bool)]
        return reduce(or_, scalars) | None if scalars else None


def _build_section(cls: type, values: Mapping, prefix: str, problems: list[Problem], sections: MethodSections) -> Any:
    """Build the section `cls`, whose keys begin with `prefix`, from a tree of values."""
    hints = get_type_hints(cls)
    built = cls()
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            problems += _unknown(dotted, value, prefix, list(hints), sections)
            continue
        key_type = _KeyType.of(hints[key])
        if key_type.named_section and is_named_sections(value, key_type.named_section):
            inner_sections = {}
            for name, inner in value.items():
                inner_prefix = f"{dotted}.{name}."
                inner_section = _build_section(key_type.named_section, inner, inner_prefix, problems, sections)
                inner_sections[str(name)] = inner_section
            setattr(built, key, inner_sections)
        elif key_type.section and isinstance(value, Mapping):
            setattr(built, key, _build_section(key_type.section, value, f"{dotted}.", problems, sections))
        elif key_type.entry and isinstance(value, list):
            setattr(built, key, _build_entries(key_type.entry, value, dotted, problems, sections))
        elif key_type.is_section:
            problems += _set_in_place_of_section(built, key, key_type, value, dotted)
        elif isinstance(value, str) and value == UNSET:
            if getattr(built, key) is not None:
                problems.append(Problem(dotted, f"{dotted} is left open (???)", "Give it a value"))
        elif value is not getattr(built, key):
            problems += _set(built, key, hints[key], value, dotted)
    return built


def _build_entries(cls: type, values: list, dotted: str, problems: list[Problem], sections: MethodSections) -> list:
    """Build a list of sections."""
    built = []
    for index, value in enumerate(values):
        if isinstance(value, str) and cls in _TEXT_KEYS:
            value = {_TEXT_KEYS[cls]: value}
        if isinstance(value, Mapping):
            built.append(_build_section(cls, value, f"{dotted}[{index}].", problems, sections))
        else:
            problems.append(_not_a_section(f"{dotted}[{index}]", value, cls, None))
    return built


def _set_in_place_of_section(section: object, key: str, key_type: _KeyType, value: Any, dotted: str) -> list[Problem]:
    """Set the key of a section, or of a list of sections, to a value that is neither, or return the problem."""
    if key_type.scalar and value is not None and not isinstance(value, list):
        if not _set(section, key, key_type.scalar, value, dotted):
            return []
        return [_not_a_section(dotted, value, key_type.section, key_type.entry, scalar="a number, or ")]
    # An empty section, `train:`, is a section of defaults. Null for a list is refused: `scheduler=null` may be meant as
    # a constant rate.
    if value is None and (key_type.entry is None or key_type.is_optional):
        return []
    return [_not_a_section(dotted, value, key_type.section, key_type.entry, is_optional=key_type.is_optional)]


def _set(section: object, key: str, hint: Any, value: Any, dotted: str) -> list[Problem]:
    """Convert a value to the type of a key, and set the key. Return the problems if the value does not fit."""
    texts = _set_or_refuse(section, key, hint, value, dotted)
    return [Problem(dotted, text) for text in texts]


def _set_or_refuse(section: object, key: str, hint: Any, value: Any, dotted: str) -> list[str]:
    """Set a key as `_set` does, but return the texts of the problems.

    Args:
        section: The section.
        key: Name of the key in the section.
        hint: Type of the key.
        value: The value.
        dotted: The dotted key, for messages.
    """
    alternatives = type_alternatives(hint)
    choices: list[Any] = []
    for alternative in alternatives:
        if get_origin(alternative) is Literal:
            choices += get_args(alternative)
    # `{lr:1e-5}` without a blank is the key "lr:1e-5" with the value null.
    if isinstance(value, Mapping):
        joined = [name for name, inner in value.items() if inner is None and spelling.lacks_space_after_colon(name)]
        if joined:
            return [f"{dotted}: YAML reads {name} as one word: write a blank after the colon" for name in joined]
    # YAML's null is meant for a choice that has the name none.
    converted = "none" if value is None and "none" in choices else _convert(value, alternatives)
    if _fits(converted, alternatives):
        setattr(section, key, converted)
        return []

    assignment = f"{dotted}={ranges.format_value(value)}"
    dtrain_value = spelling.find_dtrain_value(re.sub(r"\[\d+\]", "", dotted), value)
    if choices:
        return [f"{assignment} is not one of {', '.join(choices)}{_choice_hint(dotted, value, choices, dtrain_value)}"]
    expected = spelling.type_description(alternatives)
    if dtrain_value:
        return [f"{assignment} must be {expected}: {dtrain_value}"]
    return [f"{assignment} must be {expected}{_value_hint(value, alternatives, getattr(section, key))}"]


def _choice_hint(dotted: str, value: Any, choices: Collection[str], dtrain_value: str | None) -> str:
    """Return the hint for a value that is not one of a key's choices.

    Args:
        dotted: The key.
        value: The value.
        choices: The choices of the key.
        dtrain_value: dtrain's name for the value, if the value is another tool's name. None otherwise.
    """
    if dtrain_value:
        return spelling.pasted_character_hint(value) or f"; did you mean {dtrain_value}?"
    hint = spelling.method_hint(dotted, value)
    if hint:
        return hint
    hint = spelling.pasted_character_hint(value)  # a pasted character explains more than a similar name
    if hint:
        return hint
    hint = misspelt_key_hint(str(value), dotted)
    if hint:
        return hint
    near = closest_name(str(value), choices)
    return f"; did you mean {near}?" if near else ""


def _convert(value: Any, alternatives: list) -> Any:
    """Convert a value to one of the alternatives of a type, if nothing is lost. Otherwise return it unchanged.

    Example:
        >>> _convert("1e3", [int]), _convert(3, [float]), _convert(2024, [str]), _convert("x", [int])
        (1000, 3.0, '2024', 'x')
    """
    is_numeric = int in alternatives or float in alternatives
    if isinstance(value, str) and is_numeric and str not in alternatives:
        try:
            value = float(value)
        except ValueError:
            return value
    if bool in alternatives and str not in alternatives and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and value.is_integer() and int in alternatives and float not in alternatives:
        return int(value)
    if isinstance(value, int) and float in alternatives and int not in alternatives:
        if abs(value) < 2**1023:
            return float(value)
        return math.inf if value > 0 else -math.inf  # float() raises OverflowError for it
    if isinstance(value, int | float | Path) and str in alternatives and not is_numeric:
        return str(value)

    entry_types = {}  # of a list, and the values of a dict
    for alternative in alternatives:
        if get_origin(alternative) in (list, dict):
            entry_types[get_origin(alternative)] = list(get_args(alternative)[-1:])
    if isinstance(value, list) and list in entry_types:
        return [_convert(entry, entry_types[list]) for entry in value]
    if isinstance(value, dict) and dict in entry_types:
        return {key: _convert(entry, entry_types[dict]) for key, entry in value.items()}
    return value


def _fits(value: Any, alternatives: list) -> bool:
    """Check whether `value` has one of the alternative types, and contains no value that is left open (???)."""
    for alternative in alternatives:
        origin, arguments = get_origin(alternative), get_args(alternative)
        if origin is list and isinstance(value, list):
            fits = all(_fits(entry, list(arguments)) for entry in value)
        elif origin is dict and isinstance(value, dict):
            fits = all(isinstance(name, str) and _fits(entry, [arguments[1]]) for name, entry in value.items())
        elif origin is Literal:
            fits = value in arguments
        else:
            # `type(...) is`, because a bool is an instance of int.
            fits = alternative is Any or type(value) is alternative
        if fits and value != UNSET:
            return True
    return False


def _not_a_section(
    dotted: str, value: Any, section: type | None, entry: type | None, *, is_optional: bool = False, scalar: str = ""
) -> Problem:
    """Return the problem of a value in place of a section or of a list of sections.

    Args:
        dotted: The key.
        value: Its value.
        section: The section that the key may be.
        entry: The type of the entries if the key may be a list of sections.
        is_optional: Whether the key may be null.
        scalar: The number or text that the key may be as well, in words.
    """
    percent_hint = spelling.percent_hint(value)
    if scalar and percent_hint:
        return Problem(dotted, f"{dotted}={value} must be {scalar.partition(',')[0]}{percent_hint}")
    if isinstance(value, str) and spelling.lacks_space_after_colon(value):
        return Problem(dotted, f"{dotted}: YAML reads {value} as one word: write a blank after the colon")
    if entry and isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
        # From an override such as `scheduler[0].name=linear` while the scheduler is no list.
        first_index = next(iter(value))
        text = f"{dotted} is no list yet, so it has no entry {first_index}: give the list, {dotted}=[{{...}}]"
        return Problem(dotted, text)

    expected = scalar + _describe_section(section, entry)
    if section and is_optional:
        expected += f": write {dotted}={{}} for their defaults, or null for none"
    suggestion = _section_suggestion(dotted, value, section, entry)
    return Problem(dotted, f"{dotted}={ranges.format_value(value)}: {dotted} is {expected}{suggestion}")


def _describe_section(section: type | None, entry: type | None) -> str:
    """Return the description of a section, of a list of sections, or of both as alternatives."""
    descriptions = []
    if section:
        descriptions.append(f"a mapping with the keys {', '.join(get_type_hints(section))}")
    if entry:
        descriptions.append(f"a list of mappings with the keys {', '.join(get_type_hints(entry))}")
    return " or ".join(descriptions)


def _section_suggestion(dotted: str, value: Any, section: type | None, entry: type | None) -> str:
    """Return the override that is meant by a text in place of a section, such as `model.path=...` for `model=...`."""
    if not isinstance(value, str):
        return ""
    keys = list(get_type_hints(section)) if section else []
    if entry and not keys:
        first_key = next(iter(get_type_hints(entry)))
        text = spelling.find_dtrain_value(f"{dotted}.{first_key}", value) or value
        return f"; write {dotted}=[{{{first_key}: {text}}}]"
    for main_key in _MAIN_KEYS:
        if main_key.partition(".")[0] in keys:
            text = spelling.find_dtrain_value(f"{dotted}.{main_key}", value) or value
            return f"; write {dotted}.{main_key}={text}"
    return ""


def _value_hint(value: Any, alternatives: list, default: Any) -> str:
    """Return the hint for a refused value, by frequent mistakes. Empty if none of them fits.

    Args:
        value: The value.
        alternatives: The alternatives of the key's type.
        default: The default of the key.
    """
    return (
        spelling.pasted_character_hint(value)
        or spelling.number_hint(value, alternatives)
        or spelling.percent_hint(value)
        or spelling.list_hint(value, alternatives, default)
        or spelling.example_hint(default)
    )


def _unknown(dotted: str, value: Any, prefix: str, siblings: list[str], sections: MethodSections) -> list[Problem]:
    """Return the problems of an unknown key, or of the keys in an unknown section."""
    word = dotted.removeprefix(prefix)
    if value is None and spelling.lacks_space_after_colon(word):
        key, _, text = word.partition(":")
        text = f"{dotted}: YAML reads this as one word: write a blank after the colon, {key}: {text}"
        return [Problem(dotted, text)]
    inner = flatten(value, f"{dotted}.") if isinstance(value, Mapping) else {}
    explanation = spelling.explain_unknown_key(dotted)
    # A pasted character that only looks like a letter has a hint of its own below.
    if explanation is None and not prefix and inner and not spelling.pasted_character_hint(word):
        section = closest_name(word, list(dict.fromkeys([*siblings, *sections])))
        moved = _in_section(inner, dotted, section, list_keys(sections))
        if moved:
            return moved
    text = f"{dotted}: {explanation}"
    if explanation is None:
        hint = spelling.pasted_character_hint(word)
        text = f"{dotted} is not a key of a recipe{hint}{_nearest_key_hint(word, prefix, siblings, sections)}"
    problems = [Problem(dotted, text)]
    for key in inner:
        inner_explanation = spelling.explain_unknown_key(key)
        if inner_explanation is not None:
            problems.append(Problem(key, f"{key}: {inner_explanation}"))
    return problems


def _in_section(inner: Collection[str], dotted: str, section: str | None, all_keys: Collection[str]) -> list[Problem]:
    """Return the problems of a section with a mistyped name whose keys all exist in the section that is meant.

    For example, `optimzer.lr=1e-5` is one mistake: the key is `optimizer.lr`.

    Args:
        inner: The given keys, such as "optimzer.lr".
        dotted: The mistyped name, "optimzer".
        section: The name that is meant, "optimizer"; None if no name is near.
        all_keys: All keys of a recipe.

    Returns:
        One problem per key. Empty if the section that is meant has not all of them.
    """
    problems = []
    for key in inner:
        meant = f"{section}{key.removeprefix(dotted)}"
        if section is None or meant not in all_keys:
            return []
        problems.append(Problem(key, f"{key} is not a key of a recipe", f"Use {meant}"))
    return problems


def _nearest_key_hint(word: str, prefix: str, siblings: list[str], sections: MethodSections) -> str:
    """Return the hint for an unknown key: a similar key, the same key in another section, or all keys of the section.

    Args:
        word: The unknown key without its section.
        prefix: The section with a dot. Empty at the top level.
        siblings: The keys of the section.
        sections: The sections of the methods.
    """
    all_keys = list_keys(sections)
    if "." in word and prefix + word in all_keys:
        parts = word.split(".")
        in_braces = ": {".join(parts) + ": .." + "}" * (len(parts) - 1)
        return f"; in a file keys are nested: {in_braces}"
    if not prefix:
        siblings = list(dict.fromkeys([*siblings, *sections]))
    near = closest_name(word, siblings)
    if near:
        return f"; did you mean {prefix + near}?"

    # The key exists in another section. For example, `warmup` at the top level means `scheduler.warmup`.
    last_parts: dict[str, list[str]] = {}  # last part of a key -> all keys that end in it
    for key in all_keys:
        last_parts.setdefault(key.rpartition(".")[2], []).append(key)
    elsewhere = last_parts.get(word, [])
    if not elsewhere:
        near_part = closest_name(word, list(dict.fromkeys(key.rpartition(".")[2] for key in reversed(all_keys))))
        elsewhere = last_parts[near_part] if near_part else []
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"

    foreign_key = None if prefix else closest_name(word, spelling.DTRAIN_KEYS)
    if foreign_key:
        return f"; did you mean {foreign_key}? dtrain's word for it is {spelling.DTRAIN_KEYS[foreign_key]}"
    return f"; the keys of {prefix.rstrip('.') or 'a recipe'} are {', '.join(siblings)}"
