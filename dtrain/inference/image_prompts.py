"""`ImagePrompt`: a prompt with images as a server is sent it, with the bytes of the images' files. No torch."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.data.text.call_form import with_text_arguments

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader

_KINDS = {b"\xff\xd8": "jpeg", b"GIF": "gif", b"RIFF": "webp", b"BM": "bmp", b"II": "tiff", b"MM": "tiff"}


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
                sent["content"] = [_sent(part, uris) for part in _parts(message)]
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
    places, dropped = reader.places(ids), set[int]()
    counts = [record.layout.tokens for record in records]
    for start, count in zip(accumulate(counts, initial=0), counts, strict=False):
        own = places[start : start + count]
        dropped |= {*own[1:], *([own[0] - 1] if before else ()), *([own[-1] + 1] if after else ())}
    return [token for place, token in enumerate(ids) if place not in dropped]


def _data_uri(data: bytes) -> str:
    kind = next((kind for mark, kind in _KINDS.items() if data.startswith(mark)), "png")
    kind = "avif" if data[4:11] == b"ftypavi" else kind
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _sent(part: Mapping[str, Any], uris: Iterator[str]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": next(uris)}} if _is_image(part) else {**part}
