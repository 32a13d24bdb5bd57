"""Images of the rows of a batch, on the host."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # frames (1 of an image), rows and columns of patches


@dataclass(frozen=True)
class RowImages:
    """Images of rows [n]. pixels: of each row [P, values], its images one behind the other; grids: of each row, its
    images' in the same order."""

    pixels: Sequence[Tensor]
    grids: Sequence[Sequence[Grid]]

    @classmethod
    def beside(cls, rows: Sequence[Mapping[str, Tensor]]) -> "RowImages":
        """Return the images of data rows: their `pixels` and `grids`."""
        grids = [[(frames, tall, wide) for frames, tall, wide in row["grids"].tolist()] for row in rows]
        return cls([row["pixels"] for row in rows], grids)

    def __len__(self) -> int:
        return len(self.pixels)

    def of(self, rows: Iterable[int]) -> "RowImages":
        """Return the images of some rows, in their order."""
        rows = list(rows)
        return RowImages([self.pixels[row] for row in rows], [self.grids[row] for row in rows])

    def joined(self, values: int) -> tuple[Tensor, list[Grid]]:
        """Return the pixels [P, values] and grids of all rows, row by row; values: of a patch."""
        parts = [part for part in self.pixels if len(part)]
        pixels = torch.cat(parts) if parts else torch.empty(0, values)
        return pixels, [grid for grids in self.grids for grid in grids]
