"""Images of the rows of a planned step, as the first rows of the data have them.

Every row of the step has the same images: those of the first rows' document with the most patches; a packed row has
them as often as this document fits into it. No two images are alike, so that each is encoded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.base.errors import UserError, in_words
from dtrain.base.model_directory import has_vision
from dtrain.base.ranges import plural
from dtrain.data.images.processor import ImageProcessor, Layout
from dtrain.data.images.tensors import feature_index
from dtrain.data.sources.sources import looks
from dtrain.methods import Method
from dtrain.training.setup.data import row_options
from dtrain.training.spec import RunSpec


def add_images(spec: RunSpec) -> None:
    """Set of `spec` whether its data have images and the layouts of those of a row, with a note of what was assumed; of
    a model without a tower that dtrain has, nothing. Files of the data are read as far as `Look.first` does."""
    try:
        if not has_vision(spec.source.path) or spec.source.vision_config.vision is None:
            return
    except UserError:
        return
    try:
        options = row_options(spec, None)
        chunks = [look.first() for look in looks(spec.recipe.data, split="train", **options)]
    except (OSError, UserError) as error:
        spec.notes.append(f"images are left out: the first rows of data.train cannot be read ({in_words(error)})")
        return
    documents = [
        (length, [record.layout for record in records])
        for chunk in chunks
        if chunk is not None
        for length, records in zip(chunk.lengths, chunk.images, strict=False)  # text alone has no lists of images
        if records
    ]
    if not documents:
        spec.notes.append("images are left out: the first rows of data.train have none")
        return
    spec.has_images = True
    spec.row_images = densest(documents, spec.method.row_length(), is_packed(spec.method))
    patches, tokens = (sum(getattr(image, name) for image in spec.row_images) for name in ("patches", "tokens"))
    count = len(spec.row_images)
    spec.notes.append(
        f"images: every row is taken to have {count} {plural(count, 'image')} of {patches:,} patches and {tokens:,} "
        "tokens, the most by the first rows of data.train"
    )


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
