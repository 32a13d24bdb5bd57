"""Tensors that a model reads of images: pixels as its tower takes them, and the streams of a document's tokens.

The bits of pixels are those of torchvision's functions, as transformers' processors call them (its backend
"torchvision").
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def resize(image: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Return an image, uint8 [3, H, W], resized to uint8 [3, height, width].

    mode: bilinear or bicubic, both antialiased and rounded to whole values, as torchvision's `resize` has them on CPUs
    with AVX2 or NEON; on others its bilinear goes through float32.
    """
    if image.shape[1:] == (height, width):
        return image
    return interpolate(image.unsqueeze(0), (height, width), mode=mode, antialias=True).squeeze(0)  # [3, height, width]


def rescale(image: Tensor, factor: float) -> Tensor:
    """Return `image`, uint8 [3, H, W], times `factor`, float32 [3, H, W]."""
    return image.to(torch.float32).mul_(factor)


def normalise_pixels(image: Tensor, factor: float, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (`image` · factor − mean) ÷ std, float32 [3, H, W], of an `image`, uint8 [3, H, W], and a mean and std for
    each channel. As in transformers the factor divides mean and std instead, so that the values are rounded twice."""
    scale = 1.0 / factor
    shift = torch.tensor(mean, dtype=torch.float32) * scale  # [3]
    spread = torch.tensor(std, dtype=torch.float32) * scale  # [3]
    return image.to(torch.float32).sub_(shift.view(3, 1, 1)).div_(spread.view(3, 1, 1))


def cut_patches(image: Tensor, size: int) -> Tensor:
    """Return the patches of an image, [3, H, W], row after row: [H/size · W/size, size · size · 3], channels last."""
    rows, columns = image.shape[1] // size, image.shape[2] // size
    cut = image.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)  # [rows, columns, size, size, 3]
    return cut.reshape(rows * columns, -1)


def cut_merged_patches(image: Tensor, size: int, merge: int, frames: int) -> Tensor:
    """Return the patches of an image, [3, H, W], those that merge into one token side by side.

    The result is [H/size · W/size, 3 · frames · size · size]: squares of merge × merge patches row after row, the
    patches of a square row after row, and in each the channels first; a still image is repeated for all frames.
    """
    rows, columns = image.shape[1] // size // merge, image.shape[2] // size // merge
    cut = image.reshape(3, rows, merge, size, columns, merge, size)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [rows, columns, merge, merge, 3, 1, size, size]
    cut = cut.expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return cut.reshape(rows * columns * merge * merge, -1)


def feature_index(is_image: Tensor) -> Tensor:
    """Return the feature of each token, int64 [S], -1 for text: images stand in a row in the order of their features.
    is_image: [S] bool."""
    return torch.where(is_image, is_image.long().cumsum(0) - 1, -1)


def rotary_positions(is_image: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the positions in time, height and width of the tokens of one document, int64 [S, 3] on the CPU (M-RoPE,
    arXiv:2409.12191, section 2.1).

    is_image: [S] bool; sizes: frames, rows and columns of the tokens of each image, in order. A text's tokens count on
    alike on all axes; those of an image stand at its own places, from where the text before it ends, and the text
    behind it goes on after its longer side. Raises ValueError where sizes and image tokens disagree.
    """
    _check_count(is_image, sum(frames * rows * columns for frames, rows, columns in sizes))
    positions = torch.empty(len(is_image), 3, dtype=torch.int64)
    places = is_image.nonzero().flatten().tolist()
    at = position = taken = 0
    for frames, rows, columns in sizes:
        length = frames * rows * columns
        first = places[taken]
        if places[taken + length - 1] != first + length - 1:
            raise ValueError("the tokens of an image do not stand together")
        positions[at:first] = torch.arange(position, position + first - at)[:, None]
        position += first - at
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).view(-1, 3)
        positions[first : first + length] = position + grid
        position, at, taken = position + max(rows, columns), first + length, taken + length
    positions[at:] = torch.arange(position, position + len(is_image) - at)[:, None]
    return positions


def image_ends(is_image: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return for an image token the position of its image's last token, for text its own, int64 [S] on the CPU.

    is_image: [S] bool, of one document; lengths: of its images, in tokens and in order. Raises ValueError where
    lengths and image tokens disagree."""
    _check_count(is_image, sum(lengths))
    ends, places = torch.arange(len(is_image)), is_image.nonzero().flatten()
    last = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
    ends[places] = places[last.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))]
    return ends


def _check_count(is_image: Tensor, tokens: int) -> None:
    if (count := int(is_image.sum())) != tokens:
        raise ValueError(f"{count} image tokens for images of {tokens}")
