"""A worker process seen from inside: reads calls from standard input, writes answers to standard output, and dies with
its parent (`process.UserCodeProcess`). It loads no torch unless the user's code does.

A message is its length (8 bytes) and its bytes: pickled from the parent, JSON to it. What the user's code prints goes
to standard error; what it reads is empty. Two answers are the same for all workers: {"user": text}, a mistake that its
user can mend, and {"error": text, "kind": the exception's name}, the end of a traceback.
"""

import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.errors import UserError
from dtrain.orphans import end_with

HEADER = 8
LAST_LINES = 12  # of a traceback

Answer = dict[str, Any]
Tell = Callable[[Answer], None]


def start_line(module: str) -> list[str]:
    """The command of a worker of this process that runs `main(parent)` of `module`."""
    code = "import json, sys; parent, sys.path[:] = json.loads(sys.argv[1]); "
    code += f"from {module} import main; main(parent)"
    return [sys.executable, "-P", "-c", code, json.dumps([os.getpid(), search_path()])]


def search_path() -> list[str]:
    """sys.path with the working directory behind it, where it is not on it yet: a file there may have the name of a
    library, and does not take its place."""
    here = str(Path.cwd())
    return list(sys.path) if here in sys.path or "" in sys.path else [*sys.path, here]


def message(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER, "little") + content


def serve(parent: int, handle: Callable[[str, Any, Tell], None]) -> None:
    """Give each call, its kind and content, to `handle`, which answers by its third argument, as often as the parent
    expects, until the parent closes the pipe. Never returns."""
    end_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    source, sink = _own_pipes()

    def tell(answer: Answer) -> None:
        sink.write(message(json.dumps(answer).encode()))
        sink.flush()

    while (content := _read_message(source)) is not None:
        handle(*pickle.loads(content), tell)
    os._exit(0)  # threads of the user's code must not hold the process


def attempt(act: Callable[[], Answer]) -> Answer:
    """What `act` gives, or the answer that says what it raised, whatever that was."""
    try:
        return act()
    except UserError as error:
        return {"user": str(error)}
    except BaseException as error:  # sys.exit in the user's code too: the process serves on, and the parent tells it
        lines = traceback.format_exc().strip().splitlines()
        return {"error": "\n".join(lines[-LAST_LINES:]), "kind": type(error).__qualname__}


def _read_message(source: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = source.read(HEADER)
    return source.read(int.from_bytes(head, "little")) if len(head) == HEADER else None


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output under other numbers; in their place nothing, and standard error."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink
