"""Arithmetic of image processors on values of pixels: resize, rescale and normalise, cut into patches.

The bits are those of torchvision's functions, as transformers' processors call them (its backend "torchvision").
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def resized(image: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Return an image, uint8 [3, H, W], resized to uint8 [3, height, width].

    mode: bilinear or bicubic, both antialiased and rounded to whole values, as torchvision's `resize` has them on CPUs
    with AVX2 or NEON; on others its bilinear goes through float32.
    """
    if image.shape[1:] == (height, width):
        return image
    return interpolate(image.unsqueeze(0), (height, width), mode=mode, antialias=True).squeeze(0)  # [3, height, width]


def rescaled(image: Tensor, factor: float) -> Tensor:
    """Return `image`, uint8 [3, H, W], times `factor`, float32 [3, H, W]."""
    return image.to(torch.float32).mul_(factor)


def normalised(image: Tensor, factor: float, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (`image` · factor − mean) ÷ std, float32 [3, H, W], of an `image`, uint8 [3, H, W], and a mean and std for
    each channel. As in transformers the factor divides mean and std instead, so that the values are rounded twice."""
    scale = 1.0 / factor
    shift = torch.tensor(mean, dtype=torch.float32) * scale  # [3]
    spread = torch.tensor(std, dtype=torch.float32) * scale  # [3]
    return image.to(torch.float32).sub_(shift.view(3, 1, 1)).div_(spread.view(3, 1, 1))


def patches(image: Tensor, size: int) -> Tensor:
    """Return the patches of an image, [3, H, W], row after row: [H/size · W/size, size · size · 3], channels last."""
    rows, columns = image.shape[1] // size, image.shape[2] // size
    cut = image.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)  # [rows, columns, size, size, 3]
    return cut.reshape(rows * columns, -1)


def merged_patches(image: Tensor, size: int, merge: int, frames: int) -> Tensor:
    """Return the patches of an image, [3, H, W], those that merge into one token side by side.

    The result is [H/size · W/size, 3 · frames · size · size]: squares of merge × merge patches row after row, the
    patches of a square row after row, and in each the channels first; a still image is repeated for all frames.
    """
    rows, columns = image.shape[1] // size // merge, image.shape[2] // size // merge
    cut = image.reshape(3, rows, merge, size, columns, merge, size)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [rows, columns, merge, merge, 3, 1, size, size]
    cut = cut.expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return cut.reshape(rows * columns * merge * merge, -1)
