"""Datasets of the Hugging Face hub by their id, `owner/name`: their files in huggingface_hub's cache, or downloaded
into it. Only the files of one split of one subset are fetched. Torch is not imported.
"""

import glob
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.hub import hub_errors, is_id
from dtrain.base.json_files import LARGE, read_text
from dtrain.data.sources.file_kinds import KINDS
from dtrain.data.sources.hub_files import choose

README = "README.md"


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


def is_data_id(path: str) -> bool:
    """Return whether `path` reads as a dataset's id on the hub. A file of that name comes first."""
    return is_id(path) and not any(path.lower().endswith((kind, f"{kind}.gz")) for kind in KINDS)


def absent(name: str, pick: Pick, key: str) -> str:
    """Return the message for a dataset that `cached` does not find. key: of the recipe."""
    return (
        f"{key}={name} is no file here, and as a dataset of the Hugging Face hub it is not in this machine's cache: "
        f"`dtrain download --data {name}{pick.options()}` fetches it"
    )


def cached(name: str, pick: Pick, key: str = "data.train") -> list[Path] | None:
    """Return the files of a split in the cache; None where they are not there whole. No network.

    key: of the recipe, without .path. Raises UserError where the cache knows that there is no such split or subset.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        options: dict[str, Any] = {"repo_type": "dataset", "revision": pick.revision, "local_files_only": True}
        directory = Path(snapshot_download(name, allow_patterns=[README], **options))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    listing = _listing(name, directory)
    files = [directory / path for path in choose(name, listing, _readme(directory), pick.split, pick.subset, key)]
    return files if all(file.is_file() for file in files) else None


def look(name: str, pick: Pick, key: str = "data.train") -> tuple[Path, list[str]]:
    """Return the directory of a dataset in the cache, with its README and the hub's listing alone, and the files of the
    split in it, which may be still to come. Raises UserError that says what to do where the hub does not give them."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"repo_type": "dataset", "revision": pick.revision}
    with hub_errors(name, "dataset", f"dtrain download --data {name}{pick.options()}", f"{key}.path to files"):
        directory = Path(snapshot_download(name, allow_patterns=[README], **options))
    return directory, choose(name, _listing(name, directory), _readme(directory), pick.split, pick.subset, key)


def download(name: str, pick: Pick, key: str = "data.train") -> list[Path]:
    """Return the files of a split in the cache, the missing ones downloaded. Several processes may ask at once: the
    library locks each file. Raises UserError as `look` does."""
    from huggingface_hub import snapshot_download

    directory, chosen = look(name, pick, key)
    options: dict[str, Any] = {"repo_type": "dataset", "revision": directory.name}  # one commit, whatever is pushed
    with hub_errors(name, "dataset", f"dtrain download --data {name}{pick.options()}", f"{key}.path to files"):
        snapshot_download(name, allow_patterns=[glob.escape(path) for path in chosen], **options)
    lacking = [path for path in chosen if not (directory / path).is_file()]
    if lacking:
        raise UserError(f"{name}: the hub did not give {', '.join(lacking[:3])}")
    return [directory / path for path in chosen]


def _listing(name: str, directory: Path) -> list[str]:
    """Return every path of the repository at the commit of that snapshot. Where the library keeps no listing, of an
    earlier version or of files that others put there, the files that are there."""
    with suppress(ImportError):
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        with suppress(CachedRepoTreeNotFoundError):
            return [entry.path for entry in get_cached_repo_tree(name, repo_type="dataset", revision=directory.name)]
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]


def _readme(directory: Path) -> str:
    return read_text(directory / README, LARGE) if (directory / README).is_file() else ""
