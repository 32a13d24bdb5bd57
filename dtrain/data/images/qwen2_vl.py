"""Image processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: any size, patches in squares that merge to tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.base.errors import UserError
from dtrain.data.images.decoding import MOST_ASPECT
from dtrain.data.images.fields import ProcessorFiles, too_low
from dtrain.data.images.processor import ImageProcessor, ImageTokens, Layout
from dtrain.models.common.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, kw_only=True)
class Qwen2VLProcessor(ImageProcessor):
    """Processor that keeps an image's aspect, to whole tokens.

    patch_size              pixels of a patch's side
    merge_size              patches of a token's side
    temporal_patch_size     frames of a patch; a still image is repeated for each
    min_pixels, max_pixels  of the resized image
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout; `smart_resize` of https://github.com/QwenLM/Qwen2.5-VL gives height and width.

        A side has at least one token, so an image that is very long may have more than `max_pixels`.
        Raises UserError for a side more than 200 times the other.
        """
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise UserError(f"an image of {width} × {height}: one side is more than {MOST_ASPECT} times the other")
        side = self.patch_size * self.merge_size
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            tall = max(side, math.floor(height / shrink / side) * side)
            wide = max(side, math.floor(width / shrink / side) * side)
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall, wide = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        grid = (1, tall // self.patch_size, wide // self.patch_size)
        return Layout(tall, wide, grid, tall * wide // side**2)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.pixels import merged_patches

        return merged_patches(values, self.patch_size, self.merge_size, self.temporal_patch_size)

    def streams(self, is_image: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return `image_features` [S] and `rotary_ids` [S, 3], int64."""
        from dtrain.data.images.positions import feature_index, rotary_positions

        merge = self.merge_size
        sizes = [(frames, rows // merge, columns // merge) for _, _, (frames, rows, columns), _ in layouts]
        return {"image_features": feature_index(is_image), "rotary_ids": rotary_positions(is_image, sizes)}


def read(files: ProcessorFiles, max_pixels: int | None) -> Qwen2VLProcessor:
    """Return the processor of a directory. Raises UserError for a bound below the processor's least."""
    fields = files.fields
    patch, merge, frames = (
        fields.integer(key, default)
        for key, default in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
    )
    for key, value, other in (
        ("patch_size", patch, "patch_size"),
        ("merge_size", merge, "spatial_merge_size"),
        ("temporal_patch_size", frames, "temporal_patch_size"),
    ):
        files.must_equal(key, value, files.vision, other)
    least, most = _bounds(fields)
    values = files.values("bicubic", _CLIP_MEAN, _CLIP_STD)
    image = files.token("image_token", "<|image_pad|>")
    tokens = ImageTokens(image, "", image, "", files.image_token_id())
    files.refuse()
    least_bound = max(least, (patch * merge) ** 2)
    if max_pixels is not None and max_pixels < least_bound:
        raise too_low(max_pixels, least_bound, "size.shortest_edge of its image processor, or one token")
    return Qwen2VLProcessor(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        min_pixels=least,
        max_pixels=most if max_pixels is None else min(most, max_pixels),
        tokens=tokens,
        **values,
    )


def _bounds(fields: Fields) -> tuple[int, int]:
    """Return the least and most pixels: `size` has them as its edges, and min_pixels and max_pixels come before it."""
    size = fields.get("size")
    if size is None:
        size = {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS}
    if not isinstance(size, dict):
        fields.problem("size must be an object with shortest_edge and longest_edge")
        return 1, 1
    bounds = Fields(
        {
            "min_pixels": fields.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": fields.get("max_pixels") or size.get("longest_edge"),
        },
        fields.problems,
    )
    least, most = bounds.integer("min_pixels"), bounds.integer("max_pixels")
    if least > most:
        fields.problem(f"min_pixels {least} is above max_pixels {most}")
    return least, most
