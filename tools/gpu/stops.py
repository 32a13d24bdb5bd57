"""Part on a rank that never comes."""

import time
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.ranks import Run
from tools.gpu.runs import WRONG, Options

PATIENCE = 10.0  # seconds that the provoked hang waits in its collective
ANSWER_SECONDS = 90.0  # seconds in which it is to end


def hang(options: Options, run: Run, root: Path) -> Iterator[str]:
    """A collective that one of two ranks never joins."""
    if options.world < 2:
        yield "--  one GPU: nothing to wait for"
        return
    began = time.monotonic()
    try:
        run(hang_rank, 2, timeout=ANSWER_SECONDS, patience=PATIENCE / 3 if options.small else PATIENCE)
    except (RuntimeError, AssertionError) as error:
        took, last = time.monotonic() - began, str(error).strip().splitlines()[-1]
        is_answered = "gave no result" not in str(error)
        yield f"{'ok' if is_answered else WRONG}  a collective without its other rank: {took:.0f} s, {last[:200]}"
    else:
        yield f"{WRONG}  a collective without its other rank went through"


def hang_rank(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.ones(1, device=torch.device("cuda", rank)))
        torch.cuda.synchronize()
    else:
        time.sleep(300)
