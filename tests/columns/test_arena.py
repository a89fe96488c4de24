"""Memory that is used again: never while anybody can still see it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.columns.memory import Arena, Lease

SLAB = 4096


def view(lease: Lease, offset: int, nbytes: int) -> memoryview:
    return lease.data[offset : offset + nbytes]


@settings(max_examples=60, deadline=None)
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
    next_slabs()  # the rest of this slab, and others
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
    arena = Arena(SLAB, spare=1)
    problems: list[str] = []

    def work(value: int) -> None:
        for _ in range(400):
            lease, offset = arena.take(200)
            block = np.frombuffer(view(lease, offset, 200), np.uint8)
            block[:] = value
            if not np.all(block == value):
                problems.append(f"thread {value} saw another's bytes")

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
