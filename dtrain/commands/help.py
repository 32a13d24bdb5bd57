"""`dtrain help KEY`: the documentation of a recipe's keys, sections and metrics in the terminal.

Imports no torch, except for the keys of a method that an installed package registers (base/plugins.py).
`dtrain help` with the name of a command is handled by `cli`, which has the parsers of the commands.
"""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence

from dtrain.base.errors import UserError
from dtrain.base.plugins import plugins
from dtrain.base.ranges import closest_name
from dtrain.recipe import list_shipped_recipes, spelling
from dtrain.recipe.key_docs import FoundKey, iterate_keys, section_text
from dtrain.recipe.schema import make_recipe_type
from dtrain.training import METHODS, SECTIONS
from dtrain.training.metrics.records import MetricField, find_field

MAX_ENTRIES = 4  # if more keys end with a word, they are listed in one line each


def is_section(word: str) -> bool:
    """Check whether a word is the name of a section of recipes, such as `eval`, which is a command as well."""
    return any(found.key == word and found.doc.sections for found in _all_keys())


def describe(word: str, commands: Collection[str] = ()) -> str:
    """Return the documentation of a word.

    Args:
        word: A key (`optimizer.lr`), a section (`optimizer`), the last part of a key (`lr`), a field of metrics.jsonl,
            or another tool's name for a key. `key=value` and `--key` are read as the key.
        commands: Names of commands, for suggestions.

    Raises:
        UserError: If dtrain has nothing of this name.
    """
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    section = _without_numbers(name).partition(".")[0]
    keys = _all_keys(section)
    parts = _find_documented(name, keys)
    field = find_field(name)
    if field is not None:
        parts.append(_metric_text(name, field))
    recipe = _recipe_text(word)
    if recipe is not None:
        parts.append(recipe)
    if not parts:
        explanation = spelling.explain_unknown_key(name)
        last_part = name.rpartition(".")[2]
        # Another tool's `epsilon` is no explanation of the key `poly.epsilon` of a method that is not installed.
        is_guess = "." in name and explanation == spelling.explain_unknown_key(last_part)
        if explanation is None or (is_guess and all(found.key != section for found in keys)):
            raise UserError(_unknown_text(word, name, keys, commands))
        parts.append(_fill(f"{word}: {explanation}", ""))
        own_key = re.search(r"[a-z_]+(\.[a-z_]+)+", explanation)
        if own_key:
            parts += _find_documented(own_key[0], keys)
    return "\n\n".join(parts)


def _all_keys(plugin: str = "") -> list[FoundKey]:
    """Return every key of a recipe for any method of dtrain, and for the method `plugin` if a package registers it."""
    sections = SECTIONS.with_method(plugin) if plugin in plugins("method") else SECTIONS
    return list(iterate_keys(make_recipe_type(sections, sections)))


def _find_documented(name: str, keys: Sequence[FoundKey]) -> list[str]:
    """Return the entries of the key `name`, or of all keys that end with it. Empty if there is none."""
    wanted = _without_numbers(name)
    for found in keys:
        if _without_numbers(found.key) == wanted:
            return [_section_entry(found, keys) if found.doc.sections else _entry([found])]

    # The same field may be a key of several sections: `path` of data.train, data.val and eval has one text.
    groups: dict[tuple[str, str], list[FoundKey]] = {}
    for found in keys:
        if _without_numbers(found.key).endswith(f".{wanted}"):
            groups.setdefault((found.doc.text, found.doc.default), []).append(found)
    if len(groups) <= MAX_ENTRIES:
        return [_entry(group) for group in groups.values()]
    ending = [found for group in groups.values() for found in group]
    return [f"Keys that end with {name}:\n\n" + "\n".join(_list_lines(ending))]


def _without_numbers(key: str) -> str:
    """Return a key without the numbers of entries: "grpo.rewards[0].fn" is "grpo.rewards.fn"."""
    return re.sub(r"\[\d*\]|\.\d+(?=\.|$)", "", key)


def _entry(group: Sequence[FoundKey]) -> str:
    """Return the entry of a key, or of several keys with the same documentation."""
    doc = group[0].doc
    facts = [("type", doc.type_text(lambda section: "section"))]
    if doc.range:
        facts.append(("range", doc.range))
    facts.append(("default", doc.default or '""'))
    lines = [", ".join(found.key for found in group), ""]
    lines += [_fill(f"{label:<9}{text}", "  ", indent_more=" " * 9) for label, text in facts]
    return "\n".join([*lines, "", _fill(doc.text, "  ")])


def _section_entry(section: FoundKey, keys: Sequence[FoundKey]) -> str:
    """Return the entry of a section: its documentation, and a line for each of its keys."""
    inner = []
    for found in keys:
        parent = found.key.rpartition(".")[0]
        if parent == section.key or parent == f"{section.key}[0]":
            inner.append(found)
    texts = [section_text(cls) for cls in section.doc.sections]
    if section.doc.text and section.doc.text not in texts:
        texts.append(section.doc.text)
    lines = [section.key, ""]
    lines += [_fill(text, "  ") for text in texts]
    return "\n".join([*lines, "", *_list_lines(inner)])


def _list_lines(keys: Sequence[FoundKey]) -> Iterator[str]:
    """Yield a line for each key: key, default, and the first sentence of its text as far as the line has room."""
    key_width = max(len(found.key) for found in keys)
    default_width = min(16, max(len(found.doc.default) for found in keys))
    width = _width()
    for found in keys:
        start = f"  {found.key:<{key_width}}  {found.doc.default:<{default_width}}  "
        sentence = re.split(r"(?<=\w\w[.]) ", found.doc.text)[0]
        yield (start + textwrap.shorten(sentence, max(24, width - len(start)), placeholder=" ...")).rstrip()


def _metric_text(name: str, field: MetricField) -> str:
    """Return the entry of a field of metrics.jsonl."""
    lines = [f"{name} (a field of metrics.jsonl)", ""]
    if field.unit:
        lines.append(f"  {'unit':<9}{field.unit}")
    if field.where:
        lines.append(_fill(f"{'written':<9}with {field.where}", "  ", indent_more=" " * 9))
    if field.unit or field.where:
        lines.append("")
    return "\n".join([*lines, _fill(field.meaning, "  ")])


def _recipe_text(word: str) -> str | None:
    """Return a line about a shipped recipe. None if there is none of this name."""
    for name, text in list_shipped_recipes([*METHODS]):
        if name == word:
            return f"{name} (a recipe that ships with dtrain)\n\n{_fill(text, '  ')}\n  `dtrain cat {name}` prints it."
    return None


def _unknown_text(word: str, name: str, keys: Sequence[FoundKey], commands: Collection[str]) -> str:
    """Return the message about a word that is unknown, with the nearest name."""
    names = [_without_numbers(found.key) for found in keys]
    # The last parts come after the full keys, so that `optimizer.lrr` is compared with optimizer.lr.
    last_parts = [key.rpartition(".")[2] for key in names]
    near = closest_name(name, list(dict.fromkeys([*names, *last_parts, *commands])))
    last_part = name.rpartition(".")[2]
    if near is None and spelling.explain_unknown_key(last_part):
        near = last_part
    hint = (
        f"did you mean `dtrain help {near}`?"
        if near
        else "`dtrain help` lists the commands and the sections of a recipe"
    )
    return f"{word} is not a key of a recipe, a metric or a command; {hint}"


def section_list() -> str:
    """Return the list of a recipe's sections, for `dtrain help` without a word."""
    names = []
    for found in _all_keys():
        if "." not in found.key and "[" not in found.key:
            names.append(found.key)
    return _fill(f"Sections of a recipe: {', '.join(names)}.", "")


def _fill(text: str, indent: str, indent_more: str = "") -> str:
    """Wrap a text to the width of the terminal."""
    return textwrap.fill(
        text,
        _width(),
        initial_indent=indent,
        subsequent_indent=indent + indent_more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    return min(100, shutil.get_terminal_size((100, 0)).columns)
