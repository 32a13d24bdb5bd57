"""`ImageReader`: images of chats, from the parts of messages to image tokens in the text, streams and pixels.

    images = reader.read(values, directory)    bytes and layout of each, by its header
    text = reader.expand(rendered, layouts)    the template's placeholders become image tokens
    streams = reader.streams(ids, layouts)     what a model reads beside the ids
    pixels = reader.pixels(image)              decoded, as the tower takes them

A reader is for one model. Its processor is read at the first image, so that chats without one need no processor.
Torch is imported where tensors are asked for.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.data.images.families import read_processor
from dtrain.data.images.files import MAX_STORED_PIXELS, ImageBytes, ImageRecord, read_image, verify_image
from dtrain.data.images.processor import ImageProcessor, Layout
from dtrain.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LaidOutImage:
    """Image of a chat: its bytes, its layout, and sentences to say once for all images that have them."""

    image: ImageBytes
    layout: Layout
    notes: tuple[str, ...] = ()

    @property
    def record(self) -> ImageRecord:
        """The image as a cache keeps it."""
        image = self.image
        path, data = (None, image.data) if image.path is None else (str(image.path), None)
        return ImageRecord(image.name, image.digest, self.layout, path, data)


@dataclass(frozen=True)
class ExpandedText:
    """Rendered chat whose placeholders have become image tokens.

    ends: of each placeholder, in the text as it was rendered; shifts: characters that the text is longer before the
    first placeholder, behind it, and so on.
    """

    text: str
    ends: Sequence[int]
    shifts: Sequence[int]

    def map_position(self, position: int) -> int:
        """Return where the character at `position` of the rendered text stands now."""
        return position + self.shifts[bisect_right(self.ends, position)]


@dataclass(eq=False)
class ImageReader:
    """Reader of images for the model whose files are in `model`.

    max_stored_pixels     of an image as it is stored; more are refused before anything is decoded
    max_pixels      of an image as the tower takes it, below the processor's own bound; None: the processor's
    cache_dir       where images behind URLs are copied to; None: URLs are refused
    """

    tokenizer: Tokenizer
    model: Path
    _: KW_ONLY
    max_pixels: int | None = None
    max_stored_pixels: int = MAX_STORED_PIXELS
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        self._last: tuple[Sequence[Any], Path | None, list[LaidOutImage]] | None = None  # what `read` took and returned

    @cached_property
    def processor(self) -> ImageProcessor:
        """The model's image processor. Raises UserError where it has none that fits."""
        processor = read_processor(self.model, self.max_pixels)
        processor.check_tokens(self.tokenizer.vocabulary)
        return processor

    @property
    def fingerprint(self) -> str | None:
        """Hash of everything that decides tokens and pixels; None of a model without a processor that dtrain reads."""
        try:
            return self.processor.fingerprint
        except UserError:
            return None

    def lay_out(self, value: Any, directory: Path | None) -> LaidOutImage:
        """Return an image, as of `read_image`, with its layout by its header. Raises UserError, for a torn one too."""
        processor, image = self.processor, read_image(value, directory, self.cache_dir)
        height, width, notes = image.header(self.max_stored_pixels)
        verify_image(image.data, image.name)
        return LaidOutImage(image, processor.layout(height, width), notes)

    def read(self, values: Sequence[Any], directory: Path | None) -> list[LaidOutImage]:
        """Return the images that `values` are, each as of `lay_out`.

        directory: that of the file that names them; None: no path is read. The files of a row that is read twice in
        succession, as where a share of the rows is validated, are read once. Raises UserError that names the image by
        its number and its name.
        """
        if (last := self._last) is not None and last[:2] == (values, directory):
            return last[2]
        images = []
        for number, value in enumerate(values, start=1):
            try:
                images.append(self.lay_out(value, directory))
            except UserError as error:
                raise UserError(f"image {number} of {len(values)}: {error}") from error
        self._last = values, directory, images
        return images

    def expand(self, text: str, layouts: Sequence[Layout]) -> ExpandedText:
        """Return a rendered chat with the tokens of its images in the place of the template's placeholders.

        Placeholders in the words of users are none: templates write them escaped. Raises UserError where there are more
        or fewer placeholders than images.
        """
        placeholder = self.processor.tokens.placeholder
        pieces = text.split(placeholder)
        if len(pieces) - 1 != len(layouts):
            raise UserError(
                f"the chat template writes {len(pieces) - 1} times {placeholder} for {len(layouts)} images: use the "
                "model's own template, and leave this token out of the messages of the assistant and the system"
            )
        expansions = [self.processor.expansion(layout) for layout in layouts]
        ends = list(accumulate(len(piece) + len(placeholder) for piece in pieces[:-1]))
        shifts = list(accumulate((len(expansion) - len(placeholder) for expansion in expansions), initial=0))
        expanded = "".join(part for pair in zip(pieces, [*expansions, ""], strict=True) for part in pair)
        return ExpandedText(expanded, ends, shifts)

    def image_positions(self, ids: Sequence[int]) -> list[int]:
        """Return the places of image tokens."""
        return [place for place, token in enumerate(ids) if token == self.token_id]

    def are_contiguous(self, ids: Sequence[int], images: Sequence[LaidOutImage]) -> bool:
        """Return whether the image tokens of `ids` are as many as the images have, each image's in a row."""
        places, start = self.image_positions(ids), 0
        for image in images:
            own = places[start : start + image.layout.tokens]
            if len(own) < image.layout.tokens or own[-1] - own[0] != len(own) - 1:
                return False
            start += len(own)
        return start == len(places)

    def check_token_count(self, ids: Sequence[int], images: Sequence[LaidOutImage]) -> None:
        """Raise UserError where `ids` hold another number of image tokens than the images have."""
        count, expected = len(self.image_positions(ids)), sum(image.layout.tokens for image in images)
        if count != expected:
            raise UserError(
                f"the row has {count} image tokens ({self.processor.tokens.token}), and its images are {expected}: "
                "images alone write this token; leave it out of the text"
            )

    def within(
        self, ids: Sequence[int], images: Sequence[LaidOutImage], kept: range, max_length: int
    ) -> Sequence[LaidOutImage] | None:
        """Return the images whose tokens are at places `kept` of `ids`; None where one would be cut. Raises UserError
        for an image that no row of `max_length` has room for."""
        for image in images:
            if image.layout.tokens >= max_length:
                raise UserError(
                    f"{image.image.name}: the image has {image.layout.tokens} tokens, and data.max_length is "
                    f"{max_length}: raise it, or make images smaller with data.image_max_pixels"
                )
        places, ends = self.image_positions(ids), [*accumulate((image.layout.tokens for image in images), initial=0)]
        first, last = bisect_left(places, kept.start), bisect_left(places, kept.stop)
        return images[ends.index(first) : ends.index(last)] if first in ends and last in ends else None

    @property
    def token_id(self) -> int:
        """The id of image tokens."""
        return self.processor.tokens.token_id

    def pixels(self, image: ImageBytes) -> "Tensor":
        """Return the decoded image as the tower takes it, float32 [patches, values]."""
        return self.processor.pixels(image.decode(self.max_stored_pixels))

    def image_streams_of_rows(
        self, rows: "Sequence[Sequence[tuple[Tensor, Sequence[ImageRecord]]]]"
    ) -> "list[dict[str, Tensor]]":
        """Return what the model reads beside the ids of rows, each of documents (ids [s], images) one behind the other:
        the streams of `ImageProcessor.streams`, features counted through the row; `pixels` float32 [P, values], `grids`
        int64 [images, 3] and `image_keys` int64 [images], equal for equal images.

        An image that several documents share is decoded once. Raises UserError for an image that cannot be read or
        decoded.
        """
        import torch

        from dtrain.data.images.tensors import feature_index

        decoded: dict[str, Tensor] = {}
        made = []
        for documents in rows:
            records = [record for _, images in documents for record in images]
            for record in records:
                if record.digest not in decoded:
                    decoded[record.digest] = self.pixels(record.image())
            streams = [self.streams(ids, [record.layout for record in images]) for ids, images in documents]
            row = {name: torch.cat([own[name] for own in streams]) for name in streams[0]}
            row["image_features"] = feature_index(row["image_features"] >= 0)
            pixels = [decoded[record.digest] for record in records]
            row["pixels"] = torch.cat(pixels) if pixels else torch.empty(0, 0)
            grids = [record.layout.grid for record in records]
            row["grids"] = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
            row["image_keys"] = torch.tensor([record.key for record in records], dtype=torch.int64)
            made.append(row)
        return made

    def streams(self, ids: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return what the model reads beside the ids [S] of one document; see `ImageProcessor.streams`. Without layouts
        all ids are text, as image tokens that a model has drawn behind those of its images are."""
        is_image = ids == self.token_id
        is_image &= is_image.cumsum(0) <= sum(layout.tokens for layout in layouts)
        return self.processor.streams(is_image, layouts)
