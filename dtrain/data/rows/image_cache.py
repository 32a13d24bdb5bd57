"""Images of the samples in a cache.

A cache stores no pixels. It stores a record of each image (digest, layout, path), and the bytes of images that have no
file of their own, such as those inside parquet files and data URIs. An image is read again whenever a batch needs it.

    images.bin            uint8          the records of each document as JSON, one document after the other
    image_offsets.bin     int64 [n + 1]  where each document's records begin in images.bin
    image_bytes.bin       uint8          bytes of images without a file; each image once
    image_files.json                     paths of the other images, each with its SHA-256

A record in images.bin is, for an image file and for an image inside a row,

    ["cat.png", "9f86d0...", [448, 672, [1, 32, 48], 384], "/data/cat.png", null]
    ["an image", "60303a...", [448, 448, [1, 32, 32], 256], null, [0, 18230]]        bytes 0 to 18230 of image_bytes.bin
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
    """Writer of the images of samples to the files of a cache."""

    def __init__(self, streams: Mapping[str, IO[bytes]], write_offsets: Callable[[str, Iterable[int]], None]):
        """Start with no images.

        Args:
            streams: The open files of the cache, by name.
            write_offsets: Writes the offsets of pieces with some lengths to a file of offsets.
        """
        self._streams = streams
        self._write_offsets = write_offsets
        self._bytes_end = 0  # of image_bytes.bin
        self._byte_ranges: dict[str, tuple[int, int]] = {}  # in image_bytes.bin, by the image's digest
        self._files: dict[str, str] = {}  # digest of each image file, by its path
        self._num_images = 0
        self._num_tokens = 0
        self._notes: dict[str, None] = {}  # used as an ordered set

    @property
    def meta(self) -> dict[str, object]:
        """Entries for meta.json: number of images and of their tokens, and the notes on them, each once."""
        return {"images": self._num_images, "image_tokens": self._num_tokens, "image_notes": list(self._notes)}

    def add(self, documents: Sequence[Sequence[ImageRecord]], notes: Sequence[str]) -> bytes:
        """Write the images of documents.

        Args:
            documents: The images of each document, in the order of their tokens.
            notes: Sentences on these images.

        Returns:
            The part of the samples' fingerprint that identifies the images.
        """
        self._notes.update(dict.fromkeys(notes))
        pieces = []
        for records in documents:
            entries = [self._add_record(record) for record in records]
            pieces.append(json.dumps(entries).encode())
        self._streams["images.bin"].write(b"".join(pieces))
        self._write_offsets("image_offsets.bin", [len(piece) for piece in pieces])
        identities = []
        for records in documents:
            if records:
                identities.append([[record.digest, record.layout] for record in records])
        return json.dumps(identities).encode() if identities else b""

    def close(self, directory: Path) -> None:
        """Write the list of image files."""
        (directory / FILES).write_text(json.dumps(self._files))

    def _add_record(self, record: ImageRecord) -> list[object]:
        """Count an image, store its bytes if it has no file, and return its entry in images.bin."""
        self._num_images += 1
        self._num_tokens += record.layout.tokens
        if record.path is not None:
            self._files[record.path] = record.digest
        byte_range = None if record.data is None else self._store_bytes(record.digest, record.data)
        return [record.name, record.digest, record.layout, record.path, byte_range]

    def _store_bytes(self, digest: str, data: bytes) -> tuple[int, int]:
        if digest not in self._byte_ranges:
            self._streams["image_bytes.bin"].write(data)
            start = self._bytes_end
            self._bytes_end += len(data)
            self._byte_ranges[digest] = (start, self._bytes_end)
        return self._byte_ranges[digest]


def read_image_records(
    arrays: Sequence[Tensor], first: int, count: int, origin: tuple[str, int]
) -> list[list[ImageRecord]]:
    """Return the images of some neighbouring documents, in the order of their tokens.

    Args:
        arrays: images.bin, image_offsets.bin and image_bytes.bin of the cache, memory-mapped, each [n].
        first: Number of the first document.
        count: Number of documents.
        origin: Data file and line of their row.
    """
    records, offsets, image_bytes = arrays
    row_name = f"{origin[0]}:{origin[1]}"
    bounds = offsets[first : first + count + 1].tolist()
    documents = []
    for start, end in pairwise(bounds):
        entries = json.loads(records[start:end].numpy().tobytes())
        documents.append([_record_of_entry(entry, image_bytes, row_name) for entry in entries])
    return documents


def _record_of_entry(entry: list, image_bytes: Tensor, row_name: str) -> ImageRecord:
    name, digest, (height, width, grid, tokens), path, byte_range = entry
    data = None
    if byte_range is not None:
        start, end = byte_range
        data = image_bytes[start:end].numpy().tobytes()
    return ImageRecord(name, digest, Layout(height, width, tuple(grid), tokens), path, data, row_name)


def find_image_damage(directory: Path, ranks: Ranks) -> str | None:
    """Return a sentence on an image file of the cache that was changed or deleted; None if there is none.

    The ranks of a machine, which see the same files, share the reading. Each machine may get another result.

    Collectives:
        Two all-gathers of objects over `ranks`.
    """
    list_file = directory / FILES
    files = list(read_json(list_file, max_bytes=LARGE_FILE_BYTES).items()) if list_file.is_file() else []
    views = ranks.gather_results(lambda: file_identity([list_file.parent]) if files else "")
    ranks_of_machine = ranks.ranks_with_same(views)
    files_of_rank = files[ranks_of_machine.index(ranks.rank) :: len(ranks_of_machine)]

    def first_problem() -> str | None:
        with ThreadPoolExecutor(READ_THREADS) as threads:
            for problem in threads.map(_file_problem, files_of_rank):
                if problem is not None:
                    return problem
        return None

    problems = ranks.gather_results(first_problem)
    for rank in ranks_of_machine:
        if problems[rank] is not None:
            return problems[rank]
    return None


def _file_problem(entry: tuple[str, str]) -> str | None:
    path, digest = entry
    try:
        with open(path, "rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"the image {path} cannot be read: {error.strerror}"
    return None if actual == digest else f"the image {path} is another one now"
