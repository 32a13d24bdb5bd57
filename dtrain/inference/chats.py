"""Chats as prompts of an engine: token ids, and images if messages have parts with them.

`ChatEncoder` makes a `ChatPrompt` of messages. `ImagePrompt` is a prompt with images as it is sent to a server, with
the bytes of the images' files. Nothing is read from a path or a URL here: a part's image is a data URI, or `{"bytes",
"path"}` as `image_part` makes it. Torch is imported where pixels are asked for.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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


_MIME_TYPES = {b"\xff\xd8": "jpeg", b"GIF": "gif", b"RIFF": "webp", b"BM": "bmp", b"II": "tiff", b"MM": "tiff"}

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


@dataclass(frozen=True)
class ImagePrompt:
    """Prompt with images, for an engine whose server decodes them.

    records     its images, in order
    messages    its conversation, with bare parts in the place of images; tools: what that lists
    token_id    the id of image tokens
    short_ids   its token ids with one image token for each image, as servers expand them; None where the model's
                processor writes more around an image than tokens of its own
    max_pixels  `data.image_max_pixels`
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
        """Return the images as data URIs. Raises UserError for a file that is gone or another one."""
        return [_data_uri(record.image().data) for record in self.records]

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages as OpenAI's API has them, with the images. Raises UserError, also for a conversation that
        was cut and lost images."""
        uris = iter(self.uris())
        count = sum(map(_is_image, (part for message in self.messages for part in _parts(message))))
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
        """Return how the ids that a server read differ from the prompt's, `expected`; None where they do not."""
        if list(read) == list(expected):
            return None
        pairs = enumerate(zip(expected, read, strict=False))
        place = next((place for place, (own, other) in pairs if own != other), min(len(expected), len(read)))
        own, other = (ids[place] if place < len(ids) else "no token" for ids in (expected, read))
        counts = [sum(token == self.token_id for token in ids) for ids in (expected, read)]
        images = f", and its images are {counts[1]} tokens there and {counts[0]} here" if counts[0] != counts[1] else ""
        return f"token {place} of the prompt is {other} there and {own} here{images}"


def _short_ids(reader: "ImageReader", ids: Sequence[int], records: "Sequence[ImageRecord]") -> list[int] | None:
    tokens, vocabulary = reader.processor.tokens, reader.tokenizer.vocabulary
    around = tokens.before, tokens.after
    if tokens.placeholder != tokens.token or not all(text == "" or text in vocabulary for text in around):
        return None
    before, after = (len(text) > 0 for text in around)
    places, dropped = reader.image_positions(ids), set[int]()
    counts = [record.layout.tokens for record in records]
    for start, count in zip(accumulate(counts, initial=0), counts, strict=False):
        own = places[start : start + count]
        dropped |= {*own[1:], *([own[0] - 1] if before else ()), *([own[-1] + 1] if after else ())}
    return [token for place, token in enumerate(ids) if place not in dropped]


def _data_uri(data: bytes) -> str:
    kind = next((kind for mark, kind in _MIME_TYPES.items() if data.startswith(mark)), "png")
    kind = "avif" if data[4:11] == b"ftypavi" else kind
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _as_image_url(part: Mapping[str, Any], uris: Iterator[str]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": next(uris)}} if _is_image(part) else {**part}
