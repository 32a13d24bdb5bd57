"""Balancing of images over ranks: each rank encodes some images, and receives the features of its own.

The cp and tp ranks of a dp rank have the same images. Ranks of different dp ranks have different images, whose pixels
are sent to other dp ranks if that balances the work.

Example: 2 dp ranks with 2 tp ranks each make 4 ranks. "Slot" is the number of a rank within cp x tp. dp rank 0 has
images 0, 1 and 2, and dp rank 1 has image 3, all of the same size. Each of the 4 ranks encodes one image:

    dp rank  slot   encodes
       0       0    image 0
       0       1    image 1
       1       0    image 2, whose pixels come from dp rank 0, slot 0
       1       1    image 3

1. An all-to-all over dp, within slot 0, sends the pixels of image 2 to dp rank 1.
2. Every rank encodes its image.
3. A second all-to-all sends the features of image 2 back to dp rank 0.
4. All-gathers over tp and cp: the slots of dp rank 0 gather the features of images 0, 1 and 2, those of dp rank 1 the
   features of image 3.
"""

import math
from collections.abc import Sequence
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

MAX_IMBALANCE = 1.05
"""Load of the busiest rank that is accepted to send fewer images, relative to the load of the even assignment."""


class ImageEncoder(Protocol):
    """Interface of a vision tower whose images are balanced."""

    config: VisionConfig

    @property
    def reduces_over_tp(self) -> bool:
        """True if the gradients of all parameters are summed over tp."""

    def __call__(self, pixels: Tensor, grids: Sequence[Grid], adapters: AdapterContext | None) -> Features:
        """Compute the features of images: pixels [P, values] of the patches of all of them."""


class ImageAssignment(NamedTuple):
    """Assignment of images to the ranks that encode them, as one rank sees it.

    Images are numbered through all dp ranks.

    Attributes:
        own_images: Images of this rank's dp rank.
        encoded_images: Images that this rank encodes.
        sent_by_rank: By dp rank, the own images that it encodes in this slot.
        received_by_rank: By dp rank, its images among `encoded_images`.
        gathered_by_slot: By slot, the own images whose features it has before the all-gathers.
        exchanges_images: Whether any dp rank in this slot encodes an image of another dp rank.
    """

    own_images: range
    encoded_images: list[int]
    sent_by_rank: list[list[int]]
    received_by_rank: list[list[int]]
    gathered_by_slot: list[list[int]]
    exchanges_images: bool


def assign_images(grids: Sequence[Sequence[Grid]], dp_rank: int, num_slots: int, slot: int) -> ImageAssignment:
    """Assign the images of all dp ranks to all ranks, balanced by the number of patches.

    Args:
        grids: Sizes of the images of each dp rank.
        dp_rank: This rank's dp rank.
        num_slots: Number of ranks in cp x tp.
        slot: This rank's number within cp x tp.

    Example:
        dp rank 0 has three images, dp rank 1 has one:

        >>> grids = [[(1, 2, 2)] * 3, [(1, 2, 2)]]
        >>> [assign_images(grids, dp_rank, 2, slot).encoded_images for dp_rank in range(2) for slot in range(2)]
        [[0], [1], [2], [3]]
    """
    owners = []  # dp rank of each image
    num_patches = []
    for rank, of_rank in enumerate(grids):
        for grid in of_rank:
            owners.append(rank)
            num_patches.append(math.prod(grid))
    local_ranks = [range(owner * num_slots, (owner + 1) * num_slots) for owner in owners]
    shares = assign_locally(num_patches, local_ranks, num_slots * len(grids))

    # Images that each dp rank encodes, by slot: shares_by_slot[slot][dp_rank].
    shares_by_slot = [shares[other_slot::num_slots] for other_slot in range(num_slots)]
    encoded = shares_by_slot[slot][dp_rank]
    first_own = sum(len(of_rank) for of_rank in grids[:dp_rank])

    def own_among(images: Sequence[int]) -> list[int]:
        return [image for image in images if owners[image] == dp_rank]

    received_by_rank = []
    for rank in range(len(grids)):
        received_by_rank.append([image for image in encoded if owners[image] == rank])
    gathered_by_slot = []
    for dp_shares in shares_by_slot:
        gathered_by_slot.append([image for share in dp_shares for image in own_among(share)])

    # All dp ranks of a slot have to join the all-to-alls, or none, so this is decided for the slot.
    exchanges_images = False
    for rank, share in enumerate(shares_by_slot[slot]):
        if any(owners[image] != rank for image in share):
            exchanges_images = True
    return ImageAssignment(
        own_images=range(first_own, first_own + len(grids[dp_rank])),
        encoded_images=encoded,
        sent_by_rank=[own_among(share) for share in shares_by_slot[slot]],
        received_by_rank=received_by_rank,
        gathered_by_slot=gathered_by_slot,
        exchanges_images=exchanges_images,
    )


def assign_locally(costs: Sequence[float], local_ranks: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks by cost, to local ranks where that stays balanced.

    The load of the busiest rank is at most `MAX_IMBALANCE` times that of `base.ranks.balance_by_cost`, which ignores
    locality.

    Args:
        costs: Cost of each item.
        local_ranks: For each item, the ranks to which it need not be sent.
        num_ranks: Number of ranks.

    Returns:
        Indices of the items of each rank, ascending.

    Example:
        >>> assign_locally([4.0, 4.0, 8.0], [[0], [0], [1]], 2)
        [[0, 1], [2]]
    """
    even_shares = balance_by_cost(costs, num_ranks)
    even_load = max(sum(costs[index] for index in share) for share in even_shares)
    max_load = MAX_IMBALANCE * even_load

    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks

    def least_loaded(ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (loads[rank], rank))

    # Expensive items first. An item is sent only if its local ranks would become too busy.
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = least_loaded(local_ranks[index])
        if loads[rank] + costs[index] > max_load:
            rank = least_loaded(range(num_ranks))
        loads[rank] += costs[index]
        shares[rank].append(index)
    if max(loads) > max_load:
        return even_shares
    return [sorted(share) for share in shares]


def encode_balanced(
    tower: ImageEncoder,
    images: Images,
    tp: TensorParallel | None,
    cp: Any,
    adapters: AdapterContext | None = None,
) -> Features:
    """Compute the features of this rank's images. The ranks share the work of encoding.

    Images are balanced over dp if `images.dp` has those of all dp ranks, and over the ranks of tp and cp. They are not
    balanced over tp if the tower's gradients are not summed over it. The gradients of the tower are those of the images
    that this rank has encoded.

    Args:
        tower: The vision tower.
        images: Images of this rank.
        tp: Tensor parallelism. None for one rank.
        cp: Process group of context parallel. None for one rank.
        adapters: Whether the tower's adapters take part, without dropout. None: they do.

    Collectives:
        Over dp, two all-to-alls, of pixels and of features, if an image of this slot is sent. One all-gather each over
        tp and cp. In the backward an all-to-all, a reduce-scatter over cp, and one over tp under sequence parallel.
    """
    if tp is not None and not tower.reduces_over_tp:
        tp = None
    dp_group, grids_by_rank = None, [images.grids]
    if images.dp is not None:
        dp_group, grids_by_rank = images.dp.group, list(images.dp.grids)
    tp_size, tp_rank = (1, 0) if tp is None else (tp.size, tp.rank)
    cp_size, cp_rank = (1, 0) if cp is None else (cp.size(), cp.rank())
    num_slots = tp_size * cp_size
    grids = [grid for of_rank in grids_by_rank for grid in of_rank]
    if num_slots * len(grids_by_rank) == 1 or not grids:
        return tower(images.pixels, images.grids, adapters)
    dp_rank = 0 if dp_group is None else dp_group.rank()
    assignment = assign_images(grids_by_rank, dp_rank, num_slots, cp_rank * tp_size + tp_rank)
    num_patches = [math.prod(grid) for grid in grids]
    num_tokens = [tower.config.num_tokens(grid) for grid in grids]

    # Send the pixels of own images to the dp ranks that encode them.
    own_lengths = [num_patches[image] for image in assignment.own_images]
    pixels_of_image = dict(zip(assignment.own_images, images.pixels.split(own_lengths), strict=True))
    to_send = [images.pixels[:0]]  # so that there is something to concatenate without an image
    for of_rank in assignment.sent_by_rank:
        to_send += [pixels_of_image[image] for image in of_rank]
    pixels = torch.cat(to_send)
    if dp_group is not None and assignment.exchanges_images:
        received = _total_lengths(num_patches, assignment.received_by_rank)
        sent = _total_lengths(num_patches, assignment.sent_by_rank)
        pixels = all_to_all(pixels, received, sent, dp_group)

    # Encode, and send the features back.
    features = tower(pixels, [grids[image] for image in assignment.encoded_images], adapters)
    stacked = torch.stack([features.tokens, *features.deepstack.values()], 1)  # [t, 1 + deepstack, E]
    if dp_group is not None and assignment.exchanges_images:
        received = _total_lengths(num_tokens, assignment.sent_by_rank)
        sent = _total_lengths(num_tokens, assignment.received_by_rank)
        stacked = exchange(stacked, received, sent, dp_group)
    if not assignment.own_images:
        # The other slots of this dp rank have no images either, so none of them takes part in the all-gathers.
        return _unstack(features, stacked)

    # Gather the features of the other slots. All slots are padded to one length for the all-gathers.
    slot_length = max(_total_lengths(num_tokens, assignment.gathered_by_slot))
    stacked = F.pad(stacked, (0, 0, 0, 0, 0, slot_length - len(stacked)))
    if tp is not None:
        gather = gather_along if tp.sequence_parallel else gather_for_replicated
        stacked = gather(stacked, 0, tp.group)
    if cp is not None:
        stacked = gather_along(stacked, 0, cp)
    order = _token_order(assignment, num_tokens, slot_length).to(stacked.device, non_blocking=True)
    return _unstack(features, stacked[order])


def _total_lengths(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the total length of each group's images."""
    return [sum(lengths[image] for image in group) for group in groups]


def _unstack(features: Features, stacked: Tensor) -> Features:
    """Return `features` with the values of `stacked` [T, 1 + deepstack, E]."""
    tokens, *deepstack = stacked.unbind(1)  # [T, E]
    return features._replace(tokens=tokens, deepstack=dict(zip(features.deepstack, deepstack, strict=True)))


def _token_order(assignment: ImageAssignment, lengths: Sequence[int], slot_length: int) -> Tensor:
    """Return the index of each token of own images, image by image, among the gathered tokens, [T] int64 on the CPU.

    Args:
        assignment: The assignment of images.
        lengths: Tokens of each image.
        slot_length: Gathered tokens of each slot, with padding.
    """
    first_token: dict[int, int] = {}
    for slot, images in enumerate(assignment.gathered_by_slot):
        start = slot * slot_length
        for image in images:
            first_token[image] = start
            start += lengths[image]
    parts = [torch.arange(first_token[image], first_token[image] + lengths[image]) for image in assignment.own_images]
    return torch.cat(parts)
