"""Loaded recipes without their secrets: saving, printing, and comparing with a saved recipe.

A value that comes from the environment is saved as the text that reads it, `${oc.env:NAME}`. Secrets in plain text are
redacted. For example, this recipe

    metrics: {wandb: my-project}
    grpo: {server: {urls: ["http://user:pa55word@host:8000"]}}
    run: {dir: "${oc.env:SCRATCH}/runs"}

is saved with `urls: ["http://<hidden by dtrain>@host:8000"]` and with the text of `dir` as it is, so that a resume on
another host reads that host's SCRATCH.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf

from dtrain.base.errors import UserError
from dtrain.base.json_files import check_json_size
from dtrain.recipe import secrets
from dtrain.recipe.schema import MethodSections, Recipe, make_recipe_type

UNSET = "???"  # OmegaConf's mark for a value that the recipe leaves to its user
MAX_ENTRIES = 100_000  # entries of a recipe's mappings and lists, with those that YAML aliases repeat
MIN_SECRET_LENGTH = 4  # characters. A shorter text would be redacted in the middle of words.
# Keys whose value is the name of code. Such a name decides what is computed, so it is compared and saved by its value.
_FUNCTION_KEYS = r"\w+(\.\w+)?\.(environment|(rewards|tools)\[\d+\]\.fn)"
_CODE_KEYS = re.compile(rf"(model\.family(\[\d+\])?|(optimizer|scheduler(\[\d+\])?)\.name|{_FUNCTION_KEYS})")


class Reference(NamedTuple):
    """A value of a recipe that comes from the environment.

    Attributes:
        path: Its path in the recipe.
        text: The text with the interpolation, such as "${oc.env:SCRATCH}/runs".
        value: The value.
    """

    path: secrets.Path
    text: str
    value: Any


@dataclass(eq=False)
class LoadedRecipe(Recipe):
    """A recipe, together with its references to the environment and its secrets.

    A loaded recipe equals any recipe with the same values.

    Attributes:
        references: The values that come from the environment.
        secrets: The texts to redact, longest first.
        unused_keys: Keys that the recipe sets and its method does not read.
        origin_notes: Lines for the user if the recipe was converted from a file of another tool.
    """

    references: list[Reference] = field(default_factory=list, repr=False)
    secrets: list[str] = field(default_factory=list, repr=False)
    unused_keys: list[str] = field(default_factory=list, repr=False)
    origin_notes: list[str] = field(default_factory=list, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and recipe_values(self) == recipe_values(other)

    __hash__ = None  # type: ignore[assignment]  # as Python does for a class with __eq__ and without __hash__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the sections and the values. The class is made at run time, so pickle cannot import it by its name."""
        return _unpickle, (self.method_sections, vars(self))


def _unpickle(sections: MethodSections, values: Mapping[str, Any]) -> LoadedRecipe:
    return _loaded_type(make_recipe_type(sections, values))(**values)


def _loaded_type(kind: type) -> Any:
    """Return the class of loaded recipes for a type from `make_recipe_type`."""
    return make_dataclass("LoadedRecipe", [], bases=(kind, LoadedRecipe), eq=False)


def secrets_of(recipe: Recipe) -> list[str]:
    """Return the texts to redact. A `Recipe` that was built in Python has none."""
    return recipe.secrets if isinstance(recipe, LoadedRecipe) else []


def references_of(recipe: Recipe) -> list[Reference]:
    """Return the values that come from the environment. A `Recipe` that was built in Python has none."""
    return recipe.references if isinstance(recipe, LoadedRecipe) else []


def origin_notes_of(recipe: Recipe) -> list[str]:
    """Return the lines on the file of another tool that a recipe was converted from."""
    return recipe.origin_notes if isinstance(recipe, LoadedRecipe) else []


def unused_keys_of(recipe: Recipe) -> list[str]:
    """Return the keys that the recipe's method does not read. They are unknown for a `Recipe` built in Python."""
    return recipe.unused_keys if isinstance(recipe, LoadedRecipe) else []


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """Return the tree of a recipe's values: shared sections, its method's section, and keys set for other methods.

    Sections of other methods at their defaults are left out.
    """
    tree = asdict(recipe)
    values = {key.name: tree[key.name] for key in fields(Recipe)}
    # What to include: ("dpo",) is the full section of a method, and ("dpo", "beta") one key of it.
    included: set[tuple[str, ...]] = {(recipe.method_name,)}
    for key in unused_keys_of(recipe):
        section_and_name = re.split(r"[.\[]", key)[:2]
        included.add(tuple(section_and_name))
    for name in recipe.method_sections:
        selected = {}
        for key, value in tree.get(name, {}).items():
            if (name,) in included or (name, key) in included:
                selected[key] = value
        if selected:
            values[name] = selected
    return values


def with_origins(recipe: Recipe, raw: dict, values: dict, resolve: Callable[[dict], dict]) -> LoadedRecipe:
    """Return `recipe` as a `LoadedRecipe` with its references and secrets.

    A text is a reference if its value depends on the environment, directly or through other interpolations. To find
    these texts, the recipe is resolved a second time without the environment's values, and the two results are
    compared.

    A value that cannot be a secret and decides what is computed, such as a number or the name of an optimizer, is no
    reference. Its value is saved instead of its text, so that a resume can compare it.

    Args:
        recipe: The typed recipe.
        raw: The tree of the recipe as it is written. Changed in place.
        values: The same tree with interpolations resolved.
        resolve: Resolves the interpolations of a tree.
    """
    interpolations: dict[secrets.Path, str] = {}
    for path, text in secrets.iterate_leaves(raw):
        if isinstance(text, str) and "${" in text:
            interpolations[path] = text
    reads_environment = {path for path, text in interpolations.items() if secrets.reads_environment(text)}

    # Resolve the tree once more without the values of the environment: what differs then depends on the environment.
    for path in reads_environment:
        secrets.set_at(raw, path, UNSET)
    without_environment = resolve(raw) if reads_environment else values

    redacted = set()
    for path in reads_environment:
        redacted |= _secret_variables(interpolations[path])

    loaded = _loaded_type(type(recipe))(**vars(recipe))
    tree = asdict(recipe)
    for path, text in interpolations.items():
        is_unchanged = secrets.get_at(without_environment, path) == secrets.get_at(values, path)
        if path not in reads_environment and is_unchanged:
            continue
        value = secrets.get_at(tree, path)
        is_named_secret = any(secrets.is_secret_name(part) for part in path if isinstance(part, str))
        if is_named_secret:
            redacted.update(str(leaf) for _, leaf in secrets.iterate_leaves(value))
        has_secret = any(secret in str(value) for secret in redacted)
        if is_named_secret or has_secret or _takes_any_text(type(recipe), path, value):
            loaded.references.append(Reference(path, text, value))

    for path, value in secrets.iterate_leaves(values):
        # A value that is a plain word is not redacted, since the same word may be anywhere in a text.
        if secrets.is_secret(values, path, value) and not secrets.may_be_word(str(value)):
            redacted.add(str(value))
    long_enough = [secret for secret in redacted if len(secret) >= MIN_SECRET_LENGTH]
    loaded.secrets += sorted(long_enough, key=len, reverse=True)
    return loaded


def _secret_variables(text: str) -> set[str]:
    """Return the values of the environment variables in an interpolation whose names are names of secrets."""
    found = set()
    for name in secrets.environment_names(text):
        value = OmegaConf.create({"value": f"${{oc.env:{name},null}}"}).value
        if value and secrets.is_secret_name(name) and len(str(value)) >= MIN_SECRET_LENGTH:
            found.add(str(value))
    return found


def _takes_any_text(kind: Any, path: secrets.Path, value: Any) -> bool:
    """Check that a key takes any text, not only choices or numbers, and that its value is not the name of code.

    Args:
        kind: The type of the recipe.
        path: The path of the key.
        value: Its value.
    """
    for part in path:
        kind = get_type_hints(kind).get(str(part)) if is_dataclass(kind) else None
    is_choice = any(get_origin(alternative) is Literal for alternative in (kind, *get_args(kind)))
    is_text = all(isinstance(leaf, str) for _, leaf in secrets.iterate_leaves(value))
    return is_text and not is_choice and not _CODE_KEYS.fullmatch(secrets.dotted_key(path))


def source_tree(recipe: Recipe, hide: bool = False) -> dict:
    """Return the tree of a recipe's values, with the text `${oc.env:NAME}` in place of values from the environment.

    A value that was changed after the recipe was loaded is written as it is.

    Args:
        recipe: The recipe.
        hide: Redact secrets in plain text.
    """
    tree = recipe_values(recipe)
    unchanged = [
        reference for reference in references_of(recipe) if secrets.get_at(tree, reference.path) == reference.value
    ]
    tree = secrets.escape_interpolations(tree)
    for reference in unchanged:
        secrets.set_at(tree, reference.path, reference.text)
    if hide:
        secrets.hide_secrets(tree, secrets_of(recipe))
    return tree


def to_yaml(recipe: Recipe, with_secrets: bool = False) -> str:
    """Return the full recipe as YAML, defaults included.

    Loading the result gives an equal recipe, except for secrets in plain text, which are redacted.

    Args:
        recipe: The recipe.
        with_secrets: Write every value as it is, for other processes of the same run. They restore the references and
            secrets with `with_origins_of`.
    """
    if with_secrets:
        tree = secrets.escape_interpolations(recipe_values(recipe))
    else:
        tree = source_tree(recipe, hide=True)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def origins(recipe: Recipe) -> dict[str, list]:
    """Return the references and secrets of a `LoadedRecipe`, as JSON."""
    return {"references": list(references_of(recipe)), "secrets": list(secrets_of(recipe))}


def with_origins_of(recipe: LoadedRecipe, source: Mapping[str, list]) -> LoadedRecipe:
    """Return `recipe` with the references and secrets of another one.

    Args:
        recipe: A recipe that was read from `to_yaml(other, with_secrets=True)`.
        source: `origins(other)`.
    """
    references = [Reference(tuple(path), text, value) for path, text, value in source["references"]]
    return replace(recipe, references=references, secrets=source["secrets"])


def diff_recipes(old_yaml: str, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """Compare a recipe with a saved one.

    A list is compared as one value. A key that is missing on one side has the schema's default on that side, or None if
    the schema does not have the key any more.

    Args:
        old_yaml: The saved recipe, from `to_yaml`.
        recipe: The recipe to compare with.

    Returns:
        (key, old value, new value) for every key that differs, as `to_yaml` writes them.

    Raises:
        UserError: If `old_yaml` is not a recipe.
    """
    try:
        saved = yaml.safe_load(old_yaml) or {}
        check_json_size(saved, MAX_ENTRIES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"the saved recipe is damaged: {error}") from error
    if not isinstance(saved, dict):
        raise UserError(f"the saved recipe is damaged: it is {type(saved).__name__}, no mapping")
    values = recipe_values(recipe)
    kind = make_recipe_type(recipe.method_sections, {*saved, *values})
    defaults = asdict(kind())
    saved = _add_missing_keys(saved, kind)
    # The values before secrets are hidden, to compare with recipes that were saved by earlier versions.
    old_values = flatten(merge_trees(defaults, saved))
    new_values = flatten(merge_trees(defaults, values))
    secrets.hide_secrets(saved, secrets_of(recipe))
    old = flatten(merge_trees(defaults, saved))
    new = flatten(merge_trees(defaults, source_tree(recipe, hide=True)))
    differences = []
    for key in {**old, **new}:
        # Earlier versions of dtrain saved the value where the text with the interpolation is saved now.
        is_same_value = key in new_values and old_values.get(key) == new_values[key]
        if old.get(key) != new.get(key) and not is_same_value:
            differences.append((key, old.get(key), new.get(key)))
    return differences


def _add_missing_keys(values: Any, hint: Any) -> Any:
    """Add the defaults of keys that did not exist in the version of dtrain that saved a recipe.

    Args:
        values: A part of the saved recipe.
        hint: The type of this part.
    """
    alternatives = [hint, *get_args(hint)]
    if isinstance(values, list):
        entry_type = None
        for alternative in alternatives:
            if get_origin(alternative) is list:
                entry_type = get_args(alternative)[0]
                break
        return [_add_missing_keys(value, entry_type) for value in values]
    section = None
    for alternative in alternatives:
        if isinstance(alternative, type) and is_dataclass(alternative):
            section = alternative
            break
    if section is None or not isinstance(values, Mapping):
        return values
    named_type = named_section_type(hint)
    if named_type and is_named_sections(values, named_type):
        return {name: _add_missing_keys(value, named_type) for name, value in values.items()}
    hints = get_type_hints(section)
    completed = {key: _add_missing_keys(value, hints.get(key)) for key, value in values.items()}
    return merge_trees(asdict(section()), completed)


def named_section_type(hint: Any) -> Any:
    """Return the section type of a key that takes several sections by name, such as `eval: {math: .., chat: ..}`.

    Returns:
        The dataclass of each section. None if the key takes no such mapping.
    """
    for alternative in (hint, *get_args(hint)):
        if get_origin(alternative) is dict and is_dataclass(get_args(alternative)[1]):
            return get_args(alternative)[1]
    return None


def is_named_sections(value: Any, section: Any) -> bool:
    """Check whether `value` is a mapping from names to sections, and not itself a `section`."""
    if not isinstance(value, Mapping) or not value:
        return False
    section_keys = {key.name for key in fields(section)}
    if section_keys & value.keys():
        return False
    return all(isinstance(inner, Mapping) for inner in value.values())


def redacted_values(recipe: Recipe) -> dict[str, Any]:
    """Return key and value of everything that `to_yaml` redacts or writes as a text that reads the environment."""
    saved_values = flatten(source_tree(recipe, hide=True))
    redacted = {}
    for key, value in flatten(recipe_values(recipe)).items():
        if key in saved_values and saved_values[key] != value:
            redacted[key] = value
    return redacted


def redact(text: str, recipe: Recipe) -> str:
    """Return `text` without the secrets of `recipe`, for the terminal or a log."""
    return secrets.mask_secrets(text, secrets_of(recipe))


@contextmanager
def redacted_errors(recipe: Recipe) -> Iterator[None]:
    """Redact the secrets of `recipe` in every UserError that leaves the block."""
    try:
        yield
    except UserError as error:
        error.args = tuple(redact(str(argument), recipe) for argument in error.args)
        raise


def secret_notes(recipe: Recipe) -> list[str]:
    """Return a note for the user about each secret that the recipe contains in plain text."""
    tree = source_tree(recipe)
    notes = []
    for path, value in secrets.iterate_leaves(tree):
        if secrets.is_secret(tree, path, value):
            key = secrets.dotted_key(path)
            notes.append(
                f"note: {key} is a secret in plain text. It is not saved with the run, so a resume needs it again. "
                "Write ${oc.env:NAME} to read it from the environment"
            )
    return notes


def merge_trees(base: dict, over: Mapping) -> dict:
    """Return `base` with the values of `over`, merging mappings that both have.

    Example:
        >>> merge_trees({"train": {"steps": 1, "tile": "none"}}, {"train": {"steps": 2}})
        {'train': {'steps': 2, 'tile': 'none'}}
    """
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge_trees(merged[key], value)
        else:
            merged[key] = value
    return merged


def flatten(values: Mapping, prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted keys. An empty mapping is a value.

    Example:
        >>> flatten({"train": {"steps": 2}, "sft": {}})
        {'train.steps': 2, 'sft': {}}
    """
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of dotted keys: the inverse of `flatten`.

    Example:
        >>> unflatten({"train.steps": 2, "train.tile": "none"})
        {'train': {'steps': 2, 'tile': 'none'}}
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return tree
