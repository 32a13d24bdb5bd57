"""`ImageReader`: the images of chats, from the parts of messages to image tokens, streams and pixels.

The steps, for one image of 126 tokens in a prompt for Qwen3-VL:

    images = reader.read(["cat.png"], directory)   the file's bytes, and a layout with 126 tokens, from its header
    text = reader.expand(rendered, layouts)        "..<|image_pad|>.." becomes "..<|image_pad|> · 126.."
    ids = tokenizer.encode(text.text)
    streams = reader.streams(ids, layouts)         one entry per token: which feature, which position (tensors.py)
    pixels = reader.pixels(image)                  decoded, float32 [504 patches, values], as the tower reads them

The first steps run when rows are tokenised, and need no pixels. The last two run when a batch is built.

A reader belongs to one model. Its image processor is read with the first image, so chats without images need none.
Torch is imported only for tensors.
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
    """An image with its layout.

    Attributes:
        image: The bytes of its file.
        layout: Its patches and tokens.
        notes: Sentences that are printed once for all images that have them.
    """

    image: ImageBytes
    layout: Layout
    notes: tuple[str, ...] = ()

    @property
    def record(self) -> ImageRecord:
        """The image as a cache stores it: the path of its file, or its bytes if it has no file."""
        image = self.image
        if image.path is None:
            return ImageRecord(image.name, image.digest, self.layout, None, image.data)
        return ImageRecord(image.name, image.digest, self.layout, str(image.path), None)


@dataclass(frozen=True)
class ExpandedText:
    """A rendered chat whose placeholders were replaced by image tokens.

    Attributes:
        text: The text.
        ends: End of each placeholder in the rendered text.
        shifts: By how many characters `text` is longer before the first placeholder, after it, after the second, ...

    Example:
        >>> expanded = ExpandedText("a<i><i><i>b", ends=[4], shifts=[0, 6])  # "a<i>b", whose image has 3 tokens
        >>> expanded.map_position(0), expanded.map_position(4)
        (0, 10)
    """

    text: str
    ends: Sequence[int]
    shifts: Sequence[int]

    def map_position(self, position: int) -> int:
        """Return the position in `text` of a character of the rendered text."""
        return position + self.shifts[bisect_right(self.ends, position)]


@dataclass(eq=False)
class ImageReader:
    """Reader of images for one model.

    Attributes:
        tokenizer: The model's tokenizer.
        model: The model's directory.
        max_pixels: Maximum number of pixels of a resized image, if it is below the processor's own; None for the
            processor's.
        max_stored_pixels: Maximum number of pixels of an image file. Larger ones are refused before they are decoded.
        cache_dir: Directory to which images behind URLs are copied; None refuses URLs.
    """

    tokenizer: Tokenizer
    model: Path
    _: KW_ONLY
    max_pixels: int | None = None
    max_stored_pixels: int = MAX_STORED_PIXELS
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        # Arguments and result of the last call of `read`.
        self._last_read: tuple[Sequence[Any], Path | None, list[LaidOutImage]] | None = None

    @cached_property
    def processor(self) -> ImageProcessor:
        """The model's image processor. Raises UserError if it has none, or one that does not fit."""
        processor = read_processor(self.model, self.max_pixels)
        processor.check_tokens(self.tokenizer.vocabulary)
        return processor

    @property
    def fingerprint(self) -> str | None:
        """Hash of everything that decides tokens and pixels; None if dtrain cannot read the model's processor."""
        try:
            return self.processor.fingerprint
        except UserError:
            return None

    @property
    def token_id(self) -> int:
        """Id of image tokens."""
        return self.processor.tokens.token_id

    def lay_out(self, value: Any, directory: Path | None) -> LaidOutImage:
        """Read an image and compute its layout from its header.

        Args:
            value: The image, as in `read_image`.
            directory: Directory of relative paths, as in `read_image`.

        Raises:
            UserError: If the image cannot be read, or is damaged as far as that shows without decoding it.
        """
        processor = self.processor
        image = read_image(value, directory, self.cache_dir)
        height, width, notes = image.header(self.max_stored_pixels)
        verify_image(image.data, image.name)
        return LaidOutImage(image, processor.layout(height, width), notes)

    def read(self, values: Sequence[Any], directory: Path | None) -> list[LaidOutImage]:
        """Read the images of a row, as `lay_out` does.

        Args:
            values: The images, as in `read_image`.
            directory: Directory of the file that names them; None refuses paths.

        Raises:
            UserError: If an image is wrong, with its number and name.
        """
        # With a validation split, each row is read twice in succession. Its files are read only once.
        if self._last_read is not None:
            last_values, last_directory, last_images = self._last_read
            if (last_values, last_directory) == (values, directory):
                return last_images
        images = []
        for number, value in enumerate(values, start=1):
            try:
                images.append(self.lay_out(value, directory))
            except UserError as error:
                raise UserError(f"image {number} of {len(values)}: {error}") from error
        self._last_read = values, directory, images
        return images

    def expand(self, text: str, layouts: Sequence[Layout]) -> ExpandedText:
        """Replace the placeholders in a rendered chat by the tokens of its images.

        Placeholders that users write are not counted, because they are escaped in the text.

        Args:
            text: The rendered chat.
            layouts: Layouts of its images, in order.

        Raises:
            UserError: If the number of placeholders is not the number of images.
        """
        placeholder = self.processor.tokens.placeholder
        pieces = text.split(placeholder)
        num_placeholders = len(pieces) - 1
        if num_placeholders != len(layouts):
            raise UserError(
                f"the chat template writes {num_placeholders} times {placeholder} for {len(layouts)} images. Use the "
                "model's own template, and leave this token out of the messages of the assistant and the system"
            )
        expanded = [pieces[0]]
        ends = []
        shifts = [0]
        end = 0
        for layout, before, after in zip(layouts, pieces[:-1], pieces[1:], strict=True):
            expansion = self.processor.expansion(layout)
            expanded += [expansion, after]
            end += len(before) + len(placeholder)
            ends.append(end)
            shifts.append(shifts[-1] + len(expansion) - len(placeholder))
        return ExpandedText("".join(expanded), ends, shifts)

    def image_positions(self, ids: Sequence[int]) -> list[int]:
        """Return the positions of image tokens in `ids`."""
        return [position for position, token in enumerate(ids) if token == self.token_id]

    def are_contiguous(self, ids: Sequence[int], images: Sequence[LaidOutImage]) -> bool:
        """Check that `ids` have the image tokens of `images` and no others, with no text within an image."""
        positions = self.image_positions(ids)
        start = 0
        for image in images:
            of_image = positions[start : start + image.layout.tokens]
            if len(of_image) < image.layout.tokens or of_image[-1] - of_image[0] != len(of_image) - 1:
                return False
            start += len(of_image)
        return start == len(positions)

    def check_token_count(self, ids: Sequence[int], images: Sequence[LaidOutImage]) -> None:
        """Raise UserError if `ids` have another number of image tokens than the images."""
        count = len(self.image_positions(ids))
        expected = sum(image.layout.tokens for image in images)
        if count != expected:
            raise UserError(
                f"the row has {count} image tokens ({self.processor.tokens.token}), but its images have {expected}. "
                "Only images may write this token. Leave it out of the text"
            )

    def images_in_range(
        self, ids: Sequence[int], images: Sequence[LaidOutImage], kept: range, max_length: int
    ) -> Sequence[LaidOutImage] | None:
        """Return the images whose tokens are in a range of `ids`.

        Args:
            ids: Token ids of a document.
            images: Its images, in order.
            kept: The positions in the range.
            max_length: Maximum number of tokens of a document.

        Returns:
            The images; None if the range cuts an image.

        Raises:
            UserError: If a single image has `max_length` tokens or more.
        """
        for image in images:
            if image.layout.tokens >= max_length:
                raise UserError(
                    f"{image.image.name}: the image has {image.layout.tokens} tokens, but data.max_length is "
                    f"{max_length}. Raise it, or make images smaller with data.image_max_pixels"
                )
        positions = self.image_positions(ids)
        # Number of image tokens before each image, and of all. The range must begin and end at one of these.
        bounds = list(accumulate((image.layout.tokens for image in images), initial=0))
        num_before = bisect_left(positions, kept.start)
        num_through = bisect_left(positions, kept.stop)
        if num_before not in bounds or num_through not in bounds:
            return None
        return images[bounds.index(num_before) : bounds.index(num_through)]

    def pixels(self, image: ImageBytes) -> "Tensor":
        """Decode an image for the tower, float32 [patches, values]. Raises UserError if it is damaged."""
        return self.processor.pixels(image.decode(self.max_stored_pixels))

    def image_streams_of_rows(
        self, rows: "Sequence[Sequence[tuple[Tensor, Sequence[ImageRecord]]]]"
    ) -> "list[dict[str, Tensor]]":
        """Return the tensors for the images of rows. An image that several documents share is decoded once.

        Args:
            rows: For each row its documents, one after the other: token ids [s], and the images in order.

        Returns:
            For each row the streams of `ImageProcessor.streams`, with image features numbered through the row, and

            - `pixels`: Patches of all images, float32 [patches, values].
            - `grids`: Layout.grid of each image, int64 [images, 3].
            - `image_keys`: A number for each image, equal for equal images, int64 [images].

        Raises:
            UserError: If an image cannot be read or decoded.
        """
        import torch

        from dtrain.data.images.tensors import feature_index

        pixels_by_digest: dict[str, Tensor] = {}
        result = []
        for documents in rows:
            records: list[ImageRecord] = []
            for _, images in documents:
                records.extend(images)
            for record in records:
                if record.digest not in pixels_by_digest:
                    pixels_by_digest[record.digest] = self.pixels(record.image())
            streams = [self.streams(ids, [record.layout for record in images]) for ids, images in documents]
            row = {name: torch.cat([stream[name] for stream in streams]) for name in streams[0]}
            # Each document numbers its features from 0. The row's pixels are those of all of its documents.
            row["image_features"] = feature_index(row["image_features"] >= 0)
            pixels = [pixels_by_digest[record.digest] for record in records]
            row["pixels"] = torch.cat(pixels) if pixels else torch.empty(0, 0)
            grids = [record.layout.grid for record in records]
            row["grids"] = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
            row["image_keys"] = torch.tensor([record.key for record in records], dtype=torch.int64)
            result.append(row)
        return result

    def streams(self, ids: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return the streams of a document; see `ImageProcessor.streams`.

        A model may sample image tokens in its completion, which belong to no image. So only the first image tokens, as
        many as the layouts have, count as images. The others are text.

        Args:
            ids: Token ids of the document, [S].
            layouts: Layouts of its images, in order.
        """
        is_image = ids == self.token_id
        is_image &= is_image.cumsum(0) <= sum(layout.tokens for layout in layouts)
        return self.processor.streams(is_image, layouts)
