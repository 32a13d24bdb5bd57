"""Images of prompts: whether a model can take them, and those of several prompts as one batch."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.images import Images


def check_images(images: Images, length: int, config: ModelConfig, name: str) -> None:
    """Raise UserError for images that the model of `config` cannot take in a prompt of `length` tokens; `name` says
    which request it is."""
    if config.vision is None:
        raise UserError(f"{name} has images, and this model has no vision tower, or was loaded without it")
    try:
        config.vision.frames(images.pixels.shape, images.grids)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    tokens = sum(map(config.vision.tokens, images.grids))
    index = images.index[images.index >= 0]
    if not torch.equal(index, torch.arange(tokens, device=index.device)):
        raise UserError(f"{name} has {len(index)} tokens of images in order, and its images become {tokens}")
    has_axes = any(rope.sections for rope in config.ropes.values())
    for stream, tensor, shape in (
        ("index", images.index, (1, length)),
        ("rotary_ids", images.rotary_ids, (1, length, 3) if has_axes else None),
        ("ends", images.ends, (1, length) if config.bidirectional or images.ends is not None else None),
    ):
        if (None if tensor is None else tuple(tensor.shape)) != shape:
            raise UserError(f"{name}: {stream} of its images must be of shape {shape}, as the model reads them")


def joined(rows: Sequence[Images], length: int, config: ModelConfig) -> Images:
    """Return the images of prompts, of one row each, as those of a batch of rows of `length`, padded on the right."""
    assert config.vision is not None
    rows = [row.padded(length - row.index.shape[1]) for row in rows]
    counts = [sum(map(config.vision.tokens, row.grids)) for row in rows]
    starts = accumulate(counts, initial=0)
    index = [torch.where(row.index < 0, -1, row.index + start) for row, start in zip(rows, starts, strict=False)]
    rotary_ids = [row.rotary_ids for row in rows if row.rotary_ids is not None]
    ends = [row.ends for row in rows if row.ends is not None]
    return Images(
        torch.cat([row.pixels for row in rows]),
        [grid for row in rows for grid in row.grids],
        torch.cat(index),
        torch.cat(rotary_ids) if rotary_ids else None,
        torch.cat(ends) if ends else None,
    )


def no_images(tokens: Tensor, config: ModelConfig) -> Images:
    """Return the images of tokens [B, S] that are text, for a forward that runs the tower because other ranks do."""
    assert config.vision is not None
    return Images(torch.empty(0, config.vision.values, device=tokens.device), [], torch.full_like(tokens, -1))
