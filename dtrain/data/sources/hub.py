"""Datasets of the Hugging Face hub by their id, `owner/name`: the files of one split, and their download.

The README.md of a repository may list its subsets (configs) and their splits. Otherwise the names of files and folders
decide, as in the `datasets` library. For example, `data/test-00000-of-00001.parquet` belongs to the split `test`, and
`dev/rows.jsonl` to `validation`.

Only README.md and the files of one split are downloaded, into huggingface_hub's cache. Token, endpoint, offline mode
and the cache's directory are huggingface_hub's settings (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME).

This module does not import torch.
"""

import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from dtrain.base.errors import UserError, first_line
from dtrain.base.hub import cached_listing, cached_snapshot, hub_errors, incomplete_download_message
from dtrain.data.formats.formats import FILE_KINDS, file_suffix

# Words in names of files and folders that mean a split.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in SPLIT_WORDS.items() for word in words}
# A file that is one part of a split, such as train-00000-of-00003.parquet.
_SHARD = re.compile(r"(.+?)-\d{5}-of-(\d{5})(-[0-9a-f]+)?")
# Files that describe a dataset.
_NOT_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")

README = "README.md"


class DatasetPart(NamedTuple):
    """A part of a dataset.

    Attributes:
        split: Name of the split.
        subset: Name of the subset; None for the default one.
        revision: Branch, tag or commit; None for the main branch.

    Example:
        >>> DatasetPart("test", revision="v2").options()
        ' --split test --revision v2'
    """

    split: str = "train"
    subset: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, source: Any) -> "DatasetPart":
        """Return the split, subset and revision of a source of the recipe. Missing attributes have their defaults."""
        return cls(
            split=str(getattr(source, "split", "train")),
            subset=getattr(source, "subset", None),
            revision=getattr(source, "revision", None),
        )

    def options(self) -> str:
        """Return the options of `dtrain download` for this part."""
        options = ""
        for name, value in self._asdict().items():
            if value != self._field_defaults[name]:
                options += f" --{name} {value}"
        return options


@dataclass(frozen=True)
class Subset:
    """A subset of a dataset.

    Attributes:
        patterns: Patterns of the files of each split, relative to `folder`; None if the names of the files decide.
        folder: Folder of the subset's files; "" for the repository itself.
        is_default: Whether this subset is used if the recipe names none.
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
        UserError: If there is no such split or subset. The error names those that exist.

    Example:
        >>> listing = ["README.md", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"]
        >>> choose_files("owner/name", listing, card={}, split="test", subset=None, key="data.train")
        ['data/test-00000-of-00001.parquet']
    """
    files = sorted(path for path in listing if _is_rows(path))
    if not files:
        suffixes = sorted({PurePosixPath(path).suffix for path in listing if "." in path})
        raise UserError(
            f"{key}.path={name} has no file that dtrain reads ({', '.join(FILE_KINDS)}), only "
            f"{', '.join(suffixes) or 'files without a suffix'}. Set {key}.revision=refs/convert/parquet, which is the "
            "hub's copy in parquet if it has made one"
        )
    subsets = _subsets_of_card(card) or _subsets_of_folders(files)
    chosen_subset = _choose_subset(name, subsets, subset, key)
    splits = _splits(name, subsets[chosen_subset], files, key)
    chosen = splits.get(split) or splits.get(SPLIT_OF.get(split, split))
    if not chosen:
        where = f" of subset {chosen_subset}" if len(subsets) > 1 else ""
        raise UserError(
            f"{key}.split={split}: {name} has no such split{where}. Its splits are {', '.join(sorted(splits))}"
        )
    _refuse_missing_shards(name, chosen)
    return chosen


def _is_rows(path: str) -> bool:
    """Return True if a path is a data file. Hidden files, and files that describe a dataset, are none."""
    name = PurePosixPath(path)
    is_hidden = any(part.startswith((".", "_")) for part in name.parts)
    return file_suffix(name) in FILE_KINDS and not is_hidden and name.name not in _NOT_ROWS


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

    `data_files` is a pattern, a list of patterns, or a list of objects: `[{split: test, path: [a-*.csv, b-*.csv]}]`.
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
    """Return the subsets of a repository whose README.md lists none: its folders, unless they are named as splits."""
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
    """Return the name of the subset that a recipe uses. Raises UserError if there is no such subset, or no default."""
    if subset is not None:
        if subset not in subsets:
            raise UserError(f"{key}.subset={subset}: {name} has no such subset. Its subsets are {', '.join(subsets)}")
        return subset
    if len(subsets) == 1:
        (only_subset,) = subsets
        return only_subset
    for candidate, entry in subsets.items():
        if entry.is_default:
            return candidate
    raise UserError(f"{key}.subset is not set, but {name} has the subsets {', '.join(subsets)}. Name one of them")


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
    # Files whose names mean no split are the training split, but only if no other file means a split.
    without_name = splits.pop("", [])
    if without_name and not splits:
        return {"train": without_name}
    return splits


def _split_of(path: str) -> str:
    """Return the split that the name of a file, or else of its folders, means; "" if they name none.

    For example, "data/test-00000-of-00001.parquet" means "test", and "dev/rows.jsonl" means "validation".
    """
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
    """Return the split that a word in the name of a file or folder means; "" if there is none."""
    for word in re.split(r"[^a-z]+", name.lower()):
        if word in SPLIT_OF:
            return SPLIT_OF[word]
    return ""


def _expression(pattern: str, name: str, key: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern in a README.md. Patterns are globs of fsspec."""
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
            raise UserError(f"{name}: {folder}/{stem}-*-of-{total} are {count} files, not {int(total)}")


@dataclass(frozen=True)
class CachedSplit:
    """A split in the cache. Some of its files may not be downloaded yet.

    Attributes:
        directory: The repository's directory in the cache, at one commit.
        paths: Files of the split, relative to `directory`.
    """

    directory: Path
    paths: list[str]

    @property
    def files(self) -> list[Path]:
        """The files of the split."""
        return [self.directory / path for path in self.paths]

    @property
    def missing(self) -> list[str]:
        """The paths that are not downloaded."""
        return [path for path in self.paths if not (self.directory / path).is_file()]


def find_cached(name: str, part: DatasetPart, key: str = "data.train") -> CachedSplit | None:
    """Return a split as far as it is in the cache; None if no download of the dataset began. No network is used.

    Args:
        name: The dataset's id.
        part: Split, subset and revision.
        key: Key of the source in the recipe, without .path.

    Raises:
        UserError: If the dataset in the cache has no such split or subset.
    """
    directory = cached_snapshot(name, "dataset", part.revision, [README])
    return None if directory is None else _split_in(directory, name, part, key)


def cached_files(name: str, part: DatasetPart, key: str = "data.train") -> list[Path] | None:
    """Return the files of a split; None unless all are in the cache. No network is used. Raises as `find_cached`."""
    split = find_cached(name, part, key)
    return None if split is None or split.missing else split.files


def describe_uncached(name: str, part: DatasetPart, key: str) -> str:
    """Return the error for a dataset that `cached_files` does not find, with the command that downloads it."""
    command = f"dtrain download --data {name}{part.options()}"
    missing = _missing_files(name, part, key.removesuffix(".path"))
    if missing:
        return f"{key}={incomplete_download_message(name, missing, command)}"
    return (
        f"{key}={name} is not a file here, and as a dataset of the Hugging Face hub it is not in this machine's cache. "
        f"Run `{command}` to download it"
    )


def fetch_listing(name: str, part: DatasetPart, key: str = "data.train") -> CachedSplit:
    """Download the README.md and the listing of a dataset, but not its files.

    Returns:
        The split.

    Raises:
        UserError: If the hub does not have the dataset or the split, or cannot be reached.
    """
    return _split_in(_fetch(name, part, key, [README], part.revision), name, part, key)


def download(name: str, part: DatasetPart, key: str = "data.train") -> list[Path]:
    """Download the files of a split that are not in the cache, and return them all.

    Several processes may call this at once, because huggingface_hub locks each file. Raises as `fetch_listing`.
    """
    split = fetch_listing(name, part, key)
    patterns = [glob.escape(path) for path in split.paths]
    _fetch(name, part, key, patterns, revision=split.directory.name)  # the same commit, even if the branch moves on
    if split.missing:
        raise UserError(f"{name}: the hub did not send {', '.join(split.missing[:3])}")
    return split.files


def read_card(readme: Path, name: str) -> dict[str, Any]:
    """Return the metadata in front of the README.md of a model or dataset; {} if there are none.

    Raises:
        UserError: If they are not YAML.
    """
    from huggingface_hub import metadata_load

    try:
        return metadata_load(readme) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: the YAML in front of its README.md is broken ({first_line(error)})") from error


def _missing_files(name: str, part: DatasetPart, key: str) -> list[str]:
    """Return the files of a split that an interrupted download did not reach; [] if it never began."""
    split = find_cached(name, part, key)
    return [] if split is None else split.missing


def _fetch(name: str, part: DatasetPart, key: str, patterns: list[str], revision: str | None) -> Path:
    """Download the files of a dataset that match `patterns`, and return its directory in the cache."""
    from huggingface_hub import snapshot_download

    command = f"dtrain download --data {name}{part.options()}"
    with hub_errors(name, "dataset", command, f"{key}.path to files", partial(_missing_files, name, part, key)):
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))


def _split_in(directory: Path, name: str, part: DatasetPart, key: str) -> CachedSplit:
    """Return the split in a repository's directory of the cache."""
    readme = directory / README
    card = read_card(readme, name) if readme.is_file() else {}
    listing = cached_listing(name, "dataset", directory.name)
    if not listing:  # the cache of an early huggingface_hub, or files that were copied there
        listing = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return CachedSplit(directory, choose_files(name, listing, card, part.split, part.subset, key))
