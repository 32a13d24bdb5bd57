"""Training FLOPs of a vision tower: per patch, and of images."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from torch import nn

from dtrain.base.batch import RowImages
from dtrain.base.name_patterns import matched
from dtrain.models.vision.common import VisionTower


def flops_per_patch(tower: VisionTower, patches: int) -> float:
    """Return the FLOPs per patch of `tower`, for an image of so many `patches`, in a step that trains what of it is
    trained: of each matrix, and of the attention of each layer, those of the forward; as many again where the gradient
    goes on to the layers before, for some of these are trained; and of a trained matrix as many for its own gradient.

    Matrices of the projector see the tokens alone. Counted in full, as `TextFlops` counts, are attention to all
    patches in reach, and no recomputation.
    """
    config, total, goes_on = tower.config, 0.0, False
    layers = {id(layer): index for index, layer in enumerate(tower.layers)}
    for name, module in _children_first("", tower):
        own = {f"{name}.{key}": parameter for key, parameter in module.named_parameters(recurse=False)}
        for path, parameter in own.items():
            if parameter.dim() < 2 or isinstance(module, nn.Embedding) or matched([path], tower.lookups):
                continue
            products = 1 + goes_on + parameter.requires_grad
            share = config.pool**2 if matched([path], tower.projector) else 1
            total += 2.0 * products * parameter.numel() / share
        goes_on = goes_on or any(parameter.requires_grad for parameter in own.values())
        if (index := layers.get(id(module))) is not None:
            attention = 4.0 * config.num_attention_heads * config.head_dim * config.reach(index, patches)
            total += attention * (3 if goes_on else 1)
    return total


class ImageFlops:
    """Training FLOPs of `tower` for images, by `flops_per_patch`, which is asked once for each size of an image."""

    def __init__(self, tower: VisionTower):
        self.tower = tower
        self._by_patches: dict[int, float] = {}

    def of(self, images: RowImages) -> float:
        """Return the FLOPs for the images of a micro-batch, each different one once."""
        places = [[(row, image) for image in range(len(grids))] for row, grids in enumerate(images.grids)]
        keys: Sequence[Sequence[Hashable]] = places if images.keys is None else images.keys
        pairs = zip(chain.from_iterable(keys), chain.from_iterable(images.grids), strict=True)
        return sum(frames * self._of_frame(rows * columns) for frames, rows, columns in dict(pairs).values())

    def _of_frame(self, patches: int) -> float:
        if patches not in self._by_patches:
            self._by_patches[patches] = patches * flops_per_patch(self.tower, patches)
        return self._by_patches[patches]


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module
