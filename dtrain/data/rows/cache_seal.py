"""Digests of a data cache's files: its builder writes them, and a run checks the files before it reads them.

meta.json, written last, holds the digest of every other file, the cache's own name and a checksum of itself. The
processes of a machine share out the reading. A damaged cache is deleted, for it can be made anew.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.files import lock, sync, write_new
from dtrain.base.identity import digests, view
from dtrain.base.json_files import OWN, digest, read_json
from dtrain.base.ranks import Ranks

META = "meta.json"


def seal(directory: Path, key: str, meta: dict[str, Any]) -> None:
    """Sync the files of `directory` to disk, and write `meta` there with their digests and the cache's `key`."""
    files = sorted(directory.iterdir())
    for file in files:
        sync(file)
    contents = digests(files, ranks=Ranks(alone=True))
    meta = {**meta, "key": key, "digests": {file.name: content for file, content in zip(files, contents, strict=True)}}
    write_new(directory / META, json.dumps({**meta, "checksum": digest(meta)}, indent=1))


def is_whole(place: Path) -> bool:
    """Return whether the cache is there, by its meta.json and the sizes of its files; their content is not read."""
    try:
        _read_meta(place)
    except UserError:
        return False
    return True


def drop_damaged(place: Path, ranks: Ranks) -> list[str]:
    """Delete the cache at `place` where a file is not as it was written; return the damage, a line for each machine.

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
                problem = _damage(place, Ranks(alone=True))  # again, for another run may have made it anew
                if problem is not None:
                    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
                return None if problem is None else f"the cache {place} is damaged ({problem})"
        except OSError as error:
            raise UserError(
                f"the cache {place} is damaged ({damage}), and cannot be deleted ({error.strerror}): delete it, or "
                "set data.cache_dir to another place"
            ) from error

    return [line for line in ranks.every(drop) if line is not None]


def _damage(place: Path, ranks: Ranks) -> str | None:
    """Return the damage of the cache at `place` on this machine; None where it is whole or absent. Collective."""
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
    for (name, content), actual in zip(written.items(), contents, strict=True):
        if content != actual:
            damage = damage or f"{place / name}: its content is not what was written"
    return damage


def _read_meta(place: Path) -> dict[str, Any]:
    """Return meta.json of the cache at `place`. Raises UserError where it, or a file's size, is not as written."""
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
        if (actual := path.stat().st_size) != size:
            raise UserError(f"{path}: it has {actual} bytes instead of {size}")
    return meta
