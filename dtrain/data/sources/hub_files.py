"""Files of a split in a dataset's repository: by the `configs` of its README.md where it has them, else by names and
folders, as the `datasets` library goes by them. Torch is not imported.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from dtrain.base.errors import UserError
from dtrain.base.name_patterns import fullmatch, pattern_error
from dtrain.data.sources.file_kinds import KINDS, ending_of

# Words for the splits in names of files and folders.
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
_SHARD = re.compile(r"(.+?)-\d{5}-of-(\d{5})(-[0-9a-f]+)?")
_FRONT = re.compile(r"\A\s*---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_GLOB = re.compile(r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|[^*?\[]+|\[")
_NOT_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Subset:
    """A subset: split -> patterns of its files, or None where names tell; `folder` holds them all."""

    splits: Mapping[str, Sequence[str]] | None
    folder: str = ""
    is_default: bool = False


def choose(name: str, listing: Sequence[str], readme: str, split: str, subset: str | None, key: str) -> list[str]:
    """Return the paths, sorted, of the files that are `split` of `subset` (None: the repository's own default).

    name: the dataset's id. listing: every path in the repository. readme: the text of its README.md.
    key: of the recipe, without .path. Raises UserError that names the subsets, or the splits, that there are.
    """
    files = sorted(path for path in listing if _is_rows(path))
    if not files:
        kinds = ", ".join(sorted({PurePosixPath(path).suffix for path in listing if "." in path})) or "none"
        raise UserError(
            f"{key}.path={name} holds no file that dtrain reads ({', '.join(KINDS)}; it has {kinds}); "
            f"{key}.revision=refs/convert/parquet is the hub's own copy in parquet, where it has made one"
        )
    subsets = _subsets(front_of(readme, name), files)
    wanted = _wanted(name, subsets, subset, key)
    splits = _splits(subsets[wanted], files)
    chosen = splits.get(split) or splits.get(SPLIT_OF.get(split, split))
    if not chosen:
        of = f" of subset {wanted}" if len(subsets) > 1 else ""
        raise UserError(f"{key}.split={split}: {name} has no such split{of}; there are {', '.join(sorted(splits))}")
    _refuse_parts(name, chosen)
    return chosen


def _is_rows(path: str) -> bool:
    name = PurePosixPath(path)
    hidden = any(part.startswith((".", "_")) for part in name.parts)
    return ending_of(name) in KINDS and not hidden and name.name not in _NOT_ROWS


def front_of(readme: str, name: str) -> dict[str, Any]:
    """Return the YAML in front of a README.md."""
    match = _FRONT.match(readme)
    try:
        value = yaml.safe_load(match[1]) if match else {}
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: the YAML in front of its README.md is broken ({type(error).__name__})") from error
    return value if isinstance(value, dict) else {}


def _subsets(front: Mapping[str, Any], files: Sequence[str]) -> dict[str, Subset]:
    """Return the subsets by the README's `configs`; without these the repository's folders, unless they are splits."""
    subsets = {}
    configs = front.get("configs")
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and isinstance(config.get("config_name"), str):
            folder = str(config.get("data_dir") or "").strip("/")
            name = config["config_name"]
            is_default = config.get("default") is True or name == "default"
            subsets[name] = Subset(_patterns(config.get("data_files")), folder, is_default)
    if subsets:
        return subsets
    tops = {path.split("/")[0] for path in files if "/" in path}
    if any("/" not in path for path in files) or "data" in tops or any(_word(top) for top in tops):
        shared = Subset(None, is_default=True)
        return {"default": shared} | {top: Subset(None, top) for top in sorted(tops - {"data"}) if not _word(top)}
    return {top: Subset(None, top, len(tops) == 1) for top in sorted(tops)}


def _patterns(value: Any) -> dict[str, Sequence[str]] | None:
    """Return patterns by split of a config's `data_files`: a pattern, a list of them, or a list of {split, path}."""
    if isinstance(value, str):
        return {"train": [value]}
    if not isinstance(value, list) or not value:
        return None
    patterns: dict[str, list[str]] = {}
    for entry in value:
        split, path = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        paths = path if isinstance(path, list) else [path]
        patterns.setdefault(str(split), []).extend(item for item in paths if isinstance(item, str))
    return {**patterns}


def _wanted(name: str, subsets: Mapping[str, Subset], subset: str | None, key: str) -> str:
    if subset in subsets:
        return str(subset)
    defaults = [candidate for candidate, entry in subsets.items() if entry.is_default]
    if subset is None and (len(subsets) == 1 or defaults):
        return next(iter(defaults or subsets))
    there = f"{name} has {', '.join(subsets)}"
    if subset is None:
        raise UserError(f"{key}.subset is not set, and {there}: name one of them")
    raise UserError(f"{key}.subset={subset}: there is no such subset; {there}")


def _splits(subset: Subset, files: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split."""
    below = f"{subset.folder}/" if subset.folder else ""
    inside = [path for path in files if path.startswith(below)]
    if subset.splits is not None:
        matched = {
            split: [path for path in inside if any(_fits(path[len(below) :], pattern) for pattern in patterns)]
            for split, patterns in subset.splits.items()
        }
        return {split: paths for split, paths in matched.items() if paths}
    if not below:  # folders that are subsets of their own take no part
        inside = [path for path in inside if "/" not in path or path.startswith("data/") or _word(path.split("/")[0])]
    named: dict[str, list[str]] = {}
    for path in inside:
        named.setdefault(_split_of(path[len(below) :]), []).append(path)
    if set(named) == {""}:
        return {"train": named[""]}
    return {split: paths for split, paths in named.items() if split}


def _split_of(path: str) -> str:
    """Return the split that a path names; "" where it names none."""
    name = PurePosixPath(path)
    stem = name.name.split(".")[0]
    if shard := _SHARD.fullmatch(stem):
        return SPLIT_OF.get(shard[1], shard[1])
    return _word(name.name) or next((word for part in reversed(name.parts[:-1]) if (word := _word(part))), "")


def _word(text: str) -> str:
    """Return the split that a name of a file or folder has a word for; "" where it has none."""
    return next((SPLIT_OF[word] for word in re.split(r"[^a-z]+", text.lower()) if word in SPLIT_OF), "")


def _fits(path: str, pattern: str) -> bool:
    """Return whether `path` matches, as by fsspec's glob: `*` within a folder, `**` across them."""
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = _GLOB.findall(pattern.removeprefix("./").strip("/"))
    text = "".join(
        pieces.get(part) or (part.replace("[!", "[^") if part[0] == "[" and len(part) > 1 else re.escape(part))
        for part in parts
    )
    return path == pattern if pattern_error(text) else fullmatch(text, path)


def _refuse_parts(name: str, files: Sequence[str]) -> None:
    """Raise UserError for a shard missing in the listing: the repository, or the cache, holds a part of the split."""
    places = (path.rpartition("/") for path in files)
    counted = Counter((folder, shard[1], shard[2]) for folder, _, file in places if (shard := _SHARD.match(file)))
    for (folder, stem, total), count in counted.items():
        if count != int(total):
            raise UserError(f"{name}: of {folder}/{stem}-*-of-{total} there are {count} files, not {int(total)}")
