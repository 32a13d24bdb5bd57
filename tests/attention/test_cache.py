"""Shelves: slots in use come first, what leaves is filled from the end, growth keeps what was written."""

import pytest
import torch

from dtrain.inference.kv_cache import SMALLEST_SLOT, KeyValues, slot_size


@pytest.mark.parametrize(("length", "size"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (1000, 1024)])
def test_slots_are_powers_of_two(length, size):
    assert slot_size(length) == size


def written(store, count, layers=(0, 1)):
    """Rows whose keys and values say which row they are."""
    places = [store.new_row(row) for row in range(count)]
    for layer in layers:
        keys, values = places[0].shelf.layer(layer, torch.zeros(1, 2, 4))
        for place in places:
            keys[place.slot] = place.owner
            values[place.slot] = -place.owner
    return places


def check(store):
    seen = []
    for shelf in store.rows.values():
        for slot, place in enumerate(shelf.places):
            assert place.shelf is shelf and place.slot == slot
            seen.append(place.owner)
            for layer in (0, 1):
                keys, values = shelf.layer(layer, torch.zeros(1, 2, 4))
                used = min(place.length, shelf.size(layer))
                assert (keys[slot, :, :used] == place.owner).all()
                assert (values[slot, :, :used] == -place.owner).all()
    return seen


@pytest.mark.parametrize("gone", [[0], [4], [0, 4], [1, 2, 3], [0, 1, 2, 3, 4], [3, 4]])
def test_holes_are_filled_from_the_end(gone):
    store = KeyValues([None, 7])
    places = written(store, 5)
    for place in places:
        place.length = 9
    store.release([places[row] for row in gone])
    assert sorted(check(store)) == [row for row in range(5) if row not in gone]
    assert [place.owner for place in store.rows_in_order()] == check(store)


def test_rows_that_are_full_move_to_larger_slots():
    store = KeyValues([None, 40])
    places = written(store, 5)
    for place in places:
        place.length = SMALLEST_SLOT if place.owner in (1, 3, 4) else 5
    assert store.grow() and not store.grow()
    assert sorted(check(store)) == [0, 1, 2, 3, 4]
    assert {place.owner for place in store.rows[2 * SMALLEST_SLOT].places} == {1, 3, 4}
    assert store.rows[2 * SMALLEST_SLOT].size(1) == 40  # a window keeps no more
    assert places[3].shelf.capacity == 2 * SMALLEST_SLOT and places[0].shelf.capacity == SMALLEST_SLOT


def test_more_slots_keep_what_the_first_hold():
    store = KeyValues([None, None])
    first = written(store, 2)
    for place in first:
        place.length = 3
    for row in range(2, 9):
        store.new_row(row)
    check(store)


def test_a_window_keeps_of_a_prompt_what_the_next_token_sees():
    store = KeyValues([None, 5, 1])
    shelf = store.new_prompt(50).shelf
    assert [shelf.size(layer) for layer in range(3)] == [64, 4, 1]
