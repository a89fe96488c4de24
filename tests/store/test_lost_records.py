"""What is lost where records of a log cannot be read, told by the ids of their neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trajstore.store.lost_records import Damage, LostRecords


def added(*ranges: list[int]) -> dict[str, Any]:
    return {"operation": "add", "entries": {"ids": list(ranges)}}


def settled(*steps: Any, present: list[int], next_id: int = 0, counter: int = 0) -> Damage:
    """Return the damage of a log: records that were read, and None where some are missing."""
    records, damage = LostRecords(), Damage("log")
    records.begins(next_id)
    for step in steps:
        if step is None:
            records.missing(damage)
        else:
            records.read(step)
    records.settle(np.array(present, np.int64), counter)
    return damage


def test_what_lies_between_two_records() -> None:
    damage = settled(added([0, 2]), None, added([6, 6], [8, 9]), present=[0, 1, 2, 6, 8, 9])
    assert (damage.lost, damage.count, damage.uncounted) == (((3, 5),), 3, False)
    assert str(damage) == "log; what was committed there is left out; lost: 3 trajectories, ids 3 to 5"


def test_what_was_evicted_later_is_not_lost() -> None:
    evicted = {"operation": "evict", "ids": [[4, 4], [0, 0]]}
    assert settled(added([0, 2]), None, evicted, added([6, 6]), present=[1, 2, 6]).lost == ((3, 3), (5, 5))


def test_ids_begin_where_the_snapshot_ends() -> None:
    assert settled(None, added([12, 12]), present=[12], next_id=10).lost == ((10, 11),)


def test_ids_of_one_of_several_ranks() -> None:
    here = [*range(1, 40, 4), *range(49, 80, 4)]
    records = [added([one, one]) for one in here]
    assert settled(*records[:10], None, *records[10:], present=here).lost == ((41, 41), (45, 45))
    assert settled(added([1, 1]), None, added([9, 9]), present=[1, 9]).lost == ((2, 8),), "two ids tell no stride"


@pytest.mark.parametrize(("counter", "lost", "uncounted"), [(0, (), True), (3, (), True), (5, ((3, 4),), True)])
def test_the_end_of_a_log(counter: int, lost: tuple[tuple[int, int], ...], uncounted: bool) -> None:
    damage = settled(added([0, 2]), None, present=[0, 1, 2], counter=counter)
    assert (damage.lost, damage.uncounted) == (lost, uncounted)


@pytest.mark.parametrize("record", [added([1 << 60, 1 << 60]), {"operation": "add"}, added([5, 4]), {"operation": 7}])
def test_forged_numbers_say_nothing(record: dict[str, Any]) -> None:
    damage = settled(added([0, 2]), None, record, present=[0, 1, 2])
    assert (damage.lost, damage.uncounted) == ((), True)
    assert str(damage).endswith("lost: trajectories that nobody can count, if any")
