"""Images that a row of the data has at most, by the first rows of the data.

They are those of the first rows' document with the most patches. A packed row has them as often as this document fits
into it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.base.errors import UserError, in_words
from dtrain.base.model_directory import has_vision
from dtrain.base.ranges import plural
from dtrain.data.images.processor import Layout
from dtrain.data.sources.sources import looks
from dtrain.methods import Method
from dtrain.training.inputs import RunInputs
from dtrain.training.setup.data import row_options


@dataclass(frozen=True)
class AssumedImages:
    """The images that every row is taken to have.

    Attributes:
        layouts: Their layouts. Empty if rows have no images, or if the model takes none.
        notes: A note on the assumption.
    """

    layouts: tuple[Layout, ...] = ()
    notes: tuple[str, ...] = ()


def images_of_first_rows(inputs: RunInputs) -> AssumedImages:
    """Return the images that every row is taken to have. No row is read if the model takes no images."""
    try:
        if not has_vision(inputs.source.path) or inputs.source.vision_config.vision is None:
            return AssumedImages()
    except UserError:
        return AssumedImages()
    try:
        options = row_options(inputs, None)
        chunks = [look.first() for look in looks(inputs.recipe.data, split="train", **options)]
    except (OSError, UserError) as error:
        note = f"images are left out: the first rows of data.train cannot be read ({in_words(error)})"
        return AssumedImages(notes=(note,))
    documents = [
        (length, [record.layout for record in records])
        for chunk in chunks
        if chunk is not None
        for length, records in zip(chunk.lengths, chunk.images, strict=False)  # text alone has no lists of images
        if records
    ]
    if not documents:
        return AssumedImages(notes=("images are left out: the first rows of data.train have none",))
    layouts = densest(documents, inputs.method.row_length(), is_packed(inputs.method))
    patches = sum(image.patches for image in layouts)
    tokens = sum(image.tokens for image in layouts)
    count = len(layouts)
    note = (
        f"images: every row is taken to have {count} {plural(count, 'image')} of {patches:,} patches and {tokens:,} "
        "tokens, the most by the first rows of data.train"
    )
    return AssumedImages(layouts, (note,))


def is_packed(method: Method) -> bool:
    """Check whether rows hold several documents."""
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
