"""Stage first_rows, of dry runs: the rows of small files whole, of others the first, and the shape of what time allows.

Files of up to SMALL_DATA bytes are tokenised whole, as the run does it; of others the first rows of each file are read,
and the shape of all rows that LOOK_SECONDS allow. Notes say what was not read.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dtrain.base.json_files import loads
from dtrain.base.nested_columns import example_row
from dtrain.data.formats.encoder import EncodedChunk, describe
from dtrain.data.sources.sources import Look, looks, note_on_dropped_text, notes_on_endings, rows_left_out
from dtrain.data.text.dropped_text import CONFIRM, WAY_OUT, DroppedText, describe_dropped_text
from dtrain.training.host import DryHost
from dtrain.training.preflight import has_urls, to_copy
from dtrain.training.setup.data import accept_images, open_splits, refuse_dropped_text, row_options, splits
from dtrain.training.spec import RunSpec

SMALL_DATA = 4 << 20
LOOK_SECONDS = 5.0


def resolve(spec: RunSpec, host: DryHost) -> bool:
    """Read the first rows of every file, and the rows where the files are small. Each file's first mistake is one of
    the problems; with problems that the checks have found the dry run ends here."""
    _look_at_rows(spec, host)
    return not host.known


def _look_at_rows(spec: RunSpec, host: DryHost) -> None:
    recipe, before = spec.recipe, len(host.problems)
    copies = spec.cache if has_urls(recipe) else None  # of URLs; rows are kept nowhere
    of_rows = ("data.", "data=", "grpo.tools")
    is_unread = any(line.startswith(of_rows) for line in (*host.known, *spec.awaited)) or to_copy(recipe)
    options = None if is_unread else host.ask(row_options, spec, copies)
    if options is None:
        return
    plain: dict[str, int] = {}
    dropped_text: list[str] = []
    read: dict[str, int] = {}  # rows
    files: list[tuple[str, Look]] = []
    beginnings: dict[str, list[EncodedChunk]] = {}
    start = len(host.problems)
    for split in splits(spec):
        opened = host.ask(partial(looks, recipe.data, split=split, **options)) or []
        files += [(f"data.{split}", look) for look in opened]
        chunks = [host.ask(look.first) for look in opened]
        rows = [loads(text)["columns"] for chunk in chunks if chunk for text in chunk.columns if text]
        beginnings[split] = [chunk for chunk in chunks if chunk]
        spec.columns[split] = example_row(rows)
        plain[split] = sum(chunk.plain_prompts for chunk in chunks if chunk)
        read[split] = sum(chunk.rows for chunk in chunks if chunk)
        dropped_text += _notes_on_dropped_text(f"{split} data", opened, chunks, recipe.data.allow_dropped_text)
        host.ask(accept_images, spec, any(any(chunk.images) for chunk in chunks if chunk))
    spec.plain_prompts = plain["train"]
    if len(host.problems) > start:
        return
    encoders = {key: look.encoder for key, look in files}
    is_small = sum(_size(look.file) for _, look in files) <= SMALL_DATA
    if is_small and not host.known:
        host.ask(open_splits, spec, copies, host.say, False)
        host.ask(refuse_dropped_text, spec)
        # The whole sets are counted now, so that the first rows tell nothing more.
        dropped_text = [
            note for split, rows in spec.rows.items() for note in note_on_dropped_text(rows.samples, f"{split} data")
        ]
    for split, rows_of_split in spec.rows.items():
        spec.notes += rows_left_out(rows_of_split.samples, f"{split} data", recipe.data.too_long)
    plain |= {split: rows.samples.meta["plain_prompts"] for split, rows in spec.rows.items()}
    read |= {split: rows.samples.meta["rows"] for split, rows in spec.rows.items()}
    for split, count in plain.items():
        encoder = encoders[f"data.{split}"]
        spec.notes += describe(f"{split} data", count, encoder.prompts_as, encoder.template, bool(spec.rows))
    formats = {look.format for key, look in files if key == "data.train"}
    spec.notes += notes_on_endings(encoders["data.train"], formats, read["train"], plain["train"])
    spec.notes += dropped_text
    if not is_small:
        for split, first in beginnings.items():
            spec.notes += _left_out_of(first, f"{split} data", recipe.data.max_length)
        _shapes(files, spec, host)
    spec.is_data_read = bool(spec.columns) and len(host.problems) == before


def _left_out_of(chunks: Sequence[EncodedChunk], label: str, max_length: int) -> list[str]:
    """Return the lines on those of the first rows that are left out or cut, where not all rows are read."""
    rows = sum(chunk.rows for chunk in chunks)
    left_out = [reason for chunk in chunks for _, reason in chunk.left_out]
    lines = []
    if left_out:
        reasons = ", ".join(dict.fromkeys(left_out))
        lines.append(f"{label}: {len(left_out):,} of the first {rows:,} rows are left out ({reasons})")
    lengths = [pair for chunk in chunks for pair in zip(chunk.full, chunk.lengths, strict=True)]
    cut = sum(full > length for full, length in lengths)
    if cut:
        lines.append(f"{label}: {cut:,} documents of the first {rows:,} rows are cut to data.max_length={max_length}")
    return lines


def _notes_on_dropped_text(
    label: str, opened: Sequence[Look], chunks: Sequence[EncodedChunk | None], is_allowed: bool
) -> list[str]:
    """Return the note on text that the chat template leaves out of the first rows, if there is any."""
    read = [(look.file, chunk) for look, chunk in zip(opened, chunks, strict=True) if chunk is not None]
    dropping = [(file, *row) for file, chunk in read for row in chunk.dropping]
    if not dropping:
        return []
    text = sum((chunk.text for _, chunk in read), start=DroppedText())
    rows = f"{len(dropping):,} of the first {sum(chunk.rows for _, chunk in read):,} rows"
    file, line, _ = dropping[0]
    note = f"note: {label}: {describe_dropped_text(text, rows, f'{file}:{line}')}. To train it, {WAY_OUT}"
    if text.is_mostly_dropped and not is_allowed:
        note += f". If it is more than half of all rows' text, the run asks for {CONFIRM}=true"
    return [note]


def _size(file: Path) -> int:
    """Bytes, those that are packed counted tenfold."""
    return file.stat().st_size * (10 if file.suffix.lower() in (".gz", ".parquet") else 1)


def _shapes(files: Sequence[tuple[str, Look]], spec: RunSpec, host: DryHost) -> None:
    """The shape of the rows of large files, and in the time that is left what the template and the lengths refuse. Each
    file is given an equal part of the time."""
    end, before = time.monotonic() + LOOK_SECONDS, len(host.problems)
    files = list({look.file: (key, look) for key, look in reversed(files)}.values())  # a share of a file is one of both
    for whole, what in ((False, "not looked at"), (True, "looked at without the chat template and data.too_long")):
        wanted = [file for file in files if not (whole and file[1].shape_is_all)]
        unread = []
        for index, (key, look) in enumerate(sorted(wanted, key=lambda file: _size(file[1].file))):
            now = time.monotonic()
            line = host.ask(look.rest, now + max(0.0, end - now) / (len(wanted) - index), whole)
            if line is not None:
                unread.append(f"{key}: {look.file} from line {line} on")
        if unread:
            more = f", and of {len(unread) - 3} more files" if len(unread) > 3 else ""
            listed = "; ".join(unread[:3])
            spec.notes.append(f"note: {what}, for want of time: {listed}{more}. The run reads it all")
        if unread or len(host.problems) > before:
            return
