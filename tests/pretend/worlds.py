"""Calls of functions on ranks that have a pretend card each.

    def on_rank(rank, root): ...
    def test_it(tmp_path): run_pretend(on_rank, 2, tmp_path)

The server starts with the first call of a pytest process and ends with it; where the device cannot be built, the test
is skipped and says why.
"""

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.pretend import build
from tests.pretend.card import Card
from tests.pretend.mutants import Mutant
from tests.pretend.server import Case

ROOT = Path(__file__).parents[2]


def run_pretend(
    function: Callable[..., Any],
    world_size: int = 1,
    *args: Any,
    card: Card | None = None,
    mutants: Sequence[Mutant] = (),
    timeout: float = 300.0,
) -> list[Any]:
    """`function(rank, *args)` on `world_size` ranks, each with `cuda:rank` current, and where there are several with
    gloo and nccl up.

    function, args and the results are pickled: functions of modules, and no tensors. card: what the ranks have.
    mutants: lines of dtrain replaced before it is imported.
    Raises AssertionError with the traceback of the rank that failed.
    """
    if why := build.missing():
        pytest.skip(why)
    case = Case(pickle.dumps((function, args)), world_size, card or Card(), tuple(mutants), timeout)
    connection = _server()
    connection.send(case)
    succeeded, value = connection.recv()
    assert succeeded, value
    return value


@cache
def _server() -> Connection:
    """To the one server of this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.pretend.server", str(theirs.fileno()), str(build.library())]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL)
    theirs.close()
    connection = Connection(os.dup(ours.fileno()))
    ours.close()

    def end() -> None:
        connection.close()  # at which the server ends
        process.wait()

    atexit.register(end)
    return connection
