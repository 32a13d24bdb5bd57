"""The inside of a worker process: it answers the calls of `worker.Worker` and dies with its parent. It loads no torch
unless the user's code does.

A call is (method, arguments), pickled. An answer is a line of JSON, and null comes after the last one of a call.
"""

import json
import math
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, TypedDict

from dtrain.base.errors import UserError
from dtrain.base.orphans import end_with
from dtrain.base.ranges import LARGEST_REWARD

LAST_LINES = 12  # of a traceback


class Outcome(TypedDict, total=False):
    """Outcome of a call: its value; or `user`, a mistake that its user can mend; or `error`, the end of a traceback,
    with `kind`, the exception's name. The parent adds `lost`, why the process is gone. An environment's may have
    `missed`, why it was not waited for, and `stage`, what failed, where that is not what was asked."""

    value: Any
    user: str
    error: str
    kind: str
    lost: str
    missed: str
    stage: str


def serve(parent: int, channel: int, service: Any) -> None:
    """Answer calls of methods of `service`, which give their answers one after another, until the parent closes its end
    of the socket `channel`. Never returns. Once a service has a `main`, that has this thread, and another answers: the
    user's code may need the main one, for signals say."""
    end_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    own = os.getpid()
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    calls = connection.makefile("rb")

    def answer_one() -> None:
        method, arguments = pickle.load(calls)
        for answer in chain(getattr(service, method)(*arguments), [None]):
            if os.getpid() != own:  # a process that the user's code forked and let go on: its answer is nobody's
                os._exit(0)
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def answer_all() -> None:
        try:
            while True:
                answer_one()
        finally:
            os._exit(0)

    with suppress(EOFError):
        while getattr(service, "main", None) is None:
            answer_one()
        threading.Thread(target=answer_all, daemon=True).start()
        service.main()
    os._exit(0)  # threads of the user's code must not hold the process


def attempt(act: Callable[..., Any], *arguments: Any) -> Outcome:
    """Return what `act` returns or raises, any exception, as an Outcome."""
    try:
        return {"value": act(*arguments)}
    except UserError as error:
        return {"user": str(error)}
    except BaseException as error:  # sys.exit in the user's code too: the process serves on, and the parent tells it
        lines = traceback.format_exc().strip().splitlines()
        return {"error": "\n".join(lines[-LAST_LINES:]), "kind": type(error).__qualname__}


def reward_of(value: Any, of: str = "") -> float | None:
    """Return a reward as a float, NaN as None. of: what it is given for, as the message says it. Raises UserError for
    what is no number, infinite or above LARGEST_REWARD in size."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise UserError(f"gave {shown(value)}{of}; a finite number or None is needed")
    try:
        number = float(value)
    except OverflowError:  # a whole number
        number = math.inf
    if math.isinf(number):
        raise UserError(f"gave {number}{of}; a finite number or None is needed")
    if abs(number) > LARGEST_REWARD:
        raise UserError(f"gave {number}{of}; a number of at most {LARGEST_REWARD:g} in size, or None, is needed")
    return None if math.isnan(number) else number


def shown(value: Any) -> str:
    """Return `value` as a message shows it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
