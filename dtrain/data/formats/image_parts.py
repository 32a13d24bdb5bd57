"""Images in rows: parts of messages, placeholders in texts, and the column `images`, in one shape.

    {"type": "image", "image": IMAGE}           a part of a message's content; also as `url` or `path`
    {"type": "image_url", "image_url": ...}     the same as OpenAI writes it: a URL, or {"url": URL}
    {"type": "image"}                           a part whose image is the next of the column `images`
    "<image>"                                   in a text: the same, in rows with that column and without such parts
    neither                                     the images of the column stand before the first user's message

IMAGE is what `images.files.read_image` reads. In the one shape every image is a part with `image`, and stands where
it is in the text. Torch is not imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import as_list, json_type

COLUMN = "images"
PLACEHOLDER = "<image>"
TYPES = ("image", "image_url")  # of parts
_KEYS = ("image", "url", "path", "image_url")  # of a part, where its image stands


def read_part(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an image part with `image`, its image as the row has it; None where the column `images` has it. Raises
    UserError that names `key`."""
    values = [part[name] for name in _KEYS if part.get(name) is not None]
    if len(values) > 1:
        raise UserError(f"{key} names its image twice; keep one of {', '.join(_KEYS)}")
    value = values[0] if values else None
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    return {"type": "image", "image": value}


def images_in(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the column `images` of a row; None where it has none. One image may stand there without a list; CSV has
    lists as JSON. Raises UserError."""
    value = row.get(COLUMN)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = as_list(value, COLUMN)
    if value is None or value == "":
        return None
    return list(value) if isinstance(value, list | tuple) else [value]


def with_images(row: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose image parts have their images, those of the row's column `images` among them. Raises
    UserError where the column has more images than the messages have places for, or fewer."""
    images = images_in(row)
    parts = image_parts(messages)
    bare = [part for part in parts if part["image"] is None]
    if images is None:
        if bare:
            raise UserError(
                f"image parts of the messages without an image: {len(bare)}, and the row has no column {COLUMN}: write "
                "the image into the part, or give the row that column"
            )
        return messages
    if len(parts) > len(bare):
        raise UserError(f"the messages have images of their own, and the row has {COLUMN}; keep one of them")
    if not bare:
        messages = [_split_at_placeholders(message) for message in messages]
    count = len(image_parts(messages))
    if not count and images:
        return _before_the_first_question(messages, images)
    if count != len(images):
        written = "image parts" if bare else PLACEHOLDER
        raise UserError(
            f"the messages have {count} places for images ({written}), and {COLUMN} has {len(images)}; "
            "give each place one image"
        )
    left = iter(images)
    return [_with_parts(message, lambda part: {**part, "image": next(left)}) for message in messages]


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` whose image parts are bare, `{"type": "image"}`, as chat templates read them."""
    return [_with_parts(message, lambda part: {"type": "image"}) for message in messages]


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the image parts of messages, in order."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    return [part for content in contents for part in content if part.get("type") == "image"]


def has_images(row: Mapping[str, Any]) -> bool:
    """Return whether a row has images, in its column or in a part of any message."""

    def has_part(value: Any) -> bool:
        if isinstance(value, Mapping):
            return value.get("type") in TYPES or any(map(has_part, value.values()))
        return isinstance(value, list) and any(map(has_part, value))

    return bool(row.get(COLUMN)) or has_part(row)


def text_of(content: Any) -> str:
    """Return the text of a message's content, its images left out."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content


def _with_parts(message: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return a message with what `change` makes of its image parts, in order."""
    if not isinstance(content := message.get("content"), list):
        return {**message}
    return {**message, "content": [change(part) if part.get("type") == "image" else part for part in content]}


def _split_at_placeholders(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, whose content is a text, with a part for each placeholder."""
    texts = message.get("content", "").split(PLACEHOLDER)
    if len(texts) == 1:
        return message
    pairs = [({"type": "image", "image": None}, {"type": "text", "text": text}) for text in texts]
    parts = [part for pair in pairs for part in pair][1:]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _before_the_first_question(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Return messages with `images` at the beginning of the first user's message, as TRL reads such rows."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise UserError(f"the row has {COLUMN}, and no user's message that they belong to; write {PLACEHOLDER} there")
    message = messages[first]
    parts = [{"type": "image", "image": image} for image in images]
    parts.append({"type": "text", "text": message["content"]})
    return [*messages[:first], {**message, "content": parts}, *messages[first + 1 :]]


def read_content(content: Any, key: str, thinks: str = "") -> str | list[dict[str, Any]]:
    """Return a message's content: its text, or where it has images its parts. thinks: more on parts of thoughts, where
    these are refused. Raises UserError that names `key`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{key} must be a string, not {json_type(content)}")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else json_type(part)
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in TYPES and isinstance(part, dict):
            parts.append(read_part(part, f"{key}[{index}]"))
        else:
            more = thinks if kind == "thinking" else ""
            raise UserError(f"{key}[{index}] is of type {kind!r}; dtrain trains on texts and images{more}")
    if all(part["type"] == "text" for part in parts):
        return text_of(parts)
    return parts
