"""How a run answers signals: the first one asks it to stop, a second one ends it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain.base.orphans import descendants, kill
from dtrain.base.stop_signals import STOP_SIGNALS, handled_by

SAME_SECONDS = 1.0  # two signals closer than this are one: `timeout` and torchrun pass on what the group got too
END_SECONDS = 5.0  # for the main thread to unwind after a second signal
LOOK_SECONDS = 0.25


@contextmanager
def on_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask` with the number of the first stop signal; raise KeyboardInterrupt with the number of a second one.

    If the block does not end by that KeyboardInterrupt, the process ends within seconds. Only the main thread handles
    signals; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    asked_at: list[float] = []
    last: list[int] = []
    ended = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked helper: the run's own process decides for both
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif not asked_at:
            asked_at.append(time.monotonic())
            ask(signum)
        elif time.monotonic() - asked_at[0] > SAME_SECONDS:
            last.append(signum)
            raise KeyboardInterrupt(signum)

    def insist() -> None:
        while not ended.wait(LOOK_SECONDS):
            if last and not ended.wait(END_SECONDS):  # code of the user's may catch everything
                kill(descendants(owner))
                os._exit(128 + last[0])

    threading.Thread(target=insist, daemon=True).start()
    try:
        with handled_by(handle):
            yield
    finally:
        ended.set()


@contextmanager
def held_back() -> Iterator[None]:
    """Block stop signals in this thread, and in processes that the block starts until they call `let_through`.

    A process that has just been started has no handlers yet, so that a signal would end it without a word. A blocked
    signal stays pending instead.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Unblock stop signals, once this process has handlers; a pending one is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
