"""Documentation of the keys of a recipe, for docs/recipe.md and `dtrain help`.

A key is a field of a section's dataclass. Its type, its range and its default are those of the field. Its text is the
string below the field, which Python does not store, so it is read from the source of the class. An installed wheel
contains the sources. For example, in

    @dataclass
    class Optimizer:
        lr: Annotated[float, POSITIVE] = 1e-5
        '''Peak learning rate.'''

the key `optimizer.lr` has the type float, the range that `POSITIVE` describes, the default 1e-5, and a text.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

TYPE_WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
ENTRIES = " entries"
"""Ending of the place of a section that is an entry of a list, such as "grpo.rewards entries"."""


@dataclass(frozen=True)
class KeyDoc:
    """Documentation of a field of a section.

    Attributes:
        name: Name of the field.
        hint: Its type, without its range.
        range: What a value must be in addition to its type. "" without such a condition.
        default: The default as YAML writes it in a line. "" for a section.
        text: The text below the field. For a section without such a text, the section's own.
        sections: Dataclasses of the section, or of the entries of a list of sections.
    """

    name: str
    hint: Any
    range: str
    default: str
    text: str
    sections: tuple[type, ...]

    def type_text(self, section_text: Callable[[type], str], choice: str = "{}") -> str:
        """Return the type in words.

        Args:
            section_text: Returns the words for a section.
            choice: Format of one of several choices.
        """
        # Such a key has the type `str | bool`, and its range names the only text that is accepted.
        switch = re.fullmatch(r"(\w+), true or false", self.range)
        if switch:
            return ", ".join(choice.format(value) for value in (switch[1], "true", "false"))
        return _type_text(self.hint, section_text, choice)


@dataclass(frozen=True)
class FoundKey:
    """A dotted key with its documentation.

    Attributes:
        key: The key, such as "optimizer.lr" or "grpo.rewards[0].fn".
        doc: Its documentation.
    """

    key: str
    doc: KeyDoc


def document_section(section: type, separate: Collection[type] = ()) -> list[KeyDoc]:
    """Document the keys of a section, in the order of its fields.

    Args:
        section: The dataclass.
        separate: Sections that are documented elsewhere. Keys that `section` inherits from them are left out.
    """
    hints = get_type_hints(section)
    hints_with_ranges = get_type_hints(section, include_extras=True)
    texts = _read_texts(section, separate)
    docs = []
    for field in fields(section):
        if field.name not in texts:
            continue
        inner = inner_sections(hints[field.name])
        text = texts[field.name]
        if not text and inner:
            text = section_text(next(iter(inner)))
        is_plain_section = bool(inner) and field.default is MISSING
        docs.append(
            KeyDoc(
                name=field.name,
                hint=hints[field.name],
                range=_range_text(hints_with_ranges[field.name]),
                default="" if is_plain_section else _default_text(field),
                text=text,
                sections=tuple(inner),
            )
        )
    return docs


def section_text(section: type) -> str:
    """Return a section's documentation, without its name at the beginning: "`lora`: ..."."""
    text = " ".join(inspect.cleandoc(section.__doc__ or "").split())
    text = re.sub(r"^`[\w. ]+`: ", "", text)
    return text[:1].upper() + text[1:]


def inner_sections(hint: Any, ending: str = "") -> dict[type, str]:
    """Return the sections of a type, each with the ending of its place: "" or `ENTRIES`."""
    if is_dataclass(hint) and isinstance(hint, type):
        return {hint: ending}
    if get_origin(hint) is list:
        ending = ENTRIES
    found: dict[type, str] = {}
    for argument in get_args(hint):
        found |= inner_sections(argument, ending)
    return found


def iterate_keys(root: type, prefix: str = "") -> Iterator[FoundKey]:
    """Yield every key of a recipe type, sections before their keys. Entries of lists have the number 0.

    Args:
        root: The type of the recipe, from `make_recipe_type`, or of a section of it.
        prefix: Start of the keys, such as "optimizer.".
    """
    for doc in document_section(root):
        key = f"{prefix}{doc.name}"
        yield FoundKey(key, doc)
        for section, ending in inner_sections(doc.hint).items():
            yield from iterate_keys(section, f"{key}[0]." if ending else f"{key}.")


def _read_texts(section: type, separate: Collection[type]) -> dict[str, str]:
    """Return the text below each field of a class and of its bases. Fields without a text have ""."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if not is_dataclass(cls) or (cls in separate and cls is not section):
            continue
        texts = _texts_of_module(cls.__module__).get(cls.__qualname__)
        if texts is not None:
            found |= texts
            continue
        # The class was made at run time: by `make_recipe_type`, or in an interpreter that keeps no source.
        for field in fields(cls):
            found.setdefault(field.name, "")
    return found


@cache
def _texts_of_module(module: str) -> dict[str, dict[str, str]]:
    """Return the text below each field of each class in the source of a module. Empty if there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return {}
    texts = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = _texts_of_class(node)
    return texts


def _texts_of_class(class_node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for node in class_node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
    return found


def _range_text(hint: Any) -> str:
    """Return the description of the range of an annotated type. "" without a range."""
    for _, description in getattr(hint, "__metadata__", ()):
        return description
    return ""


def _type_text(hint: Any, section_text: Callable[[type], str], choice: str) -> str:
    if is_dataclass(hint) and isinstance(hint, type):
        return section_text(hint)
    if hint is Any:
        return "any value"
    if hint in TYPE_WORDS:
        return TYPE_WORDS[hint]
    if get_origin(hint) is Literal:
        return ", ".join(choice.format(value) for value in get_args(hint))
    inner = [_type_text(argument, section_text, choice) for argument in get_args(hint)]
    if get_origin(hint) is list:
        return f"list of {inner[0]}"
    if get_origin(hint) is dict:
        return f"mapping of text to {inner[1]}"
    return ", ".join(inner)


def _default_text(field: Field) -> str:
    """Return a field's default as YAML writes it in a line."""
    value = field.default
    if field.default_factory is not MISSING:
        value = field.default_factory()
    if isinstance(value, str):
        return value
    # Entries of a list may be sections.
    return json.dumps(value, default=asdict).replace('"', "").replace("e-0", "e-")
