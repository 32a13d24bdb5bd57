"""Image processor of Gemma 3: every image becomes one square, and always the same number of tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.data.images.fields import ProcessorFiles, too_low
from dtrain.data.images.processor import ImageProcessor, ImageTokens, Layout
from dtrain.models.common.config_fields import Fields, shown

if TYPE_CHECKING:
    from torch import Tensor

_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor(ImageProcessor):
    """Processor that stretches an image to size × size pixels.

    size        pixels of a side
    patch_size  pixels of a patch's side, by config.json: transformers' tower cuts them itself
    count       image tokens, which the projector pools from the patches
    """

    size: int
    patch_size: int
    count: int

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout, the same for all images."""
        side = self.size // self.patch_size
        return Layout(self.size, self.size, (1, side, side), self.count)

    def _cut(self, values: "Tensor") -> "Tensor":
        from dtrain.data.images.pixels import merged_patches

        return merged_patches(values, self.patch_size, merge=1, frames=1)


def read(files: ProcessorFiles, max_pixels: int | None) -> Gemma3Processor:
    """Return the processor of a directory. Raises UserError for a bound below its one size."""
    fields = files.fields
    size = _side(fields)
    fields.must_be_off("do_pan_and_scan", "crops of an image are not implemented; set it to false")
    patch = files.vision.integer("patch_size", 16)
    # The length stands in processor_config.json; the preprocessor_config.json of older files repeats it.
    count = files.outer.integer("image_seq_length", 256)
    files.must_equal("size", size, files.vision, "image_size")
    files.must_equal("image_seq_length", count, files.model, "mm_tokens_per_image")
    if size % patch:
        fields.problem(f"size {size} is not a multiple of the tower's patch_size {patch}")
    values = files.values("bilinear", _HALF, _HALF)
    begin, image, end = files.image_texts("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    tokens = ImageTokens(begin, f"\n\n{begin}", image, f"{end}\n\n", files.image_token_id())
    files.refuse()
    if max_pixels is not None and max_pixels < size * size:
        raise too_low(max_pixels, size * size, f"each is made {size} × {size}; leave the key out")
    return Gemma3Processor(size=size, patch_size=patch, count=count, tokens=tokens, **values)


def _side(fields: Fields) -> int:
    size = fields.get("size")
    if size is None:
        return 224
    edges = (size.get("height"), size.get("width")) if isinstance(size, dict) else (None, None)
    if edges[0] != edges[1] or edges[0] is None:
        fields.problem(f"size {shown(size)}: must have an equal height and width")
        return 224
    return Fields({"size": edges[0]}, fields.problems).integer("size")
