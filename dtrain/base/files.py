"""Files that are there whole or not at all, and their checksums. Knows no tensor and imports no torch.

A checksum is CRC-32 (zlib), as eight hex digits: it finds damage by disks and networks, at several GiB/s; it is no
guard against someone who writes both the file and its manifest.
"""

import errno
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any, TypedDict

from dtrain.base.errors import UserError

_BLOCK = 1 << 22
# What a file system answers to a call that it does not have.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# ENOLCK: NFS without its lock service.
NO_LOCKS = (*_NOT_SUPPORTED, errno.ENOLCK)


class FileRecord(TypedDict):
    """Size and checksum of a file."""

    bytes: int
    crc32: str


class ChecksumStream:
    """A binary file open for writing from its start that knows the checksum of what has passed.

    `failure` is the error that a write raised: torch.save replaces it by a RuntimeError that does not say why.
    """

    def __init__(self, stream: IOBase):
        self._stream: Any = stream
        self._crc = 0
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data) -> int:
        view = memoryview(data)
        try:
            written = self._stream.write(view)
        except OSError as error:
            self.failure = error
            raise
        self._crc = zlib.crc32(view, self._crc)
        self.size += view.nbytes
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    @property
    def record(self) -> FileRecord:
        """Size and checksum of the data written so far."""
        return FileRecord(bytes=self.size, crc32=f"{self._crc:08x}")


def checksum(path: Path) -> FileRecord:
    """Return size and checksum of the file `path` as it lies on disk."""
    crc = size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileRecord(bytes=size, crc32=f"{crc:08x}")


def write_synced(path: Path, text: str) -> FileRecord:
    """Write `text` to `path`, synced to disk. For files in a directory not yet published."""
    content = text.encode()
    _write(path, content)
    return FileRecord(bytes=len(content), crc32=f"{zlib.crc32(content):08x}")


def atomic_write_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step: a reader, or a kill, finds the old file or the new one."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one step, as `atomic_write_text` does."""
    beside = path.with_name(f".{path.name}.new")
    _write(beside, content)
    beside.replace(path)
    sync(path.parent)


def _write(path: Path, content: bytes) -> None:
    """Write a file, synced. An OSError names it, also where the disk is full, which Python's own does not."""
    try:
        with path.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Make the content of a file durable, or the names in a directory if its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # SMB, sshfs and other FUSE file systems refuse this for directories, where names are as durable as the server
        # makes them. Files are synced there as anywhere, so a rename still shows a complete file.
        if error.errno not in _NOT_SUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def can_sync_directories(directory: Path) -> bool:
    """Check that the file system of `directory` can sync the names in a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def resolve_links(path: Path) -> Path:
    """Return `path` with its symbolic links resolved: files staged beside it must lie on the same disk. Raises
    UserError for links that lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: {error}") from error


def staging_path(directory: Path) -> Path:
    """Return the path at which `directory` is put together until it gets its name."""
    return directory.with_name(f".{directory.name}.partial")


def check_can_publish(path: Path) -> None:
    """UserError where no directory could be published at `path` later on. Leaves nothing but its parent."""
    directory = resolve_links(path)
    named = str(path) if path == directory else f"{path}, which leads to {directory},"
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{named} is no directory: delete it, or choose another place")
    if os.path.ismount(directory):
        raise UserError(
            f"{named} is a disk's own mount point, which no directory can take the place of: let the path lead to a "
            "directory below it"
        )
    partial = staging_path(directory)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        partial.rmdir()
    except OSError as error:
        raise UserError(
            f"{named} cannot be written: it is put together beside its place, and {directory.parent} does not allow "
            f"that ({error.strerror})"
        ) from error


def publish(partial: Path, final: Path) -> None:
    """Rename a finished directory to its name, durably; raises OSError if `final` is there and not empty."""
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def set_aside(path: Path, prefix: str = ".discarded-") -> Path:
    """Take a published directory's name away in one step; returns where it lies until it is deleted."""
    beside = path.with_name(f"{prefix}{path.name}")
    if beside.exists():
        shutil.rmtree(beside)
    return path.rename(beside)


@contextmanager
def lock(place: Path) -> Iterator[None]:
    """Hold the lock file beside `place`, NAME.lock, until the block ends, or the process does; others wait.

    Raises UserError if the file system has no locks.
    """
    path = place.with_name(f"{place.name}.lock")
    with open(path, "a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise UserError(
                f"{path}: this file system has no file locks ({error.strerror}), by which processes share a cache. Set "
                "data.cache_dir to a directory on another one, such as this machine's own disk"
            ) from error
        yield
