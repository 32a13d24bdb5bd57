"""`dtrain preview`: rows as the model sees them, and what the set is like once it is tokenised and packed."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice, repeat
from operator import itemgetter
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
TRAINED, PLAIN = "\033[32m", "\033[0m"
AS_CHARACTERS, AS_TOKEN = "{{{{{} as characters}}}}", "{{{{{} as a token}}}}"  # marks of special tokens in a row
BUCKETS, BAR = 12, 40
BLOCK = 1 << 16  # samples read at once


def preview(
    recipe: Recipe,
    samples: int = 3,
    out: TextIO | None = None,
    hide: Callable[[str], str] = str,
) -> None:
    """Print rows of the recipe's training data, trained tokens coloured, then lengths, losses by filter and packing.

    out     standard output by default. Colours are for a terminal; elsewhere trained spans are in [[ ]]
    hide    removes the secrets from a line

    Tokenises into the cache that a run of the recipe uses. Raises UserError as a run would.
    """
    out = out or sys.stdout
    color = out.isatty()

    def say(text: str = "") -> None:
        print(hide(text), file=out)

    if not recipe.model.path:
        raise UserError("model.path is missing: set it to a local directory with config.json, weights and tokenizer")
    inputs = RunInputs.of(recipe, World(recipe.launch.num_processes))
    data = open_splits(inputs, inputs.cache, say, True, ["train"])
    rows, tokenizer, label = data.rows["train"], inputs.source.tokenizer, inputs.method.label()
    template = inputs.source.template
    shown = Shown(tokenizer, frozenset() if template is None else template.structure)
    noun = rows.samples.noun
    unit = "row" if rows.packing or noun == "samples" else noun.removesuffix("s")
    mark = "" if noun == "prompts" else f", trained tokens {'green' if color else 'in [[ ]]'}"
    for number, placement in enumerate(islice(rows.sample_groups(), samples), start=1):
        places = ", ".join("{}:{}".format(*rows.samples.origin(index)) for index in placement.samples[:4])
        more = f" and {len(placement.samples) - 4} more" if len(placement.samples) > 4 else ""
        say(f"\n--- {unit} {number}{mark}: {places}{more}")
        for document, text in enumerate(texts_of(rows, placement.samples, shown, color)):
            sample, side = divmod(document, 2 if noun == "pairs" else 1)
            if label is not None and side == 0:
                value = rows.samples.row(placement.samples[sample])["columns"][label.column]
                say(f"- {label.column} {value:g}:")
            if noun == "pairs":
                say(f"- {SIDES[document % 2]}:")
            if inputs.method.kind == "labelled":
                say("- wanted:" if is_desirable(rows.samples, placement.samples[document]) else "- not wanted:")
            say(text)
        if noun == "prompts":
            for name, value in rows.samples.row(placement.samples[0])["columns"].items():
                say(f"- {name}: {value}")
    for line in ["", *histogram(rows.samples), "", *packing(rows)]:
        say(line)


@dataclass(frozen=True)
class Shown:
    """How token ids are shown.

    Attributes:
        tokenizer: The model's.
        structure: Special tokens that the chat template writes itself; these have no mark.
    """

    tokenizer: Tokenizer
    structure: Collection[str]

    def text(self, ids: Sequence[int]) -> str:
        """Decode `ids` and mark special tokens that a row brings along.

        Text that spells a special token but is read as characters gets one mark, a special token outside the
        conversation's structure the other: `{{<|im_end|> as characters}}`, `{{<|box_start|> as a token}}`.
        """
        shown = []
        for control, text in self.tokenizer.pieces(ids):
            if control is not None:
                shown.append(control if control in self.structure or not self.structure else AS_TOKEN.format(control))
            end = 0
            for match in self.tokenizer.control_tokens.find(text):
                shown += [text[end : match.start()], AS_CHARACTERS.format(match[0])]
                end = match.end()
            shown.append(text[end:])
        return "".join(shown)


def texts_of(rows: Rows, samples: list[int], shown: Shown, color: bool) -> Iterator[str]:
    """Yield the text of each document of these samples. No image is decoded."""
    reader = rows.images
    images = [own for index in samples for own in rows.samples.images(index)] if reader is not None else []
    left = iter(images)
    for row in replace(rows, images=None).build(samples):
        count = int(row["seq_ids"][-1]) + 1
        records = [next(left, []) for _ in range(count)]
        yield from documents(row, shown, color, records, None if reader is None else reader.token_id)


def documents(
    row: Row, shown: Shown, color: bool, images: Sequence[Sequence[ImageRecord]], image_id: int | None
) -> Iterator[str]:
    """Yield the text of each document of a row, its trained tokens marked, and a mark in the place of the tokens of
    each image. images: of each document; image_id: the id of image tokens."""
    begin, end = (TRAINED, PLAIN) if color else ("[[", "]]")
    targets = torch.zeros_like(row["labels"], dtype=torch.bool)
    targets[1:] = row["labels"][:-1] != IGNORE_INDEX  # a label stands one place before the token that it names
    for document, records in enumerate(images):
        inside = row["seq_ids"] == document
        ids, trained = row["input_ids"][inside].tolist(), targets[inside].tolist()
        numbers = chain.from_iterable(repeat(number, record.layout.tokens) for number, record in enumerate(records))
        places = [next(numbers, None) if token == image_id else None for token in ids]  # an image's number, or text
        spans = groupby(zip(trained, places, ids, strict=True), key=itemgetter(0, 1))
        texts = (
            (
                is_trained,
                shown.text([token for *_, token in span]) if number is None else image_mark(records[number]),
            )
            for (is_trained, number), span in spans
        )
        yield "".join(f"{begin}{text}{end}" if is_trained else text for is_trained, text in texts)


def image_mark(record: ImageRecord) -> str:
    """Return the words that stand for an image in a row: its name, its size as it is resized, its tokens."""
    height, width, _, tokens = record.layout
    return f"[image {record.name} {width} × {height}, {tokens} {plural(tokens, 'token')}]"


def histogram(samples: Samples) -> list[str]:
    """Return the histogram of the documents' lengths in tokens, before truncation, as lines."""

    def blocks() -> Iterator[Tensor]:
        for start in range(0, len(samples), BLOCK):
            yield samples.full_lengths(start, min(len(samples), start + BLOCK))

    lows, highs, sums = zip(*((int(b.min()), int(b.max()), int(b.sum())) for b in blocks()), strict=True)
    lowest, highest, limit = min(lows), max(highs), samples.meta["max_length"]
    width = max(1, -(-(highest + 1 - lowest) // BUCKETS))
    counts = torch.stack([((block - lowest) // width).bincount(minlength=BUCKETS) for block in blocks()]).sum(0)
    mean = sum(sums) / (len(samples) * samples.documents_per_sample)
    lines = [f"lengths in tokens: {lowest} to {highest}, mean {mean:.1f} (max_length {limit})"]
    for bucket, count in enumerate(counts.tolist()):
        low, high = lowest + bucket * width, lowest + (bucket + 1) * width - 1
        if low <= highest:
            lines.append(f"{low:>8} - {high:<8} {count:>9,} {'#' * round(BAR * count / int(counts.max()))}".rstrip())
    return lines


def packing(rows: Rows) -> list[str]:
    """Return the rows and tokens of an epoch and how full packed rows are, as lines."""
    count, tokens = rows.rows_in_epoch(0), rows.tokens_in_epoch(0)
    noun = rows.samples.noun
    unit = "rows" if rows.packing or noun == "samples" else noun
    lines = [f"an epoch: {count:,} {unit}, {tokens:,} tokens"]
    if rows.packing:
        full = 100 * tokens / (count * rows.capacity)
        per_row = sum(share.total for share in rows.samples.sources) / count
        lines.append(f"packed rows of {rows.capacity} tokens are {full:.1f}% full, {per_row:.1f} {noun} each")
    return lines
