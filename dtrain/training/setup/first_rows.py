"""Reading the data in a dry run: all rows of small files, and the first rows of large ones.

If the files have at most SMALL_BYTES together, all rows are tokenised, as in the run. Otherwise the first rows of each
file are tokenised, and for MAX_SECONDS further rows are checked. Notes list the rows that were not read.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain.base.json_files import loads
from dtrain.base.nested_columns import example_row
from dtrain.data.formats.encoder import EncodedChunk, describe_string_prompts
from dtrain.data.sources.sources import (
    FileCheck,
    describe_left_out_rows,
    note_on_dropped_text,
    notes_on_endings,
    open_file_checks,
)
from dtrain.data.text.dropped_text import ALLOW_DROPPED_TEXT_KEY, DROPPED_TEXT_FIX, DroppedText, describe_dropped_text
from dtrain.training.host import DryHost
from dtrain.training.hub_files import has_urls, to_copy
from dtrain.training.inputs import RunInputs
from dtrain.training.setup.data import (
    DataFacts,
    open_splits,
    refuse_dropped_text,
    refuse_images,
    row_options,
    splits,
)

SMALL_BYTES = 4 << 20  # bytes of all files up to which a dry run tokenises all rows
MAX_SECONDS = 5.0  # for checking the rows of larger files


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a split.

    Attributes:
        files: The split's files.
        chunks: Their first rows. None for a file whose first rows are wrong, or that is empty.
    """

    files: Sequence[FileCheck]
    chunks: Sequence[EncodedChunk | None]

    @property
    def read_chunks(self) -> list[EncodedChunk]:
        """The chunks that could be read."""
        return [chunk for chunk in self.chunks if chunk is not None]

    @property
    def num_rows(self) -> int:
        """Number of the rows that were read."""
        return sum(chunk.rows for chunk in self.read_chunks)

    @property
    def num_string_prompts(self) -> int:
        """Number of rows whose prompt is a string instead of messages."""
        return sum(chunk.num_string_prompts for chunk in self.read_chunks)

    @property
    def has_images(self) -> bool:
        """Whether a row that was read has images."""
        return any(any(chunk.images) for chunk in self.read_chunks)

    @property
    def example_row(self) -> dict[str, Any]:
        """A row with every column that the method keeps."""
        texts = [text for chunk in self.read_chunks for text in chunk.columns if text]
        return example_row([loads(text)["columns"] for text in texts])


def look_at_data(inputs: RunInputs, host: DryHost) -> DataFacts:
    """Read the first rows of every file, and all rows of small files.

    The first mistake of each file becomes a problem of `host`. No data are read if `host` already has a problem with a
    key of the data, or if data have to be downloaded or copied first.

    Args:
        inputs: The run's inputs.
        host: Collects the problems. Its problems so far are read.

    Returns:
        The facts, as far as they are known. They have rows only if all rows were read.
    """
    facts = DataFacts(inputs.recipe)
    keys = [problem.key for problem in host.problems]
    keys += inputs.pending_downloads
    if any(_is_of_data(key) for key in keys) or to_copy(inputs.recipe):
        return facts
    # Files at URLs are copied to the cache, where the run finds them again. Without URLs nothing is stored.
    cache_dir = inputs.cache if has_urls(inputs.recipe) else None
    options = host.attempt("data.train", partial(row_options, inputs, cache_dir))
    if options is None:
        return facts
    num_problems_before = len(host.problems)
    first_rows = {}
    has_images = False
    for split in splits(inputs):
        first_rows[split] = _read_first_rows(inputs, host, split, options)
        if first_rows[split].has_images and _accepts_images(inputs, host, split):
            has_images = True
    facts = replace(
        facts,
        example_rows={split: first.example_row for split, first in first_rows.items()},
        num_string_prompts=first_rows["train"].num_string_prompts,
        has_images=has_images,
    )
    if len(host.problems) > num_problems_before:
        return facts
    files = []
    for split, first in first_rows.items():
        files += [(f"data.{split}", file_check) for file_check in first.files]
    is_small = sum(_size(file_check.file) for _, file_check in files) <= SMALL_BYTES
    # With other problems there will be no run, so the first rows are enough.
    if is_small and num_problems_before == 0:
        opened = host.attempt("data.train", partial(open_splits, inputs, cache_dir, host.print_line, False))
        if opened is not None:
            facts = opened
            host.attempt("data.train", partial(refuse_dropped_text, opened))
    notes = _notes(inputs, facts, first_rows)
    if not is_small:
        for split, first in first_rows.items():
            notes += _notes_on_rows_left_out(first, f"{split} data", inputs.recipe.data.max_length)
        notes += _check_shapes(files, host)
    is_read = bool(facts.example_rows) and len(host.problems) == num_problems_before
    return replace(facts, is_read=is_read, notes=tuple(notes))


def _accepts_images(inputs: RunInputs, host: DryHost, split: str) -> bool:
    """Check that the method and the model accept images. If they do not, that becomes a problem of `host`."""
    num_problems_before = len(host.problems)
    host.attempt(f"data.{split}", partial(refuse_images, inputs))
    return len(host.problems) == num_problems_before


def _is_of_data(key: str) -> bool:
    """Check whether rows cannot be read if there is a problem with this key."""
    return key == "data" or key.startswith(("data.", "grpo.tools"))


def _read_first_rows(inputs: RunInputs, host: DryHost, split: str, options: dict[str, Any]) -> FirstRows:
    """Tokenise the first rows of each file of a split. Mistakes become problems of `host`."""
    key = f"data.{split}"
    files = host.attempt(key, partial(open_file_checks, inputs.recipe.data, split=split, **options)) or []
    chunks = [host.attempt(key, file_check.encode_first_rows) for file_check in files]
    return FirstRows(files, chunks)


def _notes(inputs: RunInputs, facts: DataFacts, first_rows: dict[str, FirstRows]) -> list[str]:
    """Return notes on rows that are left out, on prompts and templates, on endings and on dropped text.

    Args:
        inputs: The run's inputs.
        facts: The facts so far, with the rows if they were all read.
        first_rows: The first rows by split, which are described if not all rows were read.
    """
    data = inputs.recipe.data
    notes: list[str] = []
    for split, rows in facts.rows.items():
        notes += describe_left_out_rows(rows.samples, f"{split} data", data.too_long)
    num_rows = {}
    num_string_prompts = {}
    for split, first in first_rows.items():
        if split in facts.rows:
            num_rows[split] = facts.rows[split].samples.meta["rows"]
            num_string_prompts[split] = facts.rows[split].samples.meta["plain_prompts"]
        else:
            num_rows[split] = first.num_rows
            num_string_prompts[split] = first.num_string_prompts
        encoder = first.files[0].encoder
        has_read_all = bool(facts.rows)
        notes += describe_string_prompts(
            f"{split} data", num_string_prompts[split], encoder.prompts_as, encoder.template, has_read_all
        )
    train = first_rows["train"]
    formats = {file_check.format for file_check in train.files}
    notes += notes_on_endings(train.files[0].encoder, formats, num_rows["train"], num_string_prompts["train"])
    for split, first in first_rows.items():
        if split in facts.rows:
            notes += note_on_dropped_text(facts.rows[split].samples, f"{split} data")
        else:
            notes += _notes_on_dropped_text(f"{split} data", first, data.allow_dropped_text)
    return notes


def _notes_on_rows_left_out(first: FirstRows, label: str, max_length: int) -> list[str]:
    """Return the lines on the first rows that are left out or cut."""
    left_out = []  # the reason for each row
    for chunk in first.read_chunks:
        left_out += [reason for _, reason in chunk.left_out]
    lines = []
    if left_out:
        reasons = ", ".join(dict.fromkeys(left_out))
        lines.append(f"{label}: {len(left_out):,} of the first {first.num_rows:,} rows are left out ({reasons})")
    num_cut = 0
    for chunk in first.read_chunks:
        num_cut += sum(full > length for full, length in zip(chunk.full_lengths, chunk.lengths, strict=True))
    if num_cut:
        lines.append(
            f"{label}: {num_cut:,} documents of the first {first.num_rows:,} rows are cut to "
            f"data.max_length={max_length}"
        )
    return lines


def _notes_on_dropped_text(label: str, first: FirstRows, is_allowed: bool) -> list[str]:
    """Return the note on text that the chat template drops from the first rows, if there is any."""
    text = DroppedText()
    dropping = []  # (file, line) of rows with dropped text
    for file_check, chunk in zip(first.files, first.chunks, strict=True):
        if chunk is not None:
            text += chunk.text
            dropping += [(file_check.file, line) for line, _ in chunk.dropping_rows]
    if not dropping:
        return []
    rows = f"{len(dropping):,} of the first {first.num_rows:,} rows"
    file, line = dropping[0]
    note = f"note: {label}: {describe_dropped_text(text, rows, f'{file}:{line}')}. To train it, {DROPPED_TEXT_FIX}"
    if text.is_mostly_dropped and not is_allowed:
        note += f". If it is more than half of all rows' text, the run asks for {ALLOW_DROPPED_TEXT_KEY}=true"
    return [note]


def _size(file: Path) -> int:
    """Return a file's size in bytes. Compressed files count ten times their size."""
    is_compressed = file.suffix.lower() in (".gz", ".parquet")
    return file.stat().st_size * (10 if is_compressed else 1)


def _check_shapes(files: Sequence[tuple[str, FileCheck]], host: DryHost) -> list[str]:
    """Check the rows of large files for MAX_SECONDS.

    There are two passes. The first pass checks only the shape of the rows, which is fast. The second pass also
    tokenises the rows, to find rows that the chat template or `data.too_long` refuses. Small files come first, and each
    file may use an equal part of the remaining time. For example, with 5 seconds for 5 files, the first file may use 1
    second. If it needs only 0.2 seconds, the second file may use 4.8 / 4 = 1.2 seconds.

    Args:
        files: The key of the split and the file, for each file.
        host: Collects the problems.

    Returns:
        A note on the rows that were not read.
    """
    end = time.monotonic() + MAX_SECONDS
    num_problems = len(host.problems)
    # With `data.val: 0.05` the same files are in both splits. They are checked once, under the key of the first split.
    by_file = {file_check.file: (key, file_check) for key, file_check in reversed(files)}
    for is_tokenised in (False, True):
        pending = list(by_file.values())
        if is_tokenised:
            pending = [(key, file_check) for key, file_check in pending if not file_check.only_shape_can_fail]
        pending.sort(key=lambda entry: _size(entry[1].file))
        unread = []
        for index, (key, file_check) in enumerate(pending):
            now = time.monotonic()
            seconds = max(0.0, end - now) / (len(pending) - index)
            line = host.attempt(key, partial(file_check.check_rows, now + seconds, is_tokenised))
            if line is not None:
                unread.append(f"{key}: {file_check.file} from line {line} on")
        if unread:
            return [_note_on_unread_rows(unread, is_tokenised)]
        if len(host.problems) > num_problems:
            return []
    return []


def _note_on_unread_rows(unread: Sequence[str], is_tokenised: bool) -> str:
    """Return the note on rows for which there was no time.

    Args:
        unread: Key, file and first unread line, for each file.
        is_tokenised: Whether it is the second pass that did not read them.
    """
    missed = "looked at without the chat template and data.too_long" if is_tokenised else "not looked at"
    listed = "; ".join(unread[:3])
    more = f", and of {len(unread) - 3} more files" if len(unread) > 3 else ""
    return f"note: {missed}, for want of time: {listed}{more}. The run reads it all"
