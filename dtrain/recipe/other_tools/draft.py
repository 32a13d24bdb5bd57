"""An unfinished conversion: which keys of the file were read, and the recipe's values so far.

Each tool's module reads keys of the file from a `Draft` and writes keys of the recipe to it, topic by topic. At the end
`finish` fills in the tool's defaults and lists every unread key, so that no key is dropped silently.

A value of the wrong type never raises. Values that are only copied go through `put`, which checks them against the
recipe's own key. Values that a tool's module computes with are read by `take_int`, `take_number`, `take_flag`,
`take_list` or `take_entries`. Both list a wrong value as a lost key and go on without it. For example, with
`gradient_accumulation_steps: [4]`:

    draft.take_int("gradient_accumulation_steps", default=1)   # 1, and the lost key
    # gradient_accumulation_steps: [4] is not a whole number. Write a number such as 8

Lists of data sets, which several tools write alike, become `data.train` and `data.val`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import yaml

from dtrain.recipe import spelling
from dtrain.recipe.other_tools.conversion import Conversion, LostKey
from dtrain.recipe.other_tools.effects import may_change_numbers
from dtrain.recipe.schema import OPTIMIZERS, SCHEDULES

Fit = Callable[[str, Any], tuple[Any, list[str]]]
"""(key, value) -> the value in the key's own type, and the problems with it."""
Default = TypeVar("Default")

# Keys in whose values "a,b" is a list of two entries.
_COMMA_LISTS = ("data.train.path", "data.val.path", "lora.target", "lora.modules_to_save", "reward_funcs")
_KNOWN_NAMES = {"optimizer.name": OPTIMIZERS, "scheduler.name": SCHEDULES}
_NO_KEY = "dtrain has no key for it"
# No size, count or rate is larger, and products of a few of them are still ordinary floats.
_LARGEST_NUMBER = 10**15

FILE_READERS = ("json", "csv", "parquet", "arrow", "text")
"""Names that `load_dataset` accepts in place of a data set. The files are then in `data_files`."""


@dataclass(frozen=True)
class RecipeKeys:
    """The keys of recipes, their defaults and their types.

    Attributes:
        names: Every dotted key, in the order of docs/recipe.md.
        defaults: Default by dotted key, including the section `lora`, whose default is null.
        fit: Converts a value to the type of its key.
    """

    names: Sequence[str]
    defaults: Mapping[str, Any]
    fit: Fit


@dataclass(frozen=True)
class Tool:
    """A tool whose files can be converted.

    Attributes:
        name: As its users write it.
        version: The version that the tables were compared with.
        marks: Regular expressions for dotted keys. A file with a key that matches one is this tool's.
        convert: Writes the file's content to the draft.
        counts_all_gpus: Whether its batch is that of all GPUs. Otherwise it is that of one GPU.
    """

    name: str
    version: str
    marks: tuple[str, ...]
    convert: Callable[["Draft"], None]
    counts_all_gpus: bool = False


class Meaning(NamedTuple):
    """The meaning of another tool's value in dtrain.

    Attributes:
        value: The value of the recipe's key.
        more: Values of other keys that it implies. For example, `optim: adamw_bnb_8bit` also sets `optimizer.state`.
        remark: The difference that remains, or an empty string.
    """

    value: Any
    more: dict[str, Any]
    remark: str


class Draft:
    """An unfinished recipe, and the file that it is made of.

    Attributes:
        tool: The tool that the file is written for. None if no key indicates one.
        file: The file's values by dotted key. Lists are not flattened.
        keys: The keys of dtrain's recipes.
        typed_method: The method that the user typed on the command line, after the file's name, or None.
        method: The recipe's method, as far as it is known.
        values: The recipe's values by dotted key.
        comments: Comments on some of the recipe's values, by dotted key.
        notes: Differences that no key expresses.
        lost: Keys of the file that are not carried over.
        defaults: The tool's own defaults by dotted key of the recipe. `finish` writes those that the file leaves out.
    """

    def __init__(self, tool: Tool | None, file: Mapping[str, Any], keys: RecipeKeys, method: str | None):
        self.tool = tool
        self.keys = keys
        self.typed_method = method
        self.method = method or str(keys.defaults["method"])
        self.values: dict[str, Any] = {"method": method} if method else {}
        self.comments: dict[str, str] = {}
        self.notes: list[str] = []
        self.lost: list[LostKey] = []
        self.defaults: dict[str, Any] = {}
        self._read: set[str] = set()
        self._refused: set[str] = set()  # keys of the recipe whose value was refused: no default may replace it
        self._ignored: tuple[str, ...] = ()
        self.file: dict[str, Any] = {}
        self._unresolved: dict[str, str] = {}
        for key, value in file.items():
            if isinstance(value, str) and "${" in value:
                self._unresolved[key] = value
            else:
                self.file[key] = value

    @property
    def version(self) -> str:
        """The tool with its version, for comments."""
        return f"{self.tool.name} {self.tool.version}" if self.tool else "another tool"

    # Reading the file

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that has one, and mark all of them as read.

        A key with the value null counts as absent, because null means the tool's default in most files.
        """
        self._read.update(names)
        for name in names:
            value = self.file.get(name)
            if value is not None:
                return value
        return default

    def take_int(self, *names: str, default: Default, minimum: int | None = None) -> int | Default:
        """Return the first of these keys' values as a whole number.

        Args:
            names: Keys of the file, all of which are marked as read.
            default: Returned if no key has a value, or if it is "auto" or -1, which most tools write for "not given".
                Also returned for a value of the wrong type, which is listed as lost.
            minimum: The smallest value that makes sense. Smaller ones are listed as lost.
        """
        value = self.take(*names)
        if value is None or value == "auto" or _is_unset(value):
            return default
        number = as_number(value)
        if number is None or not float(number).is_integer():
            self._lose_type(names, value, "is not a whole number. Write a number such as 8")
            return default
        if minimum is not None and number < minimum:
            self._lose_type(names, value, f"is too small. Write {minimum} or more")
            return default
        return int(number)

    def take_number(self, *names: str, default: Default) -> int | float | Default:
        """Return the first of these keys' values as a finite number. Values of another type are listed as lost.

        "auto" counts as absent.
        """
        value = self.take(*names)
        if value is None or value == "auto":
            return default
        number = as_number(value)
        if number is None:
            self._lose_type(names, value, "is not a number. Write one such as 0.1")
            return default
        return number

    def take_flag(self, *names: str, default: Default) -> bool | Default:
        """Return the first of these keys' values as true or false. Values of another type are listed as lost.

        "auto" counts as absent.
        """
        value = self.take(*names)
        if value is None or value == "auto":
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        self._lose_type(names, value, "is neither true nor false. Write one of them")
        return default

    def take_list(self, *names: str) -> list[Any]:
        """Return the first of these keys' values as a list. A text is split at its commas, as in `as_list`."""
        return as_list(self.take(*names))

    def take_entries(self, name: str) -> list[dict[str, Any]]:
        """Return the mappings in a list of mappings, such as data sets. Other entries are listed as lost."""
        value = self.take(name)
        entries = value if isinstance(value, list) else [value]
        return [] if value is None else self.checked_entries(entries, name)

    def checked_entries(self, entries: Sequence[Any], source: str) -> list[dict[str, Any]]:
        """Return the entries that are mappings with texts as keys. All other entries are listed as lost.

        Args:
            entries: The entries of a list in the file.
            source: The file's key of the list, for messages.
        """
        found = []
        for index, entry in enumerate(entries):
            if isinstance(entry, Mapping) and all(isinstance(name, str) for name in entry):
                found.append(dict(entry))
            elif entry is not None:
                self.lose(
                    f"{source}[{index}]", f"{_shorten(entry)} is not a mapping. Write one such as {{path: my.jsonl}}"
                )
        return found

    def given(self, *names: str) -> bool:
        """Check whether the file has one of these keys with a value other than null. Marks nothing as read."""
        return any(self.file.get(name) is not None for name in names)

    def section(self, prefix: str) -> dict[str, Any]:
        """Return the values below `prefix` that are not null, without the prefix, and mark all of them as read.

        If the key `prefix` has a value of its own, such as `trl: 3`, it is no section and is listed as lost.
        """
        direct_value = self.file.get(prefix)
        if direct_value not in (None, {}) and not isinstance(direct_value, list):
            self._lose_type((prefix,), direct_value, "is not a mapping. Write its keys below it")
        found = {}
        for key, value in self.file.items():
            if not key.startswith(f"{prefix}."):
                continue
            self._read.add(key)
            if value is not None:
                found[key.removeprefix(f"{prefix}.")] = value
        return found

    def ignore(self, *names: str) -> None:
        """Mark keys that change no number as read. A name that ends with a dot means all keys below it."""
        self._ignored += names
        self._read.update(key for key in self.file if _matches(key, names))

    # Writing the recipe

    def rename(self, table: Mapping[str, str]) -> None:
        """Copy values to the recipe. `table` maps keys of the file to keys of the recipe."""
        for source, key in table.items():
            value = self.take(source)
            if value is None or _is_unset(value):
                continue
            self.put(key, value, source)

    def put(self, key: str, value: Any, source: str) -> None:
        """Write a value of the file, unless the recipe's key has one already.

        Names that the other tool uses are translated, such as `optim: adamw_torch`. A value that the recipe's key does
        not accept is listed as a lost key.

        Args:
            key: The recipe's key.
            value: The value, as the file has it.
            source: The file's key, for messages.
        """
        self._read.add(source)
        meaning = find_meaning(key, value)
        if meaning is None:
            self.lose(source, f"{key} does not take {value}: {spelling.find_dtrain_value(key, value)}", key)
            return
        if meaning.remark:
            self.note(f"{source}={value}: {key}={_shorten(meaning.value)}, {meaning.remark}")
        for other_key, other_value in meaning.more.items():
            self.put(other_key, other_value, source)
        key, value = _in_form_of_recipe(key, meaning.value)
        if key.endswith("kwargs") and isinstance(value, Mapping):
            value = {**value, **self.values.get(key, {})}
        elif key in self.values:
            return
        fitted, problem = self._fit_value(key, value)
        if problem is None:
            self.values[key] = fitted
            given = self.file.get(source)
            if given is not None and not _is_same(given, fitted) and not key.endswith("kwargs"):
                shown = str(given).lower() if isinstance(given, bool) else _shorten(given)
                self.comments[key] = f"{source}: {shown}"
            return
        if key == "method":
            self.values[key] = value  # dtrain refuses this recipe too, instead of training by another method
        self.lose(source, problem, key)

    def _fit_value(self, key: str, value: Any) -> tuple[Any, str | None]:
        """Convert a value to the type of a recipe's key. Return it, and the problem if the key does not accept it."""
        known_names = _KNOWN_NAMES.get(key)
        is_import_path = isinstance(value, str) and "." in value
        if known_names and isinstance(value, str) and not is_import_path and value not in known_names:
            return value, f"{key}={value} is not one of {', '.join(known_names)}"
        fitted, problems = self.keys.fit(key, value)
        return fitted, problems[0] if problems else None

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Write a value that was computed, and replace the key's former value.

        Args:
            key: The recipe's key.
            value: The value, which is not checked.
            comment: A comment that explains the value. Empty for none.
        """
        self.values[key] = value
        self.comments.pop(key, None)
        if comment:
            self.comments[key] = comment

    def remove(self, key: str) -> None:
        """Remove a key from the recipe."""
        self.values.pop(key, None)
        self.comments.pop(key, None)

    def lose(self, source: str, reason: str, *keys: str, is_harmless: bool = False) -> None:
        """List a key of the file as not carried over. Each key is listed once.

        Args:
            source: The file's key.
            reason: Why its value is not carried over, and what to do instead.
            keys: The recipe's keys that the value is for. The tool's defaults are not written for them, because they
                would replace what the user has set.
            is_harmless: Whether no number depends on the key. Otherwise `effects` decides.
        """
        self._read.add(source)
        self._refused.update(keys)
        if all(lost.key != source for lost in self.lost):
            changes_numbers = not is_harmless and may_change_numbers(source, keys)
            self.lost.append(LostKey(source, self.file.get(source), reason, keys, changes_numbers))

    def _lose_type(self, names: Sequence[str], value: Any, reason: str) -> None:
        """List the first of these keys that has a value as lost, because the value has the wrong type."""
        source = next(name for name in names if self.file.get(name) is not None)
        self.lose(source, f"{_shorten(value)} {reason}")

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def effective(self, key: str, default: Any = None) -> Any:
        """Return the value that a recipe's key has so far: from the file, else the tool's default, else `default`."""
        return self.values.get(key, self.defaults.get(key, default))

    def has(self, prefix: str) -> bool:
        """Check whether the recipe has a value for a key or for one below it."""
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.values)

    def set_defaults(self, *layers: Mapping[str, Any]) -> None:
        """Set the tool's defaults; later layers win."""
        for layer in layers:
            self.defaults.update(layer)

    # The end

    def carry_aliases(self) -> None:
        """Write every unread key for which key_aliases.toml has a key of the recipe."""
        for key in self._unread_keys():
            self._carry_by_alias(key)

    def finish(self) -> Conversion:
        """Fill in the tool's defaults, list all unread keys as lost, and return the conversion."""
        for key in self._unread_keys():
            self._lose_unread(key)
        for key, text in self._unresolved.items():
            if not _matches(key, self._ignored):
                reason = f"{text} cannot be resolved within the file"
                self.lost.append(LostKey(key, text, reason, (), may_change_numbers(key, ())))
        if self.tool:
            self.values["method"] = str(self.values.get("method", self.method))
            self._fill_in_defaults()
        if self.values.get("train.validate_every") and not self.has("data.val"):
            self.remove("train.validate_every")
            self.note("train.validate_every needs data.val")
        values = {key: self.values[key] for key in sorted(self.values, key=self._position)}
        name, version = (self.tool.name, self.tool.version) if self.tool else (None, "")
        counts_all_gpus = self.tool is not None and self.tool.counts_all_gpus
        return Conversion(name, version, values, self.comments, self.notes, self.lost, counts_all_gpus)

    def _unread_keys(self) -> list[str]:
        """Return the keys of the file that nobody has read so far."""
        return [key for key in self.file if key not in self._read]

    def _carry_by_alias(self, source: str) -> None:
        """Write a key of the file to the recipe's key for it, if there is one.

        The recipe's key is that of key_aliases.toml, or else the same key, or else the only key whose last part is the
        same.
        """
        value = self.file[source]
        if value is None or value == "auto" or _is_unset(value):
            self._read.add(source)
            return
        key = ""
        moved = spelling.find_dtrain_key(source, value)
        if moved is not None:
            key, value = moved
        elif source in self.keys.names:
            key = source
        elif "." not in source:
            # For example, `beta` is `dpo.beta` if only one section has a key of that name.
            same_name = [name for name in self.keys.names if name.rpartition(".")[2] == source]
            if len(same_name) == 1:
                key = same_name[0]
        if not key:
            return
        section = key.partition(".")[0]
        if self._is_of_another_method(section):
            self.lose(source, f"dtrain's key for it is {key}, which method={self.method} does not read")
        else:
            self.put(key, value, source)

    def _is_of_another_method(self, section: str) -> bool:
        """Check whether a section is that of a method other than the file's."""
        _, problems = self.keys.fit("method", section)
        return not problems and section != self.method

    def _lose_unread(self, key: str) -> None:
        """List a key that was not read as lost, unless it changes nothing: it is switched off, or dtrain needs none."""
        if self._refuses_method():
            return  # dtrain refuses the recipe because of its method, whatever this key means
        value = self.file[key]
        if value is None or value is False or _is_unset(value) or value in ("", "none", "no", [], {}):
            return
        if self._is_switched_off(key):
            return
        explanation = spelling.find_key_explanation(key)
        if explanation is None:
            self.lose(key, _NO_KEY)
        elif explanation.kind == "unneeded":
            return
        elif explanation.kind == "unsupported" and value == 0:  # 0 switches most features off
            return
        elif explanation.dtrain_key is None:
            self.lose(key, explanation.text)
        else:
            self.lose(key, explanation.text, explanation.dtrain_key)

    def _refuses_method(self) -> bool:
        """Check whether dtrain does not have the recipe's method, such as PPO with a critic."""
        _, problems = self.keys.fit("method", self.values.get("method", self.method))
        return bool(problems)

    def _is_switched_off(self, key: str) -> bool:
        """Check whether a key is in a section that its own `enable` or `enabled` switches off."""
        section = key.rpartition(".")[0]
        return any(self.file.get(f"{section}.{switch}") is False for switch in ("enable", "enabled"))

    def _fill_in_defaults(self) -> None:
        """Write each default of the tool that the file leaves out, if dtrain's default is another one."""
        for key, value in self.defaults.items():
            is_taken = any(_overlaps(key, other) for other in (*self.values, *self._refused))
            if is_taken or (key in self.keys.defaults and self.keys.defaults[key] == value):
                continue
            fitted, problems = self.keys.fit(key, value)
            is_dtrain_default = key in self.keys.defaults and self.keys.defaults[key] == fitted
            if not problems and not is_dtrain_default:
                self.set(key, fitted, f"{self.version}'s default")

    def _position(self, key: str) -> int:
        """Return the position of a key in docs/recipe.md. A section has the position of its first key."""
        for position, name in enumerate(self.keys.names):
            if f"{name}.".startswith(f"{key}."):
                return position
        return -1


def _in_form_of_recipe(key: str, value: Any) -> tuple[str, Any]:
    """Return a recipe's key and its value in the form that dtrain writes.

    - "q_proj,v_proj" becomes a list of two entries, if the key takes a list.
    - A list of one path becomes the path, and [all-linear] the word all-linear.
    - "grpo.kwargs.delta" with the value 3 becomes "grpo.kwargs" with the mapping {delta: 3}.
    """
    if isinstance(value, str) and key in _COMMA_LISTS and "," in value:
        value = [part.strip() for part in value.split(",")]
    if isinstance(value, list) and len(value) == 1 and (key.endswith(".path") or value == ["all-linear"]):
        value = value[0]
    section, is_entry, entry = key.partition("kwargs.")
    if is_entry:
        return f"{section}kwargs", {entry: value}
    return key, value


def find_meaning(key: str, value: Any) -> Meaning | None:
    """Translate another tool's value of a recipe's key to dtrain's value.

    key_aliases.toml writes a translation as `value`, `value, with key=value and key=value`, or `value, remark`.

    Args:
        key: The recipe's key, such as "optimizer.name".
        value: The other tool's value, such as "adamw_bnb_8bit".

    Returns:
        The translation. A value that is not in the table is returned unchanged. None if the table has only advice,
        because dtrain has no such value.
    """
    text = spelling.find_dtrain_value(key, value)
    if text is None:
        return Meaning(value, {}, "")
    word, _, remark = text.partition(",")
    if " " in word:
        return None
    remark = remark.strip()
    more: dict[str, Any] = {}
    if re.fullmatch(r"with ([\w.]+=\w+)( and [\w.]+=\w+)*", remark):
        for pair in remark.removeprefix("with ").split(" and "):
            name, _, other_value = pair.partition("=")
            more[name] = yaml.safe_load(other_value)
        remark = ""
    return Meaning(yaml.safe_load(word), more, remark)


def as_list(value: Any) -> list[Any]:
    """Return a value as a list. A text is split at its commas, and any other single value is the only entry.

    Example:
        >>> as_list("q_proj, v_proj"), as_list(["q_proj"]), as_list(3), as_list(None)
        (['q_proj', 'v_proj'], ['q_proj'], [3], [])
    """
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return list(value)
    return [] if value is None else [value]


def as_number(value: Any) -> int | float | None:
    """Return a value as a number. None if it is no finite number of an ordinary size.

    YAML reads some numbers as text, such as 1e-5.

    Example:
        >>> as_number("1e-5"), as_number(8), as_number("auto"), as_number(True)
        (1e-05, 8, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    # nan fails this comparison too
    if not isinstance(value, int | float) or not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        return None
    return value


def _matches(key: str, names: Iterable[str]) -> bool:
    """Check whether a key is one of these names, or is below one that ends with a dot."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def _is_unset(value: Any) -> bool:
    """Check whether a value is -1, which means "not given" in the files of most tools."""
    return isinstance(value, int | float) and value == -1


def _is_same(given: Any, value: Any) -> bool:
    """Check whether a value of the file and the recipe's value read alike, such as 3.0 and 3, or [a.jsonl] and a.jsonl.

    Longer values, such as lists of data sets, are not compared: nobody would recognise them in a comment.
    """
    if isinstance(given, Mapping) or (isinstance(given, list) and any(isinstance(entry, Mapping) for entry in given)):
        return True
    if not isinstance(given, bool) and not isinstance(value, bool) and as_number(given) == as_number(value) is not None:
        return True
    return given == value or as_list(given) == as_list(value)


def _overlaps(key: str, other: str) -> bool:
    """Check whether two dotted keys are the same, or one is a section that contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _shorten(value: Any) -> str:
    """Return a value for a message, at most 60 characters of it."""
    if value is None:
        return "null"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass
class Dataset:
    """One data set of a file, with dtrain's names for its options. None: the file does not set the option.

    `is_slice` is True if the file names a part of a split, such as `train[:95%]`. dtrain cannot read such a part.
    """

    path: str | list[str]
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    weight: float | None = None
    is_slice: bool = False

    def options(self) -> dict[str, Any]:
        """Return the options that are set, by their names in `data.train.sources`. The path is not one of them."""
        values = {
            "split": self.split if self.split != "train" else None,  # dtrain's default too
            "subset": self.subset,
            "revision": self.revision,
            "format": self.format,
            "columns": self.columns or None,
            "weight": self.weight if self.weight != 1 else None,
        }
        return {name: value for name, value in values.items() if value is not None}


def put_datasets(draft: Draft, section: str, datasets: Sequence[Dataset], source: str) -> None:
    """Write data sets to `data.train` or `data.val`.

    Data sets with the same options become a list of paths, others become `sources`.

    Args:
        draft: The draft.
        section: "data.train" or "data.val".
        datasets: The data sets.
        source: The file's key, for messages.
    """
    if section == "data.val":
        # Without its slice, a validation set would be the split `train`, which is trained on.
        datasets = [dataset for dataset in datasets if not dataset.is_slice]
    if not datasets:
        return
    first_options = datasets[0].options()
    if all(dataset.options() == first_options for dataset in datasets) and "weight" not in first_options:
        paths: list[str] = []
        for dataset in datasets:
            paths += dataset.path if isinstance(dataset.path, list) else [dataset.path]
        draft.put(f"{section}.path", paths, source)
        for name, value in first_options.items():
            draft.put(f"{section}.{name}", value, source)
    else:
        sources = [{"path": dataset.path, **dataset.options()} for dataset in datasets]
        draft.put(f"{section}.sources", sources, source)


def set_split(draft: Draft, dataset: Dataset, section: str, value: Any, source: str) -> None:
    """Set the split of a data set. A slice such as `train[:95%]` is listed as a lost key.

    Args:
        draft: The draft.
        dataset: The data set, whose `split` or `is_slice` is set.
        section: "data.train" or "data.val".
        value: The split as the file writes it. None changes nothing.
        source: The file's key, for messages.
    """
    if value is None:
        return
    if "[" in str(value) or "+" in str(value):
        dataset.is_slice = True
        key = f"{section}.split"
        draft.lose(source, f"{key} takes a split's name, no slice; write the part into a file of its own", key)
        return
    dataset.split = str(value)


def lose_alpaca_prompts(draft: Draft, source: str) -> None:
    """List as lost that the tool writes Alpaca's rows into a text of their own, as Stanford Alpaca did.

    Args:
        draft: The draft.
        source: The file's key of the format.
    """
    tool = draft.tool.name if draft.tool else "the other tool"
    draft.lose(
        source,
        f"{tool} writes Alpaca's own prompts (### Instruction: ...); set data.chat_template to null for the model's "
        "template, or to a file",
        "data.chat_template",
    )


def put_chat_template(draft: Draft, source: str) -> None:
    """Write a chat template: the path of a file, or its text. A template by a tool's own name is listed as lost.

    Args:
        draft: The draft.
        source: The file's key of the template.
    """
    value = draft.take(source)
    if value in (None, "tokenizer_default", "default"):  # the model's own
        return
    text = str(value)
    if "{%" in text or "{{" in text:
        draft.put("data.chat_template", text, source)
    elif text.endswith((".jinja", ".jinja2", ".txt")):
        draft.put("data.chat_template", text, source)
    else:
        tool = draft.tool.name if draft.tool else "the other tool"
        draft.lose(
            source,
            f"the template {text} is {tool}'s; set data.chat_template to null for the model's own, or to a file",
            "data.chat_template",
        )
