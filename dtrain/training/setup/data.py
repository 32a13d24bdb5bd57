"""Setup of the data: the rows of each split, as the run reads them.

The checks come first, then `open_data`, which a run calls, and `open_splits`, which opens the rows.

A plan reads only the first rows. `images_of_first_rows` finds the document whose images would give a row the most
patches, and assumes that every row is filled with this document: once, or in a packed row as often as it fits. For
example, a document of 700 tokens with one image fits twice into a packed row of 2,048 tokens. So every row is assumed
to have 2 images.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dtrain.base.errors import Problem, RecipeError, UserError, describe_error, problems_in
from dtrain.base.model_directory import has_vision
from dtrain.base.ranges import plural
from dtrain.data.rows.rows import Rows
from dtrain.data.sources import columns
from dtrain.data.sources.files import (
    detect_formats,
    file_kind,
    files_to_copy,
    find_files as find_files,
    is_dataset_id,
    source_entries,
    source_paths,
    uncached_datasets,
)
from dtrain.data.sources.hub import DatasetPart
from dtrain.data.sources.reading import PLUGIN_KEY, known_formats, read_format
from dtrain.data.sources.sources import open_file_checks, open_rows
from dtrain.data.text.dropped_text import ALLOW_DROPPED_TEXT_KEY, DROPPED_TEXT_FIX
from dtrain.methods import Method
from dtrain.recipe import Recipe
from dtrain.recipe.schema import DataSource, Source
from dtrain.training.host import Host
from dtrain.training.inputs import RunInputs
from dtrain.training.resume import DIGEST_OF_SPLIT
from dtrain.training.setup.code import unknown_name

if TYPE_CHECKING:
    from dtrain.data.images.processor import Layout

# Options of `path`. A split with `sources` has them in each entry of `sources` instead.
_OPTIONS_OF_A_PATH = ("columns", "split", "subset", "revision")


@dataclass(frozen=True)
class DataFacts:
    """The data of a run.

    Attributes:
        recipe: The recipe with a value for `data.packing`.
        rows: Rows by split. A dry run opens them only if the files are small; a plan never does.
        example_rows: For each split, one row with every column that the method keeps.
        identities: Digests of the splits' content, by the keys that a resume compares.
        num_string_prompts: Number of training rows whose prompt is a string instead of messages.
        has_images: Whether rows have images, so that the model needs its vision tower.
        is_read: Whether the rows were read without a problem, so that the method can examine them.
        notes: Lines for the user.
    """

    recipe: Recipe
    rows: Mapping[str, Rows] = field(default_factory=dict)
    example_rows: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)
    num_string_prompts: int = 0
    has_images: bool = False
    is_read: bool = False
    notes: tuple[str, ...] = ()


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check each split's sources: paths, formats that the method accepts, names of columns."""
    recipe, method = inputs.recipe, inputs.method
    label = method.label()
    label_columns = [label.column] if label else []
    problems = []
    for key, split in _split_sections(inputs):
        problems += _check_paths(split, key)
        # Options such as `format` can be set for the whole split, and for each entry of `sources`.
        sources = [(split, key)]
        if split.sources:
            sources += source_entries(split, key)
        for source, source_key in sources:
            format_key = f"{source_key}.format"
            unknown = unknown_name(format_key, source.format, known_formats(), plugin_key=PLUGIN_KEY)
            if unknown:
                problems += unknown
                continue
            format_name, reading = read_format(source.format, source.columns, format_key)
            reason = method.format_problem(format_name)
            if reason is not None:
                problems.append(Problem(format_key, f"{format_key}={source.format}: {reason}"))
            if reading.function is None:  # else any column may be one that the function reads
                problems += columns.check_column_names(
                    source.columns, method.kind, format_name, f"{source_key}.columns", label_columns
                )
        if split.sources:
            problems += _check_options_of_a_path(split, key)
    every = recipe.train.validate_every
    if recipe.data.val is None and every not in (None, "auto"):
        fix = "Set data.val.path, data.val=0.05 for a share of the training rows, or train.validate_every=auto"
        text = f"train.validate_every={every} needs a validation set"
        problems.append(Problem("train.validate_every", text, fix))
    return problems


def _check_options_of_a_path(split: DataSource, key: str) -> list[Problem]:
    """Refuse options of `path` on a split with `sources`."""
    problems = []
    for option in _OPTIONS_OF_A_PATH:
        if getattr(split, option) != getattr(DataSource(), option):
            text = f"{key}.{option} is for {key}.path, and the recipe has {key}.sources"
            problems.append(Problem(f"{key}.{option}", text, f"Set {option} in each entry of {key}.sources"))
    return problems


def _check_paths(split: DataSource, key: str) -> list[Problem]:
    """Check that a split has either `path` or `sources`, and that each source has a path."""
    sources_key = f"{key}.sources"
    if split.sources == []:
        # The entries may be missing because they were refused.
        fix = "Add at least one {path, format, weight}"
        return [Problem(sources_key, f"{sources_key} is empty", fix, is_missing=True)]
    problems = []
    if split.path and split.sources is not None:
        text = f"{key}.path and {sources_key} are both set, and only one of them can be used"
        problems.append(Problem(sources_key, text, "Set one of them to null"))
    for source, source_key in source_entries(split, key):
        if not source.path:
            path_key = f"{source_key}.path"
            fix = "Set it to a file, a glob or a list of them"
            problems.append(Problem(path_key, f"{path_key} is missing", fix, is_missing=True))
    return problems


def notes(inputs: RunInputs) -> list[str]:
    """Return notes on validation rows that are never used, and on files that are named twice."""
    return _note_on_unused_rows(inputs) + _notes_on_repeated_files(inputs)


def _notes_on_repeated_files(inputs: RunInputs) -> list[str]:
    """Return a note for each file that is named twice, in one split or in both."""
    lines: list[str] = []
    first_key: dict[Path, str] = {}  # for each file, the key of the source that names it first
    for split_key, split in _split_sections(inputs):
        for source, key in source_entries(split, split_key):
            for file in _readable_files(inputs, source, key):
                first = first_key.get(file.resolve())
                if first is None:
                    first_key[file.resolve()] = key
                elif first.startswith(split_key):
                    lines.append(f"note: {file} is named twice ({first}.path, {key}.path): its rows count twice")
                else:
                    lines.append(f"note: {file} is in {first}.path and in {key}.path: validation sees trained rows")
    return lines


def _readable_files(inputs: RunInputs, source: Source, key: str) -> list[Path]:
    """Return the files of a source. The list is empty if they cannot be read, which `check_files` reports."""
    try:
        return local_files(inputs, source, key)
    except (OSError, UserError):
        return []


def _note_on_unused_rows(inputs: RunInputs) -> list[str]:
    share = inputs.recipe.data.val
    if not isinstance(share, float | int) or inputs.recipe.train.validate_every is not None:
        return []
    return [f"note: data.val={share} keeps rows out of training; set train.validate_every=auto to see their loss"]


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check that each source's files exist, and the first row of each."""
    problems: list[Problem] = []
    for key, split in _split_sections(inputs):
        for source, source_key in source_entries(split, key):
            problems += check_hub_options(source, source_key)
            problems += problems_in(f"{source_key}.path", partial(_check_formats, inputs, source, source_key))
    return problems


def _check_formats(inputs: RunInputs, source: Source, key: str) -> list[Problem]:
    """Detect the format of each file of a source by its first row.

    Raises:
        UserError: If a file has no format that the method accepts.
    """
    files, method = local_files(inputs, source, key), inputs.method
    format_key = f"{key}.format"
    format_name, reading = read_format(source.format, source.columns, format_key)
    if format_name not in known_formats() or method.format_problem(format_name) is not None:
        return []  # `check_keys` reports the format
    try:
        reading.reader()
    except UserError as error:
        return [Problem(format_key, str(error))]
    if files:
        detect_formats(files, format_name, method.kind, reading, f"{key}.columns")
    return []


def check_hub_options(source: Source, key: str) -> list[Problem]:
    """Refuse `split`, `subset` and `revision`, which only datasets on the hub have, for a source of files."""
    part, default = DatasetPart.of(source), DatasetPart()
    options = [name for name in DatasetPart._fields if getattr(part, name) != getattr(default, name)]
    if not source.path or not options or any(is_dataset_id(path) for path in source_paths(source)):
        return []
    named = " and ".join(f"{key}.{option}" for option in options)
    text = f"{named}: only datasets of the Hugging Face hub (owner/name) have these, and {key}.path names files"
    return [Problem(f"{key}.{options[0]}", text, "Leave it out")]


def local_files(inputs: RunInputs, source: Source, key: str) -> list[Path]:
    """Return the files of a source that are on this machine already.

    Raises:
        UserError: If the path names no files.
    """
    if not source.path or uncached_datasets(source, key):  # reported by `check_keys` or `hub_files.missing_problems`
        return []
    paths = [path for path in source_paths(source) if not _needs_copy(inputs, path, f"{key}.path")]
    return find_files(paths, f"{key}.path", source, inputs.cache) if paths else []


def _needs_copy(inputs: RunInputs, path: str, key: str) -> bool:
    """Check whether `path` is a URL whose files the run has to copy first.

    Raises:
        UserError: If there are no such files, or if dtrain cannot read files of their kind.
    """
    files = files_to_copy(path, key, inputs.cache)
    for file in files:
        file_kind(file.copy, key)
    return bool(files)


def open_data(inputs: RunInputs, host: Host) -> DataFacts:
    """Open the rows of all splits. One process of each machine tokenises; the others wait for its cache.

    Raises:
        UserError: If a row is wrong, or if the splits differ between hosts.

    Collectives:
        Over all ranks of `host`.
    """
    facts = open_splits(inputs, inputs.cache, host.print_line, host.ranks.is_first)
    refuse_dropped_text(facts)
    for split, rows in facts.rows.items():
        host.ranks.check_same(rows.fingerprint, f"data.{split} is not the same on every host")
    return facts


def refuse_dropped_text(facts: DataFacts) -> None:
    """Raise RecipeError if the chat template drops more than half of a split's text, unless the recipe allows it."""
    if facts.recipe.data.allow_dropped_text:
        return
    for split, rows in facts.rows.items():
        if rows.samples.text.is_mostly_dropped:
            text = f"data.{split}: {rows.samples.describe_dropped_text()}. That is more than half"
            fix = f"To train it, {DROPPED_TEXT_FIX}. To train without it, set {ALLOW_DROPPED_TEXT_KEY}=true"
            raise RecipeError([Problem(f"data.{split}", text, fix)])


def refuse_images(inputs: RunInputs) -> None:
    """Raise UserError if the method or the model does not accept images."""
    problems = inputs.method.image_problems()
    if problems:
        raise RecipeError(problems)
    inputs.model_config(has_images=True)  # raises if dtrain does not have the model's vision tower


def splits(inputs: RunInputs) -> list[str]:
    """Return the names of the recipe's splits."""
    return ["train"] if inputs.recipe.data.val is None else ["train", "val"]


def row_options(inputs: RunInputs, cache_dir: Path | None) -> dict[str, Any]:
    """Return the arguments of `open_rows` and `open_file_checks` that follow from a recipe.

    Args:
        inputs: The run's inputs.
        cache_dir: The directory of caches. None: nothing is stored.

    Raises:
        UserError: If the tokenizer, the template or the method's tools cannot be read.
    """
    recipe, method = inputs.recipe, inputs.method
    return {
        "kind": method.kind,
        "prompts": method.prompts(),
        "label": method.label(),
        "seed": recipe.run.seed,
        "tokenizer": inputs.source.tokenizer,
        "template": inputs.source.template,
        "cache_dir": cache_dir,
    }


def open_splits(
    inputs: RunInputs,
    cache_dir: Path | None,
    print_line: Callable[[str], None],
    progress: bool,
    names: Sequence[str] | None = None,
) -> DataFacts:
    """Open the rows of splits, tokenised now or read from the cache.

    Args:
        inputs: The run's inputs.
        cache_dir: The directory of caches. None: the tokenised rows are not stored.
        print_line: Prints a line.
        progress: Whether to show a progress bar.
        names: Names of the splits. None: all.

    Raises:
        UserError: If a row is wrong, or if rows have images and the method or the model does not accept them.
    """
    recipe, options = inputs.recipe, row_options(inputs, cache_dir)
    opened: dict[str, Rows] = {}
    for split in names or splits(inputs):
        opened[split] = open_rows(
            recipe.data, split=split, epochs=recipe.train.epochs, print_line=print_line, progress=progress, **options
        )
        if recipe.data.packing == "auto":
            # The training split decides for both splits. Rows of prompts are never packed. For methods that train on
            # completions, `data.packing` means that completions are packed, and auto switches this on.
            packs_rows = opened["train"].packing or options["kind"] == "prompts"
            recipe = replace(recipe, data=replace(recipe.data, packing=packs_rows))
    has_images = any(rows.samples.meta["images"] for rows in opened.values())
    if has_images:
        refuse_images(inputs)
    return DataFacts(
        recipe=recipe,
        rows=opened,
        example_rows={split: rows.samples.example_row() for split, rows in opened.items()},
        identities={DIGEST_OF_SPLIT[split]: rows.samples.identity for split, rows in opened.items()},
        num_string_prompts=opened["train"].samples.meta["plain_prompts"],
        has_images=has_images,
        is_read=True,
    )


@dataclass(frozen=True)
class AssumedImages:
    """The images that every row is assumed to have.

    Attributes:
        layouts: Their layouts. Empty if rows have no images, or if the model accepts none.
        notes: A note on the assumption.
    """

    layouts: "tuple[Layout, ...]" = ()
    notes: tuple[str, ...] = ()


def images_of_first_rows(inputs: RunInputs) -> AssumedImages:
    """Return the images that every row is assumed to have. No row is read if the model accepts no images."""
    try:
        if not has_vision(inputs.source.path) or inputs.source.vision_config.vision is None:
            return AssumedImages()
    except UserError:
        return AssumedImages()
    try:
        options = row_options(inputs, None)
        file_checks = open_file_checks(inputs.recipe.data, split="train", **options)
        chunks = [file_check.encode_first_rows() for file_check in file_checks]
    except (OSError, UserError) as error:
        note = f"images are left out: the first rows of data.train cannot be read ({describe_error(error)})"
        return AssumedImages(notes=(note,))
    documents: list[DocumentImages] = []
    for chunk in chunks:
        if chunk is None:
            continue
        # A chunk of text has no lists of images, so `zip` ends at once.
        for length, records in zip(chunk.lengths, chunk.images, strict=False):
            if records:
                documents.append(DocumentImages(length, [record.layout for record in records]))
    if not documents:
        return AssumedImages(notes=("images are left out: the first rows of data.train have none",))
    layouts = densest_images(documents, inputs.method.row_length(), is_packed(inputs.method))
    patches = sum(image.patches for image in layouts)
    tokens = sum(image.tokens for image in layouts)
    count = len(layouts)
    note = (
        f"images: every row is assumed to have {count} {plural(count, 'image')} of {patches:,} patches and {tokens:,} "
        "tokens, the most by the first rows of data.train"
    )
    return AssumedImages(layouts, (note,))


def is_packed(method: Method) -> bool:
    """Check whether rows of the data have several documents. Completions are packed later, in the rollout."""
    return bool(method.recipe.data.packing) and method.kind != "prompts"


class DocumentImages(NamedTuple):
    """The images of a document.

    Attributes:
        num_tokens: Tokens of the document, with those of its images.
        layouts: Layouts of its images.
    """

    num_tokens: int
    layouts: "Sequence[Layout]"


def densest_images(documents: Sequence[DocumentImages], length: int, packed: bool) -> "tuple[Layout, ...]":
    """Fill a row with the document whose images give the row the most patches, and return the row's images.

    Args:
        documents: The documents.
        length: Tokens of the row.
        packed: Whether the row is packed. It then has the document as often as it fits, otherwise once.
    """

    def num_copies(document: DocumentImages) -> int:
        return max(1, length // document.num_tokens) if packed else 1

    def num_patches(document: DocumentImages) -> int:
        return num_copies(document) * sum(image.patches for image in document.layouts)

    densest = max(documents, key=num_patches)
    row = list(densest.layouts) * num_copies(densest)
    # `full_rows` divides a packed row into two documents, each with a token of text before its images.
    while sum(image.tokens for image in row) > length - 2:
        row.pop()
    return tuple(row)


def _split_sections(inputs: RunInputs) -> Iterator[tuple[str, DataSource]]:
    """Yield the key and the section of each split that has files of its own."""
    for key, section in (("data.train", inputs.recipe.data.train), ("data.val", inputs.recipe.data.val)):
        if isinstance(section, DataSource):
            yield key, section
