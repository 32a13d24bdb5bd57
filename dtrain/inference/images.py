"""Images of prompts: whether a model can take them, and those of several prompts as one batch."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
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
    """Raise UserError for images that the model of `config` cannot take in a prompt of `length` tokens; `name` says
    which request it is."""
    if config.vision is None:
        raise UserError(f"{name} has images, and this model has no vision tower, or was loaded without it")
    try:
        config.vision.frames(images.pixels.shape, images.grids)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    tokens = sum(map(config.vision.num_tokens, images.grids))
    index = images.feature_index[images.feature_index >= 0].unique()  # an image may stand in several places
    if not torch.equal(index, torch.arange(tokens, device=index.device)):
        raise UserError(f"{name} has tokens for {len(index)} features of images, and its images have {tokens}")
    has_axes = any(rope.sections for rope in config.ropes.values())
    for stream, tensor, shape in (
        ("index", images.feature_index, (1, length)),
        ("rotary_ids", images.rotary_ids, (1, length, 3) if has_axes else None),
        ("ends", images.ends, (1, length) if config.bidirectional_types or images.ends is not None else None),
    ):
        if (None if tensor is None else tuple(tensor.shape)) != shape:
            raise UserError(f"{name}: {stream} of its images must be of shape {shape}, as the model reads them")


def prompt_images(reader: "ImageReader", ids: Sequence[int], records: Sequence["ImageRecord"]) -> Images | None:
    """Return the images of a prompt as a request has them, decoded; None without. Raises UserError for an image that
    cannot be read or decoded."""
    if not records:
        return None
    (row,) = reader.image_streams_of_rows([[(torch.tensor(ids), records)]])
    return build_images(row, row["pixels"], [record.layout.grid for record in records])


def build_images(streams: Mapping[str, Tensor], pixels: Tensor, grids: Sequence[Grid]) -> Images:
    """Return the images of one prompt as a batch of one row. streams: [S, ..] of its tokens, as `ImageReader.streams`
    gives them."""
    rows = {name: streams[name][None] for name in IMAGE_STREAMS if name in streams}
    return Images(pixels, grids, rows["image_features"], rows.get("rotary_ids"), rows.get("image_ends"))


def rotary_shift(images: Images) -> int:
    """Return the distance from the length of a prompt to the rotary position of the token that follows it."""
    return 0 if images.rotary_ids is None else int(images.rotary_ids.max()) + 1 - images.rotary_ids.shape[1]


def batch_images(rows: Sequence[Images], length: int, config: ModelConfig, device: torch.device) -> Images:
    """Return the images of prompts, of one row each, as those of a batch of rows of `length` on a device, padded on the
    right."""
    assert config.vision is not None
    rows = [row.padded(length - row.feature_index.shape[1]) for row in rows]
    counts = [sum(map(config.vision.num_tokens, row.grids)) for row in rows]
    starts = accumulate(counts, initial=0)
    index = [
        torch.where(row.feature_index < 0, -1, row.feature_index + start)
        for row, start in zip(rows, starts, strict=False)
    ]

    def together(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(device, non_blocking=True)

    rotary_ids = [row.rotary_ids for row in rows if row.rotary_ids is not None]
    ends = [row.ends for row in rows if row.ends is not None]
    return Images(
        together([row.pixels for row in rows]),
        [grid for row in rows for grid in row.grids],
        together(index),
        together(rotary_ids) if rotary_ids else None,
        together(ends) if ends else None,
    )


def empty_images(tokens: Tensor, config: ModelConfig) -> Images:
    """Return the images of tokens [B, S] that are text, for a forward that runs the tower because other ranks do."""
    assert config.vision is not None
    return Images(torch.empty(0, config.vision.values_per_patch, device=tokens.device), [], torch.full_like(tokens, -1))
