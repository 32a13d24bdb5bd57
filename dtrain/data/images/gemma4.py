"""Image processor of Gemma 4: an image is made as large as a budget of tokens allows, of its aspect in whole tokens."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.data.images.fields import ProcessorFiles, too_low
from dtrain.data.images.processor import ImageProcessor, ImageTokens, Layout

if TYPE_CHECKING:
    from torch import Tensor

BUDGETS = (70, 140, 280, 560, 1120)  # image tokens that the model was trained with


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor(ImageProcessor):
    """Processor that gives an image at most `max_soft_tokens` tokens.

    patch_size           pixels of a patch's side
    pooling_kernel_size  patches of a token's side
    max_soft_tokens      one of `BUDGETS`
    """

    patch_size: int
    pooling_kernel_size: int
    max_soft_tokens: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout: the largest sides of whole tokens, of this aspect, within the budget. A side of less
        than one token has one. The formula is that of Gemma4ImageProcessor in transformers 5.
        """
        side = self.patch_size * self.pooling_kernel_size
        most = self.max_soft_tokens * side**2
        factor = math.sqrt(most / (height * width))
        tall, wide = math.floor(factor * height / side), math.floor(factor * width / side)  # in tokens
        if not tall:
            tall, wide = 1, min(width // height, self.max_soft_tokens)
        elif not wide:
            tall, wide = min(height // width, self.max_soft_tokens), 1
        grid = (1, tall * self.pooling_kernel_size, wide * self.pooling_kernel_size)
        return Layout(tall * side, wide * side, grid, tall * wide)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.pixels import patches

        return patches(values, self.patch_size)


def read(files: ProcessorFiles, max_pixels: int | None) -> Gemma4Processor:
    """Return the processor of a directory. A bound of pixels takes the largest budget within it. Raises UserError for a
    bound below the least budget."""
    fields = files.fields
    patch, kernel = fields.integer("patch_size", 16), fields.integer("pooling_kernel_size", 3)
    budget = fields.integer("max_soft_tokens", 280)
    if budget not in BUDGETS:
        fields.problem(f"max_soft_tokens {budget} is not one of {', '.join(map(str, BUDGETS))}")
    files.must_equal("patch_size", patch, files.vision, "patch_size")
    files.must_equal("pooling_kernel_size", kernel, files.vision, "pooling_kernel_size")
    values = files.values("bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalise=False)
    begin, image, end = files.image_texts("<|image>", "<|image|>", "<image|>")
    tokens = ImageTokens(image, begin, image, end, files.image_token_id())
    files.refuse()
    if max_pixels is not None:
        pixels = (patch * kernel) ** 2  # of a token
        within = [count for count in BUDGETS if count <= budget and count * pixels <= max_pixels]
        if not within:
            raise too_low(max_pixels, BUDGETS[0] * pixels, f"{BUDGETS[0]} tokens are its least budget")
        budget = within[-1]
    return Gemma4Processor(
        patch_size=patch, pooling_kernel_size=kernel, max_soft_tokens=budget, tokens=tokens, **values
    )
