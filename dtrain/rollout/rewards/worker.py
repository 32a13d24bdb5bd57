"""The rewards' process: reads calls from standard input, writes what they gave to standard output, and dies with its
parent. It loads no torch unless a reward does.

What a reward prints goes to standard error; what it reads is empty. A message is its length (8 bytes) and its bytes:
pickled from the parent, JSON to it.

    in    ("load", rewards)          (name, module, function, options) each
          ("batch", {name: values})  what the calls that follow are about; no answer
          ("call", index)            one reward over the batch
    out   {"ready": true}            all rewards are loaded
          {"values": [..]}           numbers and null
          {"user": text}             a mistake that its user can mend
          {"error": text}            the end of a traceback
"""

import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from dtrain.errors import UserError
from dtrain.orphans import end_with
from dtrain.rollout.rewards import calls

HEADER = 8
LAST_LINES = 12  # of a traceback


def start_line(path: Sequence[str]) -> list[str]:
    """The command of a worker of this process that finds modules in `path`."""
    code = "import json, sys; parent, sys.path[:] = json.loads(sys.argv[1]); "
    code += "from dtrain.rollout.rewards.worker import main; main(parent)"
    return [sys.executable, "-c", code, json.dumps([os.getpid(), list(path)])]


def message(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER, "little") + content


def main(parent: int) -> None:
    """Serve calls until the parent closes the pipe. Never returns."""
    end_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    source, sink = _own_pipes()
    server = _Server()
    while (content := _read_message(source)) is not None:
        answer = server.answer(*pickle.loads(content))
        if answer is not None:
            sink.write(message(json.dumps(answer).encode()))
            sink.flush()
    os._exit(0)  # threads of a reward must not hold the process


class _Server:
    """The rewards that are loaded, and the batch that they are about."""

    def __init__(self) -> None:
        self.functions: list[tuple[str, Callable[..., Any]]] = []
        self.batch: calls.Batch = {}

    def answer(self, kind: str, content: Any) -> dict[str, Any] | None:
        try:
            return self._serve(kind, content)
        except UserError as error:
            return {"user": str(error)}
        except BaseException:  # sys.exit in a reward too: the process serves on, and the parent tells it
            lines = traceback.format_exc().strip().splitlines()
            return {"error": "\n".join(lines[-LAST_LINES:])}

    def _serve(self, kind: str, content: Any) -> dict[str, Any] | None:
        if kind == "load":
            self.functions = [(name, calls.load(*where)) for name, *where in content]
            return {"ready": True}
        if kind == "batch":
            self.batch = content
            return None
        name, function = self.functions[content]
        return {"values": calls.call(name, function, self.batch)}


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
