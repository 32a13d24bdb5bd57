"""From the `data` section of a recipe to samples and rows.

`open_rows` opens the rows for training or validation; the trainer and `dtrain preview` call it. `open_file_checks`
returns the same files as checks that `dtrain validate` runs, without making a cache.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from dtrain.data.formats.formats import FORMATS_BY_KIND
from dtrain.data.rows.cache import LEFT_OUT, Samples, Source, open_cache
from dtrain.data.rows.rows import Rows
from dtrain.data.sources.files import detect_formats, find_files, read_chunks, source_entries
from dtrain.data.sources.reading import RowReading, known_formats, read_format
from dtrain.data.text.dropped_text import DROPPED_TEXT_FIX
from dtrain.data.text.replies import note_on_ending
from dtrain.data.text.template import ChatTemplate, choose_template
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dtrain.data.formats.labels import Label
    from dtrain.data.formats.prompts import PromptOptions
    from dtrain.data.images.reader import ImageReader

PrintLine = Callable[[str], None]  # prints a line


class EncoderClass(NamedTuple):
    """An encoder, which is imported when a method needs it.

    Attributes:
        module: Its module.
        name: Name of the class.
        options: Arguments that only this class has.
    """

    module: str
    name: str
    options: tuple[str, ...] = ()


# The encoder of each kind of sample.
ENCODERS = {
    "examples": EncoderClass("dtrain.data.formats.encoder", "Encoder", ("loss_on",)),
    "pairs": EncoderClass("dtrain.data.formats.pairs", "PairEncoder"),
    "labelled": EncoderClass("dtrain.data.formats.labels", "LabelledEncoder"),
    "prompts": EncoderClass("dtrain.data.formats.prompts", "PromptEncoder", ("options",)),
    "examples with labels": EncoderClass("dtrain.data.formats.labels", "LabelledTextEncoder", ("label",)),
    "pairs with labels": EncoderClass("dtrain.data.formats.labels", "LabelledPairEncoder", ("label",)),
}
# Sentences on rows that spell special tokens, by the counter of the cache.
SPECIAL_TOKENS = {
    "escaped": "have the text of a special token in the words of a user or a tool; it is read as characters "
    "(data.special_tokens)",
    "kept": "have special tokens in their own text that are read as tokens (data.special_tokens=all reads them as "
    "characters where users and tools write them)",
}
MIN_PACKED_ROWS = 16  # packed rows of an epoch; with fewer, small data would give too few steps
MAX_LISTED_ROWS = 5  # left-out rows in a line


class _SourcesAndEncoder(NamedTuple):
    sources: list[Source]
    encoder: RowEncoder


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
    print_line: PrintLine = print,
    progress: bool = True,
) -> Rows:
    """Open the rows of the training or the validation data.

    Args:
        section: The recipe's `data`.
        split: "train", or "val" for validation rows: one epoch, not shuffled, all weights 1. If `section.val` is a
            fraction or a number of rows, both splits are parts of the rows of `section.train`.
        kind: What the method trains on: examples, pairs (chosen and rejected), labelled (replies that are desirable or
            not) or prompts.
        prompts: Options for prompts, if the method trains on them.
        label: Which number of each row is stored, if the method reads one.
        tokenizer: The model's tokenizer.
        template: The chat template. None: `section.chat_template`, or else the template of the tokenizer's directory.
        seed: Seed of the order and of the validation split.
        epochs: Passes over the training data; None for an endless sequence.
        cache_dir: Directory of the cache if `section.cache_dir` is not set.
        print_line: Prints a line: what was detected, chosen, truncated and left out.
        progress: Whether a progress bar is shown.

    Raises:
        UserError: If the section or a row is wrong.

    Collectives:
        Those of `open_cache`: every rank must call this function.
    """
    is_train = split == "train"
    data_name = f"{split} data"
    cache_dir = section.cache_dir or cache_dir
    sources, encoder = _open_sources(
        section, tokenizer, template, split, kind, prompts, label, seed, cache_dir, print_line
    )
    samples = open_cache(
        sources,
        encoder,
        cache_dir=cache_dir,
        num_workers=section.num_workers,
        progress=progress,
        label=data_name,
        print_line=print_line,
    )
    num_string_prompts = samples.meta["plain_prompts"]
    lines = describe_samples(samples, data_name, section.too_long)
    lines += describe_string_prompts(data_name, num_string_prompts, encoder.prompts_as, encoder.template)
    if is_train:
        formats = {name for source in sources for name in source.formats}
        lines += notes_on_endings(encoder, formats, samples.meta["rows"], num_string_prompts)
    for line in lines:
        print_line(line)
    rows = Rows(
        samples,
        max_length=section.max_length,
        packing=bool(section.packing) and kind != "prompts",  # for prompts, the completions are packed later
        shuffle=section.shuffle and is_train,
        seed=seed,
        epochs=epochs if is_train else 1,
        images=encoder.images if samples.meta["images"] else None,
    )
    if section.packing == "auto" and not should_pack(rows, kind):
        num_packed = rows.rows_in_epoch(0)
        rows = replace(rows, packing=False)
        print_line(
            f"data.packing=auto: false, since packed the data has {num_packed} {plural(num_packed, 'row')} a pass"
        )
    return rows


def should_pack(rows: Rows, kind: str) -> bool:
    """Return True if `data.packing=auto` packs these rows. Completions of prompts are always packed."""
    return kind == "prompts" or replace(rows, packing=True).rows_in_epoch(0) >= MIN_PACKED_ROWS


@dataclass(frozen=True)
class FileCheck:
    """A data file that is checked before a run. Methods raise UserError for the first row that is wrong.

    Attributes:
        file: The file.
        format: Its format.
        reading: How its rows are read.
        encoder: Encoder of its rows.
    """

    file: Path
    format: str
    reading: RowReading
    encoder: RowEncoder

    def encode_first_rows(self) -> EncodedChunk | None:
        """Encode the first rows, up to 256 of them, as for training; None if the file has none."""
        for chunk in read_chunks(self.file):
            return self.encoder.encode_chunk(chunk, self.format, self.reading)
        return None

    def check_rows(self, until: float, is_full_check: bool = False) -> int | None:
        """Check all rows until some time.

        Args:
            until: Time to stop, as of time.monotonic().
            is_full_check: Whether rows are encoded, with the template and data.too_long. Otherwise only their shape is
                checked.

        Returns:
            The line before which the check stopped; None if all rows were read.
        """
        check = self.encoder.encode_chunk if is_full_check else self.encoder.check_shapes
        for chunk in read_chunks(self.file):
            if time.monotonic() >= until:
                first_line, _ = chunk.rows[0]
                return first_line
            check(chunk, self.format, self.reading)
        return None

    @property
    def only_shape_can_fail(self) -> bool:
        """True if rows with the right shape are always accepted: no template writes them, and none is too long."""
        return self.format in ("text", "tokenized") and self.encoder.too_long != "error"


def open_file_checks(section: Any, *, cache_dir: str | Path | None = None, **options: Any) -> list[FileCheck]:
    """Return a check of each file that `open_rows` would read with the same arguments. Raises UserError."""
    sources, encoder = _open_sources(section, cache_dir=section.cache_dir or cache_dir, **options)
    checks = []
    for source in sources:
        for file, name in zip(source.files, source.formats, strict=True):
            checks.append(FileCheck(file, name, source.row_reading, encoder))
    return checks


def _print_nothing(line: str) -> None:
    pass


def _open_sources(
    section: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    split: str = "train",
    kind: str = "examples",
    prompts: "PromptOptions | None" = None,
    label: "Label | None" = None,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    print_line: PrintLine = _print_nothing,
) -> _SourcesAndEncoder:
    """Find the files of a split and build the encoder of their rows; the arguments are those of `open_rows`."""
    is_validation = split != "train"
    is_part_of_train = isinstance(section.val, float | int)  # the validation rows
    if is_validation and not is_part_of_train:
        sources = _find_sources(section.val, "data.val", print_line, kind, cache_dir)
    elif is_validation:
        print_line = _print_nothing  # these lines were printed when the training rows were opened
        sources = _find_sources(section.train, "data.train", print_line, kind, cache_dir)
    else:
        sources = _find_sources(section.train, "data.train", print_line, kind, cache_dir)
    if is_part_of_train and any(source.weight for source in sources):
        # Training and validation rows are split from the same sources, those with a weight above 0.
        sources = [source for source in sources if source.weight]
    if is_validation:
        sources = [replace(source, weight=1.0) for source in sources if source.weight]
    formats = {name for source in sources for name in source.formats}
    template = template or choose_template(
        tokenizer.directory, tokenizer, section.chat_template, section.template_kwargs, section.special_tokens
    )
    refuse_without_template(section.prompts_as, template, tokenizer.directory)
    may_have_images = not formats.isdisjoint(TEMPLATED)
    images = image_reader(section, tokenizer, cache_dir) if may_have_images else None
    encoder = _build_encoder(section, tokenizer, template, kind, prompts, label, images)
    if is_part_of_train:
        threshold = section.val if isinstance(section.val, float) else None
        encoder.split = ValidationSplit(section.val, seed, is_validation=is_validation, threshold=threshold)
    for line in _notes_on_formats(section, template, formats, kind, label):
        print_line(line)
    return _SourcesAndEncoder(sources, encoder)


def _build_encoder(
    section: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    kind: str,
    prompts: "PromptOptions | None",
    label: "Label | None",
    images: "ImageReader | None",
) -> RowEncoder:
    """Build the encoder of a kind of sample; the arguments are those of `open_rows`."""
    encoder_class = ENCODERS[kind if label is None else f"{kind} with labels"]
    build: Callable[..., RowEncoder] = getattr(import_module(encoder_class.module), encoder_class.name)
    special_options = {"label": label, "options": prompts, "loss_on": section.loss_on}
    return build(
        tokenizer,
        template,
        max_length=section.max_length,
        too_long=section.too_long,
        prompts_as=section.prompts_as or TEXT,
        images=images,
        **{option: special_options[option] for option in encoder_class.options},
    )


def image_reader(section: Any, tokenizer: Tokenizer, cache_dir: str | Path | None) -> "ImageReader | None":
    """Return the reader of images in rows; None if the model takes no images."""
    if not has_vision(tokenizer.directory):
        return None
    from dtrain.data.images.reader import ImageReader  # text-only data loads nothing of images

    return ImageReader(
        tokenizer,
        tokenizer.directory,
        max_pixels=section.image_max_pixels,
        max_stored_pixels=section.image_most_pixels,
        cache_dir=None if cache_dir is None else Path(cache_dir).expanduser(),
    )


def _find_sources(split: Any, key: str, print_line: PrintLine, kind: str, cache_dir: str | Path | None) -> list[Source]:
    """Find the files of `data.train` or `data.val`, and the format of each. Raises UserError."""
    if split is None:
        raise UserError(f"{key} is null. Name its data with {key}.path")
    if split.sources and split.path:
        raise UserError(f"{key}.path and {key}.sources are both set. sources replace path, so keep one of them")
    if not split.sources and not split.path:
        raise UserError(f"{key}.path is not set. Name a file, a glob or a list of them")
    sources = []
    for source, source_key in source_entries(split, key):
        files = tuple(find_files(source.path, f"{source_key}.path", source, cache_dir))
        weight = getattr(source, "weight", 1.0)  # only an entry of `sources` has one
        columns = getattr(source, "columns", {})
        if not 0 <= weight < float("inf"):
            raise UserError(f"{source_key}.weight is {weight!r}. It must be a number, 0 or above")
        format_name, reading = read_format(source.format, columns, f"{source_key}.format")
        if format_name not in known_formats():
            raise UserError(f"{source_key}.format is {format_name!r}; known are {', '.join(known_formats())}")
        formats = detect_formats(files, format_name, kind, reading, f"{source_key}.columns")
        if format_name == "auto":
            for line in _describe_detected_formats(files, formats):
                print_line(f"{key}: {line}" + (f" in rows from {reading.function}" if reading.function else ""))
        sources.append(Source(files, formats, float(weight), reading))
    return sources


def _describe_detected_formats(files: Collection[Path], formats: Collection[str]) -> list[str]:
    """Return a line for each format, with its first file and the number of others."""
    files_by_format: dict[str, list[Path]] = {}
    for file, name in zip(files, formats, strict=True):
        files_by_format.setdefault(name, []).append(file)
    lines = []
    for name, files_of_format in files_by_format.items():
        num_more = len(files_of_format) - 1
        more = f" and {num_more} more files" if num_more else ""
        lines.append(f"{files_of_format[0]}{more}: format {name} (detected)")
    return lines


def _notes_on_formats(
    section: Any, template: ChatTemplate | None, formats: set[str], kind: str, label: "Label | None"
) -> list[str]:
    """Return lines on the origin of the chat template, and on `data.loss_on` for rows that no template writes."""
    notes = []
    if template and formats & TEMPLATED:
        notes.append(f"chat template: {template.origin}")
        if template.writes_todays_date:
            notes.append(
                "the chat template writes today's date into each conversation; "
                "data.template_kwargs.date_string may fix it (what tokenising writes is kept in the cache)"
            )
    uses_loss_on = kind == "examples" and label is None
    if uses_loss_on and "text" in formats and section.loss_on != "all":
        notes.append(
            f"data.loss_on={section.loss_on}: rows of plain text have no such part, so all of their tokens are trained"
        )
    if "tokenized" in formats:
        keys = ", ".join(FORMATS_BY_KIND[kind]["tokenized"])
        if uses_loss_on:
            notes.append("tokenized rows are used as they are: their labels, not data.loss_on, say what is trained")
        else:
            notes.append(f"tokenized rows are used as they are: nothing is added to {keys}")
    return notes


def notes_on_endings(
    encoder: RowEncoder, formats: Collection[str], num_rows: int, num_string_prompts: int
) -> list[str]:
    """Return a note if the model would not learn to end its replies, because of the chat template.

    There is no such note if the template writes no row, or if the model does not generate text.

    Args:
        encoder: Encoder of the rows.
        formats: Formats of the rows.
        num_rows: Number of rows.
        num_string_prompts: Number of rows with a string prompt.

    Returns:
        A list with the note, or an empty list.
    """
    all_are_raw_text = num_string_prompts == num_rows and encoder.prompts_as == TEXT
    is_templated = not TEMPLATED.isdisjoint(formats) and not all_are_raw_text
    if encoder.template is None or not encoder.generates or not is_templated:
        return []
    note = note_on_ending(encoder.replies, encoder.tokenizer, encoder.loss_on == "all")
    return [] if note is None else [note]


def note_on_dropped_text(samples: Samples, label: str) -> list[str]:
    """Return the note on text that the chat template leaves out, if there is any."""
    if not samples.text.dropped:
        return []
    return [f"note: {label}: {samples.describe_dropped_text()}. To train it, {DROPPED_TEXT_FIX}"]


def describe_samples(samples: Samples, label: str, too_long: str = "truncate") -> list[str]:
    """Return lines on the samples of a cache, and on rows that gave none.

    Args:
        samples: The samples.
        label: Name of the data.
        too_long: The recipe's `data.too_long`.
    """
    meta = samples.meta
    noun = samples.noun
    noun_of_count = noun.removesuffix("s") if meta["samples"] == 1 else noun
    rows = f"{meta['rows']:,} {plural(meta['rows'], 'row')}"
    counts = f"{meta['samples']:,} {noun_of_count} of {rows}, {meta['tokens']:,} tokens"
    if noun != "prompts":
        counts += f", {meta['trained_tokens']:,} of them trained"
    if meta.get("others"):
        counts += f" (data.val is taken from these: {meta['others']:,} rows are of the other part)"
    lines = [f"{label}: {counts}"]
    if noun == "samples" and 0 < meta["trained_tokens"] <= meta["samples"]:
        lines.append(
            f"note: {label}: one token of a sample is trained, as where answers are empty: that teaches their end "
            "alone; `dtrain preview` shows it"
        )
    lines += note_on_dropped_text(samples, label)
    if meta["images"]:
        num_images = f"{meta['images']:,} {plural(meta['images'], 'image')}"
        lines.append(f"{label}: {num_images} in {meta['image_tokens']:,} of the tokens, which are not trained")
        lines += [f"note: {label}: {note}" for note in meta["image_notes"]]
    return lines + describe_left_out_rows(samples, label, too_long)


def describe_left_out_rows(samples: Samples, label: str, too_long: str = "truncate") -> list[str]:
    """Return lines on rows that were truncated or left out, and on special tokens that rows spell.

    Args:
        samples: The samples.
        label: Name of the data.
        too_long: The recipe's `data.too_long`.
    """
    meta = samples.meta
    noun = samples.noun
    lines: list[str] = []
    limit = f"data.max_length={meta['max_length']}"
    if meta["truncated"]:
        lines.append(f"{label}: {meta['truncated']:,} {noun} truncated to {limit}; {meta['tokens_cut']:,} tokens cut")
    if meta["too_long"]:
        lines.append(f"{label}: {meta['too_long']:,} rows dropped, longer than {limit} (data.too_long={too_long})")
    if meta["images_too_long"]:
        lines.append(_describe_left_out_images(meta, label))
    if meta["untrained"]:
        reason = "that teach no preference" if noun == "pairs" else "without a trained token"
        lines.append(f"{label}: {meta['untrained']:,} rows left out {reason}: {_list_untrained_rows(meta)}")
    for kind, sentence in SPECIAL_TOKENS.items():
        if meta[kind]:
            file, line, text = meta["special_tokens"][kind]
            rows = f"{meta[kind]:,} {plural(meta[kind], 'row')}"
            lines.append(f"{label}: {rows} ({file}:{line} with {text}, for one) {sentence}")
    list_file = samples.directory / LEFT_OUT
    if meta["left_out"] and list_file.is_file():
        lines.append(f"{label}: all rows left out are listed in {list_file}")
    return lines


def _list_untrained_rows(meta: Mapping[str, Any]) -> str:
    """Return the first rows without a trained token, each with its reason."""
    rows = []
    for file, line, reason in meta["left_out"]:
        if reason not in TOO_LONG_REASONS:
            rows.append(f"{file}:{line} ({reason})")
    first_rows = rows[:MAX_LISTED_ROWS]
    more = ", ..." if meta["untrained"] > len(first_rows) else ""
    return ", ".join(first_rows) + more


def _describe_left_out_images(meta: Mapping[str, Any], label: str) -> str:
    """Return a line on rows with images that were left out as too long."""
    rows = f"{meta['images_too_long']:,} {plural(meta['images_too_long'], 'row')}"
    fix = f"raise data.max_length={meta['max_length']}, or lower data.image_max_pixels for fewer tokens an image"
    if meta["images"]:
        return f"{label}: {rows} of these have images; {fix}"
    return f"note: {label}: every row with an image is left out as too long ({rows}), so no image is trained on: {fix}"
