"""Tensors that a model reads of images: the pixels of its vision tower, and the streams of a document's tokens.

Pixels have the same bits as with torchvision's functions, as transformers' image processors call them (its backend
"torchvision").

A stream is a tensor with one entry per token, like `position_ids`. It travels with `input_ids` through packing and
micro-batches. The decoder reads from it which tokens are images. For example, a document has two text tokens, an image
of 2 × 3 tokens, and one text token:

    tokens            t   t   i   i   i   i   i   i   t
    image_features   -1  -1   0   1   2   3   4   5  -1      row of the tower's output that replaces the embedding
    rotary_ids  time  0   1   2   2   2   2   2   2   5      `rotary_positions` (Qwen): 2 + (0, row, column);
              height  0   1   2   2   2   3   3   3   5      the text after it continues at 2 + max(2, 3) = 5
               width  0   1   2   3   4   2   3   4   5
    image_ends        0   1   7   7   7   7   7   7   8      `image_ends` (Gemma): an image token sees up to here
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def resize(image: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Resize an image as torchvision's `resize` does.

    Args:
        image: The image, uint8 [3, H, W].
        height: New height in pixels.
        width: New width in pixels.
        mode: bilinear or bicubic. Both are antialiased and rounded to integers, as in torchvision on CPUs with AVX2 or
            NEON. On other CPUs, torchvision's bilinear goes through float32.

    Returns:
        The image, uint8 [3, height, width].
    """
    if image.shape[1:] == (height, width):
        return image
    return interpolate(image.unsqueeze(0), (height, width), mode=mode, antialias=True).squeeze(0)  # [3, height, width]


def rescale(image: Tensor, factor: float) -> Tensor:
    """Multiply an image, uint8 [3, H, W], by `factor`. Returns float32 [3, H, W]."""
    return image.to(torch.float32).mul_(factor)


def normalise_pixels(image: Tensor, factor: float, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Compute (image · factor - mean) / std.

    As in transformers, mean and std are divided by the factor instead of multiplying the image, so values are rounded
    twice.

    Args:
        image: The image, uint8 [3, H, W].
        factor: Factor of the values, such as 1/255.
        mean: Mean of each channel.
        std: Standard deviation of each channel.

    Returns:
        float32 [3, H, W].
    """
    scale = 1.0 / factor
    scaled_mean = torch.tensor(mean, dtype=torch.float32) * scale  # [3]
    scaled_std = torch.tensor(std, dtype=torch.float32) * scale  # [3]
    return image.to(torch.float32).sub_(scaled_mean.view(3, 1, 1)).div_(scaled_std.view(3, 1, 1))


def cut_patches(image: Tensor, size: int) -> Tensor:
    """Cut an image into patches, row after row.

    Args:
        image: The image, [3, H, W].
        size: Pixels of a patch's side.

    Returns:
        The patches, [H/size · W/size, size · size · 3]. Within a patch the channels are last.
    """
    rows, columns = image.shape[1] // size, image.shape[2] // size
    cut = image.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)  # [rows, columns, size, size, 3]
    return cut.reshape(rows * columns, -1)


def cut_merged_patches(image: Tensor, size: int, merge: int, frames: int) -> Tensor:
    """Cut an image into patches. The patches that merge into one token are neighbours in the result.

    With merge=2, a token consists of 2 × 2 patches. The patches of the first token come first, row after row, then
    those of the token to its right.

    Args:
        image: The image, [3, H, W].
        size: Pixels of a patch's side.
        merge: Patches of a token's side.
        frames: Frames of a patch. A still image is repeated for each frame.

    Returns:
        The patches, [H/size · W/size, 3 · frames · size · size]. Within a patch the channels are first.
    """
    rows, columns = image.shape[1] // size // merge, image.shape[2] // size // merge  # of tokens
    # Axes: channel; then row of tokens, row of patches in the token and row of pixels in the patch; then the same three
    # for columns.
    cut = image.reshape(3, rows, merge, size, columns, merge, size)
    # The patches of a token become neighbours, and the frames are inserted between channel and pixels.
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [rows, columns, merge, merge, 3, 1, size, size]
    cut = cut.expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return cut.reshape(rows * columns * merge * merge, -1)


def feature_index(is_image: Tensor) -> Tensor:
    """Return the number of the image feature of each token.

    Args:
        is_image: Whether each token is an image token, bool [S].

    Returns:
        int64 [S]: the image tokens are numbered in order; -1 for text.

    Example:
        >>> feature_index(torch.tensor([False, True, True, False, True])).tolist()
        [-1, 0, 1, -1, 2]
    """
    return torch.where(is_image, is_image.long().cumsum(0) - 1, -1)


def rotary_positions(is_image: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the positions in time, height and width of a document's tokens (M-RoPE).

    Text tokens count on equally in all three dimensions. An image token has its own frame, row and column, counted from
    the position after the text before it. The text after an image continues after the longer side of the image.

    Args:
        is_image: Whether each token is an image token, bool [S].
        sizes: Frames, rows and columns of the tokens of each image, in order.

    Returns:
        int64 [S, 3], on the CPU.

    Raises:
        ValueError: If the sizes and the image tokens disagree.

    Reference:
        Qwen2-VL, arXiv:2409.12191, section 2.1.

    Example:
        >>> is_image = torch.tensor([False, True, True, False])
        >>> rotary_positions(is_image, [(1, 1, 2)]).tolist()
        [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]]
    """
    _check_count(is_image, sum(frames * rows * columns for frames, rows, columns in sizes))
    positions = torch.empty(len(is_image), 3, dtype=torch.int64)
    image_tokens = is_image.nonzero().flatten().tolist()
    next_token = 0  # first token without a position
    next_position = 0
    num_done = 0  # image tokens that have a position
    for frames, rows, columns in sizes:
        length = frames * rows * columns
        first = image_tokens[num_done]
        if image_tokens[num_done + length - 1] != first + length - 1:
            raise ValueError("the tokens of an image are not next to each other")
        # The text before the image counts on in all three dimensions.
        num_text = first - next_token
        positions[next_token:first] = torch.arange(next_position, next_position + num_text)[:, None]
        next_position += num_text
        # Frame, row and column of each image token; tokens are row after row, frame after frame.
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).view(-1, 3)
        positions[first : first + length] = next_position + grid
        next_position += max(rows, columns)
        next_token = first + length
        num_done += length
    num_text = len(is_image) - next_token
    positions[next_token:] = torch.arange(next_position, next_position + num_text)[:, None]
    return positions


def image_ends(is_image: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the last token that each token sees in its own image.

    Args:
        is_image: Whether each token of a document is an image token, bool [S].
        lengths: Tokens of each image, in order.

    Returns:
        int64 [S], on the CPU: for an image token the position of its image's last token, for text its own position.

    Raises:
        ValueError: If the lengths and the image tokens disagree.

    Example:
        >>> image_ends(torch.tensor([False, True, True, True, False]), [2, 1]).tolist()
        [0, 2, 2, 3, 4]
    """
    _check_count(is_image, sum(lengths))
    ends = torch.arange(len(is_image))
    image_tokens = is_image.nonzero().flatten()
    num_tokens = torch.tensor(lengths, dtype=torch.int64)
    last_of_images = num_tokens.cumsum(0) - 1  # index into image_tokens
    ends[image_tokens] = image_tokens[last_of_images.repeat_interleave(num_tokens)]
    return ends


def _check_count(is_image: Tensor, expected: int) -> None:
    count = int(is_image.sum())
    if count != expected:
        raise ValueError(f"{count} image tokens for images of {expected}")
