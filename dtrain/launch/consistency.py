"""Checks that the hosts of a run agree: versions, the recipe, the run's directory. Models and data: the trainer.

A command is typed, a file is copied and a directory is mounted on each host by itself. Where one of them is another,
ranks would train different runs together, or save a checkpoint in parts that never come together.
"""

import hashlib
import secrets
import time
from pathlib import Path

from dtrain import __version__
from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.recipe import Recipe

SEEN_SECONDS = 5.0  # for a new file to be seen by every host

# What changes nothing between ranks, or is read by one of them alone.
FREE = ("launch", "metrics", "data.cache_dir", "data.num_workers")


def same_on_all(recipe: Recipe) -> None:
    """Raises UserError, on every rank, where hosts have another version, recipe or run directory. Collective: the
    process group is up."""
    import torch

    ranks = Ranks()
    ranks.same(f"dtrain {__version__}, torch {torch.__version__}", "the hosts have different versions")
    _same_recipe(recipe, ranks)
    _same_directory(recipe.run.directory, ranks)


def _same_recipe(recipe: Recipe, ranks: Ranks) -> None:
    first, salt, digests = ranks.first(lambda: (config.to_yaml(recipe), *_digests(recipe, secrets.token_hex())))

    def compare() -> None:
        differences = [d for d in config.diff(first, recipe) if not _is_free(d[0])]
        ours = _digests(recipe, salt)[1]
        unlike = [key for key in ours if ours[key] != digests.get(key) and not _is_free(key)]
        differences += [(key, "a value that is not shown", "another") for key in unlike]
        if differences:
            lines = "".join(f"\n  {key}: {theirs} on rank 0, {ours} here" for key, theirs, ours in differences)
            raise UserError(
                f"{ranks.me} was started with another recipe than rank 0; start every host with the same{lines}"
            )

    ranks.every(compare)


def _digests(recipe: Recipe, salt: str) -> tuple[str, dict[str, str]]:
    """The salt, and a digest of each value that the recipe's YAML does not show."""
    values = config.redacted_values(recipe)
    return salt, {key: hashlib.sha256(f"{salt}{value}".encode()).hexdigest() for key, value in values.items()}


def _is_free(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in FREE)


def _same_directory(run: Path, ranks: Ranks) -> None:
    """A file that rank 0 writes is there for all."""

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
