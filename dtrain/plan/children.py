"""Functions in processes of their own, side by side.

torch keeps what it learnt of a mesh for the life of a process, the names of its process groups too, so that a second
mesh in the same process may be taken for the first one. Each trace therefore has a process, forked from this one.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What each of `calls` returns, which must be picklable, in their order. An exception of one is raised here."""
    context = multiprocessing.get_context("fork")
    children = []
    try:
        for call in calls:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(call, sender), daemon=True)
            process.start()
            sender.close()
            children.append((process, receiver))
        return [_result(process, receiver) for process, receiver in children]
    finally:
        for process, receiver in children:
            receiver.close()
            process.kill()
            process.join()


def _work(call: Callable[[], object], sender) -> None:
    gc.freeze()  # a collection here must not touch what the parent's threads hold
    torch.set_num_threads(1)  # the parent's threads did not come along, and a product would wait for them
    try:
        sender.send((True, call()))
    except Exception as error:
        error.add_note(traceback.format_exc())
        sender.send((False, error))
    finally:
        sender.close()
        os._exit(0)


def _result(process, receiver):
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process that traced a part of the plan died ({process.exitcode})") from None
    if succeeded:
        return value
    raise value
