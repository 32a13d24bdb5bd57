"""Content identity of files: a digest of their content; their names, places and time stamps play no part.

A digest is a SHA-256 over those of the file's chunks, which the processes of a machine read side by side: each takes
its share, in several threads. A machine with copies of its own reads these, and not those of another.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtrain.base.errors import UserError
from dtrain.base.json_files import digest
from dtrain.base.ranks import Ranks

CHUNK = 64 << 20
BLOCK = 1 << 16
THREADS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def digests(files: Sequence[Path], wrong: str | None = None, ranks: Ranks | None = None) -> list[str]:
    """Return the digest of each file, as this rank sees it. Collective over `ranks`: 3 or 4 all-gathers of objects.

    wrong: what to say, in a UserError on every rank, where machines have files of other content. A file that cannot be
    read, or changes meanwhile, is a UserError on every rank too.
    """
    ranks = ranks or Ranks()
    seen = ranks.every(lambda: view(files))
    beside = [rank for rank, other in enumerate(seen) if other == seen[ranks.rank]]  # this rank among them

    def read() -> dict[tuple[int, int], str]:
        counts = [-(-file.stat().st_size // CHUNK) for file in files]
        chunks = [(number, at) for number, count in enumerate(counts) for at in range(count)]
        mine = chunks[beside.index(ranks.rank) :: len(beside)]
        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(mine, threads.map(lambda chunk: _read(files[chunk[0]], chunk[1]), mine), strict=True))

    per_rank = ranks.every(read)
    table = {chunk: value for rank in beside for chunk, value in per_rank[rank].items()}
    counts = Counter(number for number, _ in table)

    def join() -> list[str]:
        whole = []
        for number, file in enumerate(files):
            parts = [table.get((number, at)) for at in range(counts[number])]
            if None in parts:
                raise UserError(f"{file} changed while it was read: start again")
            whole.append(digest(parts))
        return whole

    whole = ranks.together(join)
    if wrong is not None and len(set(seen)) > 1:
        ranks.same(digest(whole), wrong)
    return whole


def view(files: Sequence[Path]) -> str:
    """Return a text that is the same for processes of one machine that see the same `files`, whatever their mounts."""
    machine = _BOOT.read_text() if _BOOT.is_file() else socket.gethostname()
    return digest(machine, [(stat.st_dev, stat.st_ino) for stat in (file.stat() for file in files)])


def _read(file: Path, chunk: int) -> str:
    hasher, left = hashlib.sha256(), CHUNK
    with file.open("rb", buffering=0) as stream:
        stream.seek(chunk * CHUNK)
        while left and (block := stream.read(min(BLOCK, left))):
            hasher.update(block)
            left -= len(block)
    return hasher.hexdigest()
