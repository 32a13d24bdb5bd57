"""The `data` section of a recipe to samples and rows: `open_rows`, which trainer and preview call."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.model_directory import has_vision
from dtrain.base.ranges import plural
from dtrain.data.formats.encoder import (
    TEMPLATED,
    TEXT,
    TOO_LONG_REASONS,
    EncodedChunk,
    RowEncoder,
    ValidationSplit,
    describe_string_prompts,
    refuse_without_template,
)
from dtrain.data.formats.formats import FORMATS, FORMATS_BY_KIND
from dtrain.data.rows.cache import Samples, Source, open_cache
from dtrain.data.rows.rows import Rows
from dtrain.data.sources.files import detect_formats, find_files, read_chunks, source_entries
from dtrain.data.text.dropped_text import DROPPED_TEXT_FIX
from dtrain.data.text.replies import note_on_ending
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtrain.data.formats.labels import Label
    from dtrain.data.formats.prompts import PromptOptions
    from dtrain.data.images.reader import ImageReader

Say = Callable[[str], None]

# Kind of sample -> module and class that make it of a row, loaded when a method needs it, and the options of its own.
ENCODERS = {
    "examples": ("dtrain.data.formats.encoder", "Encoder", ["loss_on"]),
    "pairs": ("dtrain.data.formats.pairs", "PairEncoder", []),
    "labelled": ("dtrain.data.formats.labels", "LabelledEncoder", []),
    "prompts": ("dtrain.data.formats.prompts", "PromptEncoder", ["options"]),
    "examples with labels": ("dtrain.data.formats.labels", "LabelledTextEncoder", ["label"]),
    "pairs with labels": ("dtrain.data.formats.labels", "LabelledPairEncoder", ["label"]),
}
# What is said of rows that spell special tokens, by the counter of the cache.
SPECIAL_TOKENS = {
    "escaped": "have the text of a special token in the words of a user or a tool; it is read as characters "
    "(data.special_tokens)",
    "kept": "have special tokens in their own text that are read as tokens (data.special_tokens=all reads them as "
    "characters where users and tools write them)",
}
MIN_PACKED_ROWS = 16  # rows of a pass; with fewer, small data makes too few steps


def open_rows(
    section: Any,
    *,
    split: str = "train",
    kind: str = "examples",
    prompts: "PromptOptions | None" = None,
    label: "Label | None" = None,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    seed: int = 0,
    epochs: float | None = None,
    cache_dir: str | Path | None = None,
    say: Say = print,
    progress: bool = True,
) -> Rows:
    """Open the rows of `section.train` or `section.val`; what was detected, chosen, cut and left out goes to `say`.

    section     the recipe's `data` (its field names, as attributes)
    split       "train", or "val": unshuffled, one epoch, each weight taken as 1. Where section.val is a share or
                a number of rows, both are parts of section.train's rows
    kind        what the method trains on: examples, pairs (a sample is a chosen and a rejected document), labelled
                (replies that are wanted or not) or prompts
    prompts     how prompts are made, where the method trains on these
    label       the number of each row that is kept, where the method reads one
    template    the chat template; None: that of section and tokenizer
    cache_dir   where section.cache_dir says nothing

    Every rank calls it: the first makes the cache, the others wait for it. Raises UserError.
    """
    train, cache_dir = split == "train", section.cache_dir or cache_dir
    sources, encoder = _opened(section, tokenizer, template, split, kind, prompts, label, seed, cache_dir, say)
    samples = open_cache(
        sources,
        encoder,
        cache_dir=cache_dir,
        num_workers=section.num_workers,
        progress=progress,
        label=f"{split} data",
        say=say,
    )
    notes = describe_string_prompts(
        f"{split} data", samples.meta["plain_prompts"], encoder.prompts_as, encoder.template
    )
    if train:
        formats = {name for source in sources for name in source.formats}
        notes += notes_on_endings(encoder, formats, samples.meta["rows"], samples.meta["plain_prompts"])
    for line in (*report(samples, f"{split} data", section.too_long), *notes):
        say(line)
    rows = Rows(
        samples,
        max_length=section.max_length,
        packing=bool(section.packing) and kind != "prompts",  # what is packed are the completions, once there are some
        shuffle=section.shuffle and train,
        seed=seed,
        epochs=epochs if train else 1,
        images=encoder.images if samples.meta["images"] else None,
    )
    if section.packing == "auto" and not should_pack(rows, kind):
        packed = rows.rows_in_epoch(0)
        rows = replace(rows, packing=False)
        say(f"data.packing=auto: false, since packed the data has {packed} {plural(packed, 'row')} a pass")
    return rows


def should_pack(rows: Rows, kind: str) -> bool:
    """Return whether `data.packing=auto` packs these rows; completions to prompts always."""
    return kind == "prompts" or replace(rows, packing=True).rows_in_epoch(0) >= MIN_PACKED_ROWS


@dataclass(frozen=True)
class FileCheck:
    """A file of `open_rows`, to be checked before. Its methods raise UserError for the first row that is wrong."""

    file: Path
    format: str
    columns: Mapping[str, str]
    encoder: RowEncoder

    def encode_first_rows(self) -> EncodedChunk | None:
        """Return the first rows, up to 256 of them, as they are trained on; None where the file has none."""
        chunk = next(read_chunks(self.file), None)
        return None if chunk is None else self.encoder.encode_chunk(chunk, self.format, self.columns)

    def check_rows(self, until: float, whole: bool = False) -> int | None:
        """Check that all rows have the shape of the format; whole: that they become samples, by the template and
        data.too_long. Returns the line before which it stopped, since the clock (time.monotonic) stood at `until`; None
        where it read all."""
        look = self.encoder.encode_chunk if whole else self.encoder.look_at
        for chunk in read_chunks(self.file):
            if time.monotonic() >= until:
                return chunk.rows[0][0]
            look(chunk, self.format, self.columns)
        return None

    @property
    def only_shape_can_fail(self) -> bool:
        """Return whether rows of the right shape cannot be refused: no template writes them, and none is too long."""
        return self.format in ("text", "tokenized") and self.encoder.too_long != "error"


def open_file_checks(section: Any, *, cache_dir: str | Path | None = None, **options: Any) -> list[FileCheck]:
    """Return each file of `open_rows`, from its arguments. Raises UserError."""
    sources, encoder = _opened(section, cache_dir=section.cache_dir or cache_dir, **options)
    return [
        FileCheck(file, name, source.columns, encoder)
        for source in sources
        for file, name in zip(source.files, source.formats, strict=True)
    ]


def _opened(
    section: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    split: str = "train",
    kind: str = "examples",
    prompts: "PromptOptions | None" = None,
    label: "Label | None" = None,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    say: Say = lambda line: None,
) -> tuple[list[Source], RowEncoder]:
    train, is_part = split == "train", isinstance(section.val, float | int)
    whence = "train" if is_part else split
    tell = say if whence == split else lambda line: None  # whoever opened the other part has said it
    sources = _sources(getattr(section, whence), f"data.{whence}", tell, kind, cache_dir)
    if is_part and any(source.weight for source in sources):
        sources = [source for source in sources if source.weight]  # the same rows for both parts
    if not train:
        sources = [replace(source, weight=1.0) for source in sources if source.weight]
    formats = {name for source in sources for name in source.formats}
    template = template or choose_template(
        tokenizer.directory, tokenizer, section.chat_template, section.template_kwargs, section.special_tokens
    )
    refuse_without_template(section.prompts_as, template, tokenizer.directory)
    module, name, own = ENCODERS[kind if label is None else f"{kind} with labels"]
    options = {"label": label, "options": prompts, "loss_on": section.loss_on}
    encoder: RowEncoder = getattr(import_module(module), name)(
        tokenizer,
        template,
        max_length=section.max_length,
        too_long=section.too_long,
        prompts_as=section.prompts_as or TEXT,
        images=None if formats.isdisjoint(TEMPLATED) else image_reader(section, tokenizer, cache_dir),
        **{option: options[option] for option in own},
    )
    if is_part:
        is_share = isinstance(section.val, float)
        encoder.split = ValidationSplit(
            section.val, seed, is_validation=not train, threshold=section.val if is_share else None
        )
    for line in _notes_on_formats(section, template, formats, kind, label):
        tell(line)
    return sources, encoder


def image_reader(section: Any, tokenizer: Tokenizer, cache_dir: str | Path | None) -> "ImageReader | None":
    """Return the reader of images in rows; None where the model takes none."""
    if not has_vision(tokenizer.directory):
        return None
    from dtrain.data.images.reader import ImageReader  # rows of text alone load nothing of images

    return ImageReader(
        tokenizer,
        tokenizer.directory,
        max_pixels=section.image_max_pixels,
        max_stored_pixels=section.image_most_pixels,
        cache_dir=None if cache_dir is None else Path(cache_dir).expanduser(),
    )


def _images_left_out(meta: Mapping[str, Any], label: str) -> str:
    rows = f"{meta['images_too_long']:,} {plural(meta['images_too_long'], 'row')}"
    fix = f"raise data.max_length={meta['max_length']}, or lower data.image_max_pixels for fewer tokens an image"
    if meta["images"]:
        return f"{label}: {rows} of these have images; {fix}"
    return f"note: {label}: every row with an image is left out as too long ({rows}), so no image is trained on: {fix}"


def _sources(split: Any, key: str, say: Say, kind: str, cache_dir: str | Path | None) -> list[Source]:
    sources = []
    if split is None:
        raise UserError(f"{key} is null: name its data with {key}.path")
    if split.sources and split.path:
        raise UserError(f"{key}.path and {key}.sources are both set; sources replace path, so keep one of them")
    if not split.sources and not split.path:
        raise UserError(f"{key}.path is not set: name a file, a glob or a list of them")
    for source, where in source_entries(split, key):
        files = tuple(find_files(source.path, f"{where}.path", source, cache_dir))
        weight, name, columns = getattr(source, "weight", 1.0), source.format, getattr(source, "columns", {})
        if not 0 <= weight < float("inf"):
            raise UserError(f"{where}.weight is {weight!r}; it must be a number, 0 or above")
        if name != "auto" and name not in {**FORMATS, **FORMATS_BY_KIND[kind]}:
            known = ", ".join(dict.fromkeys([*FORMATS, *FORMATS_BY_KIND[kind]]))
            raise UserError(f"{where}.format is {name!r}; known are auto, {known}")
        formats = detect_formats(files, name, kind, columns, f"{where}.columns")
        for detected in dict.fromkeys(formats) if name == "auto" else ():
            of = [file for file, other in zip(files, formats, strict=True) if other == detected]
            more = f" and {len(of) - 1} more files" if len(of) > 1 else ""
            say(f"{key}: {of[0]}{more}: format {detected} (detected)")
        sources.append(Source(files, formats, float(weight), columns))
    return sources


def _notes_on_formats(
    section: Any, template: ChatTemplate | None, formats: set[str], kind: str, label: "Label | None"
) -> list[str]:
    """Return where the chat template is from, and what loss_on means for rows that no template writes."""
    notes = []
    if template and formats & TEMPLATED:
        notes.append(f"chat template: {template.origin}")
        if template.writes_todays_date:
            notes.append(
                "the chat template writes today's date into each conversation; "
                "data.template_kwargs.date_string may fix it (what tokenising writes is kept in the cache)"
            )
    plain = kind == "examples" and label is None
    if plain and "text" in formats and section.loss_on != "all":
        notes.append(
            f"data.loss_on={section.loss_on}: rows of plain text have no such part, so all of their tokens are trained"
        )
    if "tokenized" in formats:
        keys = ", ".join(FORMATS_BY_KIND[kind]["tokenized"])
        what = "their labels, not data.loss_on, say what is trained" if plain else f"nothing is added to {keys}"
        notes.append(f"tokenized rows are used as they are: {what}")
    return notes


def notes_on_endings(encoder: RowEncoder, formats: Collection[str], rows: int, plain: int) -> list[str]:
    """Return the note on how the chat template ends replies; none where it writes no row, or the model generates no
    text. plain: how many of the `rows` have a plain prompt."""
    is_written = not TEMPLATED.isdisjoint(formats) and (plain < rows or encoder.prompts_as != TEXT)
    if encoder.template is None or not encoder.generates or not is_written:
        return []
    note = note_on_ending(encoder.replies, encoder.tokenizer, encoder.loss_on == "all")
    return [] if note is None else [note]


def note_on_dropped_text(samples: Samples, label: str) -> list[str]:
    """Return the note on text that the chat template leaves out, if there is any."""
    if not samples.text.dropped:
        return []
    return [f"note: {label}: {samples.describe_dropped_text()}. To train it, {DROPPED_TEXT_FIX}"]


def report(samples: Samples, label: str, too_long: str = "truncate") -> list[str]:
    """Return the lines that tell what a cache holds and what is missing from it."""
    meta = samples.meta
    noun = samples.noun
    trained = "" if noun == "prompts" else f", {meta['trained_tokens']:,} of them trained"
    made = noun.removesuffix("s") if meta["samples"] == 1 else noun
    rows = f"{meta['rows']:,} {'row' if meta['rows'] == 1 else 'rows'}"
    lines = [f"{label}: {meta['samples']:,} {made} of {rows}, {meta['tokens']:,} tokens{trained}"]
    if meta.get("others"):
        lines[0] += f" (data.val is taken from these: {meta['others']:,} rows are of the other part)"
    if noun == "samples" and 0 < meta["trained_tokens"] <= meta["samples"]:
        lines.append(
            f"note: {label}: one token of a sample is trained, as where answers are empty: that teaches their end "
            "alone; `dtrain preview` shows it"
        )
    lines += note_on_dropped_text(samples, label)
    if meta["images"]:
        count = f"{meta['images']:,} {plural(meta['images'], 'image')}"
        lines.append(f"{label}: {count} in {meta['image_tokens']:,} of the tokens, which are not trained")
        lines += [f"note: {label}: {note}" for note in meta["image_notes"]]
    return [*lines, *describe_left_out_rows(samples, label, too_long)]


def describe_left_out_rows(samples: Samples, label: str, too_long: str = "truncate") -> list[str]:
    """Return the lines on rows that a cache lacks or has in part, and on special tokens that rows spell."""
    meta, noun = samples.meta, samples.noun
    lines: list[str] = []
    limit = f"data.max_length={meta['max_length']}"
    if meta["truncated"]:
        lines.append(f"{label}: {meta['truncated']:,} {noun} truncated to {limit}; {meta['tokens_cut']:,} tokens cut")
    if meta["too_long"]:
        lines.append(f"{label}: {meta['too_long']:,} rows dropped, longer than {limit} (data.too_long={too_long})")
    if meta["images_too_long"]:
        lines.append(_images_left_out(meta, label))
    if meta["untrained"]:
        named = [
            f"{file}:{line} ({reason})" for file, line, reason in meta["left_out"] if reason not in TOO_LONG_REASONS
        ]
        why = "without a trained token" if noun != "pairs" else "that teach no preference"
        lines.append(
            f"{label}: {meta['untrained']:,} rows left out {why}: {', '.join(named[:5])}"
            + (", ..." if meta["untrained"] > len(named[:5]) else "")
        )
    for kind, what in SPECIAL_TOKENS.items():
        if meta[kind]:
            file, line, text = meta["special_tokens"][kind]
            rows = f"{meta[kind]:,} {plural(meta[kind], 'row')}"
            lines.append(f"{label}: {rows} ({file}:{line} with {text}, for one) {what}")
    if meta["left_out"] and (samples.directory / "left_out.txt").is_file():
        lines.append(f"{label}: all rows left out are listed in {samples.directory / 'left_out.txt'}")
    return lines
