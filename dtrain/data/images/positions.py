"""Streams of a document with images: the feature of each token, its rotary positions, and the end of its image."""

from collections.abc import Sequence

import torch
from torch import Tensor


def feature_index(is_image: Tensor) -> Tensor:
    """Return the feature of each token, int64 [S], -1 for text: images stand in a row in the order of their features.
    is_image: [S] bool."""
    return torch.where(is_image, is_image.long().cumsum(0) - 1, -1)


def rotary_positions(is_image: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the positions in time, height and width of the tokens of one document, int64 [S, 3] on the CPU (M-RoPE,
    arXiv:2409.12191, section 2.1).

    is_image: [S] bool; sizes: frames, rows and columns of the tokens of each image, in order. A text's tokens count on
    alike on all axes; those of an image stand at its own places, from where the text before it ends, and the text
    behind it goes on after its longer side. Raises ValueError where sizes and image tokens
    disagree.
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
