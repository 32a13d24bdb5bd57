"""The process that holds the pretend device: `python -m tests.pretend.server FD LIBRARY`.

It imports torch and dtrain once, takes cases from a connection and forks a process for each, which forks the ranks: a
case costs no import. It computes nothing itself, for a fork takes no threads of autograd or of kernels along.
"""

import faulthandler
import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.pretend.card import Card
from tests.pretend.mutants import Mutant

# What most cases need, imported before the first fork.
PRELOADED = (
    "dtrain.training.trainer",
    "dtrain.attention.varlen",
    "dtrain.attention.context",
    "dtrain.inference.native",
)
PRELOADED += ("dtrain.checkpoint.dcp.store", "tests.tiny", "tests.pretend.runs", "torch.distributed.fsdp")


@dataclass(frozen=True)
class Case:
    """called: `(fn, args)`, pickled: it is imported where it runs. timeout: seconds that a rank may be silent."""

    called: bytes
    size: int
    card: Card
    mutants: tuple[Mutant, ...]
    timeout: float


def serve(connection: Connection) -> None:
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(_forked(case))


def _forked(case: Case) -> tuple[bool, Any]:
    """(whether it went well, the ranks' results or what was raised), from a process of its own."""
    if not case.mutants:
        pickle.loads(case.called)  # its modules stay imported
    gc.collect()
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        _answer(case, sender)
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = False, "the process of the case died"
    finally:
        receiver.close()
        os.waitpid(pid, 0)
    return answer


def _answer(case: Case, sender: Connection) -> None:
    try:
        sender.send((True, _run(case)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        os._exit(0)


def _run(case: Case) -> list[Any]:
    from tests.pretend import cuda, mutants
    from tests.world import run_world

    if case.mutants:
        mutants.apply(case.mutants)
    function, args = pickle.loads(case.called)
    card = replace(case.card, devices=case.size if case.card.devices is None else case.card.devices)
    return run_world(_on_card, case.size, card, function, args, timeout=case.timeout, join=_join(cuda, case.size, card))


def _join(cuda: Any, size: int, card: Card) -> Callable[[int, int, str], None]:
    """Return what gives a rank its card and its process groups; one rank alone has none, as under the launcher."""

    def join(rank: int, world_size: int, store_path: str) -> None:
        import torch
        import torch.distributed as dist

        # Makes torch's pool of threads anew after the fork: the threads of autograd, one a card, would do it at once.
        torch.set_num_threads(1)
        cuda.insert(card)
        if card.devices == 0:
            return
        device = torch.device("cuda", rank % card.devices)
        torch.cuda.set_device(device)
        if size > 1:
            from dtrain.parallel.mesh import init_process_group

            init_process_group("cuda", dist.FileStore(store_path, world_size), rank, world_size, 60.0)
            dist.all_reduce(torch.zeros(()))  # a rank that ended at once would cut others off that still connect

    return join


def _on_card(rank: int, card: Card, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(rank, *args)


def main() -> None:
    from tests.pretend import cuda

    faulthandler.enable()
    cuda.start(Path(sys.argv[2]))
    import importlib

    importlib.import_module("tests.world")  # one thread, and what FSDP2 imports late
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
