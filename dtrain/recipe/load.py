"""Loading of recipes: YAML, a shipped recipe's name or a mapping, and `key=value` overrides, to a typed `Recipe`.

Order: the schema's defaults, then the recipe, then the overrides; then interpolations; then every key and type is
checked, and all problems are reported at once.
"""

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain.base import ranges
from dtrain.base.errors import RecipeError, UserError
from dtrain.base.json_files import check_shape, read_text
from dtrain.base.ranges import nearest
from dtrain.recipe import error_hints, key_aliases, secrets
from dtrain.recipe.saved import (
    PARTS,
    UNSET,
    Loaded,
    flat,
    is_table,
    merge,
    redact,
    table_of,
    texts,
    with_origins,
)
from dtrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from dtrain.recipe.other_tools import Translation

CLUSTERS = ("slurm.sh", "kubernetes.yaml")
"""Files beside the shipped recipes that start them on a cluster. `find` knows these by their whole name."""

RECIPE_BYTES = 1 << 20
DEPTH = 32  # levels of a recipe or a value; what reads them recurses, at most about ten frames a level
_NO_RECIPE = "{} is not a recipe: its top level must be a mapping such as `train: {{steps: 100}}`"
FOREIGN = 5  # keys of another tool that make a recipe one of its own
_PATHS = ("model.path", "lora.path", "run.dir", "data.cache_dir", "data.chat_template", "checkpoint.resume")


def load(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> Loaded:
    """Load the recipe at a path, of a shipped name, or in a mapping, with `key=value` overrides (OmegaConf's dotlist).

    Raises UserError: no such recipe, or not YAML. RecipeError: every unknown key, wrong type or choice, and
    interpolation that leads nowhere.
    """
    loaded, problems = read(recipe, overrides)
    if problems:
        raise RecipeError(problems)
    return loaded


def read(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> tuple[Loaded, list[str]]:
    """Load as `load` does, but return the problems that RecipeError would list, and the recipe without wrong keys."""
    stem = None
    if isinstance(recipe, str | Path):
        path = find(recipe)
        stem, written = path.stem, _read(path)
    elif isinstance(recipe, Loaded):
        written = texts(recipe)
    else:
        tree: Any = asdict(recipe) if isinstance(recipe, Recipe) else recipe
        written = _tree(OmegaConf.create(tree))
    problems: list[str] = []
    config = OmegaConf.create(merge(asdict(Recipe()), written))
    for override in overrides:
        _apply(config, override, problems)
    values = _resolve(config, "", problems)
    made = _section(Recipe, values, "", problems)
    method = (
        made.method if "method" in written or any(override.startswith("method=") for override in overrides) else None
    )
    if problems and (foreign := translate(written, made.model.path, method)):
        problems.append("\n      ".join(foreign.answer().splitlines()))
    if made.run.name is None:
        made.run.name = _default_name(made, stem, written)
    for section, key in (path.split(".") for path in _PATHS):
        value = getattr(getattr(made, section), key, None)
        if value and re.match(r"\$\w", value):
            name = re.findall(r"\w+", value)[0]
            problems.append(f"{section}.{key}={value}: no shell reads this; write ${{oc.env:{name}}} for ${name}")
        if value and value.startswith("~"):
            setattr(getattr(made, section), key, str(Path(value).expanduser()))
    loaded = with_origins(made, _tree(config), values, lambda raw: _resolve(OmegaConf.create(raw), "", []))
    loaded.unread += _of_other_methods(values, written, overrides)
    for place, value in secrets.leaves(values):
        if isinstance(value, str) and secrets.HIDDEN in value:
            problems.append(f"{secrets.dotted(place)} was hidden when this was saved: give it as ${{oc.env:NAME}}")
    return loaded, [redact(problem, loaded) for problem in problems]


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


def recipes_dir() -> Path:
    """Return the directory of the shipped recipes: in the package of an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_recipes"
    return packaged if packaged.is_dir() else package.parent / "recipes"


def shipped() -> list[tuple[str, str]]:
    """Return (name, first line of its header) of every shipped recipe: one for each method, the quickstart's, those of
    models by name."""
    general = get_args(get_type_hints(Recipe)["method"])

    def place(path: Path) -> tuple[int, bool, str]:
        rank = general.index(path.stem) if path.stem in general else len(general)
        return rank, not path.stem.startswith("quickstart"), path.stem

    recipes = []
    for path in sorted(recipes_dir().glob("*.yaml"), key=place):
        if path.name in CLUSTERS:
            continue
        with path.open(encoding="utf-8") as file:
            recipes.append((path.stem, file.readline().lstrip("# ").strip()))
    return recipes


def find(recipe: str | Path) -> Path:
    """Return the file of a recipe: a path as it is, or the name of a shipped recipe. Raises UserError."""
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    file = str(recipe) if str(recipe) in CLUSTERS else f"{recipe}.yaml"
    packaged = recipes_dir() / file
    if path.name == str(recipe) and (file == str(recipe) or file not in CLUSTERS) and packaged.is_file():
        return packaged
    if path.is_dir():
        own = path / "config.yaml"
        meant = f"; the recipe of this run is {own}" if own.is_file() else ": name a recipe's file in it"
        raise UserError(f"{recipe or 'the recipe'} is a directory{meant}")
    names = [name for name, _ in shipped()]
    near = nearest(path.stem, names)
    hint = f"; did you mean {near}?" if near else "; `dtrain ls` lists the recipes that ship with dtrain"
    raise UserError(f"there is no recipe {recipe}: neither a file nor a shipped recipe{hint}")


def keys() -> list[str]:
    """Return every dotted key that holds a value, in the schema's order; entries of lists are not among them."""
    return _keys(Recipe, "")


def _hint_of(key: str) -> Any:
    """Return the type of a dotted key, an entry of a list by its number; None for a key of no recipe."""
    hint: Any = Recipe
    for part in re.findall(r"[^.\[\]]+", key):
        kinds = _kinds(hint)
        if part.isdigit():
            hint = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
        else:
            section = _section_of(kinds)
            hint = get_type_hints(section).get(part, table_of(hint)) if section else None
    return hint


def _keys(cls: type, prefix: str) -> list[str]:
    dotted = []
    for name, hint in get_type_hints(cls).items():
        section = _section_of(_kinds(hint))
        dotted += _keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return dotted


def _read(path: Path) -> dict:
    text = read_text(path, RECIPE_BYTES)
    try:
        if _is_too_deep(text):
            raise UserError(f"{path} is not a recipe: it is nested too deep")
        check_shape(typed := yaml.load(text, Loader=yaml.BaseLoader), PARTS)
        if typed and not isinstance(typed, dict):
            raise UserError(_NO_RECIPE.format(path))
        config = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        near = text.splitlines()[max(0, mark.line - 1) : mark.line + 1] if mark else []
        hint = error_hints.pasted(" ".join(near)) or error_hints.of_yaml(error.problem)
        raise UserError(f"{path}{line} is not YAML: {error.problem or error.context}{hint}") from error
    except RecursionError:  # called from deep in another program
        raise UserError(f"{path} is not a recipe: it is nested too deep") from None
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not YAML: {error_hints.first_line(error)}{error_hints.of_yaml(error)}") from error
    if not isinstance(config, DictConfig):
        raise UserError(_NO_RECIPE.format(path))
    return _as_typed(Recipe, _tree(config), typed)


def _is_too_deep(text: str, level: int = 0) -> bool:
    """Return whether `text`, itself at `level`, nests mappings and lists deeper than `DEPTH` levels. YAML's events are
    read without recursion, so the answer does not depend on how full the stack is. Raises YAMLError."""
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > DEPTH:
            return True
    return False


def _as_typed(hint: Any, value: Any, typed: Any) -> Any:
    """Return `value` as YAML reads it, but where `hint` wants text and no number, a number as it was `typed`: a run may
    be called 1e3, or 007."""
    kinds = _kinds(hint)
    section = _section_of(kinds)
    if section and isinstance(value, dict) and isinstance(typed, dict):
        hints, table = get_type_hints(section), table_of(hint)
        return {key: _as_typed(hints.get(key, table), inner, typed.get(str(key))) for key, inner in value.items()}
    entry = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
    if isinstance(value, list) and isinstance(typed, list) and len(value) == len(typed):
        return [_as_typed(entry, inner, other) for inner, other in zip(value, typed, strict=True)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return typed if is_number and isinstance(typed, str) and str in kinds and not {int, float} & {*kinds} else value


def _tree(config: DictConfig) -> dict[str, Any]:
    """Return `config` as plain containers, interpolations as they are written."""
    return cast(dict[str, Any], OmegaConf.to_container(config))


def _apply(config: DictConfig, override: str, problems: list[str]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        word = key.lstrip("-").partition(":")[0]
        answer = key_aliases.answer(word) if word not in keys() else None
        problems.append(
            f"{override}: an override is written key=value, without dashes, such as optimizer.lr=1e-5"
            + (f"; {word}: {answer}" if answer else "")
        )
        return
    shown = f"{key}={secrets.HIDDEN}" if any(map(secrets.is_secret_name, key.split("."))) else override
    try:
        if _is_too_deep(text, key.count(".") + key.count("[")):
            problems.append(f"{key}: the value is nested too deep")
            return
        value = _tree(OmegaConf.from_dotlist([f"value={text}"]))["value"]
        value = _as_typed(_hint_of(key), value, yaml.load(text, Loader=yaml.BaseLoader))
        old = OmegaConf.select(config, key, throw_on_resolution_failure=False)
        OmegaConf.update(config, key, value, merge=isinstance(old, DictConfig) and isinstance(value, dict))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        quoted = f"; if it is text, quote it for YAML: '{key}=\"{text}\"'" if '"' not in text else ""
        if text[:1] in "[{" and text[:1] and text.count(text[0]) > text.count("]" if text[0] == "[" else "}"):
            quoted = f"; the bracket is not closed: where the shell split it at a blank, quote all: '{key}={text} ...'"
        problems.append(f"{shown}: the value is not YAML ({problem}){quoted}")
    except (OmegaConfBaseException, IndexError, TypeError) as error:
        problems.append(f"{shown}: {error_hints.first_line(error)}")
    except RecursionError:  # called from deep in another program
        problems.append(f"{key}: the value is nested too deep")
    except ValueError:  # a name where OmegaConf takes the number of an entry
        section, _, name = key.rpartition(".")
        problems.append(f"{shown}: {section} is a list; name an entry by its number, {section}[0].{name}")


def _resolve(node: DictConfig | ListConfig, prefix: str, problems: list[str]) -> Any:
    """Return `node` as plain containers, its interpolations resolved; those that fail are left out and reported."""
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
            reason, absent = (
                error_hints.first_line(error),
                re.search(r"Environment variable '(.+?)' not found", str(error)),
            )
            if absent:
                reason = f"the environment has no {absent[1]}: export it, or write ${{oc.env:{absent[1]},default}}"
            elif other := re.search(r"Interpolation key '([A-Z_]+)' not found", str(error)):
                reason = f"the recipe has no key {other[1]} to take it from; of the environment: ${{oc.env:{other[1]}}}"
            problems.append(f"{dotted}: {reason}")
            if listed:
                values[key] = None  # what follows it keeps its place
            continue
        values[key] = _resolve(value, f"{dotted}.", problems) if OmegaConf.is_config(value) else value
    return list(values.values()) if listed else values


def _section(cls: type, values: Mapping, prefix: str, problems: list[str]) -> Any:
    """Return an instance of the dataclass `cls`; a value that does not fit is reported, and stays at its default."""
    hints, made = get_type_hints(cls), cls()
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            problems += _unknown(dotted, value, prefix, list(hints))
            continue
        kinds = _kinds(hints[key])
        section = _section_of(kinds)
        entry = _section_of([get_args(kind)[0] for kind in kinds if get_origin(kind) is list])
        if (table := table_of(hints[key])) and is_table(value, table):
            named = {str(name): _section(table, inner, f"{dotted}.{name}.", problems) for name, inner in value.items()}
            setattr(made, key, named)
        elif section and isinstance(value, Mapping):
            setattr(made, key, _section(section, value, f"{dotted}.", problems))
        elif entry and isinstance(value, list):
            setattr(made, key, _entries(entry, value, dotted, problems))
        elif plain := _plain(kinds) if (section or entry) and not isinstance(value, NoneType | list) else None:
            if _set(made, key, plain, value, dotted):
                problems.append(_not_a_section(dotted, value, section, entry, False, "a number, or "))
        elif section or entry:
            # Nothing under a section's name is a section of defaults; scheduler=null may be meant as a constant rate.
            if value is not None or (entry and NoneType not in kinds):
                problems.append(_not_a_section(dotted, value, section, entry, NoneType in kinds))
        elif isinstance(value, str) and value == UNSET:
            if getattr(made, key) is not None:
                problems.append(f"{dotted} is left open (???): give it a value")
        elif value is not getattr(made, key):
            problems += _set(made, key, hints[key], value, dotted)
    return made


def _of_other_methods(values: Mapping, tree: Mapping, overrides: Sequence[str]) -> list[str]:
    """Return the given keys of sections that another method alone reads. A saved recipe holds the sections of all
    methods: of these, the keys that are not at their defaults."""
    hints, method = get_type_hints(Recipe), values.get("method")
    methods = get_args(hints["method"])
    others = {name: hints[name] for name in methods if name in hints and name != method}
    if method not in methods:  # which is said elsewhere
        return []
    is_whole = others.keys() <= tree.keys()
    keys = []
    for name, section in others.items():
        defaults, written = flat(asdict(section()), f"{name}."), tree.get(name) or {}
        own = flat(values[name], f"{name}.") if isinstance(values[name], Mapping) else {}
        named = flat(written, f"{name}.") if isinstance(written, Mapping) else {name: written}
        keys += [key for key in named if not is_whole or own.get(key) != defaults.get(key)]
    pairs = (override.partition("=") for override in overrides)
    keys += [key for key, equals, _ in pairs if equals and _head(key) in others]
    return list(dict.fromkeys(keys))


def _head(key: str) -> str:
    """Return the section that a dotted key lies in."""
    return re.split(r"[.\[]", key)[0]


def _entries(cls: type, values: list, dotted: str, problems: list[str]) -> list:
    made = []
    for index, value in enumerate(values):
        if isinstance(value, Mapping):
            made.append(_section(cls, value, f"{dotted}[{index}].", problems))
        else:
            problems.append(_not_a_section(f"{dotted}[{index}]", value, cls, None))
    return made


def _not_a_section(
    dotted: str, value: Any, section: type | None, entry: type | None, is_optional: bool = False, plain: str = ""
) -> str:
    wanted = plain + (f"a mapping with the keys {', '.join(get_type_hints(section))}" if section else "")
    if section and entry:
        wanted += " or "
    wanted += f"a list of mappings with the keys {', '.join(get_type_hints(entry))}" if entry else ""
    wanted += f": write {dotted}={{}} for their defaults, or null for none" if section and is_optional else ""
    hints = get_type_hints(section) if section else {}
    if plain and error_hints.share(value):
        return f"{dotted}={value} must be {plain.partition(',')[0]}{error_hints.share(value)}"
    if isinstance(value, str) and error_hints.stuck(value):
        return f"{dotted}: YAML reads {value} as one word: write a blank after the colon"
    leaf = next((key for key in ("path", "name", "fn", "train.path") if key.partition(".")[0] in hints), None)
    text = key_aliases.meant(f"{dotted}.{leaf}", value) or value
    meant = f"; write {dotted}.{leaf}={text}" if isinstance(value, str) and leaf else ""
    if entry and not section and isinstance(value, str):
        first = next(iter(get_type_hints(entry)))
        meant = f"; write {dotted}=[{{{first}: {key_aliases.meant(f'{dotted}.{first}', value) or value}}}]"
    if entry and isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
        return f"{dotted} is no list yet, so it has no entry {next(iter(value))}: give the list, {dotted}=[{{...}}]"
    return f"{dotted}={ranges.shown(value)}: {dotted} is {wanted}{meant}"


def _set(section: object, key: str, hint: Any, value: Any, dotted: str) -> list[str]:
    """Put a leaf's value into its section, converted to its type; return the problem where it does not fit."""
    kinds, cls = _kinds(hint), cast(Any, type(section))  # mypy takes no class for hashable
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if isinstance(value, Mapping) and (
        stuck := [name for name, inner in value.items() if inner is None and error_hints.stuck(name)]
    ):
        return [f"{dotted}: YAML reads {name} as one word: write a blank after the colon" for name in stuck]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # OmegaConf's word for a conversion that was not asked for
            node = OmegaConf.structured(_holder(cls, key, hint))
            node[key] = "none" if value is None and "none" in choices else secrets.escaped(_converted(value, kinds))
            setattr(section, key, getattr(OmegaConf.to_object(node), key))
    except (OmegaConfBaseException, FutureWarning):
        if choices:
            near = key_aliases.meant(re.sub(r"\[\d+\]", "", dotted), value) or nearest(str(value), choices)
            hint = f"; did you mean {near}?" if near else error_hints.pasted(value)
            return [f"{dotted}={ranges.shown(value)} is none of {', '.join(choices)}{hint}"]
        if alias := key_aliases.meant(re.sub(r"\[\d+\]", "", dotted), value):
            return [f"{dotted}={ranges.shown(value)} must be {error_hints.needed(kinds)}: {alias}"]
        hint = _hint_for(value, kinds, getattr(section, key, None))
        return [f"{dotted}={ranges.shown(value)} must be {error_hints.needed(kinds)}{hint}"]
    return []


def _hint_for(value: Any, kinds: list, usual: Any) -> str:
    """Return the hint for a refused `value`, where the cause is known; usual: the setting's own value."""
    hints = (
        error_hints.pasted(value),
        error_hints.in_number(value, kinds),
        error_hints.share(value),
        error_hints.in_list(value, kinds, usual),
    )
    return next(filter(None, hints), "")


@cache
def _holder(cls: type, key: str, hint: Any) -> type:
    """Return a section of that key alone: a whole one costs OmegaConf far more time."""
    return make_dataclass(cls.__name__, [(key, hint)])


def _plain(kinds: list) -> Any:
    """Return the number, or text, that a section's key may hold in its place; None where there is none."""
    return next((kind | None for kind in kinds if kind in (int, float, str, bool)), None)


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


def _unknown(dotted: str, value: Any, prefix: str, siblings: list[str]) -> list[str]:
    """Return one problem for an unknown key, and one per word of another tool in an unknown section."""
    word = dotted.removeprefix(prefix)
    known = key_aliases.answer(dotted)
    inner = [
        f"{key}: {answer}"
        for key in (flat(value, f"{dotted}.") if isinstance(value, Mapping) else ())
        if (answer := key_aliases.answer(key))
    ]
    if value is None and error_hints.stuck(word):
        key, _, text = word.partition(":")
        return [f"{dotted}: YAML reads this as one word: write a blank after the colon, {key}: {text}"]
    if known:
        return [f"{dotted}: {known}", *inner]
    return [f"{dotted} is no key of a recipe{error_hints.pasted(word)}{_near(word, prefix, siblings)}", *inner]


def _near(word: str, prefix: str, siblings: list[str]) -> str:
    everywhere = keys()
    near = nearest(word, siblings)
    same = [key for key in everywhere if key.rpartition(".")[2] == word]
    leaves = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if near is None and not same and (leaf := nearest(word, leaves)):
        same = [key for key in everywhere if key.rpartition(".")[2] == leaf]
    if near or same:
        return f"; did you mean {prefix + near if near else ' or '.join(same)}?"
    if not prefix and (theirs := nearest(word, key_aliases.OURS)):
        return f"; did you mean {theirs}? dtrain's word for it is {key_aliases.OURS[theirs]}"
    return f"; the keys of {prefix.rstrip('.') or 'a recipe'} are {', '.join(siblings)}"


def translate(tree: Mapping, path: str | None = None, method: str | None = None) -> "Translation | None":
    """Translate a recipe of another tool to one of ours. None where it is ours: it shows no tool, or `path`, our
    model's, is given, and few of its keys have one here. method: where it is known; else the file's keys tell it."""
    hints = get_type_hints(Recipe)
    resolved = _resolve(OmegaConf.create(dict(tree)), "", [])
    theirs = flat(resolved)
    theirs |= {f"{key}.name": theirs.pop(key) for key in ("optimizer", "scheduler") if isinstance(theirs.get(key), str)}
    from dtrain.recipe import other_tools  # files of other tools alone need it

    if other_tools.tool_of(theirs) is None:
        named = ("optimizer.name", "scheduler.name")
        theirs = {key: value for key, value in theirs.items() if _head(key) not in hints or key in named}
    made = other_tools.Translation(theirs, method, keys(), _fitted)
    is_ours = (made.tool is None or path) and len(made.values) - len(made.origins) < FOREIGN
    return None if is_ours else made


def _fitted(key: str, value: Any) -> tuple[Any, list[str]]:
    """Return `value` in the type of a dotted key, and the problems with it."""
    problems: list[str] = []
    made: Any = _section(Recipe, _nested({key: value}), "", problems)
    for part in key.split("."):
        made = getattr(made, part)
    return value if isinstance(value, list) else made, problems


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of dotted keys: the inverse of `flat`."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        inner = made
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return made


def _kinds(hint: Any) -> list:
    """Return the alternatives of a type: its union's members, or itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _section_of(kinds: list) -> type | None:
    """Return the dataclass among `kinds`."""
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
