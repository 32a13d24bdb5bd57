"""`ImageProcessor`: layout of an image's patches and tokens, its tensor for a tower, and its text in a prompt.

A layout needs the image's height and width alone; torch is imported where pixels are asked for.
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

    height, width   the image as it is resized, in pixels
    grid            patches: frames, rows, columns
    tokens          image tokens in the text
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
    """Texts that stand for an image.

    placeholder     the text that a chat template writes for one image
    before, after   the texts around the image's tokens that replace it
    token           the text of an image token, one for each vector that the tower gives
    token_id        its id by config.json, by which the model knows where these vectors go
    """

    placeholder: str
    before: str
    token: str
    after: str
    token_id: int


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Processor of images, with the numbers of transformers' processor of the same files, bit for bit.

    resample        bilinear or bicubic
    rescale_factor  what values of 0 to 255 are multiplied by
    mean, std       of each channel after that; None: the values are not normalised
    """

    resample: str
    rescale_factor: float
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None
    tokens: ImageTokens

    def layout(self, height: int, width: int) -> Layout:
        """Return the layout of an image of this height and width, in pixels, of which each is at least 1 and at most
        200 times the other."""
        raise NotImplementedError

    def pixels(self, image: "Tensor") -> "Tensor":
        """Return what the tower reads of `image`, uint8 [3, H, W]: float32 [patches, values], in transformers' order.
        Gemma 3's patches are cut from its processor's square image row after row, the channels first in each."""
        from dtrain.data.images.tensors import normalise_pixels, rescale, resize

        height, width = self.layout(*image.shape[1:])[:2]
        small = resize(image, height, width, self.resample)
        if self.mean is None or self.std is None:
            return self._cut(rescale(small, self.rescale_factor))
        return self._cut(normalise_pixels(small, self.rescale_factor, self.mean, self.std))

    def _cut(self, values: "Tensor") -> "Tensor":
        raise NotImplementedError

    def streams(self, is_image: "Tensor", layouts: Sequence[Layout]) -> "dict[str, Tensor]":
        """Return what models of this processor read beside the ids of one document, by the names of
        `base.batch.IMAGE_STREAMS`: here `image_features` and `image_ends`, int64 [S].

        is_image: [S] bool; layouts: of its images, in order."""
        from dtrain.data.images.tensors import feature_index, image_ends

        lengths = [layout.tokens for layout in layouts]
        return {"image_features": feature_index(is_image), "image_ends": image_ends(is_image, lengths)}

    def expansion(self, layout: Layout) -> str:
        """Return the text that replaces the placeholder of an image of this layout."""
        return self.tokens.before + self.tokens.token * layout.tokens + self.tokens.after

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides pixels and tokens."""
        return digest(type(self).__name__, asdict(self))[:16]

    def check_tokens(self, vocabulary: Mapping[str, int]) -> None:
        """Raise UserError where a text that stands for an image is no token of `vocabulary`, or has another id than
        config.json names."""
        texts = {self.tokens.placeholder, self.tokens.before.strip(), self.tokens.token, self.tokens.after.strip()}
        missing = sorted(text for text in texts - {""} if text not in vocabulary)
        if missing:
            raise UserError(
                f"tokenizer.json has no token {', '.join(missing)}, which the image processor writes; "
                "copy the tokenizer's files of this model anew"
            )
        if vocabulary[self.tokens.token] != self.tokens.token_id:
            raise UserError(
                f"tokenizer.json gives {self.tokens.token} the id {vocabulary[self.tokens.token]}, and config.json "
                f"{self.tokens.token_id}; copy both files of this model anew"
            )
