"""Sizes of a vision tower."""

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.base.batch import Grid

Frame = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of a tower, with config.json's names where it has them.

    pool: the patches at each side of the square that becomes one token. out_hidden_size: E, of the text."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    patch_size: int
    pool: int
    hidden_act: str  # a key of functions.ACTIVATIONS
    out_hidden_size: int
    num_channels: int = 3
    temporal_patch_size: int = 1  # frames of a patch; an image is repeated
    initializer_range: float = 0.02
    theta: float = 10_000.0  # the base of rotary positions, in a tower that has some

    @property
    def values_per_patch(self) -> int:
        """The values of a patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, grid: Grid) -> int:
        """Return how many tokens an image of `grid` becomes."""
        frames, rows, columns = grid
        return frames * (rows // self.pool) * (columns // self.pool)

    def attended_patches(self, layer: int, patches: int) -> int:
        """Return to how many patches a patch attends in the `layer` of this number, of an image of `patches`."""
        return patches

    def size_problem(self, rows: int, columns: int) -> str | None:
        """Return why an image of rows x columns patches cannot be taken; None where it can."""
        if rows < 1 or columns < 1 or rows % self.pool or columns % self.pool:
            return f"both sides must be multiples of {self.pool}"
        return None

    def frames(self, shape: Sequence[int], grids: Sequence[Grid]) -> list[Frame]:
        """Return rows and columns of every frame of images of `grids`, whose patches have `shape` [P, values]. Raises
        ValueError where they do not fit the tower or one another."""
        for grid in grids:
            if problem := self.size_problem(*grid[1:]):
                raise ValueError(f"an image of {grid[1]} x {grid[2]} patches: {problem}")
        frames = [(rows, columns) for count, rows, columns in grids for _ in range(count)]
        patches = sum(rows * columns for rows, columns in frames)
        if tuple(shape) != (patches, self.values_per_patch):
            raise ValueError(
                f"pixels {tuple(shape)} of images with {patches} patches of {self.values_per_patch} values"
            )
        return frames
