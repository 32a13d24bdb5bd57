"""Images in rows, read into one shape: parts of messages.

    {"type": "image", "image": IMAGE}           a part of a message's content; also with `url` or `path`
    {"type": "image_url", "image_url": ...}     OpenAI's form: a URL, or {"url": URL}
    {"type": "image"}                           a part whose image is the next one of the column `images`
    "<image>"                                   in a text: the same, if the row has that column and no image parts
    neither                                     the images of the column are put before the first user message

IMAGE is a value that `images.files.read_image` reads. In the common shape every image is a part with `image`, at the
position where the image is in the text. For example, the row

    {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": ["cat.png"]}

becomes

    [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]}]

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import as_list, json_type
from dtrain.base.ranges import plural

COLUMN = "images"
PLACEHOLDER = "<image>"
TYPES = ("image", "image_url")  # of image parts
_IMAGE_KEYS = ("image", "url", "path", "image_url")  # of an image part: the key of its image


def read_part(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Read an image part.

    Args:
        part: The part as the row writes it.
        key: Position of the part in the row, for messages.

    Returns:
        The part with `image`, which is None if the column `images` has the image.

    Raises:
        UserError: If the part names two images.

    Example:
        >>> read_part({"type": "image_url", "image_url": {"url": "cat.png"}}, "messages[0].content[0]")
        {'type': 'image', 'image': 'cat.png'}
    """
    values = [part[name] for name in _IMAGE_KEYS if part.get(name) is not None]
    if len(values) > 1:
        raise UserError(f"{key} names its image twice. Keep one of {', '.join(_IMAGE_KEYS)}")
    value = values[0] if values else None
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    return {"type": "image", "image": value}


def images_in(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the column `images` of a row; None if it has none. Raises UserError if the column cannot be read.

    A single image may be written without a list. CSV files write lists as JSON.
    """
    value = row.get(COLUMN)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = as_list(value, COLUMN)
    if value is None or value == "":
        return None
    return list(value) if isinstance(value, list | tuple) else [value]


def with_images(row: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which every image part has its image.

    Args:
        row: The row, whose column `images` may have some of the images.
        messages: The row's messages, with parts of `read_part`.

    Raises:
        UserError: If the number of images in the column is not the number of parts and placeholders for them.
    """
    images = images_in(row)
    parts = image_parts(messages)
    # A row has its images either in the parts or in the column. Parts without an image refer to the column.
    parts_without_image = [part for part in parts if part["image"] is None]
    if images is None:
        num_without = len(parts_without_image)
        if num_without:
            raise UserError(
                f"the messages have {num_without} {plural(num_without, 'image part')} without an image, but the row "
                f"has no column {COLUMN}. Write the image into the part, or give the row that column"
            )
        return messages
    if len(parts) > len(parts_without_image):
        raise UserError(f"the messages have images of their own, and the row has {COLUMN}. Keep one of them")
    if not parts_without_image:
        messages = [_split_at_placeholders(message) for message in messages]
    num_parts = len(image_parts(messages))  # with those of placeholders
    if not num_parts and images:
        return _put_before_first_user_message(messages, images)
    if num_parts != len(images):
        place = "image parts" if parts_without_image else PLACEHOLDER
        raise UserError(
            f"the messages have {num_parts} places for images ({place}), but {COLUMN} has {len(images)}. "
            "Give each place one image"
        )
    filled = []
    num_used = 0
    for message in messages:
        num_in_message = len(image_parts([message]))
        images_of_message = images[num_used : num_used + num_in_message]
        new_parts = [{"type": "image", "image": image} for image in images_of_message]
        filled.append(_replace_image_parts(message, new_parts))
        num_used += num_in_message
    return filled


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose image parts are `{"type": "image"}` without an image, as chat templates read them."""
    stripped = []
    for message in messages:
        num_images = len(image_parts([message]))
        new_parts = [{"type": "image"} for _ in range(num_images)]
        stripped.append(_replace_image_parts(message, new_parts))
    return stripped


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the image parts of messages, in order."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts.extend(part for part in content if part.get("type") == "image")
    return parts


def has_images(row: Mapping[str, Any]) -> bool:
    """Return True if a row has images, in its column or in a part of any message.

    Example:
        >>> has_images({"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]})
        True
    """
    return bool(row.get(COLUMN)) or _has_image_part(row)


def _has_image_part(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("type") in TYPES or any(_has_image_part(item) for item in value.values())
    return isinstance(value, list) and any(_has_image_part(item) for item in value)


def text_of(content: Any) -> str:
    """Return the text of a message's content, without its images.

    Example:
        >>> text_of([{"type": "image"}, {"type": "text", "text": "What is it?"}])
        'What is it?'
    """
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content


def _replace_image_parts(message: Mapping[str, Any], new_parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a message whose image parts are `new_parts`, in order."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message}
    parts = []
    num_replaced = 0
    for part in content:
        if part.get("type") == "image":
            part = new_parts[num_replaced]
            num_replaced += 1
        parts.append(part)
    return {**message, "content": parts}


def _split_at_placeholders(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a text with an image part for each placeholder."""
    texts = message.get("content", "").split(PLACEHOLDER)
    if len(texts) == 1:
        return message
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        if number > 0:  # a placeholder is between two texts
            parts.append({"type": "image", "image": None})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _put_before_first_user_message(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Return messages with the images at the beginning of the first user message, as TRL reads such rows."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            parts = [{"type": "image", "image": image} for image in images]
            parts.append({"type": "text", "text": message["content"]})
            return [*messages[:index], {**message, "content": parts}, *messages[index + 1 :]]
    raise UserError(f"the row has {COLUMN}, but no user message that they belong to. Write {PLACEHOLDER} there")


def read_content(content: Any, key: str, thoughts_hint: str = "") -> str | list[dict[str, Any]]:
    """Read the content of a message.

    Args:
        content: A string, or a list of parts.
        key: Position of the content in the row, for messages.
        thoughts_hint: Added to the error for a part of type `thinking`.

    Returns:
        The text, or a list of parts if there are images.

    Raises:
        UserError: If a part is neither text nor image.
    """
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
            hint = thoughts_hint if kind == "thinking" else ""
            raise UserError(f"{key}[{index}] is of type {kind!r}; dtrain trains on texts and images{hint}")
    if all(part["type"] == "text" for part in parts):
        return text_of(parts)
    return parts
