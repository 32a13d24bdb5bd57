"""`dtrain preview`: training data as the model receives it, and statistics of the tokenized and packed data."""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TextIO

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.errors import UserError
from dtrain.base.ranges import plural
from dtrain.data.formats.labels import is_desirable
from dtrain.data.images.files import ImageRecord
from dtrain.data.rows.cache import Samples
from dtrain.data.rows.rows import Row, Rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe import Recipe
from dtrain.training.inputs import RunInputs, World
from dtrain.training.setup.data import open_splits

SIDES = ("chosen", "rejected")
GREEN, RESET_COLOR = "\033[32m", "\033[0m"
AS_CHARACTERS, AS_TOKEN = "{{{{{} as characters}}}}", "{{{{{} as a token}}}}"  # marks of special tokens in a row
BUCKETS = 12  # number of buckets of the histogram
BAR = 40  # length of the longest bar in characters
BLOCK = 1 << 16  # number of samples that are read at once


def preview(
    recipe: Recipe,
    samples: int = 3,
    out: TextIO | None = None,
    hide: Callable[[str], str] = str,
) -> None:
    """Print the first samples of the training data, then a histogram of lengths, and how full packed rows are.

    Tokenizes into the cache that a run of the recipe uses.

    Args:
        recipe: The recipe.
        samples: Number of samples.
        out: Where to print. None: standard output. Trained tokens are green in a terminal, otherwise inside [[ ]].
        hide: Removes the secrets from a line.

    Raises:
        UserError: As a run would.
    """
    out = out or sys.stdout
    has_color = out.isatty()

    def print_line(text: str = "") -> None:
        print(hide(text), file=out)

    if not recipe.model.path:
        raise UserError("model.path is missing: set it to a local directory with config.json, weights and tokenizer")
    inputs = RunInputs.of(recipe, World(recipe.launch.num_processes))
    data = open_splits(inputs, inputs.cache, print_line, True, ["train"])
    rows = data.rows["train"]
    template = inputs.source.template
    printer = TokenPrinter(inputs.source.tokenizer, frozenset() if template is None else template.structure)
    noun = rows.samples.noun
    unit = "row" if rows.packing or noun == "samples" else noun.removesuffix("s")
    legend = ""
    if noun != "prompts":
        legend = f", trained tokens {'green' if has_color else 'in [[ ]]'}"
    for number, group in enumerate(islice(rows.sample_groups(), samples), start=1):
        print_line(f"\n--- {unit} {number}{legend}: {_origins(rows.samples, group.samples)}")
        texts = texts_of(rows, group.samples, printer, has_color)
        for line in _document_lines(inputs, rows.samples, group.samples, texts):
            print_line(line)
    for line in ["", *histogram(rows.samples), "", *packing(rows)]:
        print_line(line)


def _origins(samples: Samples, indices: Sequence[int]) -> str:
    """Return the file and the line of up to four samples."""
    origins = []
    for index in indices[:4]:
        file, line = samples.origin(index)
        origins.append(f"{file}:{line}")
    more = f" and {len(indices) - 4} more" if len(indices) > 4 else ""
    return ", ".join(origins) + more


def _document_lines(inputs: RunInputs, samples: Samples, indices: Sequence[int], texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts of samples with headings, such as "- chosen:" and "- rejected:" of a preference pair."""
    label = inputs.method.label()
    is_pairs = samples.noun == "pairs"
    for document, text in enumerate(texts):
        # A pair has two documents.
        sample, side = divmod(document, 2) if is_pairs else (document, 0)
        if label is not None and side == 0:
            value = samples.row(indices[sample])["columns"][label.column]
            yield f"- {label.column} {value:g}:"
        if is_pairs:
            yield f"- {SIDES[side]}:"
        if inputs.method.kind == "labelled":
            yield "- desirable:" if is_desirable(samples, indices[document]) else "- undesirable:"
        yield text
    if samples.noun == "prompts":
        for name, value in samples.row(indices[0])["columns"].items():
            yield f"- {name}: {value}"


@dataclass(frozen=True)
class TokenPrinter:
    """Turns token ids into text for people.

    Attributes:
        tokenizer: The model's tokenizer.
        structure: Special tokens that the chat template itself writes. They are printed without a mark.
    """

    tokenizer: Tokenizer
    structure: Collection[str]

    def text(self, ids: Sequence[int]) -> str:
        """Decode `ids` and mark special tokens that come from the data.

        If the data contain the text of a special token, it is tokenized as characters or as the token, and marked in
        one of two ways: `{{<|im_end|> as characters}}`, `{{<|box_start|> as a token}}`.
        """
        texts = []
        for special_token, text in self.tokenizer.pieces(ids):
            if special_token is not None:
                is_structure = special_token in self.structure or not self.structure
                texts.append(special_token if is_structure else AS_TOKEN.format(special_token))
            end = 0
            for match in self.tokenizer.control_tokens.find(text):
                texts += [text[end : match.start()], AS_CHARACTERS.format(match[0])]
                end = match.end()
            texts.append(text[end:])
        return "".join(texts)


def texts_of(rows: Rows, samples: list[int], printer: TokenPrinter, has_color: bool) -> Iterator[str]:
    """Yield the text of each document of some samples. No image is decoded."""
    reader = rows.images
    images_by_document: list[Sequence[ImageRecord]] = []
    if reader is not None:
        for index in samples:
            images_by_document += rows.samples.images(index)
    image_id = None if reader is None else reader.token_id
    first = 0  # number of documents in the rows so far
    for row in replace(rows, images=None).build(samples):
        num_documents = int(row["seq_ids"][-1]) + 1
        images = images_by_document[first : first + num_documents]
        first += num_documents
        images += [[]] * (num_documents - len(images))
        yield from documents(row, printer, has_color, images, image_id)


def documents(
    row: Row, printer: TokenPrinter, has_color: bool, images: Sequence[Sequence[ImageRecord]], image_id: int | None
) -> Iterator[str]:
    """Yield the text of each document of a row. Trained tokens are marked, and each image is one mark.

    Args:
        row: The row.
        printer: Turns token ids into text.
        has_color: Whether marks are colours.
        images: Images of each document.
        image_id: Id of image tokens. None if the model has no images.
    """
    begin, end = (GREEN, RESET_COLOR) if has_color else ("[[", "]]")
    # labels[t] is the token after input_ids[t], so a token is trained if the position before it has a label.
    is_trained = torch.zeros_like(row["labels"], dtype=torch.bool)
    is_trained[1:] = row["labels"][:-1] != IGNORE_INDEX
    for document, records in enumerate(images):
        mask = row["seq_ids"] == document
        spans = _spans(row["input_ids"][mask].tolist(), is_trained[mask].tolist(), records, image_id)
        texts = []
        for span in spans:
            text = printer.text(span.ids) if span.image is None else image_mark(records[span.image])
            texts.append(f"{begin}{text}{end}" if span.is_trained else text)
        yield "".join(texts)


@dataclass
class _Span:
    """Neighbouring tokens of a document that are printed together.

    Attributes:
        is_trained: Whether they are trained.
        image: Index of the image that they belong to. None for text.
        ids: The tokens.
    """

    is_trained: bool
    image: int | None
    ids: list[int]


def _spans(
    ids: Sequence[int], trained: Sequence[bool], records: Sequence[ImageRecord], image_id: int | None
) -> list[_Span]:
    """Split the tokens of a document where text and images, or trained and other tokens, meet."""
    # The index of the image of each image token, in order. An image has as many tokens as its layout says.
    image_indices = [index for index, record in enumerate(records) for _ in range(record.layout.tokens)]
    num_image_tokens = 0
    spans: list[_Span] = []
    for token, is_trained in zip(ids, trained, strict=True):
        image = None
        if token == image_id:
            if num_image_tokens < len(image_indices):
                image = image_indices[num_image_tokens]
            num_image_tokens += 1
        if spans and (spans[-1].is_trained, spans[-1].image) == (is_trained, image):
            spans[-1].ids.append(token)
        else:
            spans.append(_Span(is_trained, image, [token]))
    return spans


def image_mark(record: ImageRecord) -> str:
    """Return the text that is printed for an image: its name, its size after resizing, its number of tokens."""
    height, width, _, tokens = record.layout
    return f"[image {record.name} {width} × {height}, {tokens} {plural(tokens, 'token')}]"


def histogram(samples: Samples) -> list[str]:
    """Return a histogram of the documents' lengths in tokens, before truncation, as lines."""

    def blocks() -> Iterator[Tensor]:
        for start in range(0, len(samples), BLOCK):
            yield samples.full_lengths(start, min(len(samples), start + BLOCK))

    lows, highs, totals = [], [], []
    for block in blocks():
        lows.append(int(block.min()))
        highs.append(int(block.max()))
        totals.append(int(block.sum()))
    lowest, highest = min(lows), max(highs)
    width = max(1, math.ceil((highest + 1 - lowest) / BUCKETS))
    # The blocks are read a second time, because the buckets depend on all of them.
    counts = torch.stack([((block - lowest) // width).bincount(minlength=BUCKETS) for block in blocks()]).sum(0)
    mean = sum(totals) / (len(samples) * samples.documents_per_sample)
    limit = samples.meta["max_length"]
    lines = [f"lengths in tokens: {lowest} to {highest}, mean {mean:.1f} (max_length {limit})"]
    largest_count = int(counts.max())
    for bucket, count in enumerate(counts.tolist()):
        low = lowest + bucket * width
        if low <= highest:
            bar = "#" * round(BAR * count / largest_count)
            lines.append(f"{low:>8} - {low + width - 1:<8} {count:>9,} {bar}".rstrip())
    return lines


def packing(rows: Rows) -> list[str]:
    """Return the numbers of rows and tokens of an epoch, and how full packed rows are, as lines."""
    num_rows, num_tokens = rows.rows_in_epoch(0), rows.tokens_in_epoch(0)
    noun = rows.samples.noun
    unit = "rows" if rows.packing or noun == "samples" else noun
    lines = [f"an epoch: {num_rows:,} {unit}, {num_tokens:,} tokens"]
    if rows.packing:
        full = 100 * num_tokens / (num_rows * rows.capacity)
        per_row = sum(source.total for source in rows.samples.sources) / num_rows
        lines.append(f"packed rows of {rows.capacity} tokens are {full:.1f}% full, {per_row:.1f} {noun} each")
    return lines
