"""The table of addresses: what is resident, and that a running copy keeps the table that it was given."""

from __future__ import annotations

import numpy as np

from trajstore.reading.addresses import Addresses


def test_a_slot_is_resident_from_set_to_clear() -> None:
    table = Addresses()
    table.reserve(3, 4)
    assert (table.signature[:3] == -1).all()
    table.set(1, np.array([0, 3]), [100, 200], [1, 2], 7)
    assert table.signature[:3].tolist() == [-1, 7, -1]
    assert table.first[1, [0, 3]].tolist() == [100, 200]
    assert table.axes[1, [0, 3]].tolist() == [1, 2]
    table.clear(1)
    assert table.signature[1] == -1
    assert table.first[1, 0] == 100  # a copy that was told so may still read there


def test_it_grows_beside_the_arrays_that_a_copy_has() -> None:
    table = Addresses()
    table.reserve(1, 1)
    table.set(0, np.array([0]), [42], [1], 5)
    given = table.first
    table.reserve(1000, 30)
    assert given is not table.first
    assert (table.first[0, 0], table.axes[0, 0], table.signature[0], table.signature[999]) == (42, 1, 5, -1)
    table.set(0, np.array([0]), [43], [1], 5)
    assert given[0, 0] == 42
    same = table.first
    table.reserve(1000, 30)
    assert table.first is same
