"""Images of the rows of a planned step, as the first rows of the data have them.

Every row of the step has the same images: those of the first rows' document with the most patches; a packed row has
them as often as this document fits into it. No two images are alike, so that each is encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.base.errors import UserError, in_words
from dtrain.base.model_directory import has_vision
from dtrain.base.ranges import plural
from dtrain.data.images.processor import ImageProcessor, Layout
from dtrain.data.images.tensors import feature_index
from dtrain.data.sources.sources import looks
from dtrain.methods import Method
from dtrain.training.inputs import RunInputs
from dtrain.training.setup.data import row_options


@dataclass(frozen=True)
class PlannedImages:
    """The images of a planned row.

    Attributes:
        layouts: Their layouts. Empty if rows have no images, or if the model takes none.
        notes: A note on the assumption.
    """

    layouts: tuple[Layout, ...] = ()
    notes: tuple[str, ...] = ()


def images_of_first_rows(inputs: RunInputs) -> PlannedImages:
    """Return the images that every planned row has, by the first rows of the data."""
    try:
        if not has_vision(inputs.source.path) or inputs.source.vision_config.vision is None:
            return PlannedImages()
    except UserError:
        return PlannedImages()
    try:
        options = row_options(inputs, None)
        chunks = [look.first() for look in looks(inputs.recipe.data, split="train", **options)]
    except (OSError, UserError) as error:
        note = f"images are left out: the first rows of data.train cannot be read ({in_words(error)})"
        return PlannedImages(notes=(note,))
    documents = [
        (length, [record.layout for record in records])
        for chunk in chunks
        if chunk is not None
        for length, records in zip(chunk.lengths, chunk.images, strict=False)  # text alone has no lists of images
        if records
    ]
    if not documents:
        return PlannedImages(notes=("images are left out: the first rows of data.train have none",))
    layouts = densest(documents, inputs.method.row_length(), is_packed(inputs.method))
    patches = sum(image.patches for image in layouts)
    tokens = sum(image.tokens for image in layouts)
    count = len(layouts)
    note = (
        f"images: every row is taken to have {count} {plural(count, 'image')} of {patches:,} patches and {tokens:,} "
        "tokens, the most by the first rows of data.train"
    )
    return PlannedImages(layouts, (note,))


def is_packed(method: Method) -> bool:
    """Return whether rows of the planned step hold several documents."""
    return bool(method.recipe.data.packing) and method.kind != "prompts"


def densest(documents: Sequence[tuple[int, Sequence[Layout]]], length: int, packed: bool) -> tuple[Layout, ...]:
    """Return the images of a row of `length` tokens. documents: tokens and images of each document."""

    def copies(tokens: int) -> int:
        return max(1, length // tokens) if packed else 1

    def patches(document: tuple[int, Sequence[Layout]]) -> int:
        tokens, images = document
        return copies(tokens) * sum(image.patches for image in images)

    tokens, images = max(documents, key=patches)
    row = [*images] * copies(tokens)
    while sum(image.tokens for image in row) > length - 2:  # a token before the images of each of two documents
        row.pop()
    return tuple(row)


def split(images: Sequence[Layout], length: int, count: int) -> list[tuple[int, Sequence[Layout]]]:
    """Return tokens and images of each document, 1 or 2 of them, of a row of `length` tokens: halves of the row, as far
    as the images of either fit into it behind a token of text."""
    if count == 1:
        return [(length, images)]
    half = -(-len(images) // 2)
    first, second = images[:half], images[half:]
    least, rest = (1 + sum(image.tokens for image in part) for part in (first, second))
    middle = min(max(-(-length // 2), least), length - rest)
    return [(middle, first), (length - middle, second)]


def streams_of(documents: Sequence[tuple[int, Sequence[Layout]]], processor: ImageProcessor) -> dict[str, Tensor]:
    """Return the image streams of a row of `documents`, each with its images one behind the other behind its first
    token; [S, ..] each."""
    parts = []
    for length, images in documents:
        places = torch.arange(length)
        parts.append(processor.streams((places > 0) & (places <= sum(image.tokens for image in images)), images))
    streams = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return streams | {"image_features": feature_index(streams["image_features"] >= 0)}
