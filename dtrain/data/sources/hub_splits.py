"""Which files of a dataset repository on the Hugging Face hub are one split of one subset.

The README.md of a repository may list its subsets (configs) and their splits. Otherwise the names of files and folders
decide, as in the `datasets` library. For example, `data/test-00000-of-00001.parquet` belongs to the split `test`, and
`dev/rows.jsonl` to `validation`. Nothing is read or downloaded here.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.data.formats.formats import ENDINGS, ending_of

# Words for the splits in names of files and folders.
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
_SHARD = re.compile(r"(.+?)-\d{5}-of-(\d{5})(-[0-9a-f]+)?")
_NOT_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


class Pick(NamedTuple):
    """A part of a dataset: `split` of `subset` (None: its default) at `revision` (None: its main branch)."""

    split: str = "train"
    subset: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, source: Any) -> "Pick":
        """Return the part that a source of the recipe names."""
        default = cls()
        split, subset, revision = (getattr(source, name, getattr(default, name)) for name in cls._fields)
        return cls(str(split), subset, revision)

    def options(self) -> str:
        """Return the options of `dtrain download` for this part."""
        options = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return "".join(f" --{name} {value}" for name, value in options.items())


@dataclass(frozen=True)
class Subset:
    """A subset of a dataset.

    Attributes:
        patterns: Patterns of the files of each split, relative to `folder`; None if the files' names decide.
        folder: Folder of the subset's files; "" for the repository itself.
        is_default: Whether it is used if the recipe names no subset.
    """

    patterns: Mapping[str, Sequence[str]] | None
    folder: str = ""
    is_default: bool = False


def choose_files(
    name: str, listing: Sequence[str], card: Mapping[str, Any], split: str, subset: str | None, key: str
) -> list[str]:
    """Return the paths of the files that are `split` of `subset`, sorted.

    Args:
        name: The dataset's id.
        listing: Every path of the repository.
        card: The metadata in front of its README.md.
        split: Name of the split, or another word for it (`dev`).
        subset: Name of the subset; None for the repository's default.
        key: Key of the source in the recipe, such as data.train.

    Raises:
        UserError: If there is no such split or subset; the message names those that exist.
    """
    files = sorted(path for path in listing if _is_rows(path))
    if not files:
        kinds = ", ".join(sorted({PurePosixPath(path).suffix for path in listing if "." in path})) or "none"
        raise UserError(
            f"{key}.path={name} holds no file that dtrain reads ({', '.join(ENDINGS)}; it has {kinds}); "
            f"{key}.revision=refs/convert/parquet is the hub's own copy in parquet, where it has made one"
        )
    subsets = _subsets_of_card(card) or _subsets_of_folders(files)
    chosen_subset = _choose_subset(name, subsets, subset, key)
    splits = _splits(name, subsets[chosen_subset], files, key)
    chosen = splits.get(split) or splits.get(SPLIT_OF.get(split, split))
    if not chosen:
        of = f" of subset {chosen_subset}" if len(subsets) > 1 else ""
        raise UserError(f"{key}.split={split}: {name} has no such split{of}; there are {', '.join(sorted(splits))}")
    _refuse_missing_shards(name, chosen)
    return chosen


def _is_rows(path: str) -> bool:
    """Return whether a path is a data file: neither hidden nor one of the files that describe a dataset."""
    name = PurePosixPath(path)
    is_hidden = any(part.startswith((".", "_")) for part in name.parts)
    return ending_of(name) in ENDINGS and not is_hidden and name.name not in _NOT_ROWS


def _subsets_of_card(card: Mapping[str, Any]) -> dict[str, Subset]:
    """Return the subsets in `configs` of a README.md; {} if it has none."""
    subsets = {}
    for config in card.get("configs") or []:
        if isinstance(config, dict) and isinstance(config.get("config_name"), str):
            name = config["config_name"]
            subsets[name] = Subset(
                patterns=_patterns(config.get("data_files")),
                folder=str(config.get("data_dir") or "").strip("/"),
                is_default=config.get("default") is True or name == "default",
            )
    return subsets


def _patterns(data_files: Any) -> dict[str, list[str]] | None:
    """Return the patterns of each split in a config's `data_files`.

    It is a pattern, a list of patterns, or a list of objects: `[{split: test, path: [a-*.csv, b-*.csv]}]`.
    """
    if not data_files or not isinstance(data_files, str | list):
        return None
    patterns: dict[str, list[str]] = {}
    entries = data_files if isinstance(data_files, list) else [data_files]
    for entry in entries:
        split = "train"
        paths = entry
        if isinstance(entry, dict):
            split = str(entry.get("split"))
            paths = entry.get("path")
        if not isinstance(paths, list):
            paths = [paths]
        for path in paths:
            patterns.setdefault(split, []).append(str(path))
    return patterns


def _subsets_of_folders(files: Sequence[str]) -> dict[str, Subset]:
    """Return the subsets of a repository whose README.md lists none: its folders, unless these are splits."""
    folders = {path.split("/")[0] for path in files if "/" in path}
    has_files_at_top = any("/" not in path for path in files)
    if not has_files_at_top and "data" not in folders and not any(map(_split_in_name, folders)):
        return {folder: Subset(None, folder, is_default=len(folders) == 1) for folder in sorted(folders)}
    subsets = {"default": Subset(None, is_default=True)}
    for folder in sorted(folders - {"data"}):
        if not _split_in_name(folder):
            subsets[folder] = Subset(None, folder)
    return subsets


def _choose_subset(name: str, subsets: Mapping[str, Subset], subset: str | None, key: str) -> str:
    if subset is not None:
        if subset not in subsets:
            raise UserError(f"{key}.subset={subset}: there is no such subset; {name} has {', '.join(subsets)}")
        return subset
    if len(subsets) == 1:
        return next(iter(subsets))
    for candidate, entry in subsets.items():
        if entry.is_default:
            return candidate
    raise UserError(f"{key}.subset is not set, and {name} has {', '.join(subsets)}: name one of them")


def _splits(name: str, subset: Subset, files: Sequence[str], key: str) -> dict[str, list[str]]:
    """Return the files of each split of a subset."""
    prefix = f"{subset.folder}/" if subset.folder else ""
    paths = [path for path in files if path.startswith(prefix)]
    splits: dict[str, list[str]] = {}
    if subset.patterns is not None:
        for split, patterns in subset.patterns.items():
            expressions = [_expression(pattern, name, key) for pattern in patterns]
            for path in paths:
                if any(expression.match(path.removeprefix(prefix)) for expression in expressions):
                    splits.setdefault(split, []).append(path)
        return splits
    for path in paths:
        is_of_another_subset = (
            not prefix and "/" in path and not path.startswith("data/") and not _split_in_name(path.split("/")[0])
        )
        if not is_of_another_subset:
            splits.setdefault(_split_of(path.removeprefix(prefix)), []).append(path)
    without_name = splits.pop("", [])
    if without_name and not splits:
        return {"train": without_name}
    return splits


def _split_of(path: str) -> str:
    """Return the split that the name of a file, or else of its folders, stands for; "" if they name none."""
    name = PurePosixPath(path)
    shard = _SHARD.fullmatch(name.name.split(".")[0])
    if shard:
        return SPLIT_OF.get(shard[1], shard[1])
    for part in reversed(name.parts):
        split = _split_in_name(part)
        if split:
            return split
    return ""


def _split_in_name(name: str) -> str:
    """Return the split that is a word in the name of a file or folder; "" if there is none."""
    for word in re.split(r"[^a-z]+", name.lower()):
        if word in SPLIT_OF:
            return SPLIT_OF[word]
    return ""


def _expression(pattern: str, name: str, key: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern in a README.md, which is a glob of fsspec."""
    from fsspec.utils import glob_translate  # only a README.md with `data_files` needs fsspec

    try:
        return re.compile(glob_translate(pattern.removeprefix("./").strip("/")))
    except ValueError as error:
        raise UserError(
            f"{name}: data_files in its README.md has {pattern}, which fsspec cannot read ({error}). Set {key}.path to "
            f"the files, such as hf://datasets/{name}/*.parquet"
        ) from error


def _refuse_missing_shards(name: str, files: Sequence[str]) -> None:
    """Raise UserError if a shard is missing, because the repository or the cache then has only a part of the split."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for path in files:
        folder, _, file = path.rpartition("/")
        shard = _SHARD.match(file)
        if shard:
            counts[folder, shard[1], shard[2]] += 1
    for (folder, stem, total), count in counts.items():
        if count != int(total):
            raise UserError(f"{name}: of {folder}/{stem}-*-of-{total} there are {count} files, not {int(total)}")
