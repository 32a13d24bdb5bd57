"""Data files behind URLs (`s3://`, `gs://`, `hf://`, `https://`), by fsspec: copied once into the data cache.

A copy lies in `<cache>/files/<key>/<name>`, where the key is a hash of the URL and of what its server says of the
content: etag, checksum, size, time of change. Where the server cannot be reached, the newest copy serves. Torch is not
imported.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from dtrain.base.errors import UserError, first_line
from dtrain.base.files import lock
from dtrain.base.json_files import digest, split_lines

# Servers' names of the marks by which content is known, in lower case.
MARKS = {"etag", "content-md5", "md5hash", "crc32c", "digest", "checksum", "sha256", "size", "blob_id", "oid"}
TIMES = {"mtime", "last-modified", "lastmodified", "last_modified", "updated", "created"}
FILES = "files"


class Remote(NamedTuple):
    """A file behind a URL: its file system, its path there, its own URL, and where its copy lies."""

    system: Any
    path: str
    url: str
    copy: Path
    size: int | None


def find(url: str, key: str, cache_dir: Path) -> list[Remote]:
    """Return the files of a URL, or of a pattern of one, sorted. Nothing is copied. Raises UserError with `key`."""
    with _url_errors(url, key):
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        is_http = urlsplit(url).scheme in ("http", "https")  # where ? begins a query
        paths = sorted(system.glob(path)) if "*" in path or ("?" in path and not is_http) else [path]
        infos = [(name, system.info(name)) for name in paths]
    files = [(name, info) for name, info in infos if info.get("type", "file") == "file"]
    if not files:
        raise UserError(f"{key}: {'no file matches' if len(infos) != 1 else 'no file is at'} {url}")
    return [_remote(system, name, info, url if len(paths) == 1 else system.unstrip_protocol(name), cache_dir)
            for name, info in files]  # fmt: skip


def away(url: str, key: str, cache_dir: Path) -> list[Remote]:
    """Return the files of `find` that `copies` would copy."""
    try:
        return [remote for remote in find(url, key, cache_dir) if not remote.copy.is_file()]
    except UserError:
        if _kept(url, cache_dir):
            return []
        raise


def copies(url: str, key: str, cache_dir: Path) -> list[Path]:
    """Return the local copies of these files, made where there is none. Processes that ask at once wait for the one
    that copies. Raises UserError, naming `key`."""
    try:
        remotes = find(url, key, cache_dir)
    except UserError:
        if kept := _kept(url, cache_dir):
            return kept
        raise
    for remote in remotes:
        folder = remote.copy.parent
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder):
            if not remote.copy.is_file():
                with _url_errors(remote.url, key):
                    _copy(remote)
    _keep(url, cache_dir, remotes)
    return [remote.copy for remote in remotes]


def _remote(system: Any, path: str, info: dict[str, Any], url: str, cache_dir: Path) -> Remote:
    marks = {name: str(value) for name, value in info.items() if name.lower() in MARKS | TIMES and value is not None}
    name = PurePosixPath(unquote(urlsplit(url).path)).name or PurePosixPath(path).name
    folder = cache_dir / FILES / digest(url, marks)[:16]
    return Remote(system, path, url, folder / name, info.get("size"))


def _copy(remote: Remote) -> None:
    folder = remote.copy.parent
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        remote.system.get_file(remote.path, str(beside / remote.copy.name))
        size = (beside / remote.copy.name).stat().st_size
        if remote.size is not None and size != remote.size:
            raise OSError(f"{size} bytes came of {remote.size}")
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _list_of(url: str, cache_dir: Path) -> Path:
    return cache_dir / FILES / f"{digest(url)[:16]}.txt"


def _keep(url: str, cache_dir: Path, remotes: list[Remote]) -> None:
    place = _list_of(url, cache_dir)
    with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as beside:
        beside.write("".join(f"{remote.copy.relative_to(cache_dir)}\n" for remote in remotes))
    Path(beside.name).rename(place)


def _kept(url: str, cache_dir: Path) -> list[Path]:
    place = _list_of(url, cache_dir)
    files = [cache_dir / line for line in split_lines(place.read_text())] if place.is_file() else []
    return files if all(file.is_file() for file in files) else []


@contextmanager
def _url_errors(url: str, key: str) -> Iterator[None]:
    """Raise what fsspec and its file systems raise in the block as a UserError."""
    scheme = url.split("://")[0]
    try:
        yield
    except ImportError as error:
        fix = "pip install 'dtrain[remote-files]'"
        raise UserError(
            f"{key}: {scheme}:// needs a package that is not installed: {fix} ({first_line(error)})"
        ) from error
    except FileNotFoundError as error:
        why = f" ({first_line(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
        raise UserError(f"{key}: no file is at {url}{why}") from error
    except PermissionError as error:
        raise UserError(f"{key}: {url}: no permission, or no credentials, to read it ({first_line(error)})") from error
    except ValueError as error:
        raise UserError(f"{key}: {url}: fsspec cannot read such a URL ({first_line(error)})") from error
    except (OSError, RuntimeError) as error:
        raise UserError(f"{key}: {url} could not be read: {first_line(error)}") from error
