"""Images dealt to ranks: the load of each, and what moves."""

import math
import random

import pytest

from dtrain.base.ranks import balance_by_cost
from dtrain.models.vision.image_balancing import assign_images, assign_locally


def load(share, costs):
    return sum(costs[index] for index in share)


@pytest.mark.parametrize("seed", range(20))
def test_local_shares_are_complete_and_at_most_5_percent_less_even(seed):
    draw = random.Random(seed)
    places, count = draw.randint(1, 6), draw.randint(0, 30)
    costs = [draw.randint(1, 1000) for _ in range(count)]
    local = [[draw.randrange(places)] for _ in costs]
    shares, even = assign_locally(costs, local, places), balance_by_cost(costs, places)
    assert sorted(index for share in shares for index in share) == list(range(count))
    assert max(load(share, costs) for share in shares) <= 1.05 * max(load(share, costs) for share in even)

    def sent(shares):
        return sum(place not in local[index] for place, share in enumerate(shares) for index in share)

    assert sent(shares) <= sent(even)


def test_even_work_stays_where_it_is():
    grids = [[(1, 2, 2), (1, 2, 2)], [(1, 2, 4)]]
    assert balance_by_cost([4, 4, 8], 2) == [[2], [0, 1]]
    for rank in range(2):
        dealing = assign_images(grids, rank, 1, 0)
        assert not dealing.exchanges_images
        assert dealing.encoded_images == list(dealing.own_images)


@pytest.mark.parametrize("places", [1, 2])
def test_images_of_one_rank_are_encoded_by_all(places):
    grids = [[(1, 4, 4)] * 6, [], []]
    encoded = []
    for place in range(places):
        dealings = [assign_images(grids, rank, places, place) for rank in range(3)]
        for rank, dealing in enumerate(dealings):
            assert dealing.exchanges_images
            encoded += dealing.encoded_images
            assert [dealing.sent_by_rank[other] for other in range(3)] == [
                dealings[other].received_by_rank[rank] for other in range(3)
            ]
            assert sum(math.prod(grids[0][0]) for _ in dealing.encoded_images) == 16 * 6 // (3 * places)
        assert sorted(image for images in dealings[0].gathered_by_slot for image in images) == list(range(6))
        assert [list(dealing.own_images) for dealing in dealings] == [list(range(6)), [], []]
    assert sorted(encoded) == list(range(6))
