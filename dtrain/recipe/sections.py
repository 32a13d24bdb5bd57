"""A tree of values as typed sections: unknown keys, types, choices and unions, each problem with its fix.

The types are those of `dtrain.recipe.schema`. A value is converted where nothing is lost. What does not fit is
reported, and stays at its default.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dtrain.base import ranges
from dtrain.base.errors import Problem
from dtrain.base.ranges import closest_name
from dtrain.recipe import spelling
from dtrain.recipe.saved import UNSET, flatten, is_named_sections, named_section_type
from dtrain.recipe.schema import Recipe, make_recipe_type


def list_keys(sections: Mapping[str, type]) -> list[str]:
    """Return every dotted key that holds a value in a recipe of any method; entries of lists are not among them.
    sections: of the methods, by name."""
    return _keys(make_recipe_type(sections, sections), "")


def _keys(cls: type, prefix: str) -> list[str]:
    dotted = []
    for name, hint in get_type_hints(cls).items():
        section = find_section_type(type_alternatives(hint))
        dotted += _keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return dotted


def find_type(hint: Any, key: str) -> Any:
    """Return the type of a dotted key within the type `hint`, an entry of a list by its number; None where it has no
    such key."""
    for part in re.findall(r"[^.\[\]]+", key):
        kinds = type_alternatives(hint)
        if part.isdigit():
            hint = find_entry_type(kinds)
        else:
            section = find_section_type(kinds)
            hint = get_type_hints(section).get(part, named_section_type(hint)) if section else None
    return hint


def build_recipe(kind: type[Recipe], values: Mapping, problems: list[Problem]) -> Any:
    """Return a recipe of a `recipe_type`; a value that does not fit is reported, and stays at its default."""
    return _section_from(kind, values, "", problems, kind.method_sections)


def _section_from(
    cls: type, values: Mapping, prefix: str, problems: list[Problem], sections: Mapping[str, type]
) -> Any:
    hints, made = get_type_hints(cls), cls()
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            problems += _unknown(dotted, value, prefix, list(hints), sections)
            continue
        kinds = type_alternatives(hints[key])
        section = find_section_type(kinds)
        entry = find_section_type([find_entry_type(kinds)])
        if (table := named_section_type(hints[key])) and is_named_sections(value, table):
            named = {
                str(name): _section_from(table, inner, f"{dotted}.{name}.", problems, sections)
                for name, inner in value.items()
            }
            setattr(made, key, named)
        elif section and isinstance(value, Mapping):
            setattr(made, key, _section_from(section, value, f"{dotted}.", problems, sections))
        elif entry and isinstance(value, list):
            setattr(made, key, _entries(entry, value, dotted, problems, sections))
        elif plain := _plain(kinds) if (section or entry) and not isinstance(value, NoneType | list) else None:
            if _set(made, key, plain, value, dotted):
                problems.append(_not_a_section(dotted, value, section, entry, False, "a number, or "))
        elif section or entry:
            # Nothing under a section's name is a section of defaults; scheduler=null may be meant as a constant rate.
            if value is not None or (entry and NoneType not in kinds):
                problems.append(_not_a_section(dotted, value, section, entry, NoneType in kinds))
        elif isinstance(value, str) and value == UNSET:
            if getattr(made, key) is not None:
                problems.append(Problem(dotted, f"{dotted} is left open (???)", "Give it a value"))
        elif value is not getattr(made, key):
            problems += _set(made, key, hints[key], value, dotted)
    return made


def _entries(cls: type, values: list, dotted: str, problems: list[Problem], sections: Mapping[str, type]) -> list:
    made = []
    for index, value in enumerate(values):
        if isinstance(value, Mapping):
            made.append(_section_from(cls, value, f"{dotted}[{index}].", problems, sections))
        else:
            problems.append(_not_a_section(f"{dotted}[{index}]", value, cls, None))
    return made


def _set(section: object, key: str, hint: Any, value: Any, dotted: str) -> list[Problem]:
    """Put a leaf's value into its section, converted to its type; return the problems if it does not fit."""
    texts = _set_or_refuse(section, key, hint, value, dotted)
    return [Problem(dotted, text) for text in texts]


def _set_or_refuse(section: object, key: str, hint: Any, value: Any, dotted: str) -> list[str]:
    kinds = type_alternatives(hint)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if isinstance(value, Mapping) and (
        stuck := [name for name, inner in value.items() if inner is None and spelling.lacks_space_after_colon(name)]
    ):
        return [f"{dotted}: YAML reads {name} as one word: write a blank after the colon" for name in stuck]
    fitting = "none" if value is None and "none" in choices else _converted(value, kinds)
    if _fits(fitting, kinds):
        setattr(section, key, fitting)
        return []
    if choices:
        near = spelling.find_dtrain_value(re.sub(r"\[\d+\]", "", dotted), value)
        hint = "" if near else spelling.method_hint(dotted, value)
        near = near or closest_name(str(value), choices)
        if not hint:
            hint = spelling.pasted_character_hint(value)  # a pasted character explains more than a near name
        if not hint and near:
            hint = f"; did you mean {near}?"
        return [f"{dotted}={ranges.format_value(value)} is none of {', '.join(choices)}{hint}"]
    if alias := spelling.find_dtrain_value(re.sub(r"\[\d+\]", "", dotted), value):
        return [f"{dotted}={ranges.format_value(value)} must be {spelling.type_description(kinds)}: {alias}"]
    hint = _hint_for(value, kinds, getattr(section, key, None))
    return [f"{dotted}={ranges.format_value(value)} must be {spelling.type_description(kinds)}{hint}"]


def _converted(value: Any, kinds: list) -> Any:
    """Convert `value` to one of the types `kinds` where nothing is lost: 1e3 is an integer, 3 a float, 2024 a name."""
    numeric = int in kinds or float in kinds
    if isinstance(value, str) and numeric and str not in kinds:
        try:
            value = float(value)
        except ValueError:
            return value
    if bool in kinds and str not in kinds and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    if isinstance(value, int) and float in kinds and int not in kinds:
        return float(value) if abs(value) < 2**1023 else math.inf if value > 0 else -math.inf
    if isinstance(value, int | float | Path) and str in kinds and not numeric:
        return str(value)
    inner = {origin: get_args(kind)[-1:] for kind in kinds if (origin := get_origin(kind)) in (list, dict)}
    if isinstance(value, list) and list in inner:
        return [_converted(entry, list(inner[list])) for entry in value]
    if isinstance(value, dict) and dict in inner:
        return {key: _converted(entry, list(inner[dict])) for key, entry in value.items()}
    return value


def _fits(value: Any, kinds: list) -> bool:
    """Return whether `value` is of one of the types `kinds`, with nothing left open in it."""
    for kind in kinds:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is list and isinstance(value, list):
            fits = all(_fits(entry, list(inner)) for entry in value)
        elif origin is dict and isinstance(value, dict):
            fits = all(isinstance(name, str) and _fits(entry, [inner[1]]) for name, entry in value.items())
        else:
            fits = kind is Any or type(value) is kind or (origin is Literal and value in inner)
        if fits and value != UNSET:
            return True
    return False


def _plain(kinds: list) -> Any:
    """Return the number, or text, that a section's key may hold in its place; None where there is none."""
    plain = [kind for kind in kinds if kind in (int, float, str, bool)]
    return reduce(or_, plain) | None if plain else None


def _not_a_section(
    dotted: str, value: Any, section: type | None, entry: type | None, is_optional: bool = False, plain: str = ""
) -> Problem:
    return Problem(dotted, _not_a_section_text(dotted, value, section, entry, is_optional, plain))


def _not_a_section_text(
    dotted: str, value: Any, section: type | None, entry: type | None, is_optional: bool, plain: str
) -> str:
    wanted = plain + (f"a mapping with the keys {', '.join(get_type_hints(section))}" if section else "")
    if section and entry:
        wanted += " or "
    wanted += f"a list of mappings with the keys {', '.join(get_type_hints(entry))}" if entry else ""
    wanted += f": write {dotted}={{}} for their defaults, or null for none" if section and is_optional else ""
    hints = get_type_hints(section) if section else {}
    if plain and spelling.percent_hint(value):
        return f"{dotted}={value} must be {plain.partition(',')[0]}{spelling.percent_hint(value)}"
    if isinstance(value, str) and spelling.lacks_space_after_colon(value):
        return f"{dotted}: YAML reads {value} as one word: write a blank after the colon"
    leaf = next((key for key in ("path", "name", "fn", "train.path") if key.partition(".")[0] in hints), None)
    text = spelling.find_dtrain_value(f"{dotted}.{leaf}", value) or value
    meant = f"; write {dotted}.{leaf}={text}" if isinstance(value, str) and leaf else ""
    if entry and not section and isinstance(value, str):
        first = next(iter(get_type_hints(entry)))
        meant = f"; write {dotted}=[{{{first}: {spelling.find_dtrain_value(f'{dotted}.{first}', value) or value}}}]"
    if entry and isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
        return f"{dotted} is no list yet, so it has no entry {next(iter(value))}: give the list, {dotted}=[{{...}}]"
    return f"{dotted}={ranges.format_value(value)}: {dotted} is {wanted}{meant}"


def _hint_for(value: Any, kinds: list, usual: Any) -> str:
    """Return the hint for a refused `value`, where the cause is known; usual: the setting's own value."""
    hints = (
        spelling.pasted_character_hint(value),
        spelling.number_hint(value, kinds),
        spelling.percent_hint(value),
        spelling.list_hint(value, kinds, usual),
    )
    return next(filter(None, hints), "")


def _unknown(dotted: str, value: Any, prefix: str, siblings: list[str], sections: Mapping[str, type]) -> list[Problem]:
    """Return the problems of an unknown key, or of the keys in an unknown section."""
    word = dotted.removeprefix(prefix)
    if value is None and spelling.lacks_space_after_colon(word):
        key, _, text = word.partition(":")
        text = f"{dotted}: YAML reads this as one word: write a blank after the colon, {key}: {text}"
        return [Problem(dotted, text)]
    inner = flatten(value, f"{dotted}.") if isinstance(value, Mapping) else {}
    known = spelling.explain_unknown_key(dotted)
    # A pasted character that only looks like a letter has a hint of its own below.
    if known is None and not prefix and inner and not spelling.pasted_character_hint(word):
        section = closest_name(word, list(dict.fromkeys([*siblings, *sections])))
        moved = _in_section(inner, dotted, section, list_keys(sections))
        if moved:
            return moved
    text = f"{dotted}: {known}"
    if known is None:
        hint = spelling.pasted_character_hint(word)
        text = f"{dotted} is no key of a recipe{hint}{_near(word, prefix, siblings, sections)}"
    problems = [Problem(dotted, text)]
    for key in inner:
        answer = spelling.explain_unknown_key(key)
        if answer is not None:
            problems.append(Problem(key, f"{key}: {answer}"))
    return problems


def _in_section(inner: Collection[str], dotted: str, section: str | None, known: Collection[str]) -> list[Problem]:
    """Return the problems of a section with a mistyped name whose keys all exist in the section that is meant.

    For example, `optimzer.lr=1e-5` is one mistake: the key is `optimizer.lr`.

    Args:
        inner: The given keys, such as "optimzer.lr".
        dotted: The mistyped name, "optimzer".
        section: The name that is meant, "optimizer"; None if no name is near.
        known: All keys of a recipe.

    Returns:
        One problem per key. Empty if the section that is meant has not all of them.
    """
    problems = []
    for key in inner:
        meant = f"{section}{key.removeprefix(dotted)}"
        if section is None or meant not in known:
            return []
        problems.append(Problem(key, f"{key} is not a key of a recipe", f"Use {meant}"))
    return problems


def _near(word: str, prefix: str, siblings: list[str], sections: Mapping[str, type]) -> str:
    everywhere = list_keys(sections)
    if "." in word and prefix + word in everywhere:
        parts = word.split(".")
        in_braces = ": {".join(parts) + ": .." + "}" * (len(parts) - 1)
        return f"; in a file keys are nested: {in_braces}"
    siblings = siblings if prefix else list(dict.fromkeys([*siblings, *sections]))
    near = closest_name(word, siblings)
    same = [key for key in everywhere if key.rpartition(".")[2] == word]
    leaves = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if near is None and not same and (leaf := closest_name(word, leaves)):
        same = [key for key in everywhere if key.rpartition(".")[2] == leaf]
    if near or same:
        return f"; did you mean {prefix + near if near else ' or '.join(same)}?"
    if not prefix and (theirs := closest_name(word, spelling.DTRAIN_KEYS)):
        return f"; did you mean {theirs}? dtrain's word for it is {spelling.DTRAIN_KEYS[theirs]}"
    return f"; the keys of {prefix.rstrip('.') or 'a recipe'} are {', '.join(siblings)}"


def type_alternatives(hint: Any) -> list:
    """Return the alternatives of a type: its union's members, or itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def find_section_type(kinds: list) -> type | None:
    """Return the dataclass among `kinds`."""
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def find_entry_type(kinds: list) -> Any:
    """Return the type of the entries of the list among `kinds`; None where there is none."""
    return next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
