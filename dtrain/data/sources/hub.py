"""Datasets of the Hugging Face hub by their id, `owner/name`: their files in huggingface_hub's cache, or downloaded
into it. Only the files of one split of one subset are fetched: by the `configs` of the README.md where it has them,
else by names and folders, as the `datasets` library goes by them. Torch is not imported.
"""

import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from dtrain.base.errors import UserError
from dtrain.base.hub import cached_listing, hub_errors, incomplete
from dtrain.base.json_files import LARGE, read_text
from dtrain.base.name_patterns import pattern_error
from dtrain.data.formats.formats import ENDINGS, ending_of

if TYPE_CHECKING:
    from dtrain.data.sources.files import Pick

README = "README.md"
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


def absent(name: str, pick: "Pick", key: str) -> str:
    """Return the message for a dataset that `cached` does not find. key: of the recipe."""
    if missing := missing_files(name, pick, key.removesuffix(".path")):
        return f"{key}={incomplete(name, missing, f'dtrain download --data {name}{pick.options()}')}"
    return (
        f"{key}={name} is no file here, and as a dataset of the Hugging Face hub it is not in this machine's cache: "
        f"`dtrain download --data {name}{pick.options()}` fetches it"
    )


def cached(name: str, pick: "Pick", key: str = "data.train") -> list[Path] | None:
    """Return the files of a split in the cache; None where they are not there whole. No network.

    key: of the recipe, without .path. Raises UserError where the cache knows that there is no such split or subset.
    """
    directory = _snapshot(name, pick)
    if directory is None:
        return None
    files = [directory / path for path in _chosen(name, directory, pick, key)]
    return files if all(file.is_file() for file in files) else None


def missing_files(name: str, pick: "Pick", key: str = "data.train") -> list[str]:
    """Return the files of a split that an interrupted download did not reach; [] if it never began. No network.

    key: of the recipe, without .path. Raises UserError as `cached` does.
    """
    directory = _snapshot(name, pick)
    if directory is None:
        return []
    return [path for path in _chosen(name, directory, pick, key) if not (directory / path).is_file()]


def _snapshot(name: str, pick: "Pick") -> Path | None:
    """Return the directory of a dataset in the cache; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        options: dict[str, Any] = {"repo_type": "dataset", "revision": pick.revision, "local_files_only": True}
        return Path(snapshot_download(name, allow_patterns=[README], **options))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def look(name: str, pick: "Pick", key: str = "data.train") -> tuple[Path, list[str]]:
    """Return the directory of a dataset in the cache, with its README and the hub's listing alone, and the files of the
    split in it, which may be still to come. Raises UserError that says what to do where the hub does not give them."""
    directory = _fetched(name, pick, key, [README], pick.revision)
    return directory, _chosen(name, directory, pick, key)


def download(name: str, pick: "Pick", key: str = "data.train") -> list[Path]:
    """Return the files of a split in the cache, the missing ones downloaded. Several processes may ask at once: the
    library locks each file. Raises UserError as `look` does."""
    directory, chosen = look(name, pick, key)
    _fetched(name, pick, key, [glob.escape(path) for path in chosen], directory.name)  # one commit, whatever is pushed
    lacking = [path for path in chosen if not (directory / path).is_file()]
    if lacking:
        raise UserError(f"{name}: the hub did not give {', '.join(lacking[:3])}")
    return [directory / path for path in chosen]


def _fetched(name: str, pick: "Pick", key: str, patterns: list[str], revision: str | None) -> Path:
    """Return the directory of a dataset in the cache, its files of these patterns downloaded. Raises UserError."""
    from huggingface_hub import snapshot_download

    command = f"dtrain download --data {name}{pick.options()}"
    with hub_errors(name, "dataset", command, f"{key}.path to files", partial(missing_files, name, pick, key)):
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))


def _listing(name: str, directory: Path) -> list[str]:
    """Return every path of the repository at the commit of that snapshot. Where the library keeps no listing, of an
    earlier version or of files that others put there, the files that are there."""
    if listing := cached_listing(name, "dataset", directory.name):
        return listing
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]


def _chosen(name: str, directory: Path, pick: "Pick", key: str) -> list[str]:
    readme = read_text(directory / README, LARGE) if (directory / README).is_file() else ""
    return choose(name, _listing(name, directory), readme, pick.split, pick.subset, key)


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
            f"{key}.path={name} holds no file that dtrain reads ({', '.join(ENDINGS)}; it has {kinds}); "
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
    return ending_of(name) in ENDINGS and not hidden and name.name not in _NOT_ROWS


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
    if pattern_error(text):
        return path == pattern
    return re.fullmatch(text, path) is not None


def _refuse_parts(name: str, files: Sequence[str]) -> None:
    """Raise UserError for a shard missing in the listing: the repository, or the cache, holds a part of the split."""
    places = (path.rpartition("/") for path in files)
    counted = Counter((folder, shard[1], shard[2]) for folder, _, file in places if (shard := _SHARD.match(file)))
    for (folder, stem, total), count in counted.items():
        if count != int(total):
            raise UserError(f"{name}: of {folder}/{stem}-*-of-{total} there are {count} files, not {int(total)}")
