"""A launcher's private directory: in the temporary folder, for its user alone, gone with it.

`lock` is held (flock) as long as its launcher lives, also where that is in another container; what killed launchers
have left is known by it and deleted by the next one.
"""

import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dtrain.base.errors import UserError

PREFIX, LOCK = "dtrain-", "lock"
BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def job_directory() -> Iterator[Path]:
    """A new directory of mode 0700, deleted at the end of the block. Raises UserError where there can be none."""
    folder = tempfile.gettempdir()
    sweep(Path(folder))
    with ExitStack() as stack:
        try:
            name = tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True)
            job = Path(stack.enter_context(name))
            lock = os.open(job / f".{LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, _marker())
            os.rename(job / f".{LOCK}", job / LOCK)  # held from when it has its name
        except OSError as error:
            raise UserError(f"the temporary folder {folder}: {error.strerror}; set TMPDIR to another one") from error
        yield job


def sweep(folder: Path) -> None:
    """Delete the directories in `folder` whose launchers were killed: those of this user, with a marker of this
    system's present start, since a lock holds among the processes of one kernel, and that nobody holds."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another launcher is at it, or it is of another user
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.pread(lock, 4096, 0) == _marker():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _marker() -> bytes:
    try:
        system = BOOT.read_text().strip()
    except OSError:
        system = socket.gethostname()
    return json.dumps({"directory of": "a dtrain launcher", "system": system}).encode()
