"""Images shared out among ranks: each encodes some, and a rank gets the features of its own images.

Ranks of cp and tp hold the same images. Those of dp hold different ones, whose pixels travel where that evens out the
work.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.batch import Grid
from dtrain.base.ranks import balance_by_cost
from dtrain.models.common.micro_batch import AdapterContext, Features, Images
from dtrain.models.common.vision_config import VisionConfig
from dtrain.parallel.collectives import all_to_all, exchange, gather_along, gather_for_replicated
from dtrain.parallel.tensor import TensorParallel


class ImageEncoder(Protocol):
    """A vision tower, as far as its images are shared out."""

    config: VisionConfig

    @property
    def reduces_over_tp(self) -> bool:
        """Whether the gradients of all parameters are summed over tp."""

    def __call__(self, pixels: Tensor, grids: Sequence[Grid], adapters: AdapterContext | None) -> Features:
        """Compute the features of images: pixels [P, values] of the patches of all of them."""


class ImageAssignment(NamedTuple):
    """Assignment of images, numbered through all dp ranks, to the ranks that encode them, as one rank sees it.

    own: images of this rank; encoded: images that it encodes; sends: its own images, by the dp rank that encodes them
    for its place in cp x tp; receives: `encoded` by the dp rank that has them; gathered: own images, by the place in
    cp x tp that has their features before the all-gathers. moves: a dp rank of this place encodes another's image.
    """

    own_images: range
    encoded_images: list[int]
    sent_by_rank: list[list[int]]
    received_by_rank: list[list[int]]
    gathered_by_place: list[list[int]]
    exchanges_images: bool


def assign_images(grids: Sequence[Sequence[Grid]], dp_rank: int, places: int, place: int) -> ImageAssignment:
    """Deal the images of all dp ranks to all ranks, balanced by patches. grids: by dp rank; places: the ranks of cp x
    tp, of which this is the one with the number `place`."""
    owners = [rank for rank, of_rank in enumerate(grids) for _ in of_rank]
    patches = [math.prod(grid) for of_rank in grids for grid in of_rank]
    local = [range(owner * places, (owner + 1) * places) for owner in owners]
    shares = assign_locally(patches, local, places * len(grids))
    columns = [shares[at::places] for at in range(places)]  # by place: the share of each dp rank
    encoded = columns[place][dp_rank]
    first = sum(len(of_rank) for of_rank in grids[:dp_rank])
    return ImageAssignment(
        own_images=range(first, first + len(grids[dp_rank])),
        encoded_images=encoded,
        sent_by_rank=[[image for image in share if owners[image] == dp_rank] for share in columns[place]],
        received_by_rank=[[image for image in encoded if owners[image] == rank] for rank in range(len(grids))],
        gathered_by_place=[
            [image for share in column for image in share if owners[image] == dp_rank] for column in columns
        ],
        # Over all dp ranks of this place: they all join the all-to-alls, or none does.
        exchanges_images=any(owners[image] != rank for rank, share in enumerate(columns[place]) for image in share),
    )


def assign_locally(costs: Sequence[float], local: Sequence[Sequence[int]], places: int) -> list[list[int]]:
    """Deal indices to places, each to one of its local places where that leaves the fullest place at most 5 % above the
    one of `balance_by_cost`.

    local: of each index, the places to which it need not be sent."""
    shares = balance_by_cost(costs, places)
    most = 1.05 * max(sum(costs[index] for index in share) for share in shares)
    kept: list[list[int]] = [[] for _ in range(places)]
    loads = [0.0] * places
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        place = min(local[index], key=lambda place: (loads[place], place))
        if loads[place] + costs[index] > most:
            place = min(range(places), key=lambda place: (loads[place], place))
        loads[place] += costs[index]
        kept[place].append(index)
    return [sorted(share) for share in kept] if max(loads) <= most else shares


def encode_balanced(
    tower: ImageEncoder,
    images: Images,
    tp: TensorParallel | None,
    cp: Any,
    adapters: AdapterContext | None = None,
) -> Features:
    """Return the features of this rank's images, of which each rank encodes some.

    Images are shared out over dp where `images.dp` has those of all dp ranks, and over the ranks of tp and cp. tp, cp:
    None: there are none beside this one; cp is a process group. Where gradients of the tower are not summed over tp,
    images are not shared out over it. adapters: as of `VisionTower.forward`. Collectives: two all-to-alls over dp, of
    pixels and of features, where an image of this place in cp x tp moves, and one all-gather for each of tp and cp;
    backward an all-to-all, and a reduce-scatter for cp, and for tp under sequence parallel. Gradients of the tower are
    then those of the images that this rank encoded.
    """
    tp = None if tp is None or not tower.reduces_over_tp else tp
    dp, by_rank = (None, [images.grids]) if images.dp is None else (images.dp.group, images.dp.grids)
    tp_size, tp_rank = (1, 0) if tp is None else (tp.size, tp.rank)
    cp_size, cp_rank = (1, 0) if cp is None else (cp.size(), cp.rank())
    places, grids = tp_size * cp_size, [grid for of_rank in by_rank for grid in of_rank]
    if places * len(by_rank) == 1 or not grids:
        return tower(images.pixels, images.grids, adapters)
    dealing = assign_images(by_rank, 0 if dp is None else dp.rank(), places, cp_rank * tp_size + tp_rank)
    patches, tokens = [math.prod(grid) for grid in grids], [tower.config.num_tokens(grid) for grid in grids]

    parts = dict(
        zip(dealing.own_images, images.pixels.split([patches[image] for image in dealing.own_images]), strict=True)
    )
    pixels = torch.cat([images.pixels[:0], *(parts[image] for of_rank in dealing.sent_by_rank for image in of_rank)])
    if dp is not None and dealing.exchanges_images:
        pixels = all_to_all(pixels, _sums(patches, dealing.received_by_rank), _sums(patches, dealing.sent_by_rank), dp)
    features = tower(pixels, [grids[image] for image in dealing.encoded_images], adapters)
    stacked = torch.stack([features.tokens, *features.deepstack.values()], 1)  # [t, 1 + deepstack, E]
    if dp is not None and dealing.exchanges_images:
        stacked = exchange(stacked, _sums(tokens, dealing.sent_by_rank), _sums(tokens, dealing.received_by_rank), dp)
    if not dealing.own_images:  # nor have the ranks of cp and tp: there is no all-gather
        return _unstacked(features, stacked)
    most = max(_sums(tokens, dealing.gathered_by_place))
    stacked = F.pad(stacked, (0, 0, 0, 0, 0, most - len(stacked)))
    if tp is not None:
        gather = gather_along if tp.sequence_parallel else gather_for_replicated
        stacked = gather(stacked, 0, tp.group)
    if cp is not None:
        stacked = gather_along(stacked, 0, cp)
    order = _token_order(dealing, tokens, most).to(stacked.device, non_blocking=True)
    return _unstacked(features, stacked[order])


def _sums(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of the lengths of each group's images."""
    return [sum(lengths[image] for image in group) for group in groups]


def _unstacked(features: Features, stacked: Tensor) -> Features:
    """Return `features` with the values [T, 1 + deepstack, E]."""
    tokens, *deepstack = stacked.unbind(1)  # [T, E]
    return features._replace(tokens=tokens, deepstack=dict(zip(features.deepstack, deepstack, strict=True)))


def _token_order(dealing: ImageAssignment, lengths: Sequence[int], most: int) -> Tensor:
    """Return where each token, image by image, lies among the gathered ones, [T] int64 on the CPU; lengths: of all
    images in tokens; most: gathered tokens of each place."""
    first: dict[int, int] = {}
    for place, gathered in enumerate(dealing.gathered_by_place):
        starts = accumulate((lengths[image] for image in gathered), initial=place * most)
        first |= dict(zip(gathered, starts, strict=False))
    return torch.cat([torch.arange(first[image], first[image] + lengths[image]) for image in dealing.own_images])
