"""Atomic writing of files and directories, checksums, and file locks. Imports no torch.

A file or directory is first written under another name, synced to disk, and then renamed in one step. So a reader, or a
process that is killed, finds the old content or the new one, and never a part of it.

A checksum is CRC-32 (zlib), as eight hex digits. It finds damage by disks and networks at several GiB/s. It does not
protect against someone who changes both a file and the list of checksums.
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
# Errors of a file system for a call that it does not support.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Errors of a file system without locks. ENOLCK: NFS without its lock service.
NO_LOCKS = (*_NOT_SUPPORTED, errno.ENOLCK)


class FileRecord(TypedDict):
    """Size and checksum of a file."""

    bytes: int
    crc32: str


class ChecksumStream:
    """A binary file that is written from its start, with the checksum of what has been written.

    Attributes:
        size: Bytes written so far.
        failure: The error that a write raised. torch.save replaces it by a RuntimeError that does not show the reason.
    """

    def __init__(self, stream: IOBase):
        self._stream: Any = stream
        self._crc = 0
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data) -> int:
        """Write bytes and add them to the checksum."""
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
        """Return the number of bytes written so far."""
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
    """Return size and checksum of a file on disk."""
    crc = size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileRecord(bytes=size, crc32=f"{crc:08x}")


def write_synced(path: Path, text: str) -> FileRecord:
    """Write a text file directly, and sync it to disk. Only for files in a directory that is not published yet."""
    content = text.encode()
    _write(path, content)
    return FileRecord(bytes=len(content), crc32=f"{zlib.crc32(content):08x}")


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of a file in one step. Readers, and a process that is killed, never see a part of it."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file in one step, as `atomic_write_text` does."""
    temporary = path.with_name(f".{path.name}.new")
    _write(temporary, content)
    temporary.replace(path)
    sync(path.parent)


def _write(path: Path, content: bytes) -> None:
    """Write a file and sync it. An OSError names the file, unlike Python's own error for a full disk."""
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
    """Sync a file to disk, or the names in a directory if its file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # SMB, sshfs and other FUSE file systems do not support this for directories. There, names are as durable as the
        # server makes them. Files are synced there as anywhere, so a renamed file is still complete.
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
    """Return a path with its symbolic links resolved, so that files staged next to it are on the same disk.

    Raises:
        UserError: If the links lead in a circle.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: {error}") from error


def staging_path(directory: Path) -> Path:
    """Return the path at which a directory is written until it is renamed to its name."""
    return directory.with_name(f".{directory.name}.partial")


def check_can_publish(path: Path) -> None:
    """Check that a directory could be published at a path. The check may create the parent directory.

    Raises:
        UserError: If it could not.
    """
    directory = resolve_links(path)
    name = str(path) if path == directory else f"{path}, which leads to {directory},"
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{name} is not a directory: delete it, or choose another path")
    if os.path.ismount(directory):
        raise UserError(
            f"{name} is the mount point of a disk, which cannot be replaced by a directory: let the path lead to a "
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
            f"{name} cannot be written: it is first written next to its final path, and {directory.parent} does not "
            f"allow that ({error.strerror})"
        ) from error


def publish(partial: Path, final: Path) -> None:
    """Rename a finished directory to its final name, and sync. Raises OSError if `final` exists and is not empty."""
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def set_aside(path: Path, prefix: str = ".discarded-") -> Path:
    """Rename a published directory in one step, so that it can be deleted, and return its new path."""
    renamed = path.with_name(f"{prefix}{path.name}")
    if renamed.exists():
        shutil.rmtree(renamed)
    return path.rename(renamed)


@contextmanager
def lock(target: Path) -> Iterator[None]:
    """Context that holds a lock file, NAME.lock next to `target`. Other processes wait for the lock.

    The lock is released at the end of the block, or of the process.

    Raises:
        UserError: If the file system has no locks.
    """
    path = target.with_name(f"{target.name}.lock")
    with open(path, "a") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise UserError(
                f"{path}: this file system has no file locks ({error.strerror}), by which processes share a cache. Set "
                "data.cache_dir to a directory on another one, such as this machine's own disk"
            ) from error
        yield
