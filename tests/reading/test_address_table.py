"""Residency of slots, also after an interrupt at any moment of mapping."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, cast

import numpy as np
import pytest

from tests.interrupting import Tracer
from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import ColumnSpec, Extent, Schema
from trajstore._core.files.partial import PartialMap
from trajstore._core.reading.address_table import AddressTable, MappedShard, RunningCopies
from trajstore._core.reading.plan import HeldRows

SCHEMA = Schema("step", (ColumnSpec("x", "float32", (), Axis.SAMPLES),))
EXTENT = Extent(1, 1, 1, 1)


class File(str):
    """A stub for a file without any content."""

    home = object()


class Memory:
    """A stub for the owner of rows."""


class Shards:
    """Shards at made-up addresses, each a file fetched on demand."""

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
        return MappedShard(SCHEMA, [1000 * row], keep=memory, extent=EXTENT, partial=partial)


def shown(rows: list[int], map_limit: int = 100) -> tuple[AddressTable, Any, Shards]:
    addresses, shards = AddressTable(map_limit), Shards()
    source = addresses.add_source(cast(Any, shards))
    return addresses, addresses.add_shards(source, np.array(rows), np.ones(len(rows), np.intp)), shards


def nothing(slot: int, extent: Extent) -> None:
    """Receive an extent."""


def test_memory_whose_entries_nobody_has_seen_can_be_withdrawn() -> None:
    addresses, slots, _ = shown([0])
    kept, taken = MappedShard(SCHEMA, [77], keep=object()), MappedShard(SCHEMA, [78], keep=object())
    addresses.add_memory(kept, 3)
    slot = addresses.add_memory(taken, 3)
    addresses.withdraw([taken])
    assert addresses.are_memory(np.array([*slots, slots[-1] + 1])).tolist() == [False, True]
    assert addresses.add_memory(taken, 1) == slot
    addresses.withdraw([])


@pytest.mark.locks_unchecked
def test_after_an_interrupt_what_is_resident_is_known_to_be_partly_there() -> None:
    """Otherwise rows that were never fetched would be copied: zeros."""

    def interrupted(at: int | None) -> int:
        addresses, slots, _ = shown([1, 2])
        reported_slots: list[int] = []
        tracer = Tracer(at)

        def work() -> None:
            addresses.ensure(slots, lambda slot, _: reported_slots.append(slot))
            addresses.leave(slots[:1])

        tracer.run(work)
        resident = [slot for slot in slots.tolist() if addresses.signature[slot] >= 0]
        assert len(addresses.partial_maps(np.array(resident, np.int64))) == len(resident)
        assert set(resident) <= set(reported_slots)
        addresses.ensure(slots[1:], nothing)
        number = addresses.number_of(int(slots[1]), SCHEMA.columns[0])  # an interrupt may have left one unused
        assert HeldRows(addresses, slots).first[slots[1], number] == 2000
        return tracer.count

    for at in range(interrupted(None)):
        interrupted(at)


def test_what_holds_rows_holds_the_memory_in_which_they_lie() -> None:
    addresses, slots, shards = shown([1])
    addresses.ensure(slots, nothing)
    held = HeldRows(addresses, slots)
    gone = shards.memory
    assert gone is not None
    addresses.leave(slots)
    del addresses, shards  # contents that were replaced
    gc.collect()
    assert gone() is not None
    held.end()
    del held
    gc.collect()
    assert gone() is None


# -- The address table: residency, and stable tables for running copies --


def test_it_grows_beside_the_arrays_that_a_copy_has() -> None:
    addresses, slots, _ = shown([42])
    addresses.ensure(slots, nothing)
    held = HeldRows(addresses, slots)
    more = addresses.add_shards(0, np.arange(1000), np.ones(1000, np.intp))
    assert held.first is not addresses.first
    assert addresses.first[slots[0], 0] == held.first[slots[0], 0] == 42_000
    assert (addresses.signature[slots[0]], addresses.signature[more[-1]]) == (0, -1)
    addresses.leave(slots)
    assert addresses.signature[slots[0]] == -1
    assert held.first[slots[0], 0] == 42_000  # copies that use it may still read there


# -- Released memory stays until no copy is running; only then is its slot free --


class Owner:
    """Holds rows, or stands for a copy of them."""


def begun(copies: RunningCopies) -> Owner:
    copy = Owner()
    copies.begin(copy)
    return copy


def test_it_waits_for_all_copies() -> None:
    free: list[int] = []
    copies = RunningCopies(free.extend)
    first_copy, other = begun(copies), begun(copies)
    owner = Owner()
    gone = weakref.ref(owner)
    copies.let_go(owner, 3)
    copies.let_go(None, 4)
    copies.let_go(None, None)
    del owner
    copies.end(first_copy)
    copies.end(first_copy)
    assert gone() is not None
    assert free == []
    assert not copies.idle
    copies.end(other)
    assert gone() is None
    assert free == [3, 4]
    assert copies.idle


def test_nothing_is_destroyed_under_the_lock() -> None:
    copies = RunningCopies(lambda slots: None)
    seen: list[bool] = []

    class Late:
        def __del__(self) -> None:
            seen.append(copies.idle)  # acquires the lock

    copy = begun(copies)
    copies.let_go(Late(), None)
    thread = threading.Thread(target=copies.end, args=(copy,), daemon=True)
    thread.start()
    del copy
    thread.join(600)
    assert not thread.is_alive()
    assert seen == [True]


@pytest.mark.locks_unchecked
def test_after_an_interrupt_a_number_is_free_once_at_most_and_the_lock_is() -> None:
    def ended(at: int | None) -> tuple[list[int], int]:
        free: list[int] = []
        copies = RunningCopies(free.extend)
        copy = begun(copies)
        copies.let_go(None, 1)
        copies.let_go(None, 2)
        tracer = Tracer(at)
        tracer.run(lambda: copies.end(copy))
        copies.end(begun(copies))
        assert copies.idle
        return free, tracer.count

    _, count = ended(None)
    for at in range(count):
        free, _ = ended(at)
        assert len(free) == len(set(free))


def test_in_a_forked_child_no_copy_runs() -> None:
    free: list[int] = []
    copies = RunningCopies(free.extend)
    copy = begun(copies)  # of a thread that the child does not have
    copies.let_go(None, 1)
    copies.stop()
    copies.go_on(in_child=True)
    copies.end(begun(copies))
    assert free == [1]
    copies.end(copy)
    assert copies.idle
