"""Images shared out among the ranks that hold the same rows: each encodes some, and the features are gathered once."""

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.dealing import deal
from dtrain.models.common.images import Images, PlacedFeatures
from dtrain.parallel.collectives import enter_region, gather_alike, gather_along
from dtrain.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from dtrain.models.vision.common import Features, VisionTower


def dealt_features(tower: "VisionTower", images: Images, tp: TensorParallel | None, cp: Any) -> "Features":
    """Return the features of all images. Each rank encodes a share, balanced by patches.

    tp, cp: the ranks that hold the same images; None: there are none beside this one; cp is a process group. Where
    gradients of the tower are not summed over tp, images are shared out over cp alone. Collectives: one all-gather for
    each of tp and cp; backward a reduce-scatter for cp, and for tp under sequence parallel. Gradients of the tower are
    then those of this rank's images.
    """
    tp = None if tp is None or not tower.sums_over_tp else tp
    sizes = [1 if tp is None else tp.size, 1 if cp is None else cp.size()]
    ranks, count = sizes[0] * sizes[1], tower.config.tokens
    if ranks == 1 or not images.grids:
        return tower(images.pixels, images.grids)
    rank = (0 if cp is None else cp.rank()) * sizes[0] + (0 if tp is None else tp.rank)
    patches = [frames * rows * columns for frames, rows, columns in images.grids]
    shares = deal(patches, ranks)
    parts = images.pixels.split(patches)
    own = torch.cat([parts[image] for image in shares[rank]]) if shares[rank] else images.pixels[:0]
    features = tower(own, [images.grids[image] for image in shares[rank]])
    stacked = torch.stack([features.tokens, *features.deepstack.values()])  # [1 + deepstack, t, E]
    most = max(sum(count(images.grids[image]) for image in share) for share in shares)
    stacked = F.pad(stacked, (0, 0, 0, most - stacked.shape[1]))
    if tp is not None:
        gather = gather_along if tp.sequence else gather_alike
        stacked = gather(stacked, 1, tp.group)
    if cp is not None:
        stacked = gather_along(stacked, 1, cp)
    places = _places(shares, [count(grid) for grid in images.grids], most).to(stacked.device, non_blocking=True)
    tokens, *deepstack = stacked[:, places].unbind(0)  # [T, E]
    return features._replace(tokens=tokens, deepstack=dict(zip(features.deepstack, deepstack, strict=True)))


def placed_features(
    tower: "VisionTower", images: Images, length: int, tp: TensorParallel | None, cp: Any
) -> PlacedFeatures:
    """Return the features of images, and where they stand among the `length` tokens of a row that this rank embeds.
    Collectives as of `dealt_features`; under sequence parallel, where that deals nothing over tp, an all-reduce
    backward."""
    features, is_image = dealt_features(tower, images, tp, cp), images.index >= 0
    if tp is None or not tp.sequence:
        return PlacedFeatures(features, images.index, is_image)
    if not tower.sums_over_tp:  # a rank's tokens give it a part of the features' gradients, which are summed
        deepstack = {layer: enter_region(added, tp.group) for layer, added in features.deepstack.items()}
        features = features._replace(tokens=enter_region(features.tokens, tp.group), deepstack=deepstack)
    return PlacedFeatures(features, images.index[:, tp.rank * length : (tp.rank + 1) * length], is_image)


def _places(shares: list[list[int]], lengths: list[int], most: int) -> Tensor:
    """Return where each token, image by image, lies among the gathered ones, [T] int64 on the CPU; most: tokens that
    each rank sends."""
    first: dict[int, int] = {}
    for rank, share in enumerate(shares):
        starts = accumulate((lengths[image] for image in share), initial=rank * most)
        first |= dict(zip(share, starts, strict=False))
    return torch.cat([torch.arange(first[image], first[image] + length) for image, length in enumerate(lengths)])
