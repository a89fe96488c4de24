"""How many files are mapped: the oldest shards go first, but never what a batch needs."""

from __future__ import annotations

from trajstore.reading.map_limit import MapLimit


def test_the_oldest_go_until_the_limit_holds() -> None:
    maps = MapLimit(4)
    for slot, count in ((7, 2), (8, 1), (9, 1)):
        maps.add(slot, count)
    assert not maps.is_over
    maps.add(3, 2)
    assert maps.is_over
    assert maps.too_old(keep=()) == [7]
    assert maps.too_old(keep={7}) == [8, 9]
    assert maps.too_old(keep={7, 8, 9, 3}) == []
    assert len(maps) == 4  # who unmaps them says so
    maps.remove(7)
    assert not maps.is_over
    assert 7 not in maps


def test_what_is_mapped_once_more_counts_once_and_is_the_newest() -> None:
    maps = MapLimit(2)
    maps.add(1, 1)
    maps.add(2, 1)
    maps.add(1, 1)
    assert not maps.is_over
    maps.add(3, 1)
    assert maps.too_old(keep=()) == [2]
    maps.remove(5)
    assert len(maps) == 3
