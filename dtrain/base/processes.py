"""Stop signals of a process, and the search path for code that a recipe names."""

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
    """Have `handle` called for every stop signal, except those that this process was started to ignore.

    nohup has SIGHUP ignored, and a shell script has SIGINT ignored for what it starts in the background. Only the main
    thread handles signals; in others this does nothing.
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
    """Handle a signal while there is nothing to save: say so, and end with the signal's status.

    An exception would do for Python code. torch aborts if one is raised while it is imported.
    """
    os.write(2, f"dtrain: {STOPPED_AT_START}\n".encode())
    os._exit(128 + signum)


def import_search_path() -> list[str]:
    """Return sys.path with the working directory at its end where it is not on it yet: a file there may have the name
    of a library, and does not take its place."""
    here = str(Path.cwd())
    return list(sys.path) if here in sys.path or "" in sys.path else [*sys.path, here]
