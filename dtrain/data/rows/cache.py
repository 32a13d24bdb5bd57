"""Tokenised samples on disk, memory-mapped: made once, by one process, whole or not at all.

A cache is a directory `<cache_dir>/<key>/`, where the key is a hash of what the data files hold, their names and
formats, the tokenizer, the template and the options. A sample is one document or, of preferences, two neighbours,
chosen and rejected; n counts documents:

    tokens.bin    int32   the ids of all documents, one behind the other
    trained.bin   uint8   1 where the token is a target
    offsets.bin   int64   n + 1 offsets of the documents into both
    origins.bin   int64   n × 3: number of the file in meta.json, line, length before truncation
    columns.bin   uint8   where an encoder keeps them: columns of each row as JSON, one behind the other
    column_offsets.bin    int64, n + 1 offsets of them
    image*.*              of a model that takes images: see image_cache.py
    left_out.txt          every row that is no sample, and why
    meta.json             counts, sizes, digests of all files, the cache's name, a checksum of itself; written last

It is built beside its place, synced and renamed, so that a kill leaves no half cache; a lock file, held by flock and so
released with its holder, lets one process build while others wait. Every run reads it, and the files of its images,
against their digests first: what is damaged, or of other images, is made anew. Building streams: memory does not grow
with the set. Old caches are not removed; the directory may be deleted whenever no run uses it.
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
from typing import TYPE_CHECKING, Any

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
from dtrain.data.text.dropped_text import DroppedText, describe_dropped_text

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.rows.image_cache import ImageWriter
    from dtrain.data.rows.pool import Job

META = "meta.json"
VERSION = 10
MIN_PARALLEL_BYTES = 2 << 20  # bytes of data below which starting processes costs more than they save
MAX_LISTED_ROWS = 20  # rows left out that messages name; left_out.txt has all
ARRAYS = {"tokens.bin": torch.int32, "trained.bin": torch.uint8, "offsets.bin": torch.int64, "origins.bin": torch.int64}
COUNTS = "rows truncated too_long untrained trained_tokens tokens_cut others plain_prompts".split()
COUNTS += ["escaped", "kept", "images_too_long"]
# Of the text that should be trained: its characters, those that the chat template leaves out, and the rows of these.
TEXT_COUNTS = "text_characters dropped_characters dropping_rows".split()
IMAGES = {"images.bin": torch.uint8, "image_offsets.bin": torch.int64, "image_bytes.bin": torch.uint8}
COLUMNS = {"columns.bin": torch.uint8, "column_offsets.bin": torch.int64}


@dataclass(frozen=True)
class SourceSamples:
    """A source's samples, `first` and `count` of them, and the times that each appears in an epoch."""

    first: int
    count: int
    weight: float = 1.0

    @property
    def copies(self) -> int:
        return int(self.weight)

    @property
    def extra(self) -> int:
        """Number of samples that appear once more."""
        return round((self.weight - self.copies) * self.count)

    @property
    def total(self) -> int:
        return self.copies * self.count + self.extra


@dataclass(frozen=True)
class Source:
    """Files, the format of each, their weight in an epoch (`rows.Order`), and their names of our columns."""

    files: tuple[Path, ...]
    formats: tuple[str, ...]
    weight: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def reading(self) -> list[Any]:
        """Format, number and columns of the files, for the cache's key."""
        name = self.formats[0] if len(set(self.formats)) == 1 else self.formats
        return [name, len(self.files), *([dict(self.columns)] if self.columns else ())]


class Samples:
    """Samples of a cache. `samples[i]` is the list of its documents, each (ids int32 [s], trained bool [s]).

    documents_per_sample   1, or 2 for preferences: chosen, rejected
    noun                   name of the samples, in the plural
    meta                   content of meta.json: rows, samples, truncated, too_long, untrained, tokens, left_out ...
    shares                 the samples of each source, with its weight
    fingerprint            a hash of ids, masks, weights and documents per sample
    file_digests           digest of the content of each file, by its path
    """

    def __init__(self, directory: Path, weights: Sequence[float], file_digests: Mapping[str, str]):
        self.directory, self.weights, self.file_digests = directory, tuple(weights), dict(file_digests)
        self.meta: dict[str, Any] = json.loads((directory / META).read_text())
        self._tokens, self._trained, self._offsets, origins = self._mapped(ARRAYS)
        self._columns, self._images = self._mapped(COLUMNS), self._mapped(IMAGES)
        self._origins = origins.view(-1, 3)
        self.noun: str = self.meta["noun"]
        self.documents_per_sample: int = self.meta["documents_per_sample"]
        counts = self.meta["per_source"]
        starts = accumulate(counts[:-1], initial=0)
        self.sources = tuple(SourceSamples(*share) for share in zip(starts, counts, self.weights, strict=True))
        self.fingerprint = digest(self.meta["fingerprint"], self.weights, self.documents_per_sample)[:16]

    def _mapped(self, kinds: Mapping[str, torch.dtype]) -> list[Tensor]:
        """Return the arrays of these files, memory-mapped; none of files that the cache has not."""
        sizes = self.meta["sizes"]
        return [
            torch.from_file(str(self.directory / name), shared=False, size=sizes[name] // kind.itemsize, dtype=kind)
            if sizes[name]
            else torch.empty(0, dtype=kind)
            for name, kind in kinds.items()
            if name in sizes
        ]

    @property
    def identity(self) -> str:
        """A digest of the samples and of the source that each is of."""
        return digest(self.fingerprint, self.meta["per_source"])[:16]

    @property
    def text(self) -> DroppedText:
        """The text that should be trained, and what of it the chat template leaves out."""
        example = self.meta["dropped_example"]
        shown = "" if example is None else example[2]
        return DroppedText(self.meta["text_characters"], self.meta["dropped_characters"], shown)

    def describe_dropped_text(self) -> str:
        """Return a sentence on the text that the chat template leaves out, of which there is some."""
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

    def __getitem__(self, index: int) -> list[tuple[Tensor, Tensor]]:
        first = index * self.documents_per_sample
        bounds = self._offsets[first : first + self.documents_per_sample + 1].tolist()
        return [(self._tokens[start:end], self._trained[start:end].bool()) for start, end in pairwise(bounds)]

    def __reduce__(self):
        return Samples, (self.directory, self.weights, self.file_digests)

    def lengths(self, indices: Tensor) -> Tensor:
        """Return the number of tokens of the samples `indices`, all documents of each. Both int64 [n]."""
        first = indices * self.documents_per_sample
        return self._offsets[first + self.documents_per_sample] - self._offsets[first]

    def full_lengths(self, start: int, stop: int) -> Tensor:
        """Return the length before truncation of each document of samples [start, stop), int64 [documents]."""
        return self._origins[start * self.documents_per_sample : stop * self.documents_per_sample, 2]

    def row(self, index: int) -> dict[str, Any]:
        """Return {"columns": the kept columns of the row}; of prompts all others, and "prompt", as the data has it."""
        content, offsets = self._columns
        first = index * self.documents_per_sample
        start, end = offsets[first : first + 2].tolist()
        return json.loads(bytes(content[start:end].tolist()))

    def images(self, index: int) -> "list[list[ImageRecord]]":
        """Return the images of each document of a sample, in the order of their tokens."""
        from dtrain.data.rows.image_cache import read_image_records  # rows of text alone load nothing of images

        first = index * self.documents_per_sample
        return read_image_records(self._images, first, self.documents_per_sample, self.origin(index))

    def example_row(self) -> dict[str, Any]:
        """Return a row with every column kept of up to 256 rows, which are evenly spread over the samples."""
        if not self._columns:
            return {}
        indices = range(0, len(self), -(-len(self) // 256))
        return example_row(self.row(index)["columns"] for index in indices)

    def origin(self, index: int) -> tuple[str, int]:
        """Return file and line of a sample."""
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
    say: Callable[[str], None] = print,
) -> Samples:
    """Open the samples of `sources`, cached or made now by `num_workers` processes (None or 0: as many as cores).

    Without a `cache_dir` they are made in a temporary file that vanishes with the process. Processes that open the
    same cache at once wait for the one that makes it. A damaged one is made anew, which goes to `say`. Collective where
    a process group is up: the ranks share out the reading that checks whether the files are those of the cache, and the
    cache is what was written. Raises UserError for a row that is wrong, with file and line, for a file that changes
    meanwhile, and where no sample is left.
    """
    weights = [source.weight for source in sources]
    file_digests = _digests_of_files(sources, Ranks())
    if cache_dir is None:
        with tempfile.TemporaryDirectory() as scratch:
            meta = _build(Path(scratch), sources, encoder, num_workers, progress, label)
            (Path(scratch) / META).write_text(json.dumps(meta))
            return Samples(Path(scratch), weights, file_digests)
    root = Path(cache_dir).expanduser().resolve()  # a link may lead to a disk where nothing is yet
    place = root / _key(sources, encoder, file_digests)
    for damage in delete_damaged_cache(place, Ranks()):
        say(f"{label}: {damage}; it is made anew")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not is_complete(place):
            with lock(place):
                if not is_complete(place):
                    for rest in root.glob(f"{place.name}.tmp-*"):  # a killed builder's: no other can be at it now
                        shutil.rmtree(rest)
                    shutil.rmtree(place, ignore_errors=True)
                    beside = Path(tempfile.mkdtemp(prefix=f"{place.name}.tmp-", dir=root))
                    try:
                        seal(beside, place.name, _build(beside, sources, encoder, num_workers, progress, label))
                        if _digests_of_files(sources, Ranks(single_process=True)) != file_digests:
                            raise UserError(f"a file of the {label} changed while it was tokenised: start again")
                        publish(beside, place)
                    finally:
                        shutil.rmtree(beside, ignore_errors=True)
    except OSError as problem:
        raise UserError(
            f"{problem.filename or root}: {problem.strerror}, while the {label} was tokenised into {root}; "
            "mend that, or set data.cache_dir to another place"
        ) from problem
    return Samples(place, weights, file_digests)


def _digests_of_files(sources: Sequence[Source], ranks: Ranks) -> dict[str, str]:
    """Return a digest of the content of each file, by its path. Collective over `ranks`."""
    files = [file for source in sources for file in source.files]
    return dict(zip(map(str, files), file_digests(files, ranks=ranks), strict=True))


def _key(sources: Sequence[Source], encoder: RowEncoder, file_digests: Mapping[str, str]) -> str:
    """Return the cache's key, by the files' content and their names, which messages use."""
    files = [file for source in sources for file in source.files]
    readings = [source.reading for source in sources]
    names = [str(file.resolve()) for file in files]
    contents = [file_digests[str(file)] for file in files]
    return digest(VERSION, readings, names, contents, encoder.fingerprint)[:16]


class _Writer:
    """Writer of samples to the files of a cache, which counts on the way."""

    def __init__(self, directory: Path, stack: ExitStack, encoder: RowEncoder):
        self.documents = encoder.documents
        names = [*ARRAYS, *(COLUMNS if encoder.stores_columns else ()), *(IMAGES if encoder.images else ())]
        self.streams = {name: stack.enter_context(open(directory / name, "wb")) for name in names}
        self.ends = {name: 0 for name in names if name.endswith("offsets.bin")}
        for name in self.ends:
            self.streams[name].write(array("q", [0]).tobytes())
        self.list = stack.enter_context(open(directory / "left_out.txt", "w", encoding="utf-8"))
        self.hash = hashlib.blake2b(digest_size=16)
        self.samples = 0
        self.counts = Counter(dict.fromkeys([*COUNTS, *TEXT_COUNTS], 0))
        self.dropped_example: list[Any] | None = None  # file, line and text
        self.named: list[list[Any]] = []
        self.special_tokens: dict[str, tuple[str, int, str]] = {}  # escaped, kept: file, line and text of the first row
        self.images: ImageWriter | None = None
        if encoder.images is not None:
            from dtrain.data.rows import image_cache

            self.images = image_cache.ImageWriter(self.streams, self._advance)

    def add(self, number: int, file: str, chunk: EncodedChunk) -> None:
        self._write("tokens.bin", chunk.tokens.tobytes())
        self._write("trained.bin", bytes(chunk.trained))
        self.hash.update(array("q", chunk.lengths).tobytes())
        self._advance("offsets.bin", chunk.lengths)
        origins = array("q")
        for line, full in zip(chunk.lines, chunk.full_lengths, strict=True):
            origins.extend((number, line, full))
        self.streams["origins.bin"].write(origins.tobytes())
        if "columns.bin" in self.streams:
            self._write("columns.bin", b"".join(chunk.columns))
            self._advance("column_offsets.bin", map(len, chunk.columns))
        if self.images is not None:
            self.hash.update(self.images.add(chunk.images, chunk.image_notes))
        cut = [full - length for full, length in zip(chunk.full_lengths, chunk.lengths, strict=True)]
        firsts = range(0, len(cut), self.documents)
        self.samples += len(firsts)
        self.counts.update(
            rows=chunk.rows,
            others=chunk.num_other_rows,
            plain_prompts=chunk.num_string_prompts,
            escaped=len(chunk.escaped),
            kept=len(chunk.kept),
            images_too_long=chunk.num_image_rows_too_long,
            trained_tokens=chunk.trained.count(1),
            tokens_cut=sum(cut),
            truncated=sum(any(cut[first : first + self.documents]) for first in firsts),
            text_characters=chunk.text.characters,
            dropped_characters=chunk.text.dropped,
            dropping_rows=len(chunk.dropping_rows),
        )
        for kind, written in (("escaped", chunk.escaped), ("kept", chunk.kept)):
            if written and kind not in self.special_tokens:
                self.special_tokens[kind] = (file, *written[0])
        if chunk.dropping_rows and self.dropped_example is None:
            self.dropped_example = [file, *chunk.dropping_rows[0]]
        for line, reason in chunk.left_out:
            self.counts["too_long" if reason in TOO_LONG_REASONS else "untrained"] += 1
            self.list.write(f"{file}:{line}: {reason}\n")
            if len(self.named) < MAX_LISTED_ROWS:
                self.named.append([file, line, reason])

    def _write(self, name: str, content: bytes) -> None:
        """Write a part of the samples themselves, which counts in the fingerprint."""
        self.hash.update(content)
        self.streams[name].write(content)

    def _advance(self, name: str, lengths: Iterable[int]) -> None:
        """Write the offsets of pieces of these lengths, behind those before."""
        _, *offsets = accumulate(lengths, initial=self.ends[name])
        self.streams[name].write(array("q", offsets).tobytes())
        self.ends[name] = offsets[-1] if offsets else self.ends[name]


def _build(
    directory: Path, sources: Sequence[Source], encoder: RowEncoder, num_workers: int | None, progress: bool, label: str
) -> dict[str, Any]:
    encoder = with_split_threshold(sources, encoder)
    files = [(number, file) for number, source in enumerate(sources) for file in source.files]
    size = sum(file.stat().st_size for _, file in files)
    per_source = [0] * len(sources)
    with ExitStack() as stack:
        writer = _Writer(directory, stack, encoder)
        encode: Callable[[Iterable[Job]], Iterator[EncodedChunk]] = partial(starmap, encoder.encode_chunk)
        if size > MIN_PARALLEL_BYTES and (workers := num_workers or num_cores()) > 1:
            from dtrain.data.rows.pool import Pool

            encode = stack.enter_context(Pool(encoder, workers)).encode
        bar = stack.enter_context(
            tqdm(
                total=None if any(file.suffix == ".gz" for _, file in files) else size,
                desc=f"tokenising {label}",
                unit="B",
                unit_scale=True,
                disable=None if progress else True,  # None: only where a terminal shows it
                leave=False,
            )
        )
        at: deque[int] = deque()  # number of the file of each chunk on its way

        def jobs() -> Iterator["Job"]:
            formats = (name for source in sources for name in source.formats)
            for number, ((source, file), name) in enumerate(zip(files, formats, strict=True)):
                for chunk in read_chunks(file):
                    at.append(number)
                    yield chunk, name, sources[source].columns

        for chunk in encode(jobs()):
            number = at.popleft()
            source, file = files[number]
            writer.add(number, str(file), chunk)
            per_source[source] += len(chunk.lengths) // encoder.documents
            bar.update(chunk.size)
        if writer.images is not None:
            writer.images.close(directory)
    _refuse_nothing(writer, files, label, encoder)
    return {
        "version": VERSION,
        "documents_per_sample": encoder.documents,
        "noun": encoder.noun,
        "fingerprint": writer.hash.hexdigest(),
        "files": [str(file) for _, file in files],
        "per_source": per_source,
        "samples": writer.samples,
        "tokens": writer.ends["offsets.bin"],
        **writer.counts,
        **(writer.images.meta if writer.images else {"images": 0}),
        "left_out": writer.named,
        "special_tokens": writer.special_tokens,
        "dropped_example": writer.dropped_example,
        "max_length": encoder.max_length,
        "sizes": {name: (directory / name).stat().st_size for name in writer.streams},
    }


def with_split_threshold(sources: Sequence[Source], encoder: RowEncoder) -> RowEncoder:
    """Return `encoder`, or a copy that knows which rows are validated where `data.val` is a number of rows.

    The validation rows are those that draw the smallest numbers. Finding them takes one more reading of all rows, but
    only while a cache is made. Raises UserError for a row that is wrong.
    """
    part = encoder.split
    if part is None or part.threshold is not None:
        return encoder
    draws = (
        draw
        for source in sources
        for file, name in zip(source.files, source.formats, strict=True)
        for chunk in read_chunks(file)
        for draw in encoder.split_numbers(chunk, name, source.columns)
    )
    smallest = heapq.nsmallest(int(part.size), draws)
    encoder = copy.copy(encoder)
    encoder.split = part._replace(threshold=math.nextafter(smallest[-1], 2.0) if smallest else 0.0)
    return encoder


def _refuse_nothing(writer: _Writer, files: Sequence[tuple[int, Path]], label: str, encoder: RowEncoder) -> None:
    if writer.samples:
        return
    names = ", ".join(str(file) for _, file in files[:3]) + (", ..." if len(files) > 3 else "")
    rows, others, part, noun = writer.counts["rows"], writer.counts["others"], encoder.split, encoder.noun
    if part is not None and others and not rows:
        raise UserError(
            f"{label}: data.val={part.size} leaves it without a row: all of the {others} in {names} fall to the other "
            f"side. Set data.val {'higher' if part.is_validation else 'lower'}, or to a file of its own (data.val.path)"
        )
    if not rows:
        raise UserError(f"{label}: the dataset is empty: there is no row in {names}")
    file, line, reason = writer.named[0]
    is_pair = noun == "pairs"
    if writer.counts["too_long"] == rows:
        limit = f"data.max_length={encoder.max_length}"
        truncate = "" if encoder.too_long == "truncate" else ", or set data.too_long=truncate"
        pixels = ", or lower data.image_max_pixels" if writer.counts["images_too_long"] else ""
        raise UserError(
            f"{label}: all {rows} rows are left out, longer than {limit} ({names}); {file}:{line}, for one: {reason}. "
            f"Raise data.max_length{truncate}{pixels}"
        )
    if "max_length" in reason:
        fix = "raise data.max_length: what each row teaches lies beyond it"
    elif is_pair:
        fix = "chosen and rejected must differ; `dtrain preview` shows them"
    else:
        fix = "data.loss_on and the roles of the messages say what is trained; `dtrain preview` shows it"
    what = "teaches a preference" if is_pair else "has a trained token"
    raise UserError(f"{label}: not one of {rows} rows {what} ({names}); {file}:{line}, for one: {reason}. Fix: {fix}")


def seal(directory: Path, key: str, meta: dict[str, Any]) -> None:
    """Sync the files of `directory` to disk, and write `meta` there with their digests and the cache's `key`."""
    files = sorted(directory.iterdir())
    for file in files:
        sync(file)
    contents = file_digests(files, ranks=Ranks(single_process=True))
    meta = {**meta, "key": key, "digests": {file.name: content for file, content in zip(files, contents, strict=True)}}
    write_synced(directory / META, json.dumps({**meta, "checksum": digest(meta)}, indent=1))


def is_complete(place: Path) -> bool:
    """Return whether the cache is there, by its meta.json and the sizes of its files; their content is not read."""
    try:
        _read_meta(place)
    except UserError:
        return False
    return True


def delete_damaged_cache(place: Path, ranks: Ranks) -> list[str]:
    """Delete the cache at `place` where a file is not as it was written; return the damage, a line for each machine.

    Every file is read, once on each machine. Raises UserError on every rank where a damaged cache cannot be deleted.
    Collective over `ranks`: six to nine all-gathers of objects.
    """
    damage = _damage(place, ranks)
    views = ranks.gather_results(lambda: None if damage is None else file_identity([place.parent]))
    is_first = views.index(views[ranks.rank]) == ranks.rank  # of those that see this directory

    def drop() -> str | None:
        if damage is None or not is_first:
            return None
        try:
            with lock(place):
                problem = _damage(place, Ranks(single_process=True))  # again, for another run may have made it anew
                if problem is not None:
                    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
                return None if problem is None else f"the cache {place} is damaged ({problem})"
        except OSError as error:
            raise UserError(
                f"the cache {place} is damaged ({damage}), and cannot be deleted ({error.strerror}): delete it, or "
                "set data.cache_dir to another place"
            ) from error

    return [line for line in ranks.gather_results(drop) if line is not None]


def _damage(place: Path, ranks: Ranks) -> str | None:
    """Return the damage of the cache at `place` on this machine; None where it is whole or absent. Collective."""
    damage, written, has_images = None, {}, False
    if os.path.lexists(place):
        try:
            meta = _read_meta(place)
            written, has_images = meta["digests"], meta["images"] > 0
        except UserError as error:
            damage = str(error)
    try:
        contents = file_digests([place / name for name in written], ranks=ranks)
    except UserError as error:  # raised on every rank: a disk may fail to read what it has
        return damage or str(error)
    for (name, content), actual in zip(written.items(), contents, strict=True):
        if content != actual:
            damage = damage or f"{place / name}: its content is not what was written"
    if any(ranks.gather_results(lambda: has_images)):
        from dtrain.data.rows.image_cache import find_image_damage

        damage = find_image_damage(place, ranks) or damage
    return damage


def _read_meta(place: Path) -> dict[str, Any]:
    """Return meta.json of the cache at `place`. Raises UserError where it, or a file's size, is not as written."""
    file = place / META
    meta = read_json(file, max_bytes=OWN_FILE_BYTES, allow_nan=True)
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
