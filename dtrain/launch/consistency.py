"""Checks that the ranks of a run agree on the recipe, the versions and the run's directory.

A command is typed, a file is copied and a directory is mounted on each host separately. If one of them differs, ranks
would train different runs together, or save a checkpoint in parts that never come together. The trainer compares models
and data.
"""

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain import __version__
from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.launch.place import RankPlace
from dtrain.recipe import Recipe

if TYPE_CHECKING:
    import torch.distributed as dist

    from dtrain.base.ranks import Ranks

SEEN_SECONDS = 5.0  # for a new file to be seen by every host

# Keys that may differ between ranks: they change no number, or only one rank reads them.
FREE = ("launch", "metrics", "data.cache_dir", "data.num_workers")


def refuse_other_recipes(recipe: Recipe, place: RankPlace, store: "dist.Store") -> None:
    """Raise UserError, on every rank, if a rank was started with another recipe than rank 0.

    This comes before a process group is up and before rank 0 decides the keys that are `auto`: its decision would hide
    a key that another host sets, and a host that leaves no key open would wait for no decision.

    Collective, through `store`: every rank sets one key and reads two.
    """
    prefix = f"recipe of attempt {place.attempt}"
    if place.rank == 0:
        salt = secrets.token_hex()
        store.set(prefix, json.dumps([config.to_yaml(recipe), salt, _digests(recipe, salt)]))
    problem = _difference(recipe, f"rank {place.rank} on {socket.gethostname()}", *json.loads(store.get(prefix)))
    store.set(f"{prefix}/{place.rank}", problem)
    if place.rank == 0:
        problems = [store.get(f"{prefix}/{rank}").decode() for rank in range(place.world_size)]
        store.set(f"{prefix}/refusal", "\n".join(problem for problem in problems if problem))
    refusal = store.get(f"{prefix}/refusal").decode()
    if refusal:
        raise UserError(refusal)


def _difference(recipe: Recipe, me: str, first: str, salt: str, digests: Mapping[str, str]) -> str:
    """Return how `recipe` differs from rank 0's, a line for each key, or an empty text.

    first: Rank 0's recipe as YAML. digests: Those of its values that the YAML does not show, made with `salt`.
    """
    differences = config.diff(first, recipe)
    own_digests = _digests(recipe, salt)
    hidden = [key for key, value in own_digests.items() if value != digests.get(key)]
    differences += [(key, "a value that is not shown", "another") for key in hidden]
    lines = [f"\n  {key}: {theirs} on rank 0, {ours} here" for key, theirs, ours in differences if not _is_free(key)]
    if not lines:
        return ""
    return f"{me} was started with another recipe than rank 0; start every host with the same{''.join(lines)}"


def _digests(recipe: Recipe, salt: str) -> dict[str, str]:
    """Return a digest of each value that the recipe's YAML does not show."""
    values = config.redacted_values(recipe)
    return {key: hashlib.sha256(f"{salt}{value}".encode()).hexdigest() for key, value in values.items()}


def _is_free(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in FREE)


def refuse_other_hosts(recipe: Recipe) -> None:
    """Raise UserError, on every rank, if hosts have another version, or do not share the run's directory.

    Collective: the process group is up.
    """
    import torch  # the launcher, which imports this file, starts without it

    from dtrain.base.ranks import Ranks

    ranks = Ranks()
    ranks.same(f"dtrain {__version__}, torch {torch.__version__}", "the hosts have different versions")
    _refuse_separate_directories(recipe.run.directory, ranks)


def _refuse_separate_directories(run: Path, ranks: "Ranks") -> None:
    """Check that every rank sees a file that rank 0 writes."""

    def write() -> Path:
        run.resolve().mkdir(parents=True, exist_ok=True)
        path = run / f".seen-by-all-{secrets.token_hex(8)}"
        path.touch()
        return path

    path = ranks.first(write)

    def look() -> None:
        until = time.monotonic() + SEEN_SECONDS
        while not path.exists():
            if time.monotonic() > until:
                raise UserError(
                    f"{ranks.me} does not see what rank 0 writes to {run}: set run.dir to a directory that all hosts "
                    "share, under the same path; a checkpoint is written by all ranks"
                )
            time.sleep(0.1)

    try:
        ranks.every(look)
    finally:
        if ranks.is_first:
            path.unlink(missing_ok=True)
