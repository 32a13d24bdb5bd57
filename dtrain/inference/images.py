"""Images of prompts: checks whether a model can use them, and batches of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtrain.base.batch import IMAGE_STREAMS, Grid
from dtrain.base.errors import UserError
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.micro_batch import Images

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader


def check_images(images: Images, length: int, config: ModelConfig, name: str) -> None:
    """Raise UserError if a model cannot use the images of a prompt.

    Args:
        images: The images.
        length: Tokens of the prompt.
        config: The model's config.
        name: Name of the request in messages, such as "request 3".
    """
    if config.vision is None:
        raise UserError(f"{name} has images, and this model has no vision tower, or was loaded without it")
    try:
        config.vision.frames(images.pixels.shape, images.grids)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    num_features = sum(map(config.vision.num_tokens, images.grids))
    used = images.feature_index[images.feature_index >= 0].unique()  # an image may appear in several places
    if not torch.equal(used, torch.arange(num_features, device=used.device)):
        raise UserError(f"{name} has tokens for {len(used)} features of images, and its images have {num_features}")
    has_axes = any(rope.sections for rope in config.ropes.values())
    has_ends = config.bidirectional_types or images.ends is not None
    _check_shape("index", images.feature_index, (1, length), name)
    _check_shape("rotary_ids", images.rotary_ids, (1, length, 3) if has_axes else None, name)
    _check_shape("ends", images.ends, (1, length) if has_ends else None, name)


def _check_shape(stream: str, tensor: Tensor | None, shape: tuple[int, ...] | None, name: str) -> None:
    """Raise UserError if a stream does not have the expected shape, or exists although `shape` is None."""
    if (None if tensor is None else tuple(tensor.shape)) != shape:
        raise UserError(f"{name}: {stream} of its images must be of shape {shape}, as the model reads them")


def prompt_images(reader: "ImageReader", ids: Sequence[int], records: Sequence["ImageRecord"]) -> Images | None:
    """Decode the images of a prompt for `Request.images`.

    Args:
        reader: Reader of the model's images.
        ids: Token ids of the prompt.
        records: The images, in order.

    Returns:
        The images as a batch of one row, or None if `records` is empty.

    Raises:
        UserError: If an image cannot be read or decoded.
    """
    if not records:
        return None
    (row,) = reader.image_streams_of_rows([[(torch.tensor(ids), records)]])
    return build_images(row, row["pixels"], [record.layout.grid for record in records])


def build_images(streams: Mapping[str, Tensor], pixels: Tensor, grids: Sequence[Grid]) -> Images:
    """Return the images of one prompt as a batch of one row.

    Args:
        streams: Streams of the prompt's tokens, [S, ..], as in `ImageReader.streams`.
        pixels: Pixels of all images.
        grids: Grid of patches of each image.
    """
    rows = {name: streams[name][None] for name in IMAGE_STREAMS if name in streams}
    return Images(pixels, grids, rows["image_features"], rows.get("rotary_ids"), rows.get("image_ends"))


def rotary_shift(images: Images) -> int:
    """Return the rotary position of the token after a prompt, minus the prompt's length.

    In models with three rotary axes an image advances the position by the larger side of its grid, not by its number of
    tokens. For example, a prompt of 20 tokens that ends at position 11 has a shift of 12 - 20 = -8.
    """
    if images.rotary_ids is None:
        return 0
    return int(images.rotary_ids.max()) + 1 - images.rotary_ids.shape[1]


def batch_images(rows: Sequence[Images], length: int, config: ModelConfig, device: torch.device) -> Images:
    """Return the images of several prompts as one batch.

    Args:
        rows: Images of each prompt, with one row each.
        length: Length of the batch's rows, to which the streams are padded on the right.
        config: The model's config.
        device: Device of the batch.
    """
    assert config.vision is not None
    rows = [row.padded(length - row.feature_index.shape[1]) for row in rows]
    # The batch numbers the features of all images consecutively, so each row's indices are shifted by the number of
    # features of the rows before.
    indices: list[Tensor] = []
    grids: list[Grid] = []
    start = 0
    for row in rows:
        indices.append(torch.where(row.feature_index < 0, -1, row.feature_index + start))
        grids += row.grids
        start += sum(map(config.vision.num_tokens, row.grids))

    def concatenate(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).to(device, non_blocking=True)

    rotary_ids = [row.rotary_ids for row in rows if row.rotary_ids is not None]
    ends = [row.ends for row in rows if row.ends is not None]
    return Images(
        concatenate([row.pixels for row in rows]),
        grids,
        concatenate(indices),
        concatenate(rotary_ids) if rotary_ids else None,
        concatenate(ends) if ends else None,
    )


def empty_images(tokens: Tensor, config: ModelConfig) -> Images:
    """Return the `Images` of a batch without images.

    If other ranks run the vision tower in this forward, this rank must run it too, because its weights are gathered by
    collectives.

    Args:
        tokens: Token ids of the batch, [B, S].
        config: The model's config.
    """
    assert config.vision is not None
    return Images(torch.empty(0, config.vision.values_per_patch, device=tokens.device), [], torch.full_like(tokens, -1))
