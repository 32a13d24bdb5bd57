"""Loading of recipes: a file, a shipped recipe's name or a mapping, with `key=value` overrides, to a typed `Recipe`.

The values are applied in this order, and a later one replaces an earlier one:

1. the defaults of the schema,
2. the recipe,
3. the overrides.

Interpolations (`${...}`) are resolved after that, and then all keys, types and choices are checked. All problems are
reported together. For example, `load("my.yaml", ["optimizer.lr=1e-5"])` with a misspelled key in the file and one in
an override raises one `RecipeError` that lists both.
"""

import io
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain.base.errors import Problem, RecipeError, UserError, first_line
from dtrain.base.json_files import check_json_size, read_text
from dtrain.base.ranges import plural
from dtrain.recipe import secrets, spelling
from dtrain.recipe.saved import (
    MAX_ENTRIES,
    UNSET,
    LoadedRecipe,
    flatten,
    merge_trees,
    named_section_type,
    redact,
    source_tree,
    unflatten,
    with_origins,
)
from dtrain.recipe.schema import Lora, MethodSections, Recipe, make_recipe_type
from dtrain.recipe.sections import (
    build_recipe,
    find_entry_type,
    find_section_type,
    find_type,
    list_keys,
    type_alternatives,
)
from dtrain.recipe.shipped import find_recipe

if TYPE_CHECKING:
    from dtrain.recipe.other_tools import Conversion

MAX_RECIPE_BYTES = 1 << 20
# Levels of nesting in a recipe or in the value of an override. The functions that read a value recurse, with at most
# about ten Python frames for each level, so this limit keeps them well below Python's recursion limit.
MAX_DEPTH = 32
_NO_RECIPE = "{} is not a recipe: its top level must be a mapping such as `train: {{steps: 100}}`"
# A file with at least this many keys of another tool is a recipe of that tool, even if it has a model.path as well.
MIN_FOREIGN_KEYS = 5


class ExclusiveKeys(NamedTuple):
    """Two keys that exclude each other.

    Attributes:
        first: One key.
        second: The other key.
        unset: The value of either key that switches it off.
    """

    first: str
    second: str
    unset: bool | None


EXCLUSIVE_KEYS = (
    ExclusiveKeys("train.steps", "train.epochs", None),
    ExclusiveKeys("data.train.path", "data.train.sources", None),
    ExclusiveKeys("data.val.path", "data.val.sources", None),
    ExclusiveKeys("lora.path", "checkpoint.init_from", None),
    ExclusiveKeys("train.dynamic_batch", "data.packing", False),
    ExclusiveKeys("parallel.optimizer_offload", "parallel.cpu_offload", False),
)
# Keys whose values are local paths: `~` is expanded in them.
_PATHS = (
    "model.path",
    "lora.path",
    "run.dir",
    "data.cache_dir",
    "data.chat_template",
    "checkpoint.resume",
    "checkpoint.init_from",
)


class Source(NamedTuple):
    """Origin of a recipe: the keys that it sets, and its file.

    Attributes:
        stem: Name of the file without its suffix. None without a file.
        tree: The keys that the recipe sets, with interpolations as they are written.
        name: The file as the user wrote it, for messages.
    """

    stem: str | None
    tree: dict[str, Any]
    name: str = "this mapping"


class LoadResult(NamedTuple):
    """A recipe, and the problems with it.

    Attributes:
        recipe: The recipe. Every key with a problem has its default.
        problems: The problems, in the order of the keys.
    """

    recipe: LoadedRecipe
    problems: list[Problem]


def load(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = (), *, sections: MethodSections
) -> LoadedRecipe:
    """Load a recipe.

    `dtrain.training.load_recipe` calls this function with the sections of dtrain's own methods.

    Args:
        recipe: The path of a file, the name of a shipped recipe, a mapping, or a `Recipe`.
        overrides: `key=value` texts in OmegaConf's dotlist grammar, such as "optimizer.lr=1e-5".
        sections: The methods' sections. The mapping may import a section when it is read: only the sections that the
            recipe uses are read, and all sections if there are problems.

    Raises:
        UserError: If there is no such recipe, or the file is not YAML.
        RecipeError: With a problem for each unknown key, wrong type, unknown choice and unresolvable interpolation.
    """
    loaded, problems = load_with_problems(recipe, overrides, sections=sections)
    if problems:
        raise RecipeError(problems)
    return loaded


def load_with_problems(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = (), *, sections: MethodSections
) -> LoadResult:
    """Load a recipe as `load` does, but return the problems instead of raising them.

    A file of another tool is converted first. Keys that may change numbers and cannot be converted are problems.

    Raises:
        UserError: If the recipe cannot be read.
        RecipeError: If the method cannot be imported. The keys of its section are then unknown.
    """
    source = _read_source(recipe, overrides, sections)
    loaded, problems = _load_source(source, overrides, sections, isinstance(recipe, Recipe))
    if problems:  # they include the unknown keys of a file of another tool
        sets_method = "method" in source.tree or any(override.startswith("method=") for override in overrides)
        method = loaded.method if sets_method else None
        conversion = convert_foreign_recipe(source.tree, loaded.model.path, method, sections=sections)
        if conversion is not None:
            loaded, problems = _load_conversion(conversion, source, overrides, sections, problems)
    return LoadResult(loaded, [problem.reworded(lambda text: redact(text, loaded)) for problem in problems])


def _load_source(source: Source, overrides: Sequence[str], sections: MethodSections, is_typed: bool) -> LoadResult:
    """Load a recipe whose keys were read.

    Args:
        source: What the recipe was read from.
        overrides: `key=value` texts.
        sections: The sections of all methods.
        is_typed: Whether the recipe was given as a `Recipe` object.
    """
    problems: list[Problem] = []

    # Only the sections that the recipe mentions become part of its type: importing the other methods costs time.
    method = _method_of(source.tree, overrides)
    sections = _with_method(sections, method)
    mentioned = _mentioned_names(source.tree, overrides)
    mentioned.add(_section_of(method, sections))
    kind = make_recipe_type(sections, mentioned)
    config = OmegaConf.create(merge_trees(asdict(kind()), source.tree))
    for override in overrides:
        _apply(config, override, kind, problems)
    _unset_excluded(config, overrides)

    # The method may come from an interpolation, which is resolved only now. Its section is then added to the type.
    method = OmegaConf.select(config, "method", throw_on_resolution_failure=False)
    sections = _with_method(sections, method)
    name = _section_of(method, sections)
    if name not in mentioned:
        kind = make_recipe_type(sections, {*mentioned, name})
        config = OmegaConf.create(merge_trees(asdict(kind()), _to_tree(config)))

    values = _resolve(config, "", problems)
    typed = build_recipe(kind, values, problems)

    if typed.run.name is None:
        typed.run.name = _default_name(typed, source)
    _expand_paths(typed, problems)

    loaded = with_origins(typed, _to_tree(config), values, _resolve_tree)
    loaded.unused_keys += _keys_of_other_methods(values, source.tree, overrides, sections, is_typed)
    problems += _hidden_secret_problems(values)
    return LoadResult(loaded, problems)


def _read_source(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str], sections: MethodSections) -> Source:
    """Read the keys that a recipe sets."""
    if isinstance(recipe, str | Path):
        path = find_recipe(recipe)
        return Source(path.stem, _read_file(path, overrides, sections), str(recipe))
    if isinstance(recipe, LoadedRecipe):
        return Source(None, source_tree(recipe))
    if isinstance(recipe, Recipe):
        tree = _to_tree(OmegaConf.create(asdict(recipe)))
        if not recipe.method:
            del tree["method"]
        return Source(None, tree)
    return Source(None, _to_tree(OmegaConf.create(cast(Any, recipe))))


def _with_method(sections: MethodSections, method: object) -> MethodSections:
    """Return `sections.with_method(method)` for a text. Raises RecipeError if the method cannot be imported."""
    if not isinstance(method, str):
        return sections
    try:
        return sections.with_method(method)
    except UserError as error:
        raise RecipeError([Problem("method", str(error))]) from None  # the message has everything


def _section_of(method: object, sections: MethodSections) -> str:
    """Return the name of the section that a value of `method` selects; that of the default for any other value."""
    known = method if isinstance(method, str) and method in sections.choices else sections.choices[0]
    return sections.name_of(known)


def _load_conversion(
    conversion: "Conversion",
    source: Source,
    overrides: Sequence[str],
    sections: MethodSections,
    problems: list[Problem],
) -> LoadResult:
    """Load the recipe that a file of another tool was converted to.

    Args:
        conversion: The file as a recipe.
        source: The file.
        overrides: `key=value` texts, with dtrain's keys.
        sections: The sections of all methods.
        problems: The problems of the file as a recipe of dtrain. They are returned if the tool is unknown.
    """
    name = source.name
    fix = f"`dtrain convert {name} -o my.yaml` writes the recipe, with a comment on each key that it lacks"
    converted, found = _load_source(Source(source.stem, conversion.recipe()), overrides, sections, is_typed=False)
    if conversion.tool is None:
        text = f"{name} has keys of another tool, but of none whose files dtrain knows"
        return LoadResult(converted, [*problems, Problem("", text, fix)])
    decided = [override.partition("=")[0] for override in overrides]
    lost = [Problem(keys, f"{keys}: {reason}") for keys, reason in conversion.describe_blocking(decided)]
    if lost:
        text = f"{name} is a file of {conversion.source}, and the keys above may change its numbers"
        return LoadResult(converted, [*found, *lost, Problem("", text, fix)])
    if found:
        found.append(Problem("", f"{name} is a file of {conversion.source}, converted", fix))
    line = f"{name} is a file of {conversion.source}, converted: `dtrain convert {name}` prints the recipe"
    if conversion.notes:
        num_notes = len(conversion.notes)
        line += f" with {num_notes} {plural(num_notes, 'note')} on what differs"
    line += f" (method={converted.method}"
    if not conversion.counts_all_gpus:
        line += f"; train.global_batch={converted.train.global_batch} is that of one GPU"
    line += ")"
    converted.origin_notes.append(line)
    if conversion.left_out():
        converted.origin_notes.append(conversion.left_out())
    return LoadResult(converted, found)


def _hidden_secret_problems(values: Mapping) -> list[Problem]:
    """Return a problem for each secret that was hidden when the recipe was saved."""
    problems = []
    for path, value in secrets.iterate_leaves(values):
        if isinstance(value, str) and secrets.HIDDEN in value:
            key = secrets.dotted_key(path)
            text = f"{key} is a secret, which was hidden when this recipe was saved"
            problems.append(Problem(key, text, "Give it as ${oc.env:NAME}"))
    return problems


def _mentioned_names(tree: Mapping, overrides: Sequence[str]) -> set[Any]:
    """Return the names of all sections that the recipe, the overrides or an interpolation in them mention."""
    names = set(tree)
    for override in overrides:
        names.add(_section_name(override.partition("=")[0]))
    # Interpolations such as ${dpo.beta} may be anywhere in the values, so the text of all values is searched.
    names.update(re.findall(r"\$\{\s*(\w+)", f"{tree}{overrides}"))
    return names


def _expand_paths(recipe: Recipe, problems: list[Problem]) -> None:
    """Expand `~` in the recipe's paths, and report paths with a shell variable, which nothing expands."""
    for path_key in _PATHS:
        section_name, name = path_key.split(".")
        section = getattr(recipe, section_name)
        value = getattr(section, name, None)
        if not value:
            continue
        variable = re.match(r"\$(\w+)", value)
        if variable:
            variable_name = variable[1]
            text = f"{path_key}={value}: no shell reads this; write ${{oc.env:{variable_name}}} for ${variable_name}"
            problems.append(Problem(path_key, text))
        if value.startswith("~"):
            setattr(section, name, str(Path(value).expanduser()))


def _resolve_tree(tree: dict) -> dict:
    """Return `tree` with its interpolations resolved. Values that cannot be resolved are left out."""
    return _resolve(OmegaConf.create(tree), "", [])


def _method_of(tree: Mapping, overrides: Sequence[str]) -> Any:
    """Return the method that the overrides or the recipe name. None without one. Interpolations are not resolved."""
    method = tree.get("method")
    for override in overrides:
        key, _, text = override.partition("=")
        if key == "method":
            method = text
    return method


def _default_name(recipe: Recipe, source: Source) -> str:
    """Return `run.name` for a recipe without one.

    If the file names a model, the run has the name of the file without its suffix. A general recipe is used for many
    models, so the name of the model is put in front, and different models do not share a run. For example, `sft` with
    Qwen/Qwen3-0.6B and `lora` is "qwen3-0.6b-lora-sft".
    """
    model_section = source.tree.get("model")
    names_model = isinstance(model_section, Mapping) and model_section.get("path") is not None
    if source.stem is not None and names_model:
        return source.stem
    base = source.stem or recipe.method_name

    model = recipe.model.path or ""
    snapshot = re.search(r"models--[^/]+--([^/]+)/snapshots/", model)
    parts = [part for part in Path(model).parts if part != "export"]
    if snapshot:  # a directory of the hub's cache
        model_name = snapshot[1]
    elif parts:  # for an export of a run, runs/NAME/export, this is the run's name
        model_name = parts[-1]
    else:
        model_name = ""

    words = []
    normalized = re.sub(r"[^a-z0-9._-]+", "-", model_name.lower()).strip("-.")
    if normalized:
        words.append(normalized)
    if recipe.lora is not None and "lora" not in base:
        words.append("lora" if recipe.lora.quantize == "none" else "qlora")
    return "-".join([*words, base])


def _read_file(path: Path, overrides: Sequence[str], sections: MethodSections) -> dict:
    """Read a recipe's file. Raises UserError if it is not YAML, too large, or not a mapping."""
    text = read_text(path, MAX_RECIPE_BYTES)
    try:
        if _is_too_deep(text):
            raise UserError(f"{path} is not a recipe: it is nested too deep")
        # BaseLoader keeps every scalar as the text that was typed, which `_restore_texts` needs.
        typed = yaml.load(text, Loader=yaml.BaseLoader)
        check_json_size(typed, MAX_ENTRIES)
        if typed and not isinstance(typed, dict):
            raise UserError(_NO_RECIPE.format(path))
        config = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        raise UserError(_yaml_error_message(path, text, error)) from None  # the message has everything
    except RecursionError:  # if this function is called from deep within another program
        raise UserError(f"{path} is not a recipe: it is nested too deep") from None
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not YAML: {first_line(error)}{spelling.yaml_hint(error)}") from error
    if not isinstance(config, DictConfig):
        raise UserError(_NO_RECIPE.format(path))
    tree = _to_tree(config)
    sections = _with_method(sections, _method_of(tree, overrides))
    return _restore_texts(make_recipe_type(sections, tree), tree, typed)


def _yaml_error_message(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    """Return the message for a file that is not YAML, with the line and a hint for frequent mistakes."""
    mark = error.problem_mark
    line, nearby_lines = "", []
    if mark is not None:
        line = f":{mark.line + 1}"
        nearby_lines = text.splitlines()[max(0, mark.line - 1) : mark.line + 1]
    hint = spelling.pasted_character_hint(" ".join(nearby_lines)) or spelling.yaml_hint(error.problem)
    return f"{path}{line} is not YAML: {error.problem or error.context}{hint}"


def _is_too_deep(text: str, level: int = 0) -> bool:
    """Check whether YAML nests mappings and lists deeper than `MAX_DEPTH` levels.

    The events of the parser are read without recursion, so the result does not depend on how full the stack is.

    Args:
        text: YAML.
        level: The level at which the text is in a recipe.

    Raises:
        YAMLError: If `text` is not YAML.
    """
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > MAX_DEPTH:
            return True
    return False


def _restore_texts(hint: Any, value: Any, typed: Any) -> Any:
    """Restore the text that was typed, for keys that accept only text, if YAML has read it as a number.

    A run may have the name 1e3 or 007: YAML reads these as the numbers 1000.0 and 7.

    Args:
        hint: The type of the key.
        value: The value as YAML reads it.
        typed: The same value with every scalar as the text that was typed.
    """
    alternatives = type_alternatives(hint)
    section = find_section_type(alternatives)
    if section and isinstance(value, dict) and isinstance(typed, dict):
        hints = get_type_hints(section)
        entry_hint = named_section_type(hint)
        restored = {}
        for key, inner in value.items():
            restored[key] = _restore_texts(hints.get(key, entry_hint), inner, typed.get(str(key)))
        return restored
    if isinstance(value, list) and isinstance(typed, list) and len(value) == len(typed):
        entry_hint = find_entry_type(alternatives)
        return [_restore_texts(entry_hint, inner, text) for inner, text in zip(value, typed, strict=True)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    takes_text_only = str in alternatives and int not in alternatives and float not in alternatives
    if is_number and isinstance(typed, str) and takes_text_only:
        return typed
    return value


def _to_tree(config: DictConfig) -> dict[str, Any]:
    """Return `config` as dicts and lists, with interpolations as they are written."""
    return cast(dict[str, Any], OmegaConf.to_container(config))


def _apply(config: DictConfig, override: str, kind: type[Recipe], problems: list[Problem]) -> None:
    """Apply a `key=value` override to `config` in place, or add a problem."""
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        problems.append(_malformed_override(override, key, kind))
        return
    is_secret = any(secrets.is_secret_name(part) for part in key.split("."))
    printed = f"{key}={secrets.HIDDEN}" if is_secret else override
    too_deep = Problem(key, f"{key}: the value is nested too deep")
    try:
        if _is_too_deep(text, key.count(".") + key.count("[")):
            problems.append(too_deep)
            return
        value = _to_tree(OmegaConf.from_dotlist([f"value={text}"]))["value"]
        value = _restore_texts(find_type(kind, key), value, yaml.load(text, Loader=yaml.BaseLoader))
        old = OmegaConf.select(config, key, throw_on_resolution_failure=False)
        # A mapping is merged into a section; any other value replaces the old one.
        is_merged = isinstance(old, DictConfig) and isinstance(value, dict)
        OmegaConf.update(config, key, value, merge=is_merged)
    except yaml.YAMLError as error:
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) and error.problem else error
        problems.append(Problem(key, f"{printed}: the value is not YAML ({reason}){_quoting_hint(key, text)}"))
    except (OmegaConfBaseException, IndexError, TypeError) as error:
        problems.append(Problem(key, f"{printed}: {first_line(error)}"))
    except RecursionError:  # if this function is called from deep within another program
        problems.append(too_deep)
    except ValueError:  # the key has a name where OmegaConf needs the number of a list's entry
        section, _, name = key.rpartition(".")
        fix = f"name an entry by its number, {section}[0].{name}"
        problems.append(Problem(key, f"{printed}: {section} is a list; {fix}"))


def _malformed_override(override: str, key: str, kind: type[Recipe]) -> Problem:
    """Return the problem of an override that is not `key=value`."""
    text = f"{override}: an override is written key=value, without dashes, such as optimizer.lr=1e-5"
    word = key.lstrip("-").partition(":")[0]
    if word not in list_keys(kind.method_sections):
        explanation = spelling.explain_unknown_key(word)
        if explanation:
            text += f"; {word}: {explanation}"
    return Problem(word, text)


def _quoting_hint(key: str, text: str) -> str:
    """Return the hint for the value of an override that is not YAML: an open bracket, or a text without quotes."""
    if text[:1] in ("[", "{"):
        closing = "]" if text[0] == "[" else "}"
        if text.count(text[0]) > text.count(closing):
            return f"; the bracket is not closed: where the shell split it at a blank, quote all: '{key}={text} ...'"
    if '"' in text:
        return ""
    return f"; if it is text, quote it for YAML: '{key}=\"{text}\"'"


def _unset_excluded(config: DictConfig, overrides: Sequence[str]) -> None:
    """Resolve conflicts between an override and the recipe: of two keys that exclude each other, the override wins.

    For example, `train.epochs=2` for a recipe with `train.steps: 100` means two epochs, so `train.steps` becomes null.
    If overrides set both keys of a pair, neither is unset.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    for first, second, unset in EXCLUSIVE_KEYS:
        for key, other in ((first, second), (second, first)):
            if key not in overridden or other in overridden:
                continue
            value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
            other_value = OmegaConf.select(config, other, throw_on_resolution_failure=False)
            are_both_set = unset not in (value, other_value) and None not in (value, other_value)
            if are_both_set and value != "auto":
                OmegaConf.update(config, other, unset)
    # scheduler.warmup_steps takes precedence over scheduler.warmup, so it would hide an override of the latter.
    steps = OmegaConf.select(config, "scheduler.warmup_steps", throw_on_resolution_failure=False)
    if "scheduler.warmup" in overridden and "scheduler.warmup_steps" not in overridden and steps is not None:
        OmegaConf.update(config, "scheduler.warmup_steps", None)


def _resolve(node: DictConfig | ListConfig, prefix: str, problems: list[Problem]) -> Any:
    """Return `node` as dicts and lists with its interpolations resolved. Those that fail are left out and reported."""
    unresolved = OmegaConf.to_container(node)
    if not any(isinstance(value, str) and "${" in value for _, value in secrets.iterate_leaves(unresolved)):
        return unresolved
    is_list = isinstance(node, ListConfig)
    values: dict = {}
    keys: Iterable[Any] = range(len(node)) if is_list else node.keys()
    for key in keys:
        dotted = f"{prefix.rstrip('.')}[{key}]" if is_list else f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            values[key] = UNSET
            continue
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(Problem(dotted, f"{dotted}: {_interpolation_error(error)}"))
            if is_list:
                values[key] = None  # so that the entries after this one keep their index
            continue
        values[key] = _resolve(value, f"{dotted}.", problems) if OmegaConf.is_config(value) else value
    return list(values.values()) if is_list else values


def _interpolation_error(error: Exception) -> str:
    """Return the message for an interpolation that cannot be resolved."""
    variable = re.search(r"Environment variable '(.+?)' not found", str(error))
    if variable:
        name = variable[1]
        return f"the environment has no {name}: export it, or write ${{oc.env:{name},default}}"
    key = re.search(r"Interpolation key '([A-Z_]+)' not found", str(error))
    if key:
        # A key in capitals is most likely meant as an environment variable.
        return f"the recipe has no key {key[1]} to take it from; of the environment: ${{oc.env:{key[1]}}}"
    return first_line(error)


def _keys_of_other_methods(
    values: Mapping, tree: Mapping, overrides: Sequence[str], sections: MethodSections, is_typed: bool
) -> list[str]:
    """Return the keys in the sections of other methods, which the recipe's method does not read.

    For example, `dpo.beta` in a recipe with `method: sft`. A saved recipe, and a `Recipe` object, contain every key of
    a section, so only keys that differ from their defaults are returned for these.

    Args:
        values: The recipe, resolved.
        tree: The recipe as it is written, without overrides.
        overrides: `key=value` texts.
        sections: The sections of all methods.
        is_typed: Whether the recipe was given as a `Recipe` object.
    """
    method = values.get("method")
    if method not in sections.choices:  # a problem that is reported elsewhere
        return []
    method_name = sections.name_of(str(method))
    other_methods = [name for name in sections if name != method_name]
    unused = []
    for name in other_methods:
        if name not in tree:
            continue
        defaults = flatten(asdict(sections[name]()), f"{name}.")
        resolved = flatten(values[name], f"{name}.") if isinstance(values[name], Mapping) else {}
        section = tree[name] or {}
        given_keys = flatten(section, f"{name}.") if isinstance(section, Mapping) else {name: section}
        has_all_keys = is_typed or defaults.keys() <= given_keys.keys()
        for key in given_keys:
            if not has_all_keys or resolved.get(key) != defaults.get(key):
                unused.append(key)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if equals and _section_name(key) in other_methods:
            unused.append(key)
    return list(dict.fromkeys(unused))


def _section_name(key: str) -> str:
    """Return the name of the section that a dotted key is in."""
    return re.split(r"[.\[]", key)[0]


def convert_foreign_recipe(
    tree: Mapping, path: str | None = None, method: str | None = None, *, sections: MethodSections
) -> "Conversion | None":
    """Convert another tool's recipe to dtrain's.

    Args:
        tree: The other recipe.
        path: `model.path`, if `tree` has this key of dtrain. None otherwise.
        method: The recipe's method if it is known. None lets the file's keys decide.
        sections: The methods' sections by name.

    Returns:
        The conversion. None if the tree is a dtrain recipe: no key indicates another tool, or it sets `model.path`, and
        fewer than `MIN_FOREIGN_KEYS` of its keys are another tool's.
    """
    from dtrain.recipe import other_tools  # measured: a dtrain recipe does not need these modules

    kind = make_recipe_type(sections, sections)
    config = OmegaConf.create(dict(tree))
    file = flatten(_resolve(config, "", []))
    for key, text in flatten(_to_tree(config)).items():
        is_resolved = any(f"{other}.".startswith(f"{key}.") for other in file)
        if not is_resolved:
            file[key] = text  # an interpolation that cannot be resolved: the conversion reports it
    if other_tools.detect_tool(file) is None:
        file = _foreign_keys(file, get_type_hints(kind))
    recipe_keys = other_tools.RecipeKeys(list_keys(sections), _defaults(kind), partial(_fit_value, kind))
    conversion = other_tools.convert(file, recipe_keys, method)
    num_foreign_keys = len(conversion.values) - len(conversion.comments)
    may_be_dtrain = conversion.tool is None or path is not None
    if may_be_dtrain and num_foreign_keys < MIN_FOREIGN_KEYS:
        return None
    return conversion


def convert_foreign_file(path: str | Path, overrides: Sequence[str] = (), *, sections: MethodSections) -> "Conversion":
    """Convert a file of another tool.

    Args:
        path: The file.
        overrides: `key=value` texts with dtrain's keys. They are part of the recipe that is returned.
        sections: The methods' sections by name.

    Raises:
        UserError: If there is no such file, if it is a recipe of dtrain, or if it has no key that dtrain knows.
        RecipeError: With a problem for each override that is wrong.
    """
    source = _read_source(path, overrides, sections)
    overridden_method = _method_of({}, overrides)
    method = None if overridden_method is None else _section_of(overridden_method, sections)
    conversion = convert_foreign_recipe(source.tree, None, method, sections=sections)
    if conversion is None or conversion.tool is None and not conversion.values:
        fix = f"`dtrain validate {path}` reports what is wrong with it as a recipe"
        raise UserError(f"{path} has no key that shows another tool's file; {fix}")
    if overrides:
        conversion = _with_overrides(conversion, overrides, sections)
    return conversion


def _with_overrides(conversion: "Conversion", overrides: Sequence[str], sections: MethodSections) -> "Conversion":
    """Return a conversion with overrides in its recipe. Raises RecipeError with the problems of the overrides."""
    overridden = [override.partition("=")[0] for override in overrides]
    _, problems = _load_source(Source(None, conversion.recipe()), overrides, sections, is_typed=False)
    problems = [
        problem for problem in problems if any(_section_name(problem.key) == _section_name(key) for key in overridden)
    ]
    if problems:
        raise RecipeError(problems)
    kind = make_recipe_type(sections, sections)
    config = OmegaConf.create(conversion.recipe())
    for override in overrides:
        _apply(config, override, kind, problems)
    _unset_excluded(config, overrides)
    # Mappings that are the value of one key, such as grpo.kwargs, are not flattened.
    names = list_keys(sections)
    values = _flatten_to(_to_tree(config), {*names, *conversion.values})
    positions = {name: position for position, name in enumerate(names)}
    set_keys = [key for key, value in values.items() if value is not None or conversion.values.get(key) is None]
    ordered = sorted(set_keys, key=lambda key: positions.get(key, -1))
    return conversion.with_values({key: values[key] for key in ordered}, "set on the command line")


def _flatten_to(tree: Mapping, names: Container[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted keys. A mapping with its key in `names` is a value."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in names:
            values.update(_flatten_to(value, names, f"{key}."))
        else:
            values[key] = value
    return values


def _foreign_keys(file: Mapping[str, Any], dtrain_sections: Container[str]) -> dict[str, Any]:
    """Return the keys of a file that are in no section of dtrain.

    `optimizer: adamw_torch`, a text in place of dtrain's section, is returned as `optimizer.name`. `scheduler` is
    handled in the same way.
    """
    foreign = {}
    for key, value in file.items():
        if key in ("optimizer", "scheduler") and isinstance(value, str):
            foreign[f"{key}.name"] = value
        elif _section_name(key) not in dtrain_sections:
            foreign[key] = value
    return foreign


def _defaults(kind: type[Recipe]) -> dict[str, Any]:
    """Return the default of every dotted key, including those of the section `lora`, which is null by default."""
    tree = asdict(kind())
    tree["lora"] = asdict(Lora())
    return flatten(tree)


def _fit_value(kind: type[Recipe], key: str, value: Any) -> tuple[Any, list[str]]:
    """Return `value` converted to the type of a dotted key, and the problems with it."""
    problems: list[Problem] = []
    typed: Any = build_recipe(kind, unflatten({key: value}), problems)
    for part in key.split("."):
        if isinstance(typed, list):
            return value, [f"{key}: the entries of a list have this key, so it cannot be set without one"]
        typed = getattr(typed, part)
    if is_dataclass(typed):
        problems.append(Problem(key, f"{key} does not take {value}: it is a section", "Set the keys below it"))
    numeric_types = {int, float, bool}.intersection(type_alternatives(find_type(kind, key)))
    if numeric_types and isinstance(typed, str) and typed not in ("auto", "default"):
        words = "true, false or auto" if numeric_types == {bool} else "a number or auto"
        problems.append(Problem(key, f"{key} does not take {value}: write {words}"))
    if key == "train.epochs" and isinstance(typed, float) and typed.is_integer():
        typed = int(typed)  # other tools write a number of epochs as 3.0
    fitted = value if isinstance(value, list) else typed
    return fitted, [str(problem) for problem in problems]
