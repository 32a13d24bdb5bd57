"""Sizes of a vision tower. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.base.batch import Grid

Frame = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of a vision tower, under config.json's names where config.json has them.

    Attributes:
        pool: Patches at each side of the square that becomes one token.
        hidden_act: Key of `functions.ACTIVATIONS`.
        out_hidden_size: Hidden size of the text model, E.
        temporal_patch_size: Frames of a patch. An image is repeated.
        theta: Base of the rotary positions, in a tower that has some.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    patch_size: int
    pool: int
    hidden_act: str
    out_hidden_size: int
    num_channels: int = 3
    temporal_patch_size: int = 1
    initializer_range: float = 0.02
    theta: float = 10_000.0

    @property
    def values_per_patch(self) -> int:
        """Number of values of a patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image.

        Args:
            grid: Frames, and rows and columns of patches. For example, with a pool of 2 an image (1, 4, 6) has 6
                tokens.
        """
        frames, rows, columns = grid
        return frames * (rows // self.pool) * (columns // self.pool)

    def attended_patches(self, layer: int, patches: int) -> int:
        """Return the number of patches that a patch attends to, in a layer and an image of `patches` patches."""
        return patches

    def size_problem(self, rows: int, columns: int) -> str | None:
        """Explain why an image of rows x columns patches does not fit the tower. None if it fits."""
        if rows < 1 or columns < 1 or rows % self.pool or columns % self.pool:
            return f"both sides must be multiples of {self.pool}"
        return None

    def frames(self, shape: Sequence[int], grids: Sequence[Grid]) -> list[Frame]:
        """Return rows and columns of every frame of some images.

        Args:
            shape: Shape of the patches of all images, [P, values].
            grids: Size of each image.

        Raises:
            ValueError: If the sizes do not fit the tower or one another.
        """
        frames: list[Frame] = []
        for num_frames, rows, columns in grids:
            problem = self.size_problem(rows, columns)
            if problem:
                raise ValueError(f"an image of {rows} x {columns} patches: {problem}")
            frames += [(rows, columns)] * num_frames
        num_patches = sum(rows * columns for rows, columns in frames)
        if tuple(shape) != (num_patches, self.values_per_patch):
            raise ValueError(
                f"pixels {tuple(shape)} of images with {num_patches} patches of {self.values_per_patch} values"
            )
        return frames
