"""The files of a data cache, known by content: what its builder writes down, and the check before a run reads them.

meta.json, written last, holds the digest of every other file, the cache's own name and a checksum of itself. The
processes of a machine share out the reading. A damaged cache is deleted, for it can be made anew.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

from dtrain.checkpoint.files import sync, write_new
from dtrain.checkpoint.identity import digests, view
from dtrain.errors import UserError
from dtrain.json_files import OWN, digest, read_json
from dtrain.parallel.ranks import Ranks

META = "meta.json"


def seal(directory: Path, key: str, meta: dict[str, Any]) -> None:
    """Sync the files of `directory` to disk, and write `meta` there with what tells that they are the cache `key`."""
    files = sorted(directory.iterdir())
    for file in files:
        sync(file)
    contents = digests(files, ranks=Ranks(alone=True))
    meta = {**meta, "key": key, "digests": {file.name: content for file, content in zip(files, contents, strict=True)}}
    write_new(directory / META, json.dumps({**meta, "checksum": digest(meta)}, indent=1))


def is_whole(place: Path) -> bool:
    """Whether the cache is there, by its meta.json and the sizes of its files; their content is not read."""
    try:
        _read_meta(place)
    except UserError:
        return False
    return True


def drop_damaged(place: Path, ranks: Ranks) -> list[str]:
    """Delete the cache at `place` where a file is not as it was written; return what was wrong, a line for each
    machine.

    Every file is read, once on each machine. Raises UserError on every rank where a damaged cache cannot be deleted.
    Collective over `ranks`: five or six all-gathers of objects.
    """
    damage = _damage(place, ranks)
    views = ranks.every(lambda: None if damage is None else view([place.parent]))
    is_first = views.index(views[ranks.rank]) == ranks.rank  # of those that see this directory

    def drop() -> str | None:
        if damage is None or not is_first:
            return None
        try:
            with lock(place):
                found = _damage(place, Ranks(alone=True))  # again, for another run may have made it anew
                if found is not None:
                    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
                return None if found is None else f"the cache {place} is damaged ({found})"
        except OSError as problem:
            raise UserError(
                f"the cache {place} is damaged ({damage}), and cannot be deleted ({problem.strerror}): delete it, or "
                "set data.cache_dir to another place"
            ) from problem

    return [line for line in ranks.every(drop) if line is not None]


def _damage(place: Path, ranks: Ranks) -> str | None:
    """Return what is wrong with the cache at `place` on this machine; None where nothing is, or there is none.
    Collective over `ranks`."""
    damage, written = None, {}
    if os.path.lexists(place):
        try:
            written = _read_meta(place)["digests"]
        except UserError as error:
            damage = str(error)
    try:
        contents = digests([place / name for name in written], ranks=ranks)
    except UserError as error:  # raised on every rank: a disk may fail to read what it has
        return damage or str(error)
    for (name, content), found in zip(written.items(), contents, strict=True):
        if content != found:
            damage = damage or f"{place / name}: its content is not what was written"
    return damage


def _read_meta(place: Path) -> dict[str, Any]:
    """meta.json of the cache at `place`. Raises UserError where it, or the size of a file, is not as it was written."""
    file = place / META
    meta = read_json(file, most=OWN, constants=True)
    if meta.pop("checksum", None) != digest(meta):
        raise UserError(f"{file}: its content is not what was written")
    if meta["key"] != place.name:
        raise UserError(f"{file}: it is of the cache {meta['key']}")
    for name, size in meta["sizes"].items():
        path = place / name
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        if (found := path.stat().st_size) != size:
            raise UserError(f"{path}: it has {found} bytes instead of {size}")
    return meta


@contextmanager
def lock(place: Path) -> Iterator[None]:
    """Hold the cache at `place` until the block ends, or the process does; others wait."""
    with open(place.with_name(f"{place.name}.lock"), "a") as held:
        flock(held, LOCK_EX)
        yield
