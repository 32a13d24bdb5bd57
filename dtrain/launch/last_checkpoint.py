"""The newest checkpoint of a run, told where a rank is lost and the file system may not answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

FILE_SECONDS = 3.0  # for the file system to answer, once a rank is lost
T = TypeVar("T")


def newest_checkpoint(run: Path) -> str:
    """Return a sentence that says where the same command goes on. run: the run's directory."""
    checkpoints = run / "checkpoints"
    saved = within(FILE_SECONDS, partial(_newest, checkpoints))
    return saved or f"{checkpoints} does not answer: the same command goes on at the last checkpoint there"


def lost_text(run: Path, lost: str) -> str:
    """Return the text of a run that ends because ranks are `lost`, a sentence."""
    return f"{lost}; the run cannot go on without. {newest_checkpoint(run)}"


def within(seconds: float, act: Callable[[], T]) -> T | None:
    """Return what `act` gives or raise what it raises; None where it takes longer: it then goes on in its thread, which
    does not hold the process back."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # raised below
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result() if wait([done], seconds).done else None


def _newest(checkpoints: Path) -> str:
    steps = [int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()]
    if steps:
        return f"The last checkpoint is {checkpoints / f'step-{max(steps)}'}: the same command goes on there"
    return "No checkpoint was saved yet: the same command starts over"
