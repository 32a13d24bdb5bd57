"""A recipe as others may see it: in what a run saves, in what it prints, and compared with what was saved.

What the environment gave is its text there, `${oc.env:NAME}`, and secrets in plain text are hidden.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf

from dtrain.base.errors import UserError
from dtrain.base.json_files import check_shape
from dtrain.recipe import secrets
from dtrain.recipe.schema import Recipe

UNSET = "???"  # OmegaConf's mark for a value that the recipe leaves to its user
PARTS = 100_000  # entries of a recipe, with what its aliases repeat
SHORTEST = 4  # characters of a secret that is looked for in a text
_FNS = r"(grpo|eval(\.\w+)?)\.(environment|(rewards|tools)\[\d+\]\.fn)"
_NAMES = re.compile(rf"((optimizer|scheduler(\[\d+\])?)\.name|{_FNS})")


@dataclass(eq=False)
class Loaded(Recipe):
    """A recipe as it was read, with the place, the text and the value of all that the environment gave, with the values
    that are nobody else's affair, and with the given keys that its method does not read. It equals any recipe of the
    same values."""

    references: list[tuple[secrets.Path, str, Any]] = field(default_factory=list, repr=False)
    secrets: list[str] = field(default_factory=list, repr=False)
    unread: list[str] = field(default_factory=list, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and values_of(self) == values_of(other)

    __hash__ = None  # type: ignore[assignment]  # as Python itself says that a class cannot be hashed


def values_of(recipe: Recipe) -> dict[str, Any]:
    """The tree of a recipe's own keys."""
    tree = asdict(recipe)
    return {one.name: tree[one.name] for one in fields(Recipe)}


def with_origins(recipe: Recipe, raw: dict, values: dict, resolve: Callable[[dict], dict]) -> Loaded:
    """`recipe` with its references and secrets. raw: its tree as written; values: what `resolve` makes of that.

    A reference is what comes out otherwise where the environment says nothing, however many texts it goes through. What
    can be no secret and decides what is computed, a number or the name of an optimizer, counts by its value instead.
    """
    written = [(path, text) for path, text in secrets.leaves(raw) if isinstance(text, str) and "${" in text]
    names = {path: secrets.variables(text) for path, text in written if secrets.reads_outside(text)}
    for path in names:
        secrets.put(raw, path, UNSET)
    silent = resolve(raw) if names else values
    given = {name: OmegaConf.create({"value": f"${{oc.env:{name},null}}"}).value for name in sum(names.values(), [])}
    found = {str(value) for name, value in given.items() if value and secrets.is_secret_name(name)}
    found = {one for one in found if len(one) >= SHORTEST}
    loaded, tree = Loaded(**vars(recipe)), asdict(recipe)
    for path, text in written:
        if path not in names and secrets.at(silent, path) == secrets.at(values, path):
            continue
        value = secrets.at(tree, path)
        if any(secrets.is_secret_name(one) for one in path if isinstance(one, str)):
            found |= {str(one) for _, one in secrets.leaves(value)}
        elif not (_is_free(path, value) or any(one in str(value) for one in found)):
            continue
        loaded.references.append((path, text, value))
    hidden = (value for path, value in secrets.leaves(values) if secrets.is_secret(values, path, value))
    found |= {str(value) for value in hidden if not secrets.is_word(str(value))}  # which may stand in any text
    loaded.secrets += sorted((one for one in found if len(one) >= SHORTEST), key=len, reverse=True)
    return loaded


def _is_free(path: secrets.Path, value: Any) -> bool:
    """Whether a key takes any text, and is no name of code."""
    kind: Any = Recipe
    for part in path:
        kind = get_type_hints(kind).get(str(part)) if is_dataclass(kind) else None
    is_choice = any(get_origin(one) is Literal for one in (kind, *get_args(kind)))
    is_text = all(isinstance(one, str) for _, one in secrets.leaves(value))
    return is_text and not is_choice and not _NAMES.fullmatch(secrets.dotted(path))


def texts(recipe: Recipe, hide: bool = False) -> dict:
    """The tree of a recipe, with the text of what the environment gave, unless another value has taken its place.
    hide: without secrets in plain text."""
    tree, known = values_of(recipe), getattr(recipe, "secrets", ())
    references = getattr(recipe, "references", ())
    kept = [(path, text) for path, text, value in references if secrets.at(tree, path) == value]
    tree = secrets.escaped(tree)
    for path, text in kept:
        secrets.put(tree, path, text)
    if hide:
        secrets.hide(tree, known)
    return tree


def to_yaml(recipe: Recipe, plain: bool = False) -> str:
    """The whole recipe, defaults included; `load` of it gives an equal recipe, except for secrets in plain text, which
    are hidden. plain: every value as it is, for processes of the same run, which `with_origins_of` tells the rest."""
    tree = secrets.escaped(values_of(recipe)) if plain else texts(recipe, hide=True)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def origins(recipe: Recipe) -> dict[str, list]:
    """What a `Loaded` recipe knows beside its values, as JSON."""
    return {name: list(getattr(recipe, name, ())) for name in ("references", "secrets")}


def with_origins_of(recipe: Loaded, found: Mapping[str, list]) -> Loaded:
    """`recipe` with the `origins` of the one that it was written from."""
    references = [(tuple(path), text, value) for path, text, value in found["references"]]
    return replace(recipe, references=references, secrets=found["secrets"])


def diff(old_yaml: str, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """(key, value in `old_yaml`, value in `recipe`) of every key whose value differs; lists are compared whole.

    A key that one side lacks counts with the schema's default, or None where the schema has no such key. Both sides are
    as `to_yaml` has them. UserError for an `old_yaml` that is no recipe.
    """
    try:
        saved = yaml.safe_load(old_yaml) or {}
        check_shape(saved, PARTS)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"the saved recipe is damaged: {error}") from error
    if not isinstance(saved, dict):
        raise UserError(f"the saved recipe is damaged: it is {type(saved).__name__}, no mapping")
    saved = _completed(saved, Recipe)
    plain, own = flat(merge(asdict(Recipe()), saved)), flat(values_of(recipe))
    secrets.hide(saved, getattr(recipe, "secrets", ()))
    old, new = flat(merge(asdict(Recipe()), saved)), flat(texts(recipe, hide=True))
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    # A value that was saved before its text was, is the same.
    return [(key, old.get(key), new.get(key)) for key in differing if key not in own or plain.get(key) != own[key]]


def _completed(values: Any, hint: Any) -> Any:
    """`values` of that type, as an earlier version saved them, with the default of each key that a section lacks."""
    kinds = [hint, *get_args(hint)]
    if isinstance(values, list):
        inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
        return [_completed(one, inner) for one in values]
    section = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
    if section is None or not isinstance(values, Mapping):
        return values
    if (table := table_of(hint)) and is_table(values, table):
        return {name: _completed(one, table) for name, one in values.items()}
    hints = get_type_hints(section)
    return merge(asdict(section()), {key: _completed(value, hints.get(key)) for key, value in values.items()})


def table_of(hint: Any) -> Any:
    """The section that a key may also hold several of, by name; None where it may not."""
    named = [get_args(kind)[1] for kind in (hint, *get_args(hint)) if get_origin(kind) is dict]
    return next((kind for kind in named if is_dataclass(kind)), None)


def is_table(value: Any, section: Any) -> bool:
    """Whether `value` holds several sections of that kind by name, and is none of its own."""
    own = {one.name for one in fields(section)}
    is_named = isinstance(value, Mapping) and bool(value) and not own & value.keys()
    return is_named and all(isinstance(one, Mapping) for one in value.values())


def unsaid(recipe: Recipe) -> dict[str, Any]:
    """Key and value of what `to_yaml` says by a text, or hides."""
    own, shown = flat(values_of(recipe)), flat(texts(recipe, hide=True))
    return {key: value for key, value in own.items() if key in shown and shown[key] != value}


def hidden(text: str, recipe: Recipe) -> str:
    """`text` for the terminal or a log, without the secrets of `recipe`."""
    return secrets.masked(text, getattr(recipe, "secrets", ()))


@contextmanager
def hiding(recipe: Recipe) -> Iterator[None]:
    """Errors of its user leave the block without the secrets of `recipe`."""
    try:
        yield
    except UserError as error:
        error.args = tuple(hidden(str(one), recipe) for one in error.args)
        raise


def notes(recipe: Recipe) -> list[str]:
    """What its user is told of secrets that a recipe holds in plain text."""
    tree = texts(recipe)
    return [
        f"note: {secrets.dotted(path)} is a secret in plain text: nothing that a run saves holds it. ${{oc.env:NAME}} "
        "in its place takes it from the environment"
        for path, value in secrets.leaves(tree)
        if secrets.is_secret(tree, path, value)
    ]


def merge(base: dict, over: Mapping) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def flat(values: Mapping, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found
