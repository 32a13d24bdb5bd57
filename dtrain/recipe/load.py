"""Loading of recipes: YAML, a shipped recipe's name or a mapping, and `key=value` overrides, to a typed `Recipe`.

Order: the schema's defaults, then the recipe, then the overrides; then interpolations; then every key and type is
checked, and all problems are reported at once.
"""

import io
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain.base.errors import Problem, RecipeError, UserError, first_line
from dtrain.base.json_files import check_json_size, read_text
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
from dtrain.recipe.schema import Lora, Recipe, make_recipe_type
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
MAX_DEPTH = 32  # levels of a recipe or a value; what reads them recurses, at most about ten frames a level
_NO_RECIPE = "{} is not a recipe: its top level must be a mapping such as `train: {{steps: 100}}`"
MIN_FOREIGN_KEYS = 5  # keys of another tool that make a recipe one of its own
EXCLUSIVE_KEYS = (  # keys that exclude each other, and the value of either that asks for nothing
    ("train.steps", "train.epochs", None),
    ("data.train.path", "data.train.sources", None),
    ("data.val.path", "data.val.sources", None),
    ("lora.path", "checkpoint.init_from", None),
    ("train.dynamic_batch", "data.packing", False),
    ("parallel.optimizer_offload", "parallel.cpu_offload", False),
)
_PATHS = (
    "model.path",
    "lora.path",
    "run.dir",
    "data.cache_dir",
    "data.chat_template",
    "checkpoint.resume",
    "checkpoint.init_from",
)


def load(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = (), *, sections: Mapping[str, type]
) -> LoadedRecipe:
    """Load the recipe at a path, of a shipped name, or in a mapping, with `key=value` overrides (OmegaConf's dotlist).

    sections: of the methods, by name. It is asked for those of the recipe's method and of its keys, and where there are
    problems for all. `dtrain.training.load_recipe` has those of dtrain.

    Raises UserError: no such recipe, or not YAML. RecipeError: every unknown key, wrong type or choice, and
    interpolation that leads nowhere.
    """
    loaded, problems = load_with_problems(recipe, overrides, sections=sections)
    if problems:
        raise RecipeError(problems)
    return loaded


def load_with_problems(
    recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = (), *, sections: Mapping[str, type]
) -> tuple[LoadedRecipe, list[Problem]]:
    """Load as `load` does, but return the problems that RecipeError would list, and the recipe without wrong keys."""
    stem = None
    if isinstance(recipe, str | Path):
        path = find_recipe(recipe)
        stem, written = path.stem, _read(path, sections)
    elif isinstance(recipe, LoadedRecipe):
        written = source_tree(recipe)
    else:
        tree: Any = asdict(recipe) if isinstance(recipe, Recipe) else recipe
        written = _tree(OmegaConf.create(tree))
        if isinstance(recipe, Recipe) and not recipe.method:
            del written["method"]
    problems: list[Problem] = []
    named = {
        *written,
        *(_head(key.partition("=")[0]) for key in overrides),
        *re.findall(r"\$\{\s*(\w+)", f"{written}{overrides}"),
    }
    named.add(_method_of(written, overrides, sections))
    kind = make_recipe_type(sections, named)
    config = OmegaConf.create(merge_trees(asdict(kind()), written))
    for override in overrides:
        _apply(config, override, kind, problems)
    _unset_excluded(config, overrides)
    chosen = OmegaConf.select(config, "method", throw_on_resolution_failure=False)
    chosen = chosen if chosen in [*sections] else kind().method
    if chosen not in named:
        kind = make_recipe_type(sections, {*named, chosen})
        config = OmegaConf.create(merge_trees(asdict(kind()), _tree(config)))
    values = _resolve(config, "", problems)
    made = build_recipe(kind, values, problems)
    method = (
        made.method if "method" in written or any(override.startswith("method=") for override in overrides) else None
    )
    if problems and (foreign := convert_foreign_recipe(written, made.model.path, method, sections=sections)):
        problems.append(Problem("", "\n      ".join(foreign.answer().splitlines())))
    if made.run.name is None:
        made.run.name = _default_name(made, stem, written)
    for section, key in (path.split(".") for path in _PATHS):
        value = getattr(getattr(made, section), key, None)
        if value and re.match(r"\$\w", value):
            name = re.findall(r"\w+", value)[0]
            text = f"{section}.{key}={value}: no shell reads this; write ${{oc.env:{name}}} for ${name}"
            problems.append(Problem(f"{section}.{key}", text))
        if value and value.startswith("~"):
            setattr(getattr(made, section), key, str(Path(value).expanduser()))
    loaded = with_origins(made, _tree(config), values, lambda raw: _resolve(OmegaConf.create(raw), "", []))
    loaded.unused_keys += _of_other_methods(values, written, overrides, sections, isinstance(recipe, Recipe))
    for place, value in secrets.iterate_leaves(values):
        if isinstance(value, str) and secrets.HIDDEN in value:
            key = secrets.dotted_key(place)
            problems.append(Problem(key, f"{key} was hidden when this was saved", "Give it as ${oc.env:NAME}"))
    return loaded, [problem.reworded(lambda text: redact(text, loaded)) for problem in problems]


def _method_of(written: Mapping, overrides: Sequence[str], sections: Mapping[str, type]) -> str:
    """Return the method that the overrides or the recipe name, else the first. Interpolations are not resolved."""
    given = [text for key, _, text in (override.partition("=") for override in overrides) if key == "method"]
    method = given[-1] if given else written.get("method")
    return method if method in [*sections] else next(iter(sections))


def _default_name(recipe: Recipe, stem: str | None, written: Mapping) -> str:
    """Return `run.name` of a recipe without one: the stem of a file that names its model. A general recipe, to which
    the model is given, trains many: the model's name comes first, so that two models are two runs."""
    section = written.get("model")
    names_model = isinstance(section, Mapping) and section.get("path") is not None
    base, model = stem or recipe.method, recipe.model.path or ""
    if stem is not None and names_model:
        return stem
    snapshot = re.search(r"models--[^/]+--([^/]+)/snapshots/", model)  # of the hub's cache
    parts = [part for part in Path(model).parts if part != "export"]  # of a run: its name
    name = snapshot[1] if snapshot else parts[-1] if parts else ""
    words = [re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")]
    if recipe.lora is not None and "lora" not in base:
        words.append("lora" if recipe.lora.quantize == "none" else "qlora")
    return "-".join([word for word in words if word] + [base])


def _read(path: Path, sections: Mapping[str, type]) -> dict:
    text = read_text(path, MAX_RECIPE_BYTES)
    try:
        if _is_too_deep(text):
            raise UserError(f"{path} is not a recipe: it is nested too deep")
        check_json_size(typed := yaml.load(text, Loader=yaml.BaseLoader), MAX_ENTRIES)
        if typed and not isinstance(typed, dict):
            raise UserError(_NO_RECIPE.format(path))
        config = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        near = text.splitlines()[max(0, mark.line - 1) : mark.line + 1] if mark else []
        hint = spelling.pasted_character_hint(" ".join(near)) or spelling.yaml_hint(error.problem)
        raise UserError(f"{path}{line} is not YAML: {error.problem or error.context}{hint}") from error
    except RecursionError:  # called from deep in another program
        raise UserError(f"{path} is not a recipe: it is nested too deep") from None
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not YAML: {first_line(error)}{spelling.yaml_hint(error)}") from error
    if not isinstance(config, DictConfig):
        raise UserError(_NO_RECIPE.format(path))
    return _as_typed(make_recipe_type(sections, config), _tree(config), typed)


def _is_too_deep(text: str, level: int = 0) -> bool:
    """Return whether `text`, itself at `level`, nests mappings and lists deeper than `DEPTH` levels. YAML's events are
    read without recursion, so the answer does not depend on how full the stack is. Raises YAMLError."""
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > MAX_DEPTH:
            return True
    return False


def _as_typed(hint: Any, value: Any, typed: Any) -> Any:
    """Return `value` as YAML reads it, but where `hint` wants text and no number, a number as it was `typed`: a run may
    be called 1e3, or 007."""
    kinds = type_alternatives(hint)
    section = find_section_type(kinds)
    if section and isinstance(value, dict) and isinstance(typed, dict):
        hints, table = get_type_hints(section), named_section_type(hint)
        return {key: _as_typed(hints.get(key, table), inner, typed.get(str(key))) for key, inner in value.items()}
    entry = find_entry_type(kinds)
    if isinstance(value, list) and isinstance(typed, list) and len(value) == len(typed):
        return [_as_typed(entry, inner, other) for inner, other in zip(value, typed, strict=True)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return typed if is_number and isinstance(typed, str) and str in kinds and not {int, float} & {*kinds} else value


def _tree(config: DictConfig) -> dict[str, Any]:
    """Return `config` as plain containers, interpolations as they are written."""
    return cast(dict[str, Any], OmegaConf.to_container(config))


def _apply(config: DictConfig, override: str, kind: type[Recipe], problems: list[Problem]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        word = key.lstrip("-").partition(":")[0]
        answer = spelling.explain_unknown_key(word) if word not in list_keys(kind.method_sections) else None
        wrong = f"{override}: an override is written key=value, without dashes, such as optimizer.lr=1e-5"
        problems.append(Problem(word, wrong + (f"; {word}: {answer}" if answer else "")))
        return
    shown = f"{key}={secrets.HIDDEN}" if any(map(secrets.is_secret_name, key.split("."))) else override
    too_deep = Problem(key, f"{key}: the value is nested too deep")
    try:
        if _is_too_deep(text, key.count(".") + key.count("[")):
            problems.append(too_deep)
            return
        value = _tree(OmegaConf.from_dotlist([f"value={text}"]))["value"]
        value = _as_typed(find_type(kind, key), value, yaml.load(text, Loader=yaml.BaseLoader))
        old = OmegaConf.select(config, key, throw_on_resolution_failure=False)
        OmegaConf.update(config, key, value, merge=isinstance(old, DictConfig) and isinstance(value, dict))
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or error
        quoted = f"; if it is text, quote it for YAML: '{key}=\"{text}\"'" if '"' not in text else ""
        if text[:1] in "[{" and text[:1] and text.count(text[0]) > text.count("]" if text[0] == "[" else "}"):
            quoted = f"; the bracket is not closed: where the shell split it at a blank, quote all: '{key}={text} ...'"
        problems.append(Problem(key, f"{shown}: the value is not YAML ({reason}){quoted}"))
    except (OmegaConfBaseException, IndexError, TypeError) as error:
        problems.append(Problem(key, f"{shown}: {first_line(error)}"))
    except RecursionError:  # called from deep in another program
        problems.append(too_deep)
    except ValueError:  # a name where OmegaConf takes the number of an entry
        section, _, name = key.rpartition(".")
        fix = f"name an entry by its number, {section}[0].{name}"
        problems.append(Problem(key, f"{shown}: {section} is a list; {fix}"))


def _unset_excluded(config: DictConfig, overrides: Sequence[str]) -> None:
    """Unset the keys that exclude one which an override sets, unless an override sets them too."""
    typed = {override.partition("=")[0] for override in overrides}
    for first, second, unset in EXCLUSIVE_KEYS:
        for key, other in ((first, second), (second, first)):
            values = [OmegaConf.select(config, name, throw_on_resolution_failure=False) for name in (key, other)]
            asks = unset not in values and None not in values and values[0] != "auto"
            if key in typed and other not in typed and asks:
                OmegaConf.update(config, other, unset)
    steps = OmegaConf.select(config, "scheduler.warmup_steps", throw_on_resolution_failure=False)
    if "scheduler.warmup" in typed and "scheduler.warmup_steps" not in typed and steps is not None:  # they would win
        OmegaConf.update(config, "scheduler.warmup_steps", None)


def _resolve(node: DictConfig | ListConfig, prefix: str, problems: list[Problem]) -> Any:
    """Return `node` as plain containers, its interpolations resolved; those that fail are left out and reported."""
    plain = OmegaConf.to_container(node)
    if not any(isinstance(value, str) and "${" in value for _, value in secrets.iterate_leaves(plain)):
        return plain
    listed = isinstance(node, ListConfig)
    values: dict = {}
    keys: Iterable[Any] = range(len(node)) if listed else node.keys()
    for key in keys:
        dotted = f"{prefix.rstrip('.')}[{key}]" if listed else f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            values[key] = UNSET
            continue
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            reason = first_line(error)
            absent = re.search(r"Environment variable '(.+?)' not found", str(error))
            if absent:
                reason = f"the environment has no {absent[1]}: export it, or write ${{oc.env:{absent[1]},default}}"
            elif other := re.search(r"Interpolation key '([A-Z_]+)' not found", str(error)):
                reason = f"the recipe has no key {other[1]} to take it from; of the environment: ${{oc.env:{other[1]}}}"
            problems.append(Problem(dotted, f"{dotted}: {reason}"))
            if listed:
                values[key] = None  # what follows it keeps its place
            continue
        values[key] = _resolve(value, f"{dotted}.", problems) if OmegaConf.is_config(value) else value
    return list(values.values()) if listed else values


def _of_other_methods(
    values: Mapping, tree: Mapping, overrides: Sequence[str], sections: Mapping[str, type], is_made: bool
) -> list[str]:
    """Return the given keys of sections that another method alone reads. A saved recipe holds all keys of its method's
    section: of these, and of a recipe that `is_made` already, the keys that are not at their defaults."""
    method, others = values.get("method"), [name for name in sections if name != values.get("method")]
    if method not in [*sections]:  # which is said elsewhere
        return []
    keys = []
    for name in others:
        if name not in tree:
            continue
        defaults, written = flatten(asdict(sections[name]()), f"{name}."), tree[name] or {}
        own = flatten(values[name], f"{name}.") if isinstance(values[name], Mapping) else {}
        named = flatten(written, f"{name}.") if isinstance(written, Mapping) else {name: written}
        is_saved = is_made or defaults.keys() <= named.keys()
        keys += [key for key in named if not is_saved or own.get(key) != defaults.get(key)]
    pairs = (override.partition("=") for override in overrides)
    keys += [key for key, equals, _ in pairs if equals and _head(key) in others]
    return list(dict.fromkeys(keys))


def _head(key: str) -> str:
    """Return the section that a dotted key lies in."""
    return re.split(r"[.\[]", key)[0]


def convert_foreign_recipe(
    tree: Mapping, path: str | None = None, method: str | None = None, *, sections: Mapping[str, type]
) -> "Conversion | None":
    """Convert a recipe of another tool to one of ours.

    Args:
        tree: The other recipe.
        path: `model.path` of the same tree read as a recipe of ours, if it has one.
        method: The recipe's method, if it is known; else the file's keys show it.
        sections: The methods' sections by name.

    Returns:
        The conversion. None if the tree is a recipe of ours: no key shows another tool, or it names our model's path,
        and few of its keys are another tool's.
    """
    from dtrain.recipe import other_tools  # no recipe of ours needs it

    kind = make_recipe_type(sections, sections)
    config = OmegaConf.create(dict(tree))
    file = flatten(_resolve(config, "", []))
    for key, text in flatten(_tree(config)).items():
        is_resolved = any(f"{other}.".startswith(f"{key}.") for other in file)
        if not is_resolved:
            file[key] = text  # an interpolation that leads nowhere: the conversion reports it
    if other_tools.detect_tool(file) is None:
        file = _keys_of_others(file, get_type_hints(kind))
    recipe_keys = other_tools.RecipeKeys(list_keys(sections), _defaults(kind), partial(_fitted, kind))
    made = other_tools.convert(file, recipe_keys, method)
    num_given = len(made.values) - len(made.comments)
    is_ours = (made.tool is None or path is not None) and num_given < MIN_FOREIGN_KEYS
    return None if is_ours else made


def _keys_of_others(file: Mapping[str, Any], own_sections: Container[str]) -> dict[str, Any]:
    """Return the keys of a file that lie in no section of ours, with an optimizer or a schedule that is only named."""
    others = {}
    for key, value in file.items():
        if key in ("optimizer", "scheduler") and isinstance(value, str):
            others[f"{key}.name"] = value
        elif _head(key) not in own_sections:
            others[key] = value
    return others


def _defaults(kind: type[Recipe]) -> dict[str, Any]:
    """Return the default of every dotted key, those of the section `lora` too, which is null by default."""
    tree = asdict(kind())
    tree["lora"] = asdict(Lora())
    return flatten(tree)


def _fitted(kind: type[Recipe], key: str, value: Any) -> tuple[Any, list[str]]:
    """Return `value` in the type of a dotted key, and the problems with it."""
    problems: list[Problem] = []
    made: Any = build_recipe(kind, unflatten({key: value}), problems)
    for part in key.split("."):
        if isinstance(made, list):
            return value, [f"{key}: the entries of a list have this key, so it cannot be set without one"]
        made = getattr(made, part)
    if is_dataclass(made):
        problems.append(Problem(key, f"{key} does not take {value}: it is a section", "Set the keys below it"))
    numbers = {int, float, bool} & {*type_alternatives(find_type(kind, key))}
    if numbers and isinstance(made, str) and made not in ("auto", "default"):
        words = "true, false or auto" if numbers == {bool} else "a number or auto"
        problems.append(Problem(key, f"{key} does not take {value}: write {words}"))
    if key == "train.epochs" and isinstance(made, float) and made.is_integer():
        made = int(made)  # other tools write whole passes as 3.0
    fitted = value if isinstance(value, list) else made
    return fitted, [str(problem) for problem in problems]
