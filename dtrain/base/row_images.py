"""Images of the rows of a batch, on the host, and the batch of rows with them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import ROW_STREAMS, collate

Grid = tuple[int, int, int]  # frames (1 of an image), rows and columns of patches


@dataclass(frozen=True)
class RowImages:
    """Images of rows [n]. pixels: of each row [P, values], its images one behind the other; grids: of each row, its
    images' in the same order; keys: of each row, a number for each image that is the same for the same image; None:
    all are different."""

    pixels: Sequence[Tensor]
    grids: Sequence[Sequence[Grid]]
    keys: Sequence[Sequence[int]] | None = None

    @classmethod
    def beside(cls, rows: Sequence[Mapping[str, Tensor]]) -> "RowImages":
        """Return the images of data rows: their `pixels`, `grids` and `image_keys`."""
        grids = [[(frames, tall, wide) for frames, tall, wide in row["grids"].tolist()] for row in rows]
        return cls([row["pixels"] for row in rows], grids, [row["image_keys"].tolist() for row in rows])

    def __len__(self) -> int:
        return len(self.pixels)

    def of(self, rows: Iterable[int]) -> "RowImages":
        """Return the images of some rows, in their order."""
        rows = list(rows)
        keys = None if self.keys is None else [self.keys[row] for row in rows]
        return RowImages([self.pixels[row] for row in rows], [self.grids[row] for row in rows], keys)

    def distinct(self, values: int, tokens: Callable[[Grid], int]) -> tuple[Tensor, list[Grid], Tensor]:
        """Return pixels [P, values] and grids of the different images of all rows, row by row, and where the features
        of all images lie among theirs, [T] int64.

        values: of a patch; tokens: gives the number of features of an image. An image that several rows share, as the
        completions of a prompt do, is one.
        """
        parts: list[Tensor] = []
        grids: list[Grid] = []
        starts: dict[int, int] = {}  # by key: the first feature
        order: list[Tensor] = []
        end = 0
        for row, (pixels, of_row) in enumerate(zip(self.pixels, self.grids, strict=True)):
            patches = [frames * tall * wide for frames, tall, wide in of_row]
            keys = range(-1 - len(order), -1 - len(order) - len(of_row), -1) if self.keys is None else self.keys[row]
            for part, grid, key in zip(pixels.split(patches) if patches else (), of_row, keys, strict=True):
                if key not in starts:
                    starts[key], end = end, end + tokens(grid)
                    parts.append(part)
                    grids.append(grid)
                order.append(torch.arange(starts[key], starts[key] + tokens(grid)))
        joined = torch.cat(parts) if parts else torch.empty(0, values)
        return joined, grids, torch.cat(order) if order else torch.empty(0, dtype=torch.int64)


def collate_with_images(rows: Sequence[Mapping[str, Tensor]], streams: Sequence[str] = ROW_STREAMS) -> dict[str, Any]:
    """Collate rows that have `pixels` as `batch.collate` does; `images` are their `RowImages`."""
    return {**collate(rows, streams), "images": RowImages.beside(rows)}
