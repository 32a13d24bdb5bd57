"""Chats to prompts of an engine: token ids, and images where messages have parts with them.

Nothing is read from a path or a URL here: a part's image is a data URI, or `{"bytes", "path"}` as `image_part` makes
it. Torch is imported where pixels are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.model_directory import has_vision
from dtrain.data.formats.image_parts import image_parts
from dtrain.data.formats.prompts import Prompt, PromptEncoder
from dtrain.data.images.families import read_processor
from dtrain.data.images.files import read_image
from dtrain.data.images.reader import ImageReader, LaidOutImage

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.models.common.images import Images

NO_IMAGES = "this model takes no images"


class ImageError(UserError):
    """Error of a chat's image, by its number among the chat's, from 0."""

    def __init__(self, number: int, message: str):
        self.number = number
        super().__init__(message)


@dataclass(frozen=True)
class ChatPrompt:
    """Prompt of a chat: its token ids, and its images in order, which are not decoded yet."""

    ids: list[int]
    images: Sequence[LaidOutImage] = ()


class ChatEncoder:
    """Encoder of chats to prompts by `encoder`, which has the reader of the model's images; problem: why it has none,
    else. images: another reader of the same model's."""

    def __init__(self, encoder: PromptEncoder, problem: str = NO_IMAGES, images: ImageReader | None = None):
        self.encoder, self._problem, self._images = encoder, problem, encoder.images if images is None else images
        self._bounded: ChatEncoder | None = None

    def encode(self, prompt: Prompt) -> ChatPrompt:
        """Return the prompt of a chat, in which parts are `{"type": "image", "image"}`. Raises UserError, ImageError
        for an image that cannot be used."""
        values = [part["image"] for part in image_parts(prompt.content)]  # type: ignore[arg-type]
        images = self.lay_out_all(values)
        return ChatPrompt(self.encoder.encode(prompt, images), images)

    def lay_out_all(self, values: Sequence[Any]) -> list[LaidOutImage]:
        """Return images by their headers. Raises ImageError."""
        images = []
        for number, value in enumerate(values):
            try:
                images.append(self.lay_out(value))
            except UserError as error:
                raise ImageError(number, str(error)) from error
        return images

    def lay_out(self, value: Any) -> LaidOutImage:
        """Return an image by its header. Raises UserError, also where the model takes none."""
        return self.reader.lay_out(value, None)

    @property
    def reader(self) -> ImageReader:
        """The reader of images. Raises UserError where there is none."""
        if self._images is None:
            raise UserError(self._problem)
        return self._images

    def within(self, max_pixels: int | None) -> "ChatEncoder":
        """Return the encoder with this bound on the pixels of images; None: the processor's own. Only for the images of
        token ids. Raises UserError where the model takes none."""
        if max_pixels is None:
            return self
        bounded = self._bounded
        if bounded is None or bounded.reader.max_pixels != max_pixels:
            bounded = ChatEncoder(self.encoder, self._problem, replace(self.reader, max_pixels=max_pixels))
            self._bounded = bounded  # a server parses requests on many threads
        return bounded

    def images_of(self, prompt: ChatPrompt, pixels: "Tensor | None" = None) -> "Images | None":
        """Return the images as a request has them, decoded; None of a prompt without. pixels: of the same images, where
        they are decoded already. Raises ImageError for one that cannot be decoded."""
        if not prompt.images:
            return None
        import torch

        from dtrain.inference.images import images_of

        layouts = [image.layout for image in prompt.images]
        if pixels is None:
            pixels = torch.cat([self._pixels(number, image) for number, image in enumerate(prompt.images)])
        streams = self.reader.streams(torch.tensor(prompt.ids), layouts)
        return images_of(streams, pixels, [layout.grid for layout in layouts])

    def _pixels(self, number: int, image: LaidOutImage) -> "Tensor":
        try:
            return self.reader.pixels(image.image)
        except UserError as error:
            raise ImageError(number, str(error)) from error


def image_part(path: Path) -> dict[str, Any]:
    """Return the part of a message that has the image in a file; only its header is looked at. Raises UserError."""
    image = read_image(path, Path())
    image.header()
    return {"type": "image", "image": {"bytes": image.data, "path": str(path)}}


def vision_problem(files: Path) -> str | None:
    """Return why images cannot be given to the model of these files, weights apart; None where they can."""
    from dtrain.models.read_config import read_config

    if not has_vision(files):
        return f"the model in {files} takes no images (its config.json has no vision_config)"
    try:
        read_config(files, vision=True)
        read_processor(files)
    except UserError as error:
        return str(error)
    return None
