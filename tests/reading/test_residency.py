"""What is resident can be read as it is, also when an interrupt came at any moment of mapping or unmapping it."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import numpy as np
import pytest

from tests.interrupting import Tracer
from trajstore.columns.fields import Axis
from trajstore.columns.schema import ColumnSpec, Extent, Schema
from trajstore.files.partial import PartialMap
from trajstore.reading.residency import HeldRows, MappedShard, Residency

SCHEMA = Schema("step", (ColumnSpec("x", "float32", (), Axis.SAMPLES),))
TOLD = Extent(1, 1, 1, 1)


class File(str):
    """Stands for a file of which nothing is there."""

    home = object()


class Memory:
    """Stands for what rows lie in."""


class Shards:
    """Shards at made-up addresses, each a file of which only what is asked for is there."""

    def __init__(self) -> None:
        self.opened = 0
        self.memory: weakref.ref[Memory] | None = None

    def map_shard(self, row: int) -> MappedShard | None:
        if row == 9:
            return None
        self.opened += 1
        partial = (cast(PartialMap, File(f"file {row}")),)
        memory = Memory()
        self.memory = weakref.ref(memory)
        return MappedShard(SCHEMA, [1000 * row], keep=memory, extent=TOLD, partial=partial)


def shown(rows: list[int], map_limit: int = 100) -> tuple[Residency, Any, Shards]:
    residency, shards = Residency(map_limit), Shards()
    source = residency.add_source(shards)
    return residency, residency.add_shards(source, np.array(rows), np.ones(len(rows), np.intp)), shards


def nothing(slot: int, extent: Extent) -> None:
    """Be told of an extent."""


def test_a_shard_is_mapped_once_and_what_cannot_be_is_told() -> None:
    residency, slots, shards = shown([3, 9, 4])
    told: list[tuple[int, Extent]] = []
    for _ in range(2):
        assert residency.ensure(slots, lambda *said: told.append(said)) == [1]
    assert shards.opened == residency.mapped == 2
    assert told == [(0, TOLD), (2, TOLD)]
    assert [HeldRows(residency, np.array([slot])).addresses_of(slot) for slot in (0, 2)] == [[3000], [4000]]
    assert residency.partial_maps(slots) == ["file 3", "file 4"]
    assert residency.table.signature[slots].tolist() == [0, -1, 0]


def test_shards_that_a_batch_does_not_need_are_unmapped_and_mapped_again() -> None:
    residency, slots, shards = shown([1, 2, 3], map_limit=2)
    residency.ensure(slots[:2], nothing)
    residency.ensure(slots[1:], nothing)
    assert residency.table.signature[slots].tolist() == [-1, 0, 0]
    residency.ensure(slots, nothing)
    assert (residency.mapped, shards.opened) == (3, 4)


def test_a_slot_is_given_out_again_when_its_last_entry_has_left_and_no_copy_runs() -> None:
    residency, slots, _ = shown([1, 2])
    residency.ensure(slots, nothing)
    held = HeldRows(residency, slots)
    residency.leave(slots[:1])
    assert residency.table.signature[slots[0]] == -1
    assert residency.add_shard(0, 5, 1) == 2
    held.let_go()
    assert residency.add_shard(0, 6, 1) == slots[0]
    assert residency.mapped == 1


def test_memory_is_resident_when_it_is_first_asked_for() -> None:
    residency, _, _ = shown([])
    rows = MappedShard(SCHEMA, [77], keep=object())
    slot = residency.add_memory(rows)
    assert residency.table.signature[slot] == -1
    residency.ensure(np.array([slot]), nothing)
    assert HeldRows(residency, np.array([slot])).addresses_of(slot) == [77]
    residency.release(slot)
    assert residency.table.signature[slot] == -1
    assert residency.add_memory(rows) == slot


@pytest.mark.locks_unchecked
def test_after_an_interrupt_what_is_resident_is_known_to_be_partly_there() -> None:
    """Else rows would be copied that were never fetched: zeros."""

    def interrupted(at: int | None) -> int:
        residency, slots, _ = shown([1, 2])
        told: list[int] = []
        tracer = Tracer(at)

        def work() -> None:
            residency.ensure(slots, lambda slot, _: told.append(slot))
            residency.leave(slots[:1])

        tracer.run(work)
        resident = [slot for slot in slots.tolist() if residency.table.signature[slot] >= 0]
        assert len(residency.partial_maps(np.array(resident, np.int64))) == len(resident)
        assert set(resident) <= set(told)
        residency.ensure(slots[1:], nothing)
        assert HeldRows(residency, slots).addresses_of(int(slots[1])) == [2000]
        return tracer.count

    for at in range(interrupted(None)):
        interrupted(at)


def test_what_holds_rows_holds_the_memory_in_which_they_lie() -> None:
    residency, slots, shards = shown([1])
    residency.ensure(slots, nothing)
    held = HeldRows(residency, slots)
    gone = shards.memory
    assert gone is not None
    residency.leave(slots)
    del residency, shards  # contents that were replaced
    gc.collect()
    assert gone() is not None
    held.let_go()
    del held
    gc.collect()
    assert gone() is None
