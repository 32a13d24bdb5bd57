"""Signals that ask a process to stop, and the import path for code that a recipe names."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dtrain.base.errors import STOPPED_AT_START

# Batch systems announce a pre-emption with SIGUSR1. SIGHUP comes when a terminal or an ssh connection closes.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def stop_signals_handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which `handle` is called for every stop signal.

    Signals that the process was started to ignore stay ignored. For example, nohup ignores SIGHUP, and a shell script
    ignores SIGINT for its background processes. Python handles signals only in the main thread, so the context does
    nothing in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handle) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def exit_without_saving(signum: int, frame: FrameType | None) -> None:
    """Print a message and exit with the signal's status: the signal handler before the first step.

    The handler does not raise an exception, because torch aborts if an exception is raised while torch is imported.
    """
    os.write(2, f"dtrain: {STOPPED_AT_START}\n".encode())
    os._exit(128 + signum)


def import_search_path() -> list[str]:
    """Return sys.path with the working directory.

    The working directory is last, so that a file there with the name of a library does not replace the library.
    """
    directory = str(Path.cwd())
    if directory in sys.path or "" in sys.path:
        return list(sys.path)
    return [*sys.path, directory]
