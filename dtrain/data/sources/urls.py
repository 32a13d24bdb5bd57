"""Data files behind URLs (`s3://`, `gs://`, `hf://`, `https://`), copied into the data cache by fsspec.

With `data.train.path=s3://bucket/rows-*.jsonl`, for example, the cache directory contains

    files/5f0c1d9e80b1c7aa/rows-0.jsonl   a copy; a hash of the file's URL and etag names its directory
    files/5f0c1d9e80b1c7aa.lock           locked while a process downloads; the other ranks wait
    files/77ab02e4419cd3f0.txt            the copies of `rows-*.jsonl` when its server was last reached

If the server cannot be reached, the copies listed in the .txt file are used.

fsspec's own cache, `filecache`, does not fit. It never notices that a file behind https:// has changed, it overwrites a
copy that another run may be reading, and it saves the URL, whose query may be a signature or a token, as plain text.
Importing this module loads fsspec, but not torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.core import url_to_fs

from dtrain.base.errors import UserError, first_line
from dtrain.base.files import atomic_write_text, lock
from dtrain.base.hub import client_errors
from dtrain.base.json_files import LARGE_FILE_BYTES, digest, read_text, split_lines

FILES = "files"
# Entries of fsspec's `info` that change with the content of a file, in lower case. Each file system has its own.
CONTENT_MARKS = {"etag", "content-md5", "md5hash", "crc32c", "digest", "checksum", "sha256", "size", "blob_id", "oid"}
CONTENT_MARKS |= {"mtime", "last-modified", "lastmodified", "last_modified", "updated", "created"}
MISSING = (404, 410)  # HTTP status: not found, gone


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL.

    Attributes:
        system: fsspec's file system of the URL.
        path: The file's path in `system`.
        url: The URL of this file, also if a pattern matched it.
        copy: Path of the local copy, which may be still to come.
        size: Bytes; None if the server does not report them.
    """

    system: fsspec.AbstractFileSystem
    path: str
    url: str
    copy: Path
    size: int | None


def find_files(url: str, key: str, cache_dir: Path) -> list[RemoteFile]:
    """Find the files of a URL or of a pattern (`s3://bucket/*.jsonl`), sorted. Nothing is copied.

    Raises:
        UserError: If there is no such file or it cannot be read, with the recipe's `key`.
    """
    files = []
    with _url_errors(url, key):
        system, path = url_to_fs(url)
        is_http = urlsplit(url).scheme in ("http", "https")
        is_pattern = "*" in path or ("?" in path and not is_http)  # in https:// URLs, ? starts the query
        paths = sorted(system.glob(path)) if is_pattern else [path]
        for name in paths:
            info = system.info(name)
            if info.get("type", "file") == "file":
                file_url = system.unstrip_protocol(name) if is_pattern else url
                files.append(_remote_file(system, name, info, file_url, cache_dir))
    if not files:
        raise UserError(f"{key}: {'no file matches' if is_pattern else 'no file is at'} {url}. Check the address")
    return files


def files_to_copy(url: str, key: str, cache_dir: Path) -> list[RemoteFile]:
    """Return the files that `local_copies` would download. Raises UserError as `find_files` does."""
    try:
        files = find_files(url, key, cache_dir)
    except UserError:
        if _recorded_copies(url, cache_dir):
            return []
        raise
    return [file for file in files if not file.copy.is_file()]


def local_copies(url: str, key: str, cache_dir: Path) -> list[Path]:
    """Return local copies of the files of a URL or pattern, and download those that are not in the cache.

    If several processes ask for a file at once, one downloads it and the others wait. If the server cannot be reached,
    the copies of the last time are returned.

    Raises:
        UserError: As `find_files` does, if there are no copies of an earlier time.
    """
    recorded = _recorded_copies(url, cache_dir)
    try:
        files = find_files(url, key, cache_dir)
    except UserError:
        if recorded:
            return recorded
        raise
    for file in files:
        _download(file, key)
    copies = [file.copy for file in files]
    if copies != recorded:
        _record_copies(url, cache_dir, copies)
    return copies


def _remote_file(
    system: fsspec.AbstractFileSystem, path: str, info: dict[str, Any], url: str, cache_dir: Path
) -> RemoteFile:
    # The etag is part of the directory's name, so a changed file does not overwrite a copy that another run is reading.
    marks = {}
    for name, value in info.items():
        if name.lower() in CONTENT_MARKS and value is not None:
            marks[name] = str(value)
    directory = cache_dir / FILES / digest(url, marks)[:16]
    name = PurePosixPath(unquote(urlsplit(url).path)).name or PurePosixPath(path).name
    return RemoteFile(system, path, url, directory / name, info.get("size"))


def _download(file: RemoteFile, key: str) -> None:
    """Download a file to its `copy`, unless it is there."""
    directory = file.copy.parent
    directory.mkdir(parents=True, exist_ok=True)
    with lock(directory), _url_errors(file.url, key):
        if not file.copy.is_file():
            partial = file.copy.with_name(f"{file.copy.name}.partial")
            file.system.get_file(file.path, str(partial))
            partial.rename(file.copy)


def _record_of(url: str, cache_dir: Path) -> Path:
    return cache_dir / FILES / f"{digest(url)[:16]}.txt"


def _record_copies(url: str, cache_dir: Path, copies: list[Path]) -> None:
    record = _record_of(url, cache_dir)
    lines = [f"{copy.relative_to(cache_dir)}\n" for copy in copies]
    with lock(record):
        atomic_write_text(record, "".join(lines))


def _recorded_copies(url: str, cache_dir: Path) -> list[Path]:
    """Return the copies of the last time that the server was reached; [] if there are none or some are deleted."""
    record = _record_of(url, cache_dir)
    if not record.is_file():
        return []
    copies = [cache_dir / line for line in split_lines(read_text(record, LARGE_FILE_BYTES))]
    return copies if all(copy.is_file() for copy in copies) else []


@contextmanager
def _url_errors(url: str, key: str) -> Iterator[None]:
    """Turn errors of fsspec and of its file systems in the block into a UserError that says what to do."""
    scheme = url.split("://")[0]
    try:
        yield
    except ImportError as error:
        fix = "pip install 'dtrain[remote-files]'"
        raise UserError(
            f"{key}: {scheme}:// needs a package that is not installed: {fix} ({first_line(error)})"
        ) from error
    except ValueError as error:
        raise UserError(f"{key}: {url}: fsspec cannot read such a URL ({first_line(error)})") from error
    except client_errors(OSError, RuntimeError) as error:
        reason: BaseException = error
        if isinstance(error, FileNotFoundError) and error.__cause__ is not None and scheme in ("http", "https"):
            reason = error.__cause__  # fsspec reports every failure of HTTP as a file that is not there
        if isinstance(reason, FileNotFoundError) or getattr(reason, "status", None) in MISSING:
            login = ". If its repository is private or gated, run `hf auth login` or set HF_TOKEN"
            raise UserError(
                f"{key}: no file is at {url}. Check the address{login if scheme == 'hf' else ''}"
            ) from error
        raise UserError(
            f"{key}: {url} could not be read: {first_line(reason).rstrip('.')}. Check the network and this machine's "
            f"credentials for {scheme}://, or copy the file to this machine and name the copy"
        ) from error
