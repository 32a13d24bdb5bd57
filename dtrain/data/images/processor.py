"""Base class of the image processors: what an image becomes for a model.

An image processor answers three questions about an image of some height and width:

    layout   how it is cut into patches, and how many tokens it has
    pixels   the patches, as the vision tower reads them
    streams  tensors with one entry per token of a document, by which the decoder finds its images (tensors.py)

For example, Qwen3-VL has patches of 16 × 16 pixels, and 2 × 2 patches are one token. An image of 450 × 300 pixels
(height, width) is resized to 448 × 288, so its layout is

    Layout(height=448, width=288, grid=(1, 28, 18), tokens=126)         28 · 18 / 4 = 126 tokens

A layout needs only the height and width, which are in the header of an image file. Torch is imported only for pixels
and streams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.json_files import digest

if TYPE_CHECKING:
    from torch import Tensor


class Layout(NamedTuple):
    """Patches and tokens of one image.

    Attributes:
        height: Height of the resized image in pixels.
        width: Width of the resized image in pixels.
        grid: Number of frames, rows and columns of patches.
        tokens: Number of image tokens in the text.

    Example:
        >>> Layout(448, 288, (1, 28, 18), 126).patches
        504
    """

    height: int
    width: int
    grid: tuple[int, int, int]
    tokens: int

    @property
    def patches(self) -> int:
        """Number of patches."""
        frames, rows, columns = self.grid
        return frames * rows * columns


class ImageTokens(NamedTuple):
    """Texts for an image in a prompt.

    Attributes:
        placeholder: Text that a chat template writes for an image. `before`, the image tokens and `after` replace it.
        before: Text before the image tokens.
        token: Text of an image token. There is one for each vector of the tower.
        after: Text after the image tokens.
        token_id: Id of an image token in config.json, by which the model finds the positions of the vectors.
    """

    placeholder: str
    before: str
    token: str
    after: str
    token_id: int


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Base class of image processors. Pixels equal those of transformers' processor with the same files, bit for bit.

    A subclass defines `layout` and `_cut`.

    Attributes:
        resample: bilinear or bicubic.
        rescale_factor: Factor of the values 0 to 255.
        mean: Mean of each channel after rescaling; None if values are not normalised.
        std: Standard deviation of each channel; None if values are not normalised.
        tokens: Texts for an image in a prompt.
    """

    resample: str
    rescale_factor: float
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None
    tokens: ImageTokens

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout of an image.

        Args:
            height: Height in pixels, at least 1 and at most 200 times the width.
            width: Width in pixels, at least 1 and at most 200 times the height.
        """
        raise NotImplementedError

    def pixels(self, image: "Tensor") -> "Tensor":
        """Return the patches that the tower reads.

        Args:
            image: The image, uint8 [3, H, W].

        Returns:
            float32 [patches, values per patch], in transformers' order. transformers' tower of Gemma 3 cuts the patches
            itself. dtrain cuts them here, row after row, with the channels first in each patch.
        """
        from dtrain.data.images.tensors import normalise_pixels, rescale, resize

        height, width = self.layout(*image.shape[1:])[:2]
        resized = resize(image, height, width, self.resample)
        if self.mean is None or self.std is None:
            return self._cut(rescale(resized, self.rescale_factor))
        return self._cut(normalise_pixels(resized, self.rescale_factor, self.mean, self.std))

    def _cut(self, values: "Tensor") -> "Tensor":
        """Cut an image, float32 [3, H, W], into patches, [patches, values per patch]."""
        raise NotImplementedError

    def streams(self, is_image: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return the streams of a document, by the names of `base.batch.IMAGE_STREAMS`; see tensors.py.

        Args:
            is_image: Whether each token is an image token, bool [S].
            layouts: Layouts of the document's images, in order.

        Returns:
            `image_features` and `image_ends`, both int64 [S].
        """
        from dtrain.data.images.tensors import feature_index, image_ends

        lengths = [layout.tokens for layout in layouts]
        return {"image_features": feature_index(is_image), "image_ends": image_ends(is_image, lengths)}

    def expansion(self, layout: Layout) -> str:
        """Return the text that replaces the placeholder of an image with this layout."""
        return self.tokens.before + self.tokens.token * layout.tokens + self.tokens.after

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides pixels and tokens."""
        return digest(type(self).__name__, asdict(self))[:16]

    def check_tokens(self, vocabulary: Mapping[str, int]) -> None:
        """Compare the image tokens with the tokenizer's vocabulary.

        Raises:
            UserError: If a text is no token, or the image token has another id than in config.json.
        """
        texts = {self.tokens.placeholder, self.tokens.before.strip(), self.tokens.token, self.tokens.after.strip()}
        missing = sorted(text for text in texts - {""} if text not in vocabulary)
        if missing:
            raise UserError(
                f"tokenizer.json has no token {', '.join(missing)}, which the image processor writes. "
                "Copy the tokenizer's files of this model again"
            )
        token, token_id = self.tokens.token, self.tokens.token_id
        if vocabulary[token] != token_id:
            raise UserError(
                f"tokenizer.json gives {token} the id {vocabulary[token]}, but config.json {token_id}. Copy both files "
                "of this model again"
            )
