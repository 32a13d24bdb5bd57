"""Images of samples in a cache: their records, the bytes of those without a file of their own, the files of the others.

    images.bin            uint8, each document's records as JSON, one behind the other
    image_offsets.bin     int64, n + 1 offsets of them
    image_bytes.bin       uint8, bytes of images that stood in the rows themselves (parquet, data URIs), each once
    image_files.json      paths of the other images, and the SHA-256 of each

No pixels are kept. An image is read from its own file, or from here, each time that it is needed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import IO

from torch import Tensor

from dtrain.base.json_files import LARGE_FILE_BYTES, read_json
from dtrain.base.ranks import READ_THREADS, Ranks, file_identity
from dtrain.data.images.files import ImageRecord
from dtrain.data.images.processor import Layout

FILES = "image_files.json"


class ImageWriter:
    """Writer of the images of samples to the files of a cache, whose streams are open. advance: writes the offsets of
    pieces of some lengths to a file of offsets."""

    def __init__(self, streams: Mapping[str, IO[bytes]], advance: Callable[[str, Iterable[int]], None]):
        self._streams, self._advance = streams, advance
        self._bytes_end = 0
        self._places: dict[str, tuple[int, int]] = {}  # by the digest of an image: where its bytes are
        self._files: dict[str, str] = {}  # by the path of an image: its digest
        self._count, self._tokens, self._notes = 0, 0, dict[str, None]()

    @property
    def meta(self) -> dict[str, object]:
        """Counts of images and their tokens, and the notes on them, each once."""
        return {"images": self._count, "image_tokens": self._tokens, "image_notes": list(self._notes)}

    def add(self, documents: Sequence[Sequence[ImageRecord]], notes: Sequence[str]) -> bytes:
        """Write the images of each document; return what says in a fingerprint which they are. notes: on some of
        them."""
        self._notes |= dict.fromkeys(notes)
        written = [json.dumps([self._entry(record) for record in records]).encode() for records in documents]
        self._streams["images.bin"].write(b"".join(written))
        self._advance("image_offsets.bin", map(len, written))
        contents = [[[record.digest, record.layout] for record in records] for records in documents if records]
        return json.dumps(contents).encode() if contents else b""

    def close(self, directory: Path) -> None:
        """Write the list of the images' files."""
        (directory / FILES).write_text(json.dumps(self._files))

    def _entry(self, record: ImageRecord) -> list[object]:
        self._count, self._tokens = self._count + 1, self._tokens + record.layout.tokens
        if record.path is not None:
            self._files[record.path] = record.digest
        place = None if record.data is None else self._place(record.digest, record.data)
        return [record.name, record.digest, record.layout, record.path, place]

    def _place(self, digest: str, data: bytes) -> tuple[int, int]:
        if digest not in self._places:
            self._streams["image_bytes.bin"].write(data)
            start, self._bytes_end = self._bytes_end, self._bytes_end + len(data)
            self._places[digest] = (start, self._bytes_end)
        return self._places[digest]


def read_image_records(
    arrays: Sequence[Tensor], first: int, count: int, origin: tuple[str, int]
) -> list[list[ImageRecord]]:
    """Return the images of `count` documents of a cache from `first` on, in the order of their tokens. arrays: its
    images.bin, image_offsets.bin and image_bytes.bin, memory-mapped, [n] each. origin: file and line of their row."""
    records, offsets, contents = arrays
    where = f"{origin[0]}:{origin[1]}"
    bounds = offsets[first : first + count + 1].tolist()
    written = [json.loads(records[start:end].numpy().tobytes()) for start, end in pairwise(bounds)]
    return [[_record(contents, where, *entry) for entry in entries] for entries in written]


def _record(
    contents: Tensor, origin: str, name: str, digest: str, layout: list, path: str | None, stored: list[int] | None
) -> ImageRecord:
    height, width, grid, tokens = layout
    data = None if stored is None else contents[slice(*stored)].numpy().tobytes()
    return ImageRecord(name, digest, Layout(height, width, tuple(grid), tokens), path, data, origin)


def find_image_damage(place: Path, ranks: Ranks) -> str | None:
    """Return why images of the cache at `place` are not those that it was made of, as this machine sees their files;
    None where they are. Collective over `ranks`, which share out the reading: two all-gathers of objects."""
    file = place / FILES
    files = list(read_json(file, max_bytes=LARGE_FILE_BYTES).items()) if file.is_file() else []
    views = ranks.gather_results(lambda: file_identity([file.parent]) if files else "")
    beside = ranks.ranks_with_same(views)
    mine = files[beside.index(ranks.rank) :: len(beside)]
    with ThreadPoolExecutor(READ_THREADS) as threads:
        problems = ranks.gather_results(lambda: next(filter(None, threads.map(_damage, mine)), None))
    return next((problems[rank] for rank in beside if problems[rank] is not None), None)


def _damage(entry: tuple[str, str]) -> str | None:
    path, digest = entry
    try:
        with open(path, "rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"the image {path} cannot be read: {error.strerror}"
    return None if actual == digest else f"the image {path} is another one now"
