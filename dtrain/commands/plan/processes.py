"""Functions in forked processes, in parallel.

torch remembers meshes, and the names of their process groups, for the life of a process, so a second mesh in the same
process may be mistaken for the first one. Therefore each trace runs in a process of its own. An executor of the
standard library would have to pickle the functions, and cannot end one that is running.
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
    """A forked process that runs a function. The process ends with the `with` block, or with this process.

    CUDA devices are hidden from the process.

    Args:
        call: The function. Its result must be picklable.
        niceness: Niceness of the process, as of `os.nice`.
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
        """Wait up to `wait` seconds for the function to end. Return whether it has ended."""
        return self._receiver.poll(wait)

    def outcome(self) -> Result | Exception:
        """Return the function's result, or the exception that it raised. Can be called once."""
        try:
            return self._receiver.recv()
        except EOFError:
            self._process.join()
            return RuntimeError(f"a process that computes a plan died (exit code {self._process.exitcode})")

    def result(self) -> Result:
        """Return the function's result, or raise its exception. Can be called once."""
        outcome = self.outcome()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def run_in_parallel(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run functions in forked processes and return their results in order. Raises the first exception in that order."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child(call)) for call in calls]
        return [child.result() for child in children]


def _work(call: Callable[[], object], niceness: int, parent: int, sender) -> None:
    """Run the function in the forked process, and send its result or exception."""
    end_with_parent(parent)
    os.nice(niceness)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch asks for a device where it needs none, and CUDA survives no fork
    gc.freeze()  # a garbage collection here must not touch objects of the parent's threads
    torch.set_num_threads(1)  # a fork has no threads but this one, and a matrix product would wait for the others
    try:
        sender.send(call())
    except Exception as error:
        sender.send(_picklable(error))
    finally:
        os._exit(0)


def _picklable(error: Exception) -> Exception:
    """Return a UserError, or a RuntimeError with the name of the error's class, with the traceback as a note."""
    picklable: Exception
    if isinstance(error, UserError):
        picklable = UserError(str(error))
    else:
        picklable = RuntimeError(f"{type(error).__name__}: {error}")
    picklable.add_note(traceback.format_exc())
    return picklable
