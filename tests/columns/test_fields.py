"""Column names, the arithmetic of extra rows, portions, and reused column memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.interleaving import interleavings
from trajstore._core.columns import memory
from trajstore._core.columns.fields import Axis, axis_of, join_name, nest, skip_extra_rows, split_name, walk
from trajstore._core.columns.memory import Arena, Lease
from trajstore._core.columns.portions import portions

KEYS = st.lists(st.text(max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("actions",), "actions"),
        (("curr_obs", "states"), "curr_obs.states"),
        (("a.b", "c"), "a\\.b.c"),
        (("a\\", "b"), "a\\\\.b"),
        (("", ""), "."),
    ],
)
def test_dotted_names(path: tuple[str, ...], name: str) -> None:
    assert join_name(path) == name
    assert split_name(name) == path


@settings(max_examples=40, deadline=None)
@given(path=KEYS)
def test_every_path_comes_back(path: list[str]) -> None:
    assert split_name(join_name(path)) == tuple(path)


def test_leaves_come_in_the_order_of_the_dicts() -> None:
    value = {"b": {"y": 1, "x.z": {"k": 2}}, "a": 3, "empty": {}}
    assert list(walk(value)) == [(("b", "y"), 1), (("b", "x.z", "k"), 2), (("a",), 3), (("empty",), {})]
    assert nest({join_name(path): leaf for path, leaf in walk(value)}) == value


@pytest.mark.parametrize(
    ("field", "rows", "expected"),
    [
        ("rewards", 12, (Axis.SAMPLES, 0)),
        ("dones", 12, (Axis.SAMPLES, 0)),
        ("dones", 13, (Axis.FIRST_EXTRA, 1)),
        ("truncations", 16, (Axis.FIRST_EXTRA, 4)),
        ("prev_values", 24, (Axis.LAST_EXTRA, 12)),
        ("forward_inputs.tokens.ids", 14, (Axis.LAST_EXTRA, 2)),
    ],
)
def test_axis_by_field_and_rows(field: str, rows: int, expected: tuple[Axis, int]) -> None:
    assert axis_of(field, rows, 12) == expected


@settings(max_examples=30, deadline=None)
@given(epochs=st.integers(1, 4), steps_each=st.integers(1, 4), batch=st.integers(1, 3), data=st.data())
def test_extra_rows_are_skipped(epochs: int, steps_each: int, batch: int, data: Any) -> None:
    """Each row is labelled with its sample, extra rows with None, as in the written form."""
    first: list[int | None] = []
    last: list[int | None] = []
    for epoch in range(epochs):
        samples: list[int | None] = list(range(epoch * steps_each * batch, (epoch + 1) * steps_each * batch))
        first += [None] * batch + samples
        last += samples + [None] * batch
    sample = data.draw(st.integers(0, epochs * steps_each * batch - 1))
    assert first[skip_extra_rows(Axis.FIRST_EXTRA, sample, batch, steps_each * batch)] == sample
    assert last[skip_extra_rows(Axis.LAST_EXTRA, sample, batch, steps_each * batch)] == sample
    assert skip_extra_rows(Axis.SAMPLES, sample, batch, 0) == sample


# -- Items in portions --


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=20), limit=st.integers(0, 20), most=st.integers(1, 5))
def test_portions_are_the_list_within_their_bounds_and_as_long_as_they_can_be(
    sizes: list[int], limit: int, most: int
) -> None:
    cut = list(portions(sizes, limit, int, most=most))
    assert [size for portion, _ in cut for size in portion] == sizes
    for at, (portion, total) in enumerate(cut):
        assert total == sum(portion)
        assert len(portion) == 1 or (total <= limit and len(portion) <= most)
        if at + 1 < len(cut):
            assert total + cut[at + 1][0][0] > limit or len(portion) == most


def test_items_are_taken_as_portions_are_asked_for() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    assert next(portions(items(), 100, lambda number: 50)) == ([0, 1], 100)
    assert taken == [0, 1, 2]


# -- Reused memory: never while any view of it exists --


SLAB = 4096


def view(lease: Lease, offset: int, nbytes: int) -> memoryview:
    return lease.data[offset : offset + nbytes]


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2 * SLAB), st.integers(0, 6)), max_size=40))
def test_blocks_that_are_held_keep_what_was_written(steps: list[tuple[int, int]]) -> None:
    arena = Arena(SLAB, spare=2)
    held: list[tuple[memoryview, int]] = []
    for number, (nbytes, drop) in enumerate(steps):
        block = view(*arena.take(nbytes), nbytes)
        block[:] = bytes([number]) * nbytes
        held.append((block, number))
        del held[drop : drop + 1]
        for kept, value in held:
            assert bytes(kept) == bytes([value]) * len(kept)


def test_blocks_begin_at_cache_lines() -> None:
    arena = Arena(SLAB)
    for nbytes in (1, 63, 64, 65, 1000, SLAB, 3 * SLAB):
        lease, offset = arena.take(nbytes)
        assert (lease.address + offset) % 64 == 0
        assert lease.address == lease.memory.ctypes.data
        assert len(lease.data) >= offset + nbytes


def test_a_slab_comes_back_when_the_last_view_of_it_is_gone() -> None:
    arena = Arena(SLAB, spare=1)

    def next_slabs() -> set[int]:
        return {arena.take(SLAB // 4)[0].address for _ in range(12)}

    lease, offset = arena.take(SLAB // 4)
    address = lease.address
    tensor = torch.frombuffer(view(lease, offset, SLAB // 4), dtype=torch.uint8)
    tensor.fill_(7)
    row = tensor[3:7]
    del lease, tensor
    gc.collect()
    next_slabs()  # the rest of this slab, then further slabs
    assert address not in next_slabs()
    assert row.tolist() == [7, 7, 7, 7]
    del row
    gc.collect()
    assert address in next_slabs()


def test_large_blocks_have_memory_of_their_own() -> None:
    for arena in (Arena(SLAB), Arena(0)):
        size = SLAB // 4 + 1
        leases = [arena.take(size)[0] for _ in range(3)]
        assert len({lease.address for lease in leases}) == 3
        assert all(len(lease.memory) == size for lease in leases)


def test_threads_get_different_blocks() -> None:
    def filling() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arena = Arena(SLAB, spare=1)

        def fill(value: int) -> Any:
            arena.take(200)  # and return
            lease, offset = arena.take(200)
            block = np.frombuffer(view(lease, offset, 200), np.uint8)
            block[:] = value
            return lease, block

        return partial(fill, 1), partial(fill, 2)

    for (_, first), (_, second) in interleavings(memory, filling):
        assert np.all(first == 1)
        assert np.all(second == 2)
