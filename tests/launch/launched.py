"""A process for tests to watch: launches a tiny recipe with one of the fake trainings below.

python -m tests.launch.launched DIRECTORY TRAINING [key=value ...]
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from dtrain.base.errors import Stopped, UserError
from dtrain.commands.run import start_background_plan
from dtrain.launch import launch
from dtrain.launch.exits import WorkerFailed
from dtrain.training import load_recipe
from tests.tiny import tiny_recipe


def _mark(recipe, runtime, text=""):
    Path(recipe.run.dir, f"mark-{runtime.rank}").write_text(text or str(os.getpid()))


def ends(recipe, runtime):
    total = torch.tensor(float(runtime.rank))
    if runtime.world_size > 1:
        dist.all_reduce(total)
    print(f"hello from {runtime.rank}")
    _mark(recipe, runtime, f"{runtime.world_size} {total.item()} {torch.get_num_threads()} {runtime.device}")


def mistaken(recipe, runtime):
    raise UserError("data.train.path: line 7 is not JSON")


def crashes(recipe, runtime):
    _mark(recipe, runtime)
    if runtime.rank == 1:
        raise ZeroDivisionError("the reason")
    dist.barrier()
    time.sleep(3600)


def waits(recipe, runtime):
    """Until it is asked to stop; then it takes its time to save."""
    _mark(recipe, runtime)
    for _ in range(600):
        time.sleep(0.1)
        if runtime.stop.signum:
            time.sleep(1)
            Path(recipe.run.dir, f"saved-{runtime.rank}").touch()
            raise Stopped(runtime.stop.signum, "stopped after step 3, which is saved")


def hangs(recipe, runtime):
    """Deaf to everything, as in a collective that nobody ends."""
    _mark(recipe, runtime)
    time.sleep(3600)


def spins(recipe, runtime):
    """Code of the user's that never ends on the last rank, and catches all that is thrown at it; the others wait."""
    _mark(recipe, runtime)
    if runtime.rank < runtime.world_size - 1:
        dist.barrier()
    while True:
        with suppress(BaseException):
            time.sleep(0.01)


def reduces(recipe, runtime):
    """Collectives one after another, until a rank is lost; all ranks have met once there are marks."""
    dist.all_reduce(torch.zeros(1))
    _mark(recipe, runtime)
    while True:
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.05)


def told_its_plan(recipe, runtime):
    text = "not asked"
    if runtime.wait_for_plan is not None:
        text = runtime.wait_for_plan(280.0).words
    _mark(recipe, runtime, text)
    dist.barrier()  # a rank that ends while the other still connects to it fails it


def _fail_once(recipe, runtime):
    tried = Path(recipe.run.dir, f"tried-{runtime.rank}")
    if not tried.exists():
        tried.touch()
        dist.barrier()
        raise RuntimeError("a passing cloud")


def fails_once(recipe, runtime):
    _fail_once(recipe, runtime)
    _mark(recipe, runtime, recipe.checkpoint.resume)
    dist.barrier()  # a rank that ends while the other still connects to it fails it


def fails_once_and_waits(recipe, runtime):
    _fail_once(recipe, runtime)
    dist.barrier()
    waits(recipe, runtime)


def main() -> int:
    directory, training, *overrides = sys.argv[1:]
    recipe = load_recipe(tiny_recipe(Path(directory)), overrides)
    Path(recipe.run.dir).mkdir(exist_ok=True)
    try:
        launch(recipe, globals()[training], start_background_plan)
    except (UserError, WorkerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except Stopped as error:
        print(error, file=sys.stderr)
        return 128 + error.signum
    return 0


if __name__ == "__main__":
    # Under its own name, so that workers find the functions where this process did.
    from tests.launch import launched

    sys.exit(launched.main())
