"""From YAML, a shipped recipe's name or a mapping, and `key=value` overrides, to a typed `Recipe`; and back to YAML.

Order: the schema's defaults, then the recipe, then the overrides; then interpolations; then every key and type is
looked at, and all that is wrong is said at once.
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
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain import ranges
from dtrain.config import other_tools, secrets, slips, words
from dtrain.config.saved import (
    PARTS,
    UNSET,
    Loaded,
    flat,
    hidden,
    is_table,
    merge,
    table_of,
    texts,
    with_origins,
)
from dtrain.config.schema import Recipe
from dtrain.errors import RecipeError, UserError
from dtrain.json_files import check_shape, read_text
from dtrain.ranges import nearest

CLUSTERS = ("slurm.sh", "kubernetes.yaml")
"""What lies beside the shipped recipes and starts them on a cluster. `find` knows these by their whole name."""

RECIPE_BYTES = 1 << 20
_NO_RECIPE = "{} is not a recipe: its top level must be a mapping such as `train: {{steps: 100}}`"
FOREIGN = 5  # keys of another tool that make a recipe one of its own
_PATHS = ("model.path", "lora.path", "run.dir", "data.cache_dir", "data.chat_template", "checkpoint.resume")


def load(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> Loaded:
    """The recipe at a path, of a shipped name, or in a mapping, with `key=value` overrides (OmegaConf's dotlist).

    Raises UserError: no such recipe, or not YAML. RecipeError: every unknown key, wrong type or choice, and
    interpolation that leads nowhere.
    """
    loaded, problems = read(recipe, overrides)
    if problems:
        raise RecipeError(problems)
    return loaded


def read(recipe: str | Path | Mapping | Recipe, overrides: Sequence[str] = ()) -> tuple[Loaded, list[str]]:
    """As `load`, but what RecipeError would list is returned, beside the recipe without the keys that are wrong."""
    stem = None
    if isinstance(recipe, str | Path):
        path = find(recipe)
        stem, given = path.stem, _read(path)
    elif isinstance(recipe, Loaded):
        given = texts(recipe)
    else:
        tree: Any = asdict(recipe) if isinstance(recipe, Recipe) else recipe
        given = _tree(OmegaConf.create(tree))
    problems: list[str] = []
    config = OmegaConf.create(merge(asdict(Recipe()), given))
    for override in overrides:
        _apply(config, override, problems)
    values = _resolve(config, "", problems)
    made = _section(Recipe, values, "", problems)
    method = made.method if "method" in given or any(one.startswith("method=") for one in overrides) else None
    if foreign := translate(given, made.model.path, method):
        problems.append("\n      ".join(foreign.answer().splitlines()))
    if made.run.name is None:
        made.run.name = stem or made.method
    for section, key in (path.split(".") for path in _PATHS):
        value = getattr(getattr(made, section), key, None)
        if value and re.match(r"\$\w", value):
            name = re.findall(r"\w+", value)[0]
            problems.append(f"{section}.{key}={value}: no shell reads this; write ${{oc.env:{name}}} for ${name}")
        if value and value.startswith("~"):
            setattr(getattr(made, section), key, str(Path(value).expanduser()))
    loaded = with_origins(made, _tree(config), values, lambda raw: _resolve(OmegaConf.create(raw), "", []))
    loaded.unread += _of_other_methods(values, given, overrides)
    for place, value in secrets.leaves(values):
        if isinstance(value, str) and secrets.HIDDEN in value:
            problems.append(f"{secrets.dotted(place)} was hidden when this was saved: give it as ${{oc.env:NAME}}")
    return loaded, [hidden(problem, loaded) for problem in problems]


def recipes_dir() -> Path:
    """Where the shipped recipes lie: in the package of an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_recipes"
    return packaged if packaged.is_dir() else package.parent / "recipes"


def shipped() -> list[tuple[str, str]]:
    """(name, first line of its header) of every shipped recipe, by name."""
    found = []
    for path in sorted(recipes_dir().glob("*.yaml")):
        if path.name in CLUSTERS:
            continue
        with path.open(encoding="utf-8") as file:
            found.append((path.stem, file.readline().lstrip("# ").strip()))
    return found


def find(recipe: str | Path) -> Path:
    """The file of a recipe: a path as it is, or the name of a shipped recipe. Raises UserError."""
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
    """Every dotted key that holds a value, in the schema's order; entries of lists are not among them."""
    return _keys(Recipe, "")


def _hint_of(key: str) -> Any:
    """The type of a dotted key, an entry of a list by its number; None for a key of no recipe."""
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
    found = []
    for name, hint in get_type_hints(cls).items():
        section = _section_of(_kinds(hint))
        found += _keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return found


def _read(path: Path) -> dict:
    text = read_text(path, RECIPE_BYTES)
    try:
        check_shape(typed := yaml.load(text, Loader=yaml.BaseLoader), PARTS)
        if typed and not isinstance(typed, dict):
            raise UserError(_NO_RECIPE.format(path))
        config = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        near = text.splitlines()[max(0, mark.line - 1) : mark.line + 1] if mark else []
        said = slips.pasted(" ".join(near)) or slips.of_yaml(error.problem)
        raise UserError(f"{path}{line} is not YAML: {error.problem or error.context}{said}") from error
    except RecursionError:
        raise UserError(f"{path} is not a recipe: it is nested too deep") from None
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not YAML: {slips.first_line(error)}{slips.of_yaml(error)}") from error
    if not isinstance(config, DictConfig):
        raise UserError(_NO_RECIPE.format(path))
    return _as_typed(Recipe, _tree(config), typed)


def _as_typed(hint: Any, value: Any, typed: Any) -> Any:
    """`value` as YAML reads it, but where `hint` wants text and no number, a number as it was `typed`: a run may be
    called 1e3, or 007."""
    kinds = _kinds(hint)
    section = _section_of(kinds)
    if section and isinstance(value, dict) and isinstance(typed, dict):
        hints, table = get_type_hints(section), table_of(hint)
        return {key: _as_typed(hints.get(key, table), one, typed.get(str(key))) for key, one in value.items()}
    entry = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
    if isinstance(value, list) and isinstance(typed, list) and len(value) == len(typed):
        return [_as_typed(entry, one, other) for one, other in zip(value, typed, strict=True)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return typed if is_number and isinstance(typed, str) and str in kinds and not {int, float} & {*kinds} else value


def _tree(config: DictConfig) -> dict[str, Any]:
    """As written, interpolations and all."""
    return cast(dict[str, Any], OmegaConf.to_container(config))


def _apply(config: DictConfig, override: str, problems: list[str]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith("-"):
        word = key.lstrip("-").partition(":")[0]
        said = words.answer(word) if word not in keys() else None
        problems.append(
            f"{override}: an override is written key=value, without dashes, such as optimizer.lr=1e-5"
            + (f"; {word}: {said}" if said else "")
        )
        return
    shown = f"{key}={secrets.HIDDEN}" if any(map(secrets.is_secret_name, key.split("."))) else override
    try:
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
        problems.append(f"{shown}: {slips.first_line(error)}")
    except RecursionError:
        problems.append(f"{key}: the value is nested too deep")
    except ValueError:  # a name where OmegaConf takes the number of an entry
        section, _, name = key.rpartition(".")
        problems.append(f"{shown}: {section} is a list; name an entry by its number, {section}[0].{name}")


def _resolve(node: DictConfig | ListConfig, prefix: str, problems: list[str]) -> Any:
    """`node` as plain containers, its interpolations resolved; those that cannot be are left out and reported."""
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
            said, absent = slips.first_line(error), re.search(r"Environment variable '(.+?)' not found", str(error))
            if absent:
                said = f"the environment has no {absent[1]}: export it, or write ${{oc.env:{absent[1]},default}}"
            elif other := re.search(r"Interpolation key '([A-Z_]+)' not found", str(error)):
                said = f"the recipe has no key {other[1]} to take it from; of the environment: ${{oc.env:{other[1]}}}"
            problems.append(f"{dotted}: {said}")
            values |= {key: None} if listed else {}  # what follows it keeps its place
            continue
        values[key] = _resolve(value, f"{dotted}.", problems) if OmegaConf.is_config(value) else value
    return list(values.values()) if listed else values


def _section(cls: type, values: Mapping, prefix: str, problems: list[str]) -> Any:
    """An instance of the dataclass `cls`; what does not fit is reported, and stays at its default."""
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
            named = {str(name): _section(table, one, f"{dotted}.{name}.", problems) for name, one in value.items()}
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


def _of_other_methods(values: Mapping, given: Mapping, overrides: Sequence[str]) -> list[str]:
    """The given keys of sections that another method alone reads. A saved recipe holds the sections of all methods: of
    these, the keys that are not at their defaults."""
    hints, method = get_type_hints(Recipe), values.get("method")
    methods = get_args(hints["method"])
    others = {name: hints[name] for name in methods if name in hints and name != method}
    if method not in methods:  # which is said elsewhere
        return []
    is_whole = others.keys() <= given.keys()
    keys = []
    for name, section in others.items():
        defaults, written = flat(asdict(section()), f"{name}."), given.get(name) or {}
        own = flat(values[name], f"{name}.") if isinstance(values[name], Mapping) else {}
        named = flat(written, f"{name}.") if isinstance(written, Mapping) else {name: written}
        keys += [key for key in named if not is_whole or own.get(key) != defaults.get(key)]
    keys += [key for key, equals, _ in (one.partition("=") for one in overrides) if equals and _head(key) in others]
    return list(dict.fromkeys(keys))


def _head(key: str) -> str:
    """The section that a dotted key lies in."""
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
    wanted += " or " if section and entry else ""
    wanted += f"a list of mappings with the keys {', '.join(get_type_hints(entry))}" if entry else ""
    wanted += f": write {dotted}={{}} for their defaults, or null for none" if section and is_optional else ""
    hints = get_type_hints(section) if section else {}
    if plain and slips.share(value):
        return f"{dotted}={value} must be {plain.partition(',')[0]}{slips.share(value)}"
    if isinstance(value, str) and slips.stuck(value):
        return f"{dotted}: YAML reads {value} as one word: write a blank after the colon"
    leaf = next((key for key in ("path", "name", "fn", "train.path") if key.partition(".")[0] in hints), None)
    said = words.meant(f"{dotted}.{leaf}", value) or value
    meant = f"; write {dotted}.{leaf}={said}" if isinstance(value, str) and leaf else ""
    if entry and not section and isinstance(value, str):
        first = next(iter(get_type_hints(entry)))
        meant = f"; write {dotted}=[{{{first}: {words.meant(f'{dotted}.{first}', value) or value}}}]"
    if entry and isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
        return f"{dotted} is no list yet, so it has no entry {next(iter(value))}: give the list, {dotted}=[{{...}}]"
    return f"{dotted}={ranges.shown(value)}: {dotted} is {wanted}{meant}"


def _set(section: object, key: str, hint: Any, value: Any, dotted: str) -> list[str]:
    """Put a leaf's value into its section, converted to its type; the problem, where it does not fit."""
    kinds, cls = _kinds(hint), cast(Any, type(section))  # mypy takes no class for hashable
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if isinstance(value, Mapping) and (
        stuck := [one for one, said in value.items() if said is None and slips.stuck(one)]
    ):
        return [f"{dotted}: YAML reads {one} as one word: write a blank after the colon" for one in stuck]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # OmegaConf's word for a conversion that was not asked for
            node = OmegaConf.structured(_holder(cls, key, hint))
            node[key] = "none" if value is None and "none" in choices else secrets.escaped(_converted(value, kinds))
            setattr(section, key, getattr(OmegaConf.to_object(node), key))
    except (OmegaConfBaseException, FutureWarning):
        if choices:
            near = words.meant(re.sub(r"\[\d+\]", "", dotted), value) or nearest(str(value), choices)
            hint = f"; did you mean {near}?" if near else slips.pasted(value)
            return [f"{dotted}={ranges.shown(value)} is none of {', '.join(choices)}{hint}"]
        if said := words.meant(re.sub(r"\[\d+\]", "", dotted), value):
            return [f"{dotted}={ranges.shown(value)} must be {slips.needed(kinds)}: {said}"]
        slip = _slip(value, kinds, getattr(section, key, None))
        return [f"{dotted}={ranges.shown(value)} must be {slips.needed(kinds)}{slip}"]
    return []


def _slip(value: Any, kinds: list, usual: Any) -> str:
    """What to add to a refusal of `value`, where the cause is known; usual: the setting's own value."""
    found = (slips.pasted(value), slips.in_number(value, kinds), slips.share(value), slips.in_list(value, kinds, usual))
    return next(filter(None, found), "")


@cache
def _holder(cls: type, key: str, hint: Any) -> type:
    """A section of that key alone: a whole one costs OmegaConf far more time."""
    return make_dataclass(cls.__name__, [(key, hint)])


def _plain(kinds: list) -> Any:
    """The number, or text, that a section's key may hold in its place; None where there is none."""
    return next((kind | None for kind in kinds if kind in (int, float, str, bool)), None)


def _converted(value: Any, kinds: list) -> Any:
    """`value` as the type that is asked for, where that loses nothing: 1e3 is an integer, 3 a float, 2024 a name."""
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
    """One problem for an unknown key, and one per word of another tool in an unknown section."""
    word = dotted.removeprefix(prefix)
    known = words.answer(dotted)
    inner = [
        f"{key}: {said}"
        for key in (flat(value, f"{dotted}.") if isinstance(value, Mapping) else ())
        if (said := words.answer(key))
    ]
    if value is None and slips.stuck(word):
        key, _, text = word.partition(":")
        return [f"{dotted}: YAML reads this as one word: write a blank after the colon, {key}: {text}"]
    if known:
        return [f"{dotted}: {known}", *inner]
    return [f"{dotted} is no key of a recipe{slips.pasted(word)}{_near(word, prefix, siblings)}", *inner]


def _near(word: str, prefix: str, siblings: list[str]) -> str:
    everywhere = keys()
    near = nearest(word, siblings)
    same = [key for key in everywhere if key.rpartition(".")[2] == word]
    leaves = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if near is None and not same and (leaf := nearest(word, leaves)):
        same = [key for key in everywhere if key.rpartition(".")[2] == leaf]
    if near or same:
        return f"; did you mean {prefix + near if near else ' or '.join(same)}?"
    if not prefix and (theirs := nearest(word, words.OURS)):
        return f"; did you mean {theirs}? dtrain's word for it is {words.OURS[theirs]}"
    return f"; the keys of {prefix.rstrip('.') or 'a recipe'} are {', '.join(siblings)}"


def translate(given: Mapping, path: str | None = None, method: str | None = None) -> other_tools.Translation | None:
    """A recipe of another tool as one of ours. None where it is ours: it shows no tool, or `path`, our model's, is
    given, and few of its keys have one here. method: where it is known; else the file's keys tell it."""
    hints = get_type_hints(Recipe)
    resolved = _resolve(OmegaConf.create(dict(given)), "", [])
    theirs = flat(resolved)
    theirs |= {f"{key}.name": theirs.pop(key) for key in ("optimizer", "scheduler") if isinstance(theirs.get(key), str)}
    if other_tools.tool_of(theirs) is None:
        named = ("optimizer.name", "scheduler.name")
        theirs = {key: value for key, value in theirs.items() if _head(key) not in hints or key in named}
    made = other_tools.Translation(theirs, method, keys(), _fitted)
    is_ours = (made.tool is None or path) and len(made.values) - len(made.origins) < FOREIGN
    return None if is_ours else made


def _fitted(key: str, value: Any) -> tuple[Any, list[str]]:
    """`value` in the type of a dotted key, and what is wrong with it."""
    problems: list[str] = []
    made: Any = _section(Recipe, _nested({key: value}), "", problems)
    for part in key.split("."):
        made = getattr(made, part)
    return value if isinstance(value, list) else made, problems


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`flat`, backwards."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        inner = made
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return made


def _kinds(hint: Any) -> list:
    """The alternatives of a type: its union's members, or itself."""
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _section_of(kinds: list) -> type | None:
    """The dataclass among `kinds`."""
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
