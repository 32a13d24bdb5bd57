"""Conversion of chats to prompts of an engine: token ids, and images if messages have parts with images.

`ChatEncoder` encodes messages to a `ChatPrompt`. `ImagePrompt` is a prompt with images for a server, which receives the
bytes of the image files. The image of a message part is a data URI, or `{"bytes", "path"}` as `image_part` returns it.
Files or URLs that a message names are never read. torch is imported only for decoding pixels, because servers of text
start faster without it.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
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
from dtrain.data.text.call_form import with_text_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.data.images.files import ImageRecord
    from dtrain.models.common.micro_batch import Images


# The type of an image file by its first bytes.
_MIME_TYPES = {b"\xff\xd8": "jpeg", b"GIF": "gif", b"RIFF": "webp", b"BM": "bmp", b"II": "tiff", b"MM": "tiff"}

NO_IMAGES = "this model takes no images"


class ImageError(UserError):
    """An image of a chat cannot be used.

    Attributes:
        number: Index of the image in the chat.
    """

    def __init__(self, number: int, message: str):
        self.number = number
        super().__init__(message)


@dataclass(frozen=True)
class ChatPrompt:
    """Prompt of a chat.

    Attributes:
        ids: Token ids.
        images: Images in order, not decoded yet.
    """

    ids: list[int]
    images: Sequence[LaidOutImage] = ()


class ChatEncoder:
    """Encoder of chats to prompts.

    Args:
        encoder: Encoder of prompts, with the reader of images if the model uses images.
        problem: Message of the error for a chat with images, if there is no reader of images.
        images: Another reader of images in place of the encoder's.

    Attributes:
        encoder: As in the arguments.
    """

    def __init__(self, encoder: PromptEncoder, problem: str = NO_IMAGES, images: ImageReader | None = None):
        self.encoder = encoder
        self._problem = problem
        self._images = encoder.images if images is None else images
        self._bounded: ChatEncoder | None = None

    def encode(self, prompt: Prompt) -> ChatPrompt:
        """Encode a chat.

        Args:
            prompt: The chat. Parts with images are `{"type": "image", "image": ...}`.

        Raises:
            UserError: If the chat cannot be encoded.
            ImageError: If an image cannot be used.
        """
        values = [part["image"] for part in image_parts(prompt.content)]  # type: ignore[arg-type]
        images = self.lay_out_all(values)
        return ChatPrompt(self.encoder.encode(prompt, images), images)

    def lay_out_all(self, values: Sequence[Any]) -> list[LaidOutImage]:
        """Return the layouts of images. Only the headers of the images are read. Raises ImageError."""
        images = []
        for number, value in enumerate(values):
            try:
                images.append(self.lay_out(value))
            except UserError as error:
                raise ImageError(number, str(error)) from error
        return images

    def lay_out(self, value: Any) -> LaidOutImage:
        """Return the layout of an image. Raises UserError if the image or the model cannot be used."""
        return self.reader.lay_out(value, None)

    @property
    def reader(self) -> ImageReader:
        """The reader of images. Raises UserError if there is none."""
        if self._images is None:
            raise UserError(self._problem)
        return self._images

    def within(self, max_pixels: int | None) -> "ChatEncoder":
        """Return an encoder with another limit on the pixels of an image.

        A prompt of token ids was made with a certain limit, and its images must be laid out with the same one.

        Args:
            max_pixels: The limit. None: the limit of the model's image processor.

        Raises:
            UserError: If the model uses no images.
        """
        if max_pixels is None:
            return self
        bounded = self._bounded
        if bounded is None or bounded.reader.max_pixels != max_pixels:
            bounded = ChatEncoder(self.encoder, self._problem, replace(self.reader, max_pixels=max_pixels))
            # The local variable is returned, because another thread of a server may replace the attribute meanwhile.
            self._bounded = bounded
        return bounded

    def images_of(self, prompt: ChatPrompt, pixels: "Tensor | None" = None) -> "Images | None":
        """Decode the images of a prompt for `Request.images`.

        Args:
            prompt: The prompt.
            pixels: Pixels of the same images, if they are already decoded.

        Returns:
            The images as a batch of one row, or None if the prompt has no images.

        Raises:
            ImageError: If an image cannot be decoded.
        """
        if not prompt.images:
            return None
        import torch

        from dtrain.inference.images import build_images

        layouts = [image.layout for image in prompt.images]
        if pixels is None:
            pixels = torch.cat([self._pixels(number, image) for number, image in enumerate(prompt.images)])
        streams = self.reader.streams(torch.tensor(prompt.ids), layouts)
        return build_images(streams, pixels, [layout.grid for layout in layouts])

    def _pixels(self, number: int, image: LaidOutImage) -> "Tensor":
        try:
            return self.reader.pixels(image.image)
        except UserError as error:
            raise ImageError(number, str(error)) from error


def image_part(path: Path) -> dict[str, Any]:
    """Return a part of a message with the image in a file. Raises UserError if the file is no image.

    Only the image's header is decoded.
    """
    image = read_image(path, Path())
    image.header()
    return {"type": "image", "image": {"bytes": image.data, "path": str(path)}}


def vision_problem(files: Path) -> str | None:
    """Return the reason why the model in a directory cannot use images. None if it can.

    Only the model's config and image processor are checked, not its weights.

    Args:
        files: Directory of the model's files.
    """
    from dtrain.models.read_config import read_config

    if not has_vision(files):
        return f"the model in {files} takes no images (its config.json has no vision_config)"
    try:
        read_config(files, vision=True)
        read_processor(files)
    except UserError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class ImagePrompt:
    """Prompt with images, for an engine whose server decodes them.

    Attributes:
        records: The images, in order.
        messages: The conversation, with empty parts in the places of images.
        tools: Tools of the conversation.
        token_id: Id of image tokens.
        short_ids: Token ids with one image token per image, which servers expand. None if the model's processor writes
            text around an image that is not a single token.
        max_pixels: `data.image_max_pixels`.
    """

    records: "Sequence[ImageRecord]"
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    token_id: int
    short_ids: Sequence[int] | None
    max_pixels: int | None = None

    @classmethod
    def of(
        cls,
        reader: "ImageReader",
        ids: Sequence[int],
        records: "Sequence[ImageRecord]",
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> "ImagePrompt":
        """Return the prompt of these token ids, images and messages."""
        short_ids = _short_ids(reader, ids, records)
        return cls(records, messages, tools, reader.token_id, short_ids, reader.max_pixels)

    def uris(self) -> list[str]:
        """Return the images as data URIs. Raises UserError if a file is missing or has changed."""
        return [_data_uri(record.image().data) for record in self.records]

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages in the format of OpenAI's API, with the images.

        Raises:
            UserError: If the conversation was cut to its maximum length and lost images, or a file is missing or has
                changed.
        """
        uris = iter(self.uris())
        count = 0
        for message in self.messages:
            count += sum(map(_is_image, _parts(message)))
        if count != len(self.records):
            raise UserError(
                f"the prompt lost {count - len(self.records)} of its {count} images when it was cut to its room, and "
                "this server reads whole conversations: raise data.max_length, or set data.too_long=drop"
            )
        messages = []
        for message in self.messages:
            sent = with_text_arguments(message)
            if _parts(message):
                sent["content"] = [_as_image_url(part, uris) for part in _parts(message)]
            messages.append(sent)
        return messages

    def difference(self, expected: Sequence[int], read: Sequence[int]) -> str | None:
        """Describe how the ids that a server has read differ from the prompt's. None if they are equal.

        Args:
            expected: Ids of the prompt.
            read: Ids that the server has read.
        """
        expected, read = list(expected), list(read)
        if read == expected:
            return None
        index = 0
        while index < min(len(expected), len(read)) and expected[index] == read[index]:
            index += 1
        expected_token = expected[index] if index < len(expected) else "no token"
        read_token = read[index] if index < len(read) else "no token"
        text = f"token {index} of the prompt is {read_token} there and {expected_token} here"
        expected_images, read_images = expected.count(self.token_id), read.count(self.token_id)
        if read_images != expected_images:
            text += f", and its images are {read_images} tokens there and {expected_images} here"
        return text


def _short_ids(reader: "ImageReader", ids: Sequence[int], records: "Sequence[ImageRecord]") -> list[int] | None:
    """Return `ImagePrompt.short_ids`.

    For example, if the image token is 9, and the tokens before and after an image are 7 and 8, the ids
    1 7 9 9 9 8 2 become 1 9 2.
    """
    tokens, vocabulary = reader.processor.tokens, reader.tokenizer.vocabulary
    is_token = [text == "" or text in vocabulary for text in (tokens.before, tokens.after)]
    if tokens.placeholder != tokens.token or not all(is_token):
        return None
    places = reader.image_positions(ids)  # of image tokens
    dropped = set[int]()
    start = 0
    for record in records:
        image_places = places[start : start + record.layout.tokens]
        start += record.layout.tokens
        dropped.update(image_places[1:])
        if tokens.before:
            dropped.add(image_places[0] - 1)
        if tokens.after:
            dropped.add(image_places[-1] + 1)
    return [token for place, token in enumerate(ids) if place not in dropped]


def _data_uri(data: bytes) -> str:
    """Return the bytes of an image file as a data URI. Unknown file types are declared as PNG.

    Example:
        >>> _data_uri(b"GIF89a")
        'data:image/gif;base64,R0lGODlh'
    """
    kind = "png"
    for first_bytes, type_name in _MIME_TYPES.items():
        if data.startswith(first_bytes):
            kind = type_name
            break
    if data[4:11] == b"ftypavi":
        kind = "avif"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a message's content, or () if the content is text."""
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _as_image_url(part: Mapping[str, Any], uris: Iterator[str]) -> dict[str, Any]:
    """Return a part in OpenAI's format. A part with an image takes the next of `uris`."""
    if _is_image(part):
        return {"type": "image_url", "image_url": {"url": next(uris)}}
    return {**part}
