"""Datasets of the Hugging Face hub by their id, `owner/name`, through huggingface_hub and its cache.

Only README.md and the files of one split are downloaded; `hub_splits` decides which files these are. Token, endpoint,
offline mode and the cache's place are huggingface_hub's settings (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME).
Torch is not imported.
"""

import glob
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dtrain.base.errors import UserError, first_line
from dtrain.base.hub import cached_listing, cached_snapshot, hub_errors, incomplete
from dtrain.data.sources.hub_splits import Pick, choose_files

README = "README.md"


@dataclass(frozen=True)
class CachedSplit:
    """A split in the cache, some of whose files may be still to come.

    Attributes:
        directory: The repository's directory in the cache, at one commit.
        paths: The split's files, relative to `directory`.
    """

    directory: Path
    paths: list[str]

    @property
    def files(self) -> list[Path]:
        return [self.directory / path for path in self.paths]

    @property
    def missing(self) -> list[str]:
        return [path for path in self.paths if not (self.directory / path).is_file()]


def find_cached(name: str, pick: Pick, key: str = "data.train") -> CachedSplit | None:
    """Return a split as far as it is in the cache; None if no download of the dataset began. No network.

    Args:
        name: The dataset's id.
        pick: Which split, subset and revision.
        key: Key of the source in the recipe, without .path.

    Raises:
        UserError: If the dataset in the cache has no such split or subset.
    """
    directory = cached_snapshot(name, "dataset", pick.revision, [README])
    return None if directory is None else _split_in(directory, name, pick, key)


def cached(name: str, pick: Pick, key: str = "data.train") -> list[Path] | None:
    """Return the files of a split; None unless all are in the cache. No network. Raises as `find_cached` does."""
    split = find_cached(name, pick, key)
    return None if split is None or split.missing else split.files


def absent(name: str, pick: Pick, key: str) -> str:
    """Return the message for a dataset that `cached` does not find. key: of the recipe."""
    command = f"dtrain download --data {name}{pick.options()}"
    if missing := _missing(name, pick, key.removesuffix(".path")):
        return f"{key}={incomplete(name, missing, command)}"
    return (
        f"{key}={name} is no file here, and as a dataset of the Hugging Face hub it is not in this machine's cache: "
        f"`{command}` fetches it"
    )


def look(name: str, pick: Pick, key: str = "data.train") -> CachedSplit:
    """Download the README.md and the listing of a dataset, and return the split, whose files may be still to come.

    Raises:
        UserError: If the hub does not have the dataset or the split, or cannot be reached.
    """
    return _split_in(_fetch(name, pick, key, [README], pick.revision), name, pick, key)


def download(name: str, pick: Pick, key: str = "data.train") -> list[Path]:
    """Download the files of a split that are not in the cache, and return them all.

    Several processes may call this at once, because huggingface_hub locks each file. Raises as `look` does.
    """
    split = look(name, pick, key)
    patterns = [glob.escape(path) for path in split.paths]
    _fetch(name, pick, key, patterns, revision=split.directory.name)  # the same commit, even if the branch moves on
    if split.missing:
        raise UserError(f"{name}: the hub did not give {', '.join(split.missing[:3])}")
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


def _missing(name: str, pick: Pick, key: str) -> list[str]:
    """Return the files of a split that an interrupted download did not reach; [] if it never began."""
    split = find_cached(name, pick, key)
    return [] if split is None else split.missing


def _fetch(name: str, pick: Pick, key: str, patterns: list[str], revision: str | None) -> Path:
    """Download the files of a dataset that match `patterns`, and return its directory in the cache."""
    from huggingface_hub import snapshot_download

    command = f"dtrain download --data {name}{pick.options()}"
    with hub_errors(name, "dataset", command, f"{key}.path to files", partial(_missing, name, pick, key)):
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))


def _split_in(directory: Path, name: str, pick: Pick, key: str) -> CachedSplit:
    readme = directory / README
    card = read_card(readme, name) if readme.is_file() else {}
    listing = cached_listing(name, "dataset", directory.name)
    if not listing:  # files of an early huggingface_hub, or that were copied there
        listing = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return CachedSplit(directory, choose_files(name, listing, card, pick.split, pick.subset, key))
