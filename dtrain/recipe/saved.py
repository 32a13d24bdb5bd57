"""Recipes without their secrets: as a run saves them, as it prints them, and compared with saved ones.

A value from the environment is its text there, `${oc.env:NAME}`, and secrets in plain text are redacted.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf

from dtrain.base.errors import UserError
from dtrain.base.json_files import check_json_size
from dtrain.recipe import secrets
from dtrain.recipe.schema import Recipe, make_recipe_type

UNSET = "???"  # OmegaConf's mark for a value that the recipe leaves to its user
MAX_ENTRIES = 100_000  # entries of a recipe, with what its aliases repeat
MIN_SECRET_LENGTH = 4  # characters of a secret that is looked for in a text
_FNS = r"\w+(\.\w+)?\.(environment|(rewards|tools)\[\d+\]\.fn)"
_NAMES = re.compile(rf"((optimizer|scheduler(\[\d+\])?)\.name|{_FNS})")


@dataclass(eq=False)
class LoadedRecipe(Recipe):
    """A recipe as it was read, with the place, the text and the value of all that the environment gave, with its
    secrets, and with the given keys that its method does not read. It equals any recipe of the same values."""

    references: list[tuple[secrets.Path, str, Any]] = field(default_factory=list, repr=False)
    secrets: list[str] = field(default_factory=list, repr=False)
    unused_keys: list[str] = field(default_factory=list, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and recipe_values(self) == recipe_values(other)

    __hash__ = None  # type: ignore[assignment]  # as Python itself says that a class cannot be hashed

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the sections: no module has the class of a loaded recipe."""
        return _unpickled, (self.method_sections, vars(self))


def _unpickled(sections: Mapping[str, type], values: Mapping[str, Any]) -> LoadedRecipe:
    return _loaded_type(make_recipe_type(sections, values))(**values)


def _loaded_type(kind: type) -> Any:
    """Return the class of loaded recipes of a `recipe_type`."""
    return make_dataclass("Loaded", [], bases=(kind, LoadedRecipe), eq=False)


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """Return the tree of a recipe's own keys, and of those given to another method."""
    tree = asdict(recipe)
    own = {key.name: tree[key.name] for key in fields(Recipe)}
    kept_keys = {(recipe.method,), *(tuple(re.split(r"[.\[]", key)[:2]) for key in getattr(recipe, "unused_keys", ()))}
    for name in recipe.method_sections:
        section = tree.get(name, {}).items()
        if kept := {key: value for key, value in section if {(name,), (name, key)} & kept_keys}:
            own[name] = kept
    return own


def with_origins(recipe: Recipe, raw: dict, values: dict, resolve: Callable[[dict], dict]) -> LoadedRecipe:
    """Return `recipe` with its references and secrets. raw: its tree as written; values: `resolve` of that.

    A reference is a text whose value differs where the environment is empty, however many texts it goes through. What
    can be no secret and decides what is computed, a number or the name of an optimizer, counts by its value instead.
    """
    written = [(path, text) for path, text in secrets.iterate_leaves(raw) if isinstance(text, str) and "${" in text]
    names = {path: secrets.environment_names(text) for path, text in written if secrets.reads_environment(text)}
    for path in names:
        secrets.set_at(raw, path, UNSET)
    silent = resolve(raw) if names else values
    variables = sum(names.values(), [])
    environment = {name: OmegaConf.create({"value": f"${{oc.env:{name},null}}"}).value for name in variables}
    redacted = {str(value) for name, value in environment.items() if value and secrets.is_secret_name(name)}
    redacted = {secret for secret in redacted if len(secret) >= MIN_SECRET_LENGTH}
    loaded, tree = _loaded_type(type(recipe))(**vars(recipe)), asdict(recipe)
    for path, text in written:
        if path not in names and secrets.get_at(silent, path) == secrets.get_at(values, path):
            continue
        value = secrets.get_at(tree, path)
        if any(secrets.is_secret_name(part) for part in path if isinstance(part, str)):
            redacted |= {str(leaf) for _, leaf in secrets.iterate_leaves(value)}
        elif not (_is_free(type(recipe), path, value) or any(secret in str(value) for secret in redacted)):
            continue
        loaded.references.append((path, text, value))
    plain = (value for path, value in secrets.iterate_leaves(values) if secrets.is_secret(values, path, value))
    redacted |= {str(value) for value in plain if not secrets.may_be_word(str(value))}  # which may stand in any text
    loaded.secrets += sorted((secret for secret in redacted if len(secret) >= MIN_SECRET_LENGTH), key=len, reverse=True)
    return loaded


def _is_free(kind: Any, path: secrets.Path, value: Any) -> bool:
    """Return whether a key takes any text, and is no name of code. kind: the recipe's type."""
    for part in path:
        kind = get_type_hints(kind).get(str(part)) if is_dataclass(kind) else None
    is_choice = any(get_origin(option) is Literal for option in (kind, *get_args(kind)))
    is_text = all(isinstance(leaf, str) for _, leaf in secrets.iterate_leaves(value))
    return is_text and not is_choice and not _NAMES.fullmatch(secrets.dotted_key(path))


def source_tree(recipe: Recipe, hide: bool = False) -> dict:
    """Return the tree of a recipe, with the text of what the environment gave, unless another value has taken its
    place. hide: without secrets in plain text."""
    tree, known = recipe_values(recipe), getattr(recipe, "secrets", ())
    references = getattr(recipe, "references", ())
    kept = [(path, text) for path, text, value in references if secrets.get_at(tree, path) == value]
    tree = secrets.escape_interpolations(tree)
    for path, text in kept:
        secrets.set_at(tree, path, text)
    if hide:
        secrets.hide_secrets(tree, known)
    return tree


def to_yaml(recipe: Recipe, plain: bool = False) -> str:
    """Return the whole recipe as YAML, defaults included; `load` of it gives an equal recipe, except for secrets in
    plain text, which are redacted. plain: every value as it is, for processes of the same run, which take the rest by
    `with_origins_of`."""
    tree = secrets.escape_interpolations(recipe_values(recipe)) if plain else source_tree(recipe, hide=True)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def origins(recipe: Recipe) -> dict[str, list]:
    """Return the references and secrets of a `Loaded` recipe, as JSON."""
    return {name: list(getattr(recipe, name, ())) for name in ("references", "secrets")}


def with_origins_of(recipe: LoadedRecipe, source: Mapping[str, list]) -> LoadedRecipe:
    """Return `recipe` with `source`, the `origins` of the one that it was written from."""
    references = [(tuple(path), text, value) for path, text, value in source["references"]]
    return replace(recipe, references=references, secrets=source["secrets"])


def diff_recipes(old_yaml: str, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (key, value in `old_yaml`, value in `recipe`) of every key that differs; lists are compared whole.

    A key missing on one side counts with the schema's default, or None where the schema has no such key. Both sides are
    as `to_yaml` has them. Raises UserError for an `old_yaml` that is no recipe.
    """
    try:
        saved = yaml.safe_load(old_yaml) or {}
        check_json_size(saved, MAX_ENTRIES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"the saved recipe is damaged: {error}") from error
    if not isinstance(saved, dict):
        raise UserError(f"the saved recipe is damaged: it is {type(saved).__name__}, no mapping")
    kind = make_recipe_type(recipe.method_sections, {*saved, *recipe_values(recipe)})
    defaults, saved = asdict(kind()), _completed(saved, kind)
    plain, own = flatten(merge_trees(defaults, saved)), flatten(merge_trees(defaults, recipe_values(recipe)))
    secrets.hide_secrets(saved, getattr(recipe, "secrets", ()))
    old, new = flatten(merge_trees(defaults, saved)), flatten(merge_trees(defaults, source_tree(recipe, hide=True)))
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    # A value that was saved before its text was, is the same.
    return [(key, old.get(key), new.get(key)) for key in differing if key not in own or plain.get(key) != own[key]]


def _completed(values: Any, hint: Any) -> Any:
    """Complete `values` of that type, as an earlier version saved them, with the default of each missing key."""
    kinds = [hint, *get_args(hint)]
    if isinstance(values, list):
        inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
        return [_completed(value, inner) for value in values]
    section = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
    if section is None or not isinstance(values, Mapping):
        return values
    if (table := named_section_type(hint)) and is_named_sections(values, table):
        return {name: _completed(value, table) for name, value in values.items()}
    hints = get_type_hints(section)
    return merge_trees(asdict(section()), {key: _completed(value, hints.get(key)) for key, value in values.items()})


def named_section_type(hint: Any) -> Any:
    """Return the section that a key may also hold several of, by name; None where it may not."""
    named = [get_args(kind)[1] for kind in (hint, *get_args(hint)) if get_origin(kind) is dict]
    return next((kind for kind in named if is_dataclass(kind)), None)


def is_named_sections(value: Any, section: Any) -> bool:
    """Return whether `value` holds several sections of that kind by name, and is none of its own."""
    own = {key.name for key in fields(section)}
    is_named = isinstance(value, Mapping) and bool(value) and not own & value.keys()
    return is_named and all(isinstance(inner, Mapping) for inner in value.values())


def redacted_values(recipe: Recipe) -> dict[str, Any]:
    """Return key and value of everything that `to_yaml` writes as a text of the environment, or redacts."""
    own, shown = flatten(recipe_values(recipe)), flatten(source_tree(recipe, hide=True))
    return {key: value for key, value in own.items() if key in shown and shown[key] != value}


def redact(text: str, recipe: Recipe) -> str:
    """Return `text` for the terminal or a log, without the secrets of `recipe`."""
    return secrets.mask_secrets(text, getattr(recipe, "secrets", ()))


@contextmanager
def redacted_errors(recipe: Recipe) -> Iterator[None]:
    """Redact the secrets of `recipe` in every UserError that leaves the block."""
    try:
        yield
    except UserError as error:
        error.args = tuple(redact(str(argument), recipe) for argument in error.args)
        raise


def secret_notes(recipe: Recipe) -> list[str]:
    """Return the notes to a recipe's user about secrets that it holds in plain text."""
    tree = source_tree(recipe)
    return [
        f"note: {secrets.dotted_key(path)} is a secret in plain text: nothing that a run saves holds it. "
        f"${{oc.env:NAME}} in its place takes it from the environment"
        for path, value in secrets.iterate_leaves(tree)
        if secrets.is_secret(tree, path, value)
    ]


def merge_trees(base: dict, over: Mapping) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_trees(merged[key], value) if both else value
    return merged


def flatten(values: Mapping, prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        leaves |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return leaves


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of dotted keys: the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return tree
