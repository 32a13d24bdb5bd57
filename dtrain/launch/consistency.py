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

SEEN_SECONDS = 5.0  # timeout for a new file to become visible on every host

# Keys that may differ between ranks: they change no number, or only one rank reads them.
FREE = ("launch", "metrics", "data.cache_dir", "data.num_workers")


def refuse_other_recipes(recipe: Recipe, place: RankPlace, store: "dist.Store") -> None:
    """Raise UserError, on every rank, if a rank was started with another recipe than rank 0.

    This comes before the process group, and before rank 0 decides the keys that are `auto`. That decision would hide a
    key that another host sets, and a host whose recipe has no `auto` would not take part in it.

    Collectives:
        Through `store`: every rank sets one key and reads two.
    """
    prefix = f"recipe of attempt {place.attempt}"
    if place.rank == 0:
        salt = secrets.token_hex()
        store.set(prefix, json.dumps([config.to_yaml(recipe), salt, _digests(recipe, salt)]))
    first_yaml, salt, first_digests = json.loads(store.get(prefix))
    problem = _difference(recipe, f"rank {place.rank} on {socket.gethostname()}", first_yaml, salt, first_digests)
    store.set(f"{prefix}/{place.rank}", problem)
    if place.rank == 0:
        problems = [store.get(f"{prefix}/{rank}").decode() for rank in range(place.world_size)]
        store.set(f"{prefix}/refusal", "\n".join(problem for problem in problems if problem))
    refusal = store.get(f"{prefix}/refusal").decode()
    if refusal:
        raise UserError(refusal)


def _difference(recipe: Recipe, name: str, first_yaml: str, salt: str, first_digests: Mapping[str, str]) -> str:
    """Describe how a recipe differs from rank 0's, with a line for each key. Return an empty text if it does not.

    Args:
        recipe: This rank's recipe.
        name: This rank and its host, for the message.
        first_yaml: Rank 0's recipe, without its secrets.
        salt: Random text that the digests were computed with.
        first_digests: Digests of rank 0's secrets by key.
    """
    differences = config.diff(first_yaml, recipe)
    for key, digest in _digests(recipe, salt).items():
        if digest != first_digests.get(key):
            differences.append((key, "a value that is not shown", "another"))
    lines = []
    for key, first_value, own_value in differences:
        if not _is_free(key):
            lines.append(f"\n  {key}: {first_value} on rank 0, {own_value} here")
    if not lines:
        return ""
    return f"{name} was started with another recipe than rank 0; start every host with the same{''.join(lines)}"


def _digests(recipe: Recipe, salt: str) -> dict[str, str]:
    """Return salted digests of the recipe's secrets, which its YAML does not show, by key."""
    values = config.redacted_values(recipe)
    return {key: hashlib.sha256(f"{salt}{value}".encode()).hexdigest() for key, value in values.items()}


def _is_free(key: str) -> bool:
    """Return whether a key may differ between ranks."""
    return any(key == name or key.startswith(f"{name}.") for name in FREE)


def refuse_other_hosts(recipe: Recipe) -> None:
    """Raise UserError, on every rank, if hosts have different versions, or do not share the run's directory.

    Collectives:
        Over all ranks, through the process group.
    """
    import torch  # the launcher, which imports this file, starts without it

    from dtrain.base.ranks import Ranks

    ranks = Ranks()
    ranks.same(f"dtrain {__version__}, torch {torch.__version__}", "the hosts have different versions")
    _refuse_separate_directories(recipe.run.directory, ranks)


def _refuse_separate_directories(run: Path, ranks: "Ranks") -> None:
    """Check that every rank sees a file that rank 0 writes. Collective."""

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
