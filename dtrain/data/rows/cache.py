"""Tokenised samples on disk, memory-mapped.

A cache is a directory `<cache_dir>/<key>/`. The key is a hash of the contents and names of the data files, their
formats, the tokenizer, the chat template and the options, so a run never reads a cache of other data. A sample is one
document, or two neighbouring ones for a preference pair (chosen, rejected). With n documents, the files are

    tokens.bin            int32  [tokens]  the ids of all documents, one after the other
    trained.bin           uint8  [tokens]  1 if the token is a target
    offsets.bin           int64  [n + 1]   where each document begins in these two
    origins.bin           int64  [n, 3]    number of the data file (in meta.json), line, length before truncation
    columns.bin           uint8            if the encoder stores columns: columns of each row as JSON
    column_offsets.bin    int64  [n + 1]   where each document's columns begin in columns.bin
    image*.*                               for a model with images: see image_cache.py
    left_out.txt                           every row that gave no sample, with the reason
    meta.json                              counts, sizes, digests of all files, the key, a checksum of itself

For example, with the documents [5, 6, 7] and [8, 9], of which the last two tokens and the last token are trained:

    tokens.bin    5 6 7 8 9
    trained.bin   0 1 1 0 1
    offsets.bin   0 3 5                    sample 1 is tokens[3:5]
    origins.bin   (0, 1, 3) (0, 2, 10)     line 2 of file 0 had 10 tokens and was truncated to 2

Writing: the files are written to a temporary directory next to the final one, synced, and renamed. meta.json is written
last. So a killed run leaves no half-written cache. A file lock lets one process write while the others wait; it is
released when its process ends. Rows are streamed, so memory does not grow with the data.

Reading: each run first compares the files, and the files of the images, with their digests. A damaged cache is deleted
and made again. Old caches are never deleted otherwise; a user may delete the directory when no run uses it.
"""

import copy
import hashlib
import heapq
import json
import math
import os
import shutil
import tempfile
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from dtrain.base.errors import UserError
from dtrain.base.files import lock, publish, sync, write_synced
from dtrain.base.hardware import num_cores
from dtrain.base.json_files import OWN_FILE_BYTES, digest, read_json
from dtrain.base.nested_columns import example_row
from dtrain.base.ranges import plural
from dtrain.base.ranks import Ranks, file_digests, file_identity
from dtrain.data.formats.encoder import TOO_LONG_REASONS, EncodedChunk, RowEncoder
from dtrain.data.sources.files import read_chunks
from dtrain.data.sources.reading import RowReading
from dtrain.data.text.dropped_text import DroppedText, describe_dropped_text

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.rows.image_cache import ImageWriter
    from dtrain.data.rows.pool import Job

META = "meta.json"
LEFT_OUT = "left_out.txt"
VERSION = 10  # of the files' layout; part of the key
MIN_PARALLEL_BYTES = 2 << 20  # with less data, starting processes costs more than they save
MAX_LISTED_ROWS = 20  # left-out rows that are listed in meta.json, for messages; left_out.txt lists all
MAX_EXAMPLE_ROWS = 256  # rows that `Samples.example_row` reads

# The files of arrays and their dtypes.
ARRAYS = {"tokens.bin": torch.int32, "trained.bin": torch.uint8, "offsets.bin": torch.int64, "origins.bin": torch.int64}
COLUMNS = {"columns.bin": torch.uint8, "column_offsets.bin": torch.int64}
IMAGES = {"images.bin": torch.uint8, "image_offsets.bin": torch.int64, "image_bytes.bin": torch.uint8}

# Counters in meta.json.
COUNTS = (
    "rows",
    "truncated",
    "too_long",
    "untrained",
    "trained_tokens",
    "tokens_cut",
    "others",  # rows of the other side of a validation split
    "plain_prompts",  # rows whose prompt is a string
    "escaped",  # rows that spell a special token that is read as characters
    "kept",  # rows that spell a special token that is read as a token
    "images_too_long",
)
# Characters that should be trained, those that the chat template leaves out, and the number of rows that lose some.
TEXT_COUNTS = ("text_characters", "dropped_characters", "dropping_rows")


@dataclass(frozen=True)
class SourceSamples:
    """The samples of one source, a contiguous range, and the number of times that each appears in an epoch.

    Attributes:
        first: Number of the first sample.
        count: Number of samples.
        weight: How often each sample appears in an epoch.

    Example:
        >>> source = SourceSamples(first=0, count=4, weight=2.5)
        >>> source.copies, source.extra, source.total
        (2, 2, 10)
    """

    first: int
    count: int
    weight: float = 1.0

    @property
    def copies(self) -> int:
        """Number of times that every sample appears."""
        return int(self.weight)

    @property
    def extra(self) -> int:
        """Number of samples that appear once more."""
        return round((self.weight - self.copies) * self.count)

    @property
    def total(self) -> int:
        """Number of appearances in an epoch."""
        return self.copies * self.count + self.extra


@dataclass(frozen=True)
class Source:
    """Data files that are read in the same way.

    Attributes:
        files: The files.
        formats: The format of each file.
        weight: How often each of their samples appears in an epoch; see `rows.EpochOrder`.
        row_reading: How their rows are read.
    """

    files: tuple[Path, ...]
    formats: tuple[str, ...]
    weight: float = 1.0
    row_reading: RowReading = field(default_factory=RowReading)

    @property
    def reading(self) -> list[Any]:
        """Format and number of the files, and how their rows are read, for the cache's key."""
        has_one_format = len(set(self.formats)) == 1
        reading: list[Any] = [self.formats[0] if has_one_format else self.formats, len(self.files)]
        return reading + self.row_reading.cache_key()


class CachedDocument(NamedTuple):
    """A document of a cache.

    Attributes:
        ids: Token ids, int32 [s].
        trained: Whether each token is trained, bool [s].
    """

    ids: Tensor
    trained: Tensor


class Samples:
    """The samples of a cache. `samples[i]` is the list of documents of sample i.

    Attributes:
        directory: The cache's directory.
        documents_per_sample: 2 for preference pairs (chosen, rejected), otherwise 1.
        noun: Name of the samples in the plural, such as "pairs".
        meta: Content of meta.json.
        sources: The range of samples of each source, with its weight.
        weights: The weight of each source.
        fingerprint: Hash of the ids, masks, weights and documents per sample.
        file_digests: Digest of the content of each data file, by its path.
    """

    def __init__(self, directory: Path, weights: Sequence[float], file_digests: Mapping[str, str]):
        self.directory = directory
        self.weights = tuple(weights)
        self.file_digests = dict(file_digests)
        self.meta: dict[str, Any] = json.loads((directory / META).read_text())
        self._tokens, self._trained, self._offsets, origins = self._map_files(ARRAYS)
        self._columns = self._map_files(COLUMNS)
        self._images = self._map_files(IMAGES)
        self._origins = origins.view(-1, 3)
        self.noun: str = self.meta["noun"]
        self.documents_per_sample: int = self.meta["documents_per_sample"]
        counts = self.meta["per_source"]
        starts = accumulate(counts[:-1], initial=0)
        self.sources = tuple(
            SourceSamples(first, count, weight)
            for first, count, weight in zip(starts, counts, self.weights, strict=True)
        )
        self.fingerprint = digest(self.meta["fingerprint"], self.weights, self.documents_per_sample)[:16]

    def _map_files(self, dtypes: Mapping[str, torch.dtype]) -> list[Tensor]:
        """Memory-map files of the cache. Files that this cache does not have are left out."""
        sizes = self.meta["sizes"]
        arrays = []
        for name, dtype in dtypes.items():
            if name not in sizes:
                continue
            if sizes[name] == 0:  # an empty file cannot be mapped
                arrays.append(torch.empty(0, dtype=dtype))
                continue
            num_elements = sizes[name] // dtype.itemsize
            arrays.append(torch.from_file(str(self.directory / name), shared=False, size=num_elements, dtype=dtype))
        return arrays

    @property
    def identity(self) -> str:
        """Digest of the samples and of the source that each belongs to."""
        return digest(self.fingerprint, self.meta["per_source"])[:16]

    @property
    def text(self) -> DroppedText:
        """Amount of text that should be trained, and how much of it the chat template leaves out."""
        example = self.meta["dropped_example"]
        example_text = "" if example is None else example[2]
        return DroppedText(self.meta["text_characters"], self.meta["dropped_characters"], example_text)

    def describe_dropped_text(self) -> str:
        """Return a sentence on the text that the chat template leaves out. There must be some."""
        file, line, _ = self.meta["dropped_example"]
        rows = self.meta["dropping_rows"]
        return describe_dropped_text(self.text, f"{rows:,} {plural(rows, 'row')}", f"{file}:{line}")

    @property
    def summary(self) -> dict[str, Any]:
        """Counts of rows, samples and tokens, and the identity."""
        counts = {name: self.meta[name] for name in ("rows", "samples", "tokens", "trained_tokens", "plain_prompts")}
        return {**counts, "identity": self.identity}

    def __len__(self) -> int:
        return self.meta["samples"]

    def __getitem__(self, index: int) -> list[CachedDocument]:
        first = index * self.documents_per_sample
        bounds = self._offsets[first : first + self.documents_per_sample + 1].tolist()
        documents = []
        for start, end in pairwise(bounds):
            documents.append(CachedDocument(self._tokens[start:end], self._trained[start:end].bool()))
        return documents

    def __reduce__(self):
        # A worker process maps the files again instead of receiving their content.
        return Samples, (self.directory, self.weights, self.file_digests)

    def lengths(self, indices: Tensor) -> Tensor:
        """Return the number of tokens of each sample, all of its documents together.

        Args:
            indices: Samples, int64 [n].

        Returns:
            Tokens, int64 [n].
        """
        first = indices * self.documents_per_sample
        return self._offsets[first + self.documents_per_sample] - self._offsets[first]

    def full_lengths(self, start: int, stop: int) -> Tensor:
        """Return the length before truncation of each document of samples [start, stop), int64 [documents]."""
        return self._origins[start * self.documents_per_sample : stop * self.documents_per_sample, 2]

    def row(self, index: int) -> dict[str, Any]:
        """Return the stored columns of a sample's row, as {"columns": {...}}.

        For prompts, these are all columns but the prompt, which is stored under "prompt" as the data file writes it.
        """
        content, offsets = self._columns
        first = index * self.documents_per_sample
        start, end = offsets[first : first + 2].tolist()
        return json.loads(bytes(content[start:end].tolist()))

    def images(self, index: int) -> "list[list[ImageRecord]]":
        """Return the images of each document of a sample, in the order of their tokens."""
        from dtrain.data.rows.image_cache import read_image_records  # text-only data loads nothing of images

        first = index * self.documents_per_sample
        return read_image_records(self._images, first, self.documents_per_sample, self.origin(index))

    def example_row(self) -> dict[str, Any]:
        """Return a row that has every stored column of up to 256 rows, evenly spread over the samples."""
        if not self._columns:
            return {}
        stride = -(-len(self) // MAX_EXAMPLE_ROWS)
        return example_row(self.row(index)["columns"] for index in range(0, len(self), stride))

    def origin(self, index: int) -> tuple[str, int]:
        """Return the data file and line of a sample."""
        file, line, _ = self._origins[index * self.documents_per_sample].tolist()
        return self.meta["files"][file], line


def open_cache(
    sources: Sequence[Source],
    encoder: RowEncoder,
    *,
    cache_dir: str | Path | None,
    num_workers: int | None = None,
    progress: bool = True,
    label: str = "data",
    print_line: Callable[[str], None] = print,
) -> Samples:
    """Open the samples of some sources, and tokenise them first if they are not cached.

    Args:
        sources: The data files.
        encoder: Encoder of their rows.
        cache_dir: Directory of the caches. None: the samples are written to a temporary directory, which is deleted at
            once; the process keeps its mapping of the files.
        num_workers: Processes that tokenise; None or 0 for one per core.
        progress: Whether a progress bar is shown.
        label: Name of the data in messages.
        print_line: Prints a line if a damaged cache is made again.

    Returns:
        The samples.

    Raises:
        UserError: If a row is wrong (with file and line), a data file changes meanwhile, or no sample is left.

    Collectives:
        If a process group is up: the ranks share the reading of the data files and of the cache's files, whose digests
        they exchange. One process writes the cache while the others wait at a file lock.
    """
    weights = [source.weight for source in sources]
    data_digests = _digest_data_files(sources, Ranks())
    if cache_dir is None:
        with tempfile.TemporaryDirectory() as scratch:
            meta = _write_samples(Path(scratch), sources, encoder, num_workers, progress, label)
            (Path(scratch) / META).write_text(json.dumps(meta))
            # The directory is deleted on return. Files that are mapped stay readable until the process ends.
            return Samples(Path(scratch), weights, data_digests)
    root = Path(cache_dir).expanduser().resolve()  # a link may lead to a disk on which nothing exists yet
    directory = root / _cache_key(sources, encoder, data_digests)
    for damage in delete_damaged_cache(directory, Ranks()):
        print_line(f"{label}: {damage}; it is made again")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not is_complete(directory):
            with lock(directory):
                # Another process may have finished it while this one waited for the lock.
                if not is_complete(directory):
                    _make_cache(directory, sources, encoder, data_digests, num_workers, progress, label)
    except OSError as problem:
        raise UserError(
            f"{problem.filename or root}: {problem.strerror}, while the {label} was tokenised into {root}. "
            "Fix this, or set data.cache_dir to another directory"
        ) from problem
    return Samples(directory, weights, data_digests)


def _make_cache(
    directory: Path,
    sources: Sequence[Source],
    encoder: RowEncoder,
    data_digests: Mapping[str, str],
    num_workers: int | None,
    progress: bool,
    label: str,
) -> None:
    """Write the cache `directory`. The caller has its lock."""
    root = directory.parent
    # Temporary directories of killed runs: with the lock, no other process can be writing to one.
    for leftover in root.glob(f"{directory.name}.tmp-*"):
        shutil.rmtree(leftover)
    shutil.rmtree(directory, ignore_errors=True)
    partial_cache = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=root))
    try:
        meta = _write_samples(partial_cache, sources, encoder, num_workers, progress, label)
        seal(partial_cache, directory.name, meta)
        # The key was computed from the files before they were read. Rows with other content must not get this key.
        if _digest_data_files(sources, Ranks(single_process=True)) != data_digests:
            raise UserError(f"a file of the {label} changed while it was tokenised. Start the run again")
        publish(partial_cache, directory)
    finally:
        shutil.rmtree(partial_cache, ignore_errors=True)


def _digest_data_files(sources: Sequence[Source], ranks: Ranks) -> dict[str, str]:
    """Return a digest of the content of each data file, by its path. Collective over `ranks`."""
    files = [file for source in sources for file in source.files]
    return dict(zip(map(str, files), file_digests(files, ranks=ranks), strict=True))


def _cache_key(sources: Sequence[Source], encoder: RowEncoder, data_digests: Mapping[str, str]) -> str:
    """Return the cache's key. The files' names are part of it, because messages about rows use them."""
    files = [file for source in sources for file in source.files]
    readings = [source.reading for source in sources]
    names = [str(file.resolve()) for file in files]
    contents = [data_digests[str(file)] for file in files]
    return digest(VERSION, readings, names, contents, encoder.fingerprint)[:16]


class _CacheWriter:
    """Writer of samples to the files of a cache. It counts rows, tokens and characters on the way."""

    def __init__(self, directory: Path, stack: ExitStack, encoder: RowEncoder):
        self.documents_per_sample = encoder.documents
        names = list(ARRAYS)
        if encoder.stores_columns:
            names += COLUMNS
        if encoder.images:
            names += IMAGES
        self.streams = {name: stack.enter_context(open(directory / name, "wb")) for name in names}
        self.ends = {name: 0 for name in names if name.endswith("offsets.bin")}  # last offset of each file of offsets
        for name in self.ends:
            self.streams[name].write(array("q", [0]).tobytes())
        self.left_out_list = stack.enter_context(open(directory / LEFT_OUT, "w", encoding="utf-8"))
        self.hash = hashlib.blake2b(digest_size=16)  # of all samples: their fingerprint
        self.num_samples = 0
        self.counts = Counter(dict.fromkeys([*COUNTS, *TEXT_COUNTS], 0))
        self.dropped_example: list[Any] | None = None  # file, line and text
        self.listed_rows: list[list[Any]] = []  # file, line and reason of the first rows that are left out
        # For "escaped" and "kept": file, line and text of the first row with such a special token.
        self.special_tokens: dict[str, tuple[str, int, str]] = {}
        self.images: ImageWriter | None = None
        if encoder.images is not None:
            from dtrain.data.rows import image_cache

            self.images = image_cache.ImageWriter(self.streams, self._write_offsets)

    def add(self, number: int, file: str, chunk: EncodedChunk) -> None:
        """Write the samples of a chunk of rows.

        Args:
            number: Number of the data file.
            file: Path of the data file.
            chunk: The encoded rows.
        """
        # The fingerprint is a hash of these parts in this order.
        self._write_hashed("tokens.bin", chunk.tokens.tobytes())
        self._write_hashed("trained.bin", bytes(chunk.trained))
        self.hash.update(array("q", chunk.lengths).tobytes())
        self._write_offsets("offsets.bin", chunk.lengths)
        origins = array("q")
        for line, full_length in zip(chunk.lines, chunk.full_lengths, strict=True):
            origins.extend((number, line, full_length))
        self.streams["origins.bin"].write(origins.tobytes())
        if "columns.bin" in self.streams:
            self._write_hashed("columns.bin", b"".join(chunk.columns))
            self._write_offsets("column_offsets.bin", [len(columns) for columns in chunk.columns])
        if self.images is not None:
            self.hash.update(self.images.add(chunk.images, chunk.image_notes))
        self._count(chunk)
        self._collect_examples(file, chunk)
        self._list_left_out_rows(file, chunk)

    def _count(self, chunk: EncodedChunk) -> None:
        """Add the rows, samples, tokens and characters of a chunk to the counters."""
        num_cut = [full - length for full, length in zip(chunk.full_lengths, chunk.lengths, strict=True)]
        first_documents = range(0, len(num_cut), self.documents_per_sample)  # of each sample
        num_truncated = 0
        for first in first_documents:
            if any(num_cut[first : first + self.documents_per_sample]):
                num_truncated += 1
        self.num_samples += len(first_documents)
        self.counts.update(
            rows=chunk.rows,
            others=chunk.num_other_rows,
            plain_prompts=chunk.num_string_prompts,
            escaped=len(chunk.escaped),
            kept=len(chunk.kept),
            images_too_long=chunk.num_image_rows_too_long,
            trained_tokens=chunk.trained.count(1),
            tokens_cut=sum(num_cut),
            truncated=num_truncated,
            text_characters=chunk.text.characters,
            dropped_characters=chunk.text.dropped,
            dropping_rows=len(chunk.dropping_rows),
        )

    def _collect_examples(self, file: str, chunk: EncodedChunk) -> None:
        for kind, tokens in (("escaped", chunk.escaped), ("kept", chunk.kept)):
            if tokens and kind not in self.special_tokens:
                self.special_tokens[kind] = (file, tokens[0].line, tokens[0].text)
        if chunk.dropping_rows and self.dropped_example is None:
            line, text = chunk.dropping_rows[0]
            self.dropped_example = [file, line, text]

    def _list_left_out_rows(self, file: str, chunk: EncodedChunk) -> None:
        for line, reason in chunk.left_out:
            self.counts["too_long" if reason in TOO_LONG_REASONS else "untrained"] += 1
            self.left_out_list.write(f"{file}:{line}: {reason}\n")
            if len(self.listed_rows) < MAX_LISTED_ROWS:
                self.listed_rows.append([file, line, reason])

    def _write_hashed(self, name: str, content: bytes) -> None:
        """Write content that is part of the fingerprint."""
        self.hash.update(content)
        self.streams[name].write(content)

    def _write_offsets(self, name: str, lengths: Iterable[int]) -> None:
        """Write the end of each piece with these lengths, counted from the last offset that was written."""
        offsets = array("q")
        end = self.ends[name]
        for length in lengths:
            end += length
            offsets.append(end)
        self.streams[name].write(offsets.tobytes())
        self.ends[name] = end


def _write_samples(
    directory: Path, sources: Sequence[Source], encoder: RowEncoder, num_workers: int | None, progress: bool, label: str
) -> dict[str, Any]:
    """Tokenise the rows of `sources` into files of `directory`, and return the content of meta.json."""
    encoder = with_split_threshold(sources, encoder)
    files = [(number, file) for number, source in enumerate(sources) for file in source.files]
    formats = [name for source in sources for name in source.formats]
    num_bytes = sum(file.stat().st_size for _, file in files)
    has_gzip = any(file.suffix == ".gz" for _, file in files)
    samples_per_source = [0] * len(sources)
    with ExitStack() as stack:
        writer = _CacheWriter(directory, stack, encoder)
        encode = _parallel_encode(stack, encoder, num_bytes, num_workers)
        # The chunks of a gzipped file count its uncompressed bytes, whose number is not known.
        bar = stack.enter_context(_progress_bar(label, None if has_gzip else num_bytes, progress))
        # `encode` reads jobs ahead of the results that it yields. Results keep the order of the jobs, so a queue of the
        # jobs' file numbers maps each result to its file.
        file_numbers: deque[int] = deque()

        def jobs() -> Iterator["Job"]:
            for number, ((source, file), name) in enumerate(zip(files, formats, strict=True)):
                for chunk in read_chunks(file):
                    file_numbers.append(number)
                    yield chunk, name, sources[source].row_reading

        for chunk in encode(jobs()):
            number = file_numbers.popleft()
            source, file = files[number]
            writer.add(number, str(file), chunk)
            samples_per_source[source] += len(chunk.lengths) // encoder.documents
            bar.update(chunk.size)
        if writer.images is not None:
            writer.images.close(directory)
    if writer.num_samples == 0:
        raise _no_samples_error(writer, [file for _, file in files], label, encoder)
    return {
        "version": VERSION,
        "documents_per_sample": encoder.documents,
        "noun": encoder.noun,
        "fingerprint": writer.hash.hexdigest(),
        "files": [str(file) for _, file in files],
        "per_source": samples_per_source,
        "samples": writer.num_samples,
        "tokens": writer.ends["offsets.bin"],
        **writer.counts,
        **(writer.images.meta if writer.images else {"images": 0}),
        "left_out": writer.listed_rows,
        "special_tokens": writer.special_tokens,
        "dropped_example": writer.dropped_example,
        "max_length": encoder.max_length,
        "sizes": {name: (directory / name).stat().st_size for name in writer.streams},
    }


def _parallel_encode(
    stack: ExitStack, encoder: RowEncoder, num_bytes: int, num_workers: int | None
) -> "Callable[[Iterable[Job]], Iterator[EncodedChunk]]":
    """Return a function that encodes chunks in order: in processes, or in this one if there are few bytes."""
    workers = num_workers or num_cores()
    if num_bytes <= MIN_PARALLEL_BYTES or workers <= 1:
        return partial(starmap, encoder.encode_chunk)
    from dtrain.data.rows.pool import Pool  # needed only for large data

    return stack.enter_context(Pool(encoder, workers)).encode


def _progress_bar(label: str, total: int | None, progress: bool) -> tqdm:
    return tqdm(
        total=total,
        desc=f"tokenising {label}",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: shown only on a terminal
        leave=False,
    )


def with_split_threshold(sources: Sequence[Source], encoder: RowEncoder) -> RowEncoder:
    """Return an encoder whose validation split has a threshold. It is a copy if the threshold had to be found.

    If `data.val` is a number of rows, the validation rows are those with the smallest hash numbers. For example, with
    data.val=2 and the numbers 0.7, 0.1, 0.4, 0.2, the threshold is just above 0.2. Finding it takes one more reading of
    all rows, but only while a cache is made.

    Raises:
        UserError: If a row is wrong.
    """
    split = encoder.split
    if split is None or split.threshold is not None:
        return encoder
    numbers = _split_numbers(sources, encoder)
    smallest = heapq.nsmallest(int(split.size), numbers)
    threshold = math.nextafter(smallest[-1], 2.0) if smallest else 0.0
    encoder = copy.copy(encoder)
    encoder.split = split._replace(threshold=threshold)
    return encoder


def _split_numbers(sources: Sequence[Source], encoder: RowEncoder) -> Iterator[float]:
    """Yield the hash number of each row of `sources`."""
    for source in sources:
        for file, name in zip(source.files, source.formats, strict=True):
            for chunk in read_chunks(file):
                yield from encoder.split_numbers(chunk, name, source.row_reading)


def _no_samples_error(writer: _CacheWriter, files: Sequence[Path], label: str, encoder: RowEncoder) -> UserError:
    """Return the error for data that gave no sample, with the reason and a fix."""
    names = ", ".join(str(file) for file in files[:3])
    if len(files) > 3:
        names += ", ..."
    num_rows = writer.counts["rows"]
    num_other_rows = writer.counts["others"]
    split = encoder.split
    if split is not None and num_other_rows and not num_rows:
        direction = "higher" if split.is_validation else "lower"
        return UserError(
            f"{label}: data.val={split.size} leaves it without a row: all of the {num_other_rows} rows in {names} are "
            f"on the other side of the split. Set data.val {direction}, or name a validation file with data.val.path"
        )
    if not num_rows:
        return UserError(f"{label}: the dataset is empty: there is no row in {names}")
    file, line, reason = writer.listed_rows[0]
    example = f"for example {file}:{line}: {reason}"
    if writer.counts["too_long"] == num_rows:
        fixes = ["Raise data.max_length"]
        if encoder.too_long != "truncate":
            fixes.append("set data.too_long=truncate")
        if writer.counts["images_too_long"]:
            fixes.append("lower data.image_max_pixels")
        return UserError(
            f"{label}: all {num_rows} rows are left out, longer than data.max_length={encoder.max_length} ({names}), "
            f"{example}. {', or '.join(fixes)}"
        )
    is_pair = encoder.noun == "pairs"
    if "max_length" in reason:
        fix = "Raise data.max_length, because the trained tokens are beyond it"
    elif is_pair:
        fix = "chosen and rejected must differ. `dtrain preview` shows them"
    else:
        fix = "data.loss_on and the roles of the messages decide what is trained. `dtrain preview` shows it"
    what = "teaches a preference" if is_pair else "has a trained token"
    return UserError(f"{label}: not one of {num_rows} rows {what} ({names}), {example}. {fix}")


def seal(directory: Path, key: str, meta: dict[str, Any]) -> None:
    """Sync the files of `directory` to disk, and write meta.json with their digests and the cache's `key`."""
    files = sorted(directory.iterdir())
    for file in files:
        sync(file)
    contents = file_digests(files, ranks=Ranks(single_process=True))
    meta = {**meta, "key": key, "digests": {file.name: content for file, content in zip(files, contents, strict=True)}}
    write_synced(directory / META, json.dumps({**meta, "checksum": digest(meta)}, indent=1))


def is_complete(directory: Path) -> bool:
    """Return True if the cache exists, by its meta.json and the sizes of its files. Their content is not read."""
    try:
        _read_meta(directory)
    except UserError:
        return False
    return True


def delete_damaged_cache(directory: Path, ranks: Ranks) -> list[str]:
    """Delete the cache `directory` if one of its files was changed.

    Every file is read, once on each machine.

    Returns:
        A sentence on the damage, for each machine on which the cache was deleted.

    Raises:
        UserError: On every rank, if a damaged cache cannot be deleted.

    Collectives:
        Six all-gathers of objects over `ranks`, or eight if the cache has images. Fewer if a file cannot be read.
    """
    damage = _find_damage(directory, ranks)
    # Ranks that see the same directory get equal texts from `file_identity`. The first of these ranks deletes it.
    views = ranks.gather_results(lambda: None if damage is None else file_identity([directory.parent]))
    deletes = damage is not None and views.index(views[ranks.rank]) == ranks.rank

    def delete() -> str | None:
        if not deletes:
            return None
        try:
            with lock(directory):
                # Check again under the lock: another run may have deleted the damaged cache and written a new one.
                problem = _find_damage(directory, Ranks(single_process=True))
                if problem is None:
                    return None
                if directory.is_dir() and not directory.is_symlink():
                    shutil.rmtree(directory)
                else:
                    directory.unlink()
                return f"the cache {directory} is damaged ({problem})"
        except OSError as error:
            raise UserError(
                f"the cache {directory} is damaged ({damage}) and cannot be deleted ({error.strerror}). Delete it, or "
                "set data.cache_dir to another directory"
            ) from error

    return [line for line in ranks.gather_results(delete) if line is not None]


def _find_damage(directory: Path, ranks: Ranks) -> str | None:
    """Return the damage of a cache as this machine sees it; None if it is intact or absent. Collective over `ranks`."""
    damage: str | None = None
    expected: dict[str, str] = {}
    has_images = False
    if os.path.lexists(directory):
        try:
            meta = _read_meta(directory)
            expected = meta["digests"]
            has_images = meta["images"] > 0
        except UserError as error:
            damage = str(error)
    try:
        contents = file_digests([directory / name for name in expected], ranks=ranks)
    except UserError as error:  # raised on every rank: a disk may fail to read a file
        return damage or str(error)
    for (name, content), actual in zip(expected.items(), contents, strict=True):
        if content != actual:
            damage = damage or f"{directory / name}: its content is not what was written"
    if any(ranks.gather_results(lambda: has_images)):
        from dtrain.data.rows.image_cache import find_image_damage

        damage = find_image_damage(directory, ranks) or damage
    return damage


def _read_meta(directory: Path) -> dict[str, Any]:
    """Return meta.json of a cache. Raises UserError if it was changed, or if a file has another size."""
    file = directory / META
    meta = read_json(file, max_bytes=OWN_FILE_BYTES, allow_nan=True)
    if meta.pop("checksum", None) != digest(meta):
        raise UserError(f"{file}: its content is not what was written")
    if meta["key"] != directory.name:
        raise UserError(f"{file}: it belongs to the cache {meta['key']}")
    for name, size in meta["sizes"].items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        actual_size = path.stat().st_size
        if actual_size != size:
            raise UserError(f"{path}: it has {actual_size} bytes instead of {size}")
    return meta
