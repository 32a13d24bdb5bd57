"""Functions in processes of their own, side by side.

torch keeps what it learnt of a mesh for the life of a process, the names of its process groups too, so that a second
mesh in the same process may be taken for the first one. Each trace therefore has a process, forked from this one. An
executor of the standard library would pickle the calls, and could end none that is under way.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

import torch

from dtrain.base.errors import UserError
from dtrain.base.orphans import end_with_parent

Result = TypeVar("Result")


class Child(Generic[Result]):
    """Forked process that runs `call`, sees no CUDA device and ends with this one; its context ends it earlier.

    The result of `call` must be picklable. niceness: of the process, as of `os.nice`.
    """

    def __init__(self, call: Callable[[], Result], niceness: int = 0):
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(call, niceness, os.getpid(), sender))
        self._process.start()
        sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.close()
        self._process.kill()
        self._process.join()

    def is_done(self, wait: float = 0.0) -> bool:
        """Return whether `outcome` would return at once; waits for that up to `wait` seconds."""
        return self._receiver.poll(wait)

    def outcome(self) -> Result | Exception:
        """Return the result of the call, or the exception that it raised. Can be called once."""
        try:
            return self._receiver.recv()
        except EOFError:
            self._process.join()
            return RuntimeError(f"a process that worked on a plan died ({self._process.exitcode})")

    def result(self) -> Result:
        """Return the result of the call, or raise its exception. Can be called once."""
        outcome = self.outcome()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def run_in_parallel(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run `calls` in processes side by side and return their results in order. Raises what one of them raised."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child(call)) for call in calls]
        return [child.result() for child in children]


def _work(call: Callable[[], object], niceness: int, parent: int, sender) -> None:
    end_with_parent(parent)
    os.nice(niceness)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch asks for a device where it needs none, and CUDA survives no fork
    gc.freeze()  # a collection here must not touch objects that the parent's threads hold
    torch.set_num_threads(1)  # the parent's threads did not come along, and a product would wait for them
    try:
        sender.send(call())
    except Exception as error:
        sender.send(_picklable(error))
    finally:
        os._exit(0)


def _picklable(error: Exception) -> Exception:
    """Return `error` with its traceback as what can be pickled: a UserError, or a RuntimeError that names its class."""
    picklable = (
        UserError(str(error)) if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")
    )
    picklable.add_note(traceback.format_exc())
    return picklable
