"""Numbers of slots: what each is a table of, and when a number is given out again."""

from __future__ import annotations

import numpy as np

from trajstore.reading.slots import UNAVAILABLE, SlotTable


def test_each_slot_is_the_shard_or_the_memory_that_it_was_given_for() -> None:
    slots = SlotTable()
    several = slots.add_shards(2, np.array([5, 7]), np.array([1, 1]))
    one, memory = slots.add_shard(3, 9, 1), slots.add_memory(1)
    assert [*several.tolist(), one, memory] == [0, 1, 2, 3]
    assert [slots.shard_of(slot) for slot in (0, 1, 2)] == [(2, 5), (2, 7), (3, 9)]
    assert slots.are_memory(np.array([0, 1, 2, 3, UNAVAILABLE])).tolist() == [False, False, False, True, False]
    assert len(slots) == 4


def test_a_shard_is_empty_when_its_last_entry_has_left() -> None:
    slots = SlotTable()
    one, other = slots.add_shards(0, np.array([0, 1]), np.array([3, 1])).tolist()
    assert slots.leave(np.array([one, one])) == []
    assert slots.leave(np.array([other])) == [other]
    assert slots.leave(np.array([one])) == [one]
    assert slots.leave(np.array([], np.intp)) == []


def test_it_grows_and_keeps_what_it_has() -> None:
    slots = SlotTable()
    for row in range(200):
        assert slots.add_shard(0, row, 1) == row
    assert slots.add_shards(1, np.arange(1000), np.ones(1000, np.intp)).tolist() == list(range(200, 1200))
    assert [slots.shard_of(slot) for slot in (0, 199, 200, 1199)] == [(0, 0), (0, 199), (1, 0), (1, 999)]
