"""The watch over several hosts as `launch` uses it: around a run, and where a run cannot begin."""

import os
import signal
import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from dtrain.base.errors import UserError
from dtrain.launch.hosts.consistency import same_on_all
from dtrain.launch.hosts.rendezvous import Callbacks, Rendezvous, rendezvous
from dtrain.launch.last_checkpoint import FILE_SECONDS, newest_checkpoint, within
from dtrain.launch.place import RankPlace
from dtrain.launch.signals import on_signals
from dtrain.recipe import Recipe

if TYPE_CHECKING:
    from dtrain.parallel.runtime import StopFlag

__all__ = ["fail_together", "same_on_all", "watch"]

TOLD_SECONDS = 60.0  # of silence after which a rank is lost, where no recipe could be read that says so


def watch(
    recipe: Recipe, place: RankPlace, stop: "StopFlag", terminal: int | None
) -> AbstractContextManager[Rendezvous]:
    """The ranks meet, and watch over one another while the block runs. A lost rank is told of on stderr and on
    `terminal`, a file, with the last checkpoint. Raises as `rendezvous`."""
    callbacks = Callbacks(partial(tell_lost, recipe, terminal), _end_lost, partial(_note, terminal), stop)
    return rendezvous(place, recipe.launch.lost_after, callbacks)


def fail_together(place: RankPlace, problem: UserError) -> NoReturn:
    """The other ranks are told of `problem`, for which the run cannot begin. Raises UserError with what all have found,
    or SystemExit where another process of this host tells of it."""
    from dtrain.parallel.runtime import StopFlag

    stop = StopFlag()
    callbacks = Callbacks(lambda who: who, _end_lost, partial(_note, None), stop)
    with on_signals(stop.request):
        try:
            with rendezvous(place, TOLD_SECONDS, callbacks, str(problem)):
                pass
        except UserError:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once another process here has ended
            if place.local_rank == 0:
                raise
    sys.exit(1)


def tell_lost(recipe: Recipe, terminal: int | None, who: str) -> str:
    """`who` was lost, and what is saved: on the terminal, and returned for whoever tells on stderr."""
    text = f"{who}; the run cannot go on without. {newest_checkpoint(recipe)}"
    if terminal is not None:
        os.write(terminal, f"\ndtrain: {text}\n".encode())
    return text


def _end_lost(text: str) -> None:
    """The last of this process, whose main thread waits in a collective for a rank that is lost."""
    within(FILE_SECONDS, partial(os.write, 2, f"\ndtrain: {text}\n".encode()))
    os._exit(1)


def _note(terminal: int | None, text: str) -> None:
    os.write(2 if terminal is None else terminal, f"dtrain: {text}\n".encode())
