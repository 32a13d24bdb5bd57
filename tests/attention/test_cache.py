"""Pools: slots in use come first, what leaves is filled from the end, growth keeps what was written."""

import pytest
import torch

from dtrain.inference.kv_cache import SMALLEST_SLOT, KeyValues, slot_size


@pytest.mark.parametrize(("length", "size"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (1000, 1024)])
def test_slots_are_powers_of_two(length, size):
    assert slot_size(length) == size


def written(store, count, layers=(0, 1)):
    """Rows whose keys and values say which row they are."""
    slots = [store.new_row(row) for row in range(count)]
    for layer in layers:
        keys, values = slots[0].pool.layer(layer, torch.zeros(1, 2, 4), torch.zeros(1, 2, 3))
        for slot in slots:
            keys[slot.index] = slot.owner
            values[slot.index] = -slot.owner
    return slots


def check(store):
    seen = []
    for pool in store.rows.values():
        for index, slot in enumerate(pool.slots):
            assert slot.pool is pool and slot.index == index
            seen.append(slot.owner)
            for layer in (0, 1):
                keys, values = pool.layer(layer, torch.zeros(1, 2, 4), torch.zeros(1, 2, 3))
                used = min(slot.length, pool.sizes[layer])
                assert (keys[index, :, :used] == slot.owner).all()
                assert (values[index, :, :used] == -slot.owner).all()
    return seen


@pytest.mark.parametrize("gone", [[0], [4], [0, 4], [1, 2, 3], [0, 1, 2, 3, 4], [3, 4]])
def test_holes_are_filled_from_the_end(gone):
    store = KeyValues([None, 7])
    slots = written(store, 5)
    for slot in slots:
        slot.length = 9
    store.release([slots[row] for row in gone])
    assert sorted(check(store)) == [row for row in range(5) if row not in gone]
    assert [slot.owner for slot in store.rows_in_order()] == check(store)


def test_rows_that_are_full_move_to_larger_slots():
    store = KeyValues([None, 40])
    slots = written(store, 5)
    for slot in slots:
        slot.length = SMALLEST_SLOT if slot.owner in (1, 3, 4) else 5
    assert store.grow() and not store.grow()
    assert sorted(check(store)) == [0, 1, 2, 3, 4]
    assert {slot.owner for slot in store.rows[2 * SMALLEST_SLOT].slots} == {1, 3, 4}
    assert store.rows[2 * SMALLEST_SLOT].sizes[1] == 40  # a window keeps no more
    assert slots[3].pool.capacity == 2 * SMALLEST_SLOT and slots[0].pool.capacity == SMALLEST_SLOT


def test_more_slots_keep_what_the_first_hold():
    store = KeyValues([None, None])
    first = written(store, 2)
    for slot in first:
        slot.length = 3
    for row in range(2, 9):
        store.new_row(row)
    check(store)


def test_a_window_keeps_of_a_prompt_what_the_next_token_sees():
    store = KeyValues([None, 5, 1])
    pool = store.new_prompt(50).pool
    assert [pool.sizes[layer] for layer in range(3)] == [64, 4, 1]
